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
from optax_accum._loss.ratio import Returns
from optax_accum._space.device import Device
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
        # Differentiated; constant over micro-batches (BatchNorm's statistics); carried (random streams, counters).
        self.graph, self.params, self.stats, self.rest = self.split(self.model)
        remedy = "For a tree of arrays, take what optax_accum has of the same name."
        check_trained(self.model, self.params, wrt, remedy)

    def differentiate(self, fun: Callable[..., Any], has_aux: bool, options: dict[str, Any]) -> tuple[Any, Any]:
        """The value and the gradient of the whole batch; updates the model's state as one call with all rows does."""
        by_position, by_keyword = self._arguments()

        def pure(params: Any, *args_and_state: Any, **kwargs: Any) -> Any:
            *args, state = args_and_state
            arguments = {**dict(enumerate(args, start=1)), **kwargs}
            if not is_partial:
                return self.loss(fun, has_aux, (params, *state), arguments)
            out, moments, rest = self._micro_batch(fun, (params, *state), arguments)
            loss, aux = Returns(has_aux).taken_apart(out)
            return loss, (aux, (moments, rest))

        is_partial = _calls.devices_of(options).is_partial
        placed: dict[str, Any] = {**options, "has_aux": True, "batch_argnums": self.call.batch}
        compute = optax_accum.value_and_grad(pure, **placed)
        value, grads = compute(self.params, *by_position, (self.stats, self.rest), **by_keyword)
        value, *measured = value if options.get("statistics") else (value,)
        loss, (aux, state) = value
        if is_partial:
            moments, rest = state
            self._write(moments, _join_devices(rest, options), options)
        else:
            nnx.update(self.model, *state)
        value = (loss, aux) if has_aux else loss
        return (value, *measured) if measured else value, grads

    def loss(self, fun: Callable[..., Any], has_aux: bool, state: Any, arguments: dict[Name, Any]) -> tuple[Any, Any]:
        """`(loss, (aux, state))`; the state is a pair: running statistics, and the rest."""
        out, (_, *state) = self._called(fun, state, arguments)
        loss, aux = Returns(has_aux).taken_apart(out)
        return loss, (aux, state)

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments beside the model, by position and by keyword."""
        by_position = [arg for name, arg in self.others.items() if isinstance(name, int)]
        return by_position, {name: arg for name, arg in self.others.items() if isinstance(name, str)}

    def _called(
        self, fun: Callable[..., Any], state: Any, arguments: dict[Name, Any], device: Device | None = None
    ) -> tuple[Any, Any]:
        """Calls `fun` with a copy of the module; returns its result, and the copy's state, as `split` orders it.

        Random streams are the whole batch's, or one device's.
        """
        model = nnx.merge(self.graph, *jax.tree.map(lambda leaf: leaf, state))  # variables of this trace
        before = variables(model)
        streams = own_streams(model, device or Device())
        out = self.call.with_arguments({self.call.params[0]: model, **arguments}).apply(fun)
        check_variables(before, variables(model))
        if streams is not None:
            nnx.update(model, streams)
        return out, self.split(model)[1:]

    def reduce(self, fun: Callable[..., Any], options: dict[str, Any]) -> Any:
        """The result of the micro-batches, reduced; updates the model's state."""
        call, (by_position, by_keyword) = self.call, self._arguments()
        placed: dict[str, Any] = {"batch_argnums": call.batch, "rng_argnum": call.rng, "carry_argnum": -1}
        placed["whole_argnums"] = (*call.whole, 1 + len(by_position))  # the running statistics

        def pure(params: Any, *args_and_state: Any, **kwargs: Any) -> Any:
            *args, stats, rest = args_and_state
            arguments = {**dict(enumerate(args, start=1)), **kwargs}
            out, moments, rest = self._micro_batch(fun, (params, stats, rest), arguments)
            return (out, moments), rest

        run = optax_accum.reduce_microbatches(pure, **{**options, **placed})
        (result, moments), rest = run(self.params, *by_position, self.stats, self.rest, **by_keyword)
        self._write(moments, rest, options)
        return result

    def _micro_batch(self, fun: Callable[..., Any], state: Any, arguments: dict[Name, Any]) -> tuple[Any, Any, Any]:
        """Calls `fun` for one micro-batch; returns its result, the moments weighted by rows, and the carry."""
        out, (_, new, rest) = self._called(fun, state, arguments, self.device)
        old, rows = nnx.to_pure_dict(state[1]), self.call.with_arguments(arguments)[self.call.batch]
        moments = batch_moments(nnx.to_pure_dict(new), old, self.momenta(old))
        return out, _window.weighted(moments, jnp.float32(count_rows(rows))), rest

    def _write(self, moments: Tree, rest: Any, options: dict[str, Any]) -> None:
        """Updates the module: statistics from the micro-batches' mean moments, all else from the last carry."""
        old, moments = nnx.to_pure_dict(self.stats), weighted_mean(_calls.over_devices(moments, options))
        nnx.replace_by_pure_dict(self.stats, merge_batch_stats(moments, old, self.momenta(old)))
        nnx.update(self.model, self.stats, rest)


def _join_devices(rest: Any, options: Mapping[str, Any]) -> Any:
    """What the devices' own variables are for all of them; the model's keys stay what they are."""
    _, rest = nnx.split_state(rest, nnx.RngKey, ...)

    def joined(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return _calls.over_devices(leaf, options, "max")
        total, devices = _calls.over_devices((leaf, jnp.ones_like(leaf)), options)
        return total / devices

    return jax.tree.map(joined, rest)


def _check_streams(args: Mapping[Name, Any]) -> None:
    """Raises for random streams outside the model: no call would advance them."""
    for name, arg in args.items():
        for node in jax.tree.leaves(arg, is_leaf=lambda node: isinstance(node, nnx.Pytree)):
            if isinstance(node, nnx.Rngs):
                raise TypeError(
                    f"An nnx.Rngs beside the model is advanced by nobody: argument {name!r}. Make it an attribute of "
                    "the module; or pass a key, which reduce_microbatches needs named by rng_argnum."
                )


def batch_norms(model: Any) -> tuple[Any, Callable[[Tree], Tree]]:
    """A filter for the running statistics of `nnx.BatchNorm`, and a function from their tree to their momenta."""
    momenta = {
        tuple(path): module.momentum
        for path, module in modules(model)
        if isinstance(module, nnx.BatchNorm) and module.momentum != 1  # at 1 they never change
    }
    is_running = nnx.All(nnx.BatchStat, lambda path, _: tuple(path[:-1]) in momenta)
    momentum_at = lambda path, _: momenta[tuple(entry.key for entry in path[:-1])]
    return is_running, lambda stats: jax.tree.map_with_path(momentum_at, stats)


def running_stats(model: Any) -> tuple[Tree, Tree]:
    """The running statistics of every `nnx.BatchNorm`, and their momenta."""
    running, momenta = batch_norms(model)
    stats = nnx.to_pure_dict(nnx.state(model, running))
    return stats, momenta(stats)


def own_streams(model: Any, device: Device) -> Any:
    """Folds the device's index into the model's random keys; returns the keys from before, None for one device."""
    if device.count == 1:
        return None
    keys = jax.tree.map(lambda key: key, nnx.state(model, nnx.RngKey))  # not the variables of the model
    nnx.update(model, device.fold_keys(keys))
    return keys


def check_module(model: Any) -> None:
    """Raises for a Linen model."""
    if isinstance(model, linen.Module):
        raise TypeError(
            f"The first argument must be an NNX module: {type(model).__name__} is one of Linen. Take "
            "optax_accum.value_and_grad, with its parameters."
        )


def check_trained(model: Any, params: Any, wrt: Any, remedy: str) -> None:
    """Raises if `wrt` selects no variable: an empty gradient would train nothing, in silence."""
    if not jax.tree.leaves(params):
        kinds = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(nnx.state(model))})
        raise ValueError(
            f"wrt must name variables of the model: wrt={wrt!r} names none, and it has {', '.join(kinds) or 'none'}. "
            + remedy
        )


def variables(model: Any) -> dict[str, Any]:
    """Each variable's name and type, mapped to its tree and shapes; a micro-batch may change none of these."""
    kind = lambda variable: (jax.tree.structure(variable), list(map(jnp.shape, jax.tree.leaves(variable))))
    return {
        f"{'.'.join(map(str, path))} ({type(variable).__name__})": kind(variable)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def check_variables(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises if variables were created, removed or reshaped: they are the carry from micro-batch to micro-batch."""
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
