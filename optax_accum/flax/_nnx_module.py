"""An NNX model taken apart for functions of arrays: its parameters, running statistics, random streams."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

import optax_accum
from optax_accum._arguments.roles import Call
from optax_accum._arguments.rows import count_rows
from optax_accum._core.sums import mean as weighted_mean
from optax_accum._core.types import Name, Tree
from optax_accum._space.device import Device
from optax_accum._within.value_and_grad import of_whole_batch
from optax_accum.flax import _calls, _window
from optax_accum.flax._batch_norm import batch_moments, merge_batch_stats
from optax_accum.flax._versions import modules


class Module:
    """The module of one call of `fun`, taken apart for functions of arrays."""

    def __init__(self, call: Call, wrt: Any, device: Device):
        self.call, self.device, (self.model,) = call, device, call[call.params]
        self.others = {name: arg for name, arg in call.arguments.items() if name not in call.params}
        check_module(self.model)
        _check_streams(self.others)
        running, self.momenta = batch_norms(self.model)
        self.split: Callable[[Any], Any] = lambda model: nnx.split(model, wrt, running, ...)
        # Differentiated; the same for all micro-batches (BatchNorm's); handed on (random streams, counters).
        self.graph, self.params, self.stats, self.rest = self.split(self.model)
        remedy = "For a tree of arrays, take what optax_accum has of the same name."
        check_trained(self.model, self.params, wrt, remedy)

    def of_whole_batch(self, fun: Callable[..., Any], has_aux: bool, options: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the value and the gradient of the whole batch, and leaves the model's state as that call does."""
        by_position, by_keyword = self._arguments()

        def pure(params: Any, *args_and_state: Any, **kwargs: Any) -> Any:
            *args, state = args_and_state
            return self.loss(fun, has_aux, (params, *state), {**dict(enumerate(args, start=1)), **kwargs})

        placed: dict[str, Any] = {**options, "has_aux": True, "batch_argnums": self.call.batch}
        compute = of_whole_batch(optax_accum.value_and_grad(pure, **placed))
        value, grads = compute(self.params, *by_position, (self.stats, self.rest), **by_keyword)
        value, *measured = value if options.get("statistics") else (value,)
        loss, (aux, state) = value
        nnx.update(self.model, *state)
        value = (loss, aux) if has_aux else loss
        return (value, *measured) if measured else value, grads

    def loss(self, fun: Callable[..., Any], has_aux: bool, state: Any, arguments: dict[Name, Any]) -> tuple[Any, Any]:
        """Returns the loss, the auxiliary outputs, and the state that is left."""
        out, (_, *state) = self._called(fun, state, arguments)
        loss, aux = _calls.pair(out) if has_aux else (out, None)
        return loss, (aux, state)

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments beside the model, by position and by keyword."""
        by_position = [arg for name, arg in self.others.items() if isinstance(name, int)]
        return by_position, {name: arg for name, arg in self.others.items() if isinstance(name, str)}

    def _called(
        self, fun: Callable[..., Any], state: Any, arguments: dict[Name, Any], device: Device | None = None
    ) -> tuple[Any, Any]:
        """Calls `fun` with a module of its own; beside the result returns the module's state, as `split` has it.

        Random streams are those of the whole batch, or of one device.
        """
        model = nnx.merge(self.graph, *jax.tree.map(lambda leaf: leaf, state))  # variables of this trace
        before = variables(model)
        streams = own_streams(model, device or Device())
        out = self.call.with_arguments({self.call.params[0]: model, **arguments}).apply(fun)
        check_variables(before, variables(model))
        if streams is not None:
            nnx.update(model, streams)
        return out, self.split(model)[1:]

    def apply(
        self, transform: Callable[..., Any], form: Callable[..., Any], fun: Callable[..., Any], options: dict[str, Any]
    ) -> Any:
        """Calls what `transform` makes of `fun` as a function of arrays, which returns `form(out, moments, rest)`."""
        call, (by_position, by_keyword) = self.call, self._arguments()
        placed: dict[str, Any] = {"batch_argnums": call.batch, "rng_argnum": call.rng, "carry_argnum": -1}
        placed["whole_argnums"] = (*call.whole, 1 + len(by_position))  # the running statistics

        def pure(params: Any, *args_and_state: Any, **kwargs: Any) -> Any:
            *args, stats, rest = args_and_state
            arguments = {**dict(enumerate(args, start=1)), **kwargs}
            return form(*self._micro_batch(fun, (params, stats, rest), arguments))

        return transform(pure, **{**options, **placed})(self.params, *by_position, self.stats, self.rest, **by_keyword)

    def _micro_batch(self, fun: Callable[..., Any], state: Any, arguments: dict[Name, Any]) -> tuple[Any, Any, Any]:
        """Calls `fun` for one micro-batch; moments and the rest come beside its result."""
        out, (_, new, rest) = self._called(fun, state, arguments, self.device)
        old, rows = nnx.to_pure_dict(state[1]), self.call.with_arguments(arguments)[self.call.batch]
        moments = batch_moments(nnx.to_pure_dict(new), old, self.momenta(old))
        return out, _window.weighted(moments, jnp.float32(count_rows(rows))), rest

    def write(self, moments: Tree, rest: Any, options: dict[str, Any]) -> None:
        """Writes the micro-batches' state into the module: means of moments, and the last carry."""
        old, moments = nnx.to_pure_dict(self.stats), weighted_mean(_calls.over_devices(moments, options))
        nnx.replace_by_pure_dict(self.stats, merge_batch_stats(moments, old, self.momenta(old)))
        nnx.update(self.model, self.stats, rest)


def _check_streams(args: Mapping[Name, Any]) -> None:
    """Raises for random streams that nobody would advance."""
    for name, arg in args.items():
        for node in jax.tree.leaves(arg, is_leaf=lambda node: isinstance(node, nnx.Pytree)):
            if isinstance(node, nnx.Rngs):
                raise TypeError(
                    f"An nnx.Rngs beside the model is advanced by nobody: argument {name!r}. Make it an attribute of "
                    "the module; or pass a key, which accumulate needs named by rng_argnum."
                )


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
