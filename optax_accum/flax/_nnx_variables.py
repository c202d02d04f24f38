"""An NNX model's running statistics, random streams and variables."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from optax_accum._core.types import Tree
from optax_accum._space.device import Device
from optax_accum.flax._versions import modules


def batch_norms(model: Any) -> tuple[Any, Callable[[Tree], Tree]]:
    """Returns a filter for the running statistics of `nnx.BatchNorm`, and what gives each of them its momentum."""
    momenta = {
        tuple(path): module.momentum
        for path, module in modules(model)
        if isinstance(module, nnx.BatchNorm) and module.momentum != 1  # at 1 they never change
    }
    is_running = nnx.All(nnx.BatchStat, lambda path, _: tuple(path[:-1]) in momenta)

    def of(path: Any, _: Any) -> Any:
        return momenta[tuple(entry.key for entry in path[:-1])]

    return is_running, lambda stats: jax.tree.map_with_path(of, stats)


def running_stats(model: Any) -> tuple[Tree, Tree]:
    """Returns the running statistics of all `nnx.BatchNorm`, and their momenta."""
    running, momenta = batch_norms(model)
    stats = nnx.to_pure_dict(nnx.state(model, running))
    return stats, momenta(stats)


def own_streams(model: Any, device: Device) -> Any:
    """Gives each of several devices random streams of its own; returns those that all of them had."""
    if device.count == 1:
        return None
    keys = jax.tree.map(lambda key: key, nnx.state(model, nnx.RngKey))  # not the variables of the model
    nnx.update(model, device.fold_keys(keys))
    return keys


def check_module(model: Any) -> None:
    """Raises for a model of Linen, which keeps its parameters elsewhere."""
    if isinstance(model, linen.Module):
        raise TypeError(
            f"The first argument must be an NNX module: {type(model).__name__} is one of Linen. Take "
            "optax_accum.value_and_grad, with its parameters."
        )


def check_trained(model: Any, params: Any, wrt: Any, remedy: str) -> None:
    """Raises where there is nothing to train: an empty gradient does so without a word."""
    if not jax.tree.leaves(params):
        kinds = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(nnx.state(model))})
        raise ValueError(
            f"wrt must name variables of the model: wrt={wrt!r} names none, and it has {', '.join(kinds) or 'none'}. "
            + remedy
        )


def variables(model: Any) -> dict[str, Any]:
    """Returns the variables of a model by name, and of each what a micro-batch may not change: its type and shapes."""

    def kind(variable: Any) -> Any:
        return (jax.tree.structure(variable), [jnp.shape(leaf) for leaf in jax.tree.leaves(variable)])

    return {
        f"{'.'.join(map(str, path))} ({type(variable).__name__})": kind(variable)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def check_variables(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises unless the model has the variables that it had: each micro-batch hands them on to the next."""
    changed = {name for name in old if name in new and old[name] != new[name]}
    for what, names in {
        "made": set(new) - set(old),
        "took out": set(old) - set(new),
        "changed the tree or shape of": changed,
    }.items():
        if names:
            raise ValueError(
                f"fun must leave the model the variables that it had: it {what} {', '.join(sorted(names))}. What sow "
                "makes, take out inside fun, aux = nnx.pop(model, nnx.Intermediate), and return it with has_aux=True; "
                "what an earlier call has left in the model, take out before."
            )
