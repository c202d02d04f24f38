"""The gradient of an NNX module within a call."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import optax_accum
from optax_accum._arguments.roles import Call, Roles
from optax_accum._arguments.rows import count_rows
from optax_accum._core.sums import mean as weighted_mean
from optax_accum._core.types import Name, Tree
from optax_accum._explain.weighing import Weigher
from optax_accum._space.device import Device
from optax_accum._space.devices import as_devices, with_replicated
from optax_accum._within import one_by_one as weighed
from optax_accum._within.value_and_grad import of_whole_batch
from optax_accum._within.whole_batch import UnreadableError
from optax_accum.flax import _window
from optax_accum.flax._batch_norm import batch_moments, merge_batch_stats
from optax_accum.flax._nnx_variables import (
    batch_norms,
    check_module,
    check_trained,
    check_variables,
    own_streams,
    variables,
)


def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Replaces `nnx.value_and_grad`, one micro-batch at a time.

    Args:
      fun: a loss `fun(model, batch, *args, **kwargs)`, whose first argument
        is an NNX module; it may change the values of the module's
        variables, but not create new ones: remove what `sow` creates with
        `nnx.pop`. All other arguments are trees of arrays: put an
        `nnx.Rngs` into the module.
      num_microbatches: as in `optax_accum.value_and_grad`; or
        `microbatch_size`.
      wrt: the variables to differentiate, such as `nnx.LoRAParam`: all
        others cost no accumulator.
      has_aux: `fun` returns `(loss, aux)`.
      **options: those of `optax_accum.value_and_grad`: `microbatch_size`,
        `devices`, ...; the positions in them are those in `fun`, the
        model being 0.

    Returns:
      A function of the arguments of `fun`, which returns `(value, grads)`
      and leaves the model's other state as the batch leaves it.

    Raises:
      TypeError: `argnums`; an `nnx.Rngs` as an argument; a model of Linen.
      ValueError: `wrt` names no variable of the model; `fun` makes
        variables, takes some out, or changes their shapes.

    Guarantees:
      State of the model, after the call:

      * It is what the call of the whole batch leaves: `nnx.BatchNorm`
        normalises all rows together and makes one momentum step, streams of
        random numbers draw the masks of the whole batch, counters count
        one call.
      * Where the loss communicates, and with `Devices(to="partial")`: each
        micro-batch is normalised by itself, and `nnx.BatchNorm` makes one
        momentum step, with the statistics of all rows
        (`merge_batch_stats`). Streams advance at each micro-batch, each
        device has its own, and other variables are passed on from
        micro-batch to micro-batch.
      * Variables of `wrt` that `fun` assigns, as `nnx.SpectralNorm` does:
        are restored; only gradients come out.

    Example:
      >>> import jax.numpy as jnp, optax_accum.flax
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss = lambda model, x: jnp.mean(model(x) ** 2)
      >>> value_and_grad = optax_accum.flax.nnx.value_and_grad(loss, 2)
      >>> value, grads = value_and_grad(model, jnp.ones((4, 2)))
      >>> grads["kernel"].shape
      (2, 1)
    """
    _window.check_options("optax_accum.flax.nnx.value_and_grad", options, _OWN_OPTIONS)
    options |= {"num_microbatches": num_microbatches, "wrt": wrt, "has_aux": has_aux}
    whole, separate = whole_batch(fun, **options), one_by_one(fun, **options)
    if _window.has_partial_sums(options):
        return separate

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with contextlib.suppress(UnreadableError):
            return whole(*args, **kwargs)
        return separate(*args, **kwargs)

    return run


def whole_batch(
    fun: Callable[..., Any], *, wrt: Any = nnx.Param, has_aux: bool = False, **options: Any
) -> Callable[..., tuple[Any, Any]]:
    """Does what `value_and_grad` does; the function raises an `UnreadableError` where the trace does not tell how."""
    optax_accum.value_and_grad(fun, has_aux=True, **options)  # its errors come when this is built
    roles = _roles(fun, options)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return _Module(roles.bind(args, kwargs), wrt, Device()).of_whole_batch(fun, has_aux, options)

    return run


def one_by_one(
    fun: Callable[..., Any],
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    aux_reduction: Tree = "mean",
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Does what `value_and_grad` does; each micro-batch counts by itself."""
    options |= {"has_aux": True, "aux_reduction": ("sum", aux_reduction)}
    weighed.one_by_one(fun, **options)  # its errors come when this is built
    roles, axes = _roles(fun, options), as_devices(options.get("devices"), partial=True).axes

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        module = _Module(roles.bind(args, kwargs), wrt, Device(axes))
        value, grads = module.apply(weighed.one_by_one, functools.partial(_as_loss, has_aux), fun, options)
        value, *measured = value if options.get("statistics") else (value,)
        loss, ((moments, aux), rest) = value
        module.write(moments, rest, options)
        value = (loss, aux) if has_aux else loss
        return (value, *measured) if measured else value, grads

    return run


def weigher(fun: Callable[..., Any], model: Any, batch: Tree, wrt: Any) -> Weigher:
    """Returns what weighs batches of `fun`, which has auxiliary outputs, as its loss tells."""
    module = _Module(Roles(fun).bind((model, batch), {}), wrt, Device())

    def loss(model: Any, batch: Tree, stats: Any, rest: Any) -> tuple[Any, Any]:
        return module.loss(fun, True, (model, stats, rest), {1: batch})

    return Weigher(loss, Roles(loss), has_aux=True)


def call_of_arrays(fun: Callable[..., Any], model: Any, batch: Tree, wrt: Any) -> Call:
    """Returns a call of `fun` as a function of arrays, as a `weigher` takes it."""
    call = Roles(fun).bind((model, batch), {})
    module = _Module(call, wrt, Device())
    return dataclasses.replace(call, arguments={0: module.params, 1: batch, 2: module.stats, 3: module.rest})


def accumulate(
    fun: Callable[..., Any], num_microbatches: int | None = None, *, wrt: Any = nnx.Param, **options: Any
) -> Callable[..., Any]:
    """Does what `optax_accum.accumulate` does, for a function of a module.

    Pass an `nnx.value_and_grad(loss)`, an evaluation, or any other function
    of a batch. If you have the loss, `value_and_grad` needs less memory.

    Args:
      fun: a function `fun(model, batch, *args, **kwargs)` of an NNX module,
        as in `value_and_grad`.
      num_microbatches: as in `optax_accum.accumulate`; or
        `microbatch_size`.
      wrt: the variables that `fun` differentiates, or only reads.
      **options: those of `optax_accum.accumulate`: `microbatch_size`,
        `weight_fn`, `reduction`, ...; the positions in them are those in
        `fun`, the model being 0.

    Returns:
      A function of the arguments of `fun`, which returns what `fun` does,
      for the whole batch, and leaves the model's other state as
      `value_and_grad` does.

    Raises:
      TypeError: `carry_argnum`; an `nnx.Rngs` as an argument; a model of
        Linen.
      ValueError: as in `value_and_grad`.

    Guarantees:
      * Variables of `wrt` that `fun` assigns: are what they were.
      * A batch without rows: the model stays as it is.

    Example:
      >>> import jax.numpy as jnp, optax_accum.flax
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> grad_fn = nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))
      >>> cut = optax_accum.flax.nnx.accumulate(grad_fn, 2)
      >>> value, grads = cut(model, jnp.ones((4, 2)))
      >>> grads["kernel"].shape
      (2, 1)
    """
    carry = {"carry_argnum": _OWN_OPTIONS["carry_argnum"]}
    _window.check_options("optax_accum.flax.nnx.accumulate", options, carry)
    devices = as_devices(options.get("devices"), partial=True)
    options |= {"num_microbatches": num_microbatches, "reduction": (options.get("reduction", "mean"), "sum")}
    options["devices"] = with_replicated(devices)
    if weight_of := options.get("weight_of"):
        options["weight_of"] = lambda result: weight_of(result[0])
    optax_accum.accumulate(fun, **options)  # its errors come when this is built
    roles = _roles(fun, options)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = roles.bind(args, kwargs)
        module = _Module(call, wrt, Device(devices.axes))
        (result, moments), rest = module.apply(optax_accum.accumulate, _as_result, fun, options)
        module.write(moments, rest, options)
        return result

    return run


def _as_loss(has_aux: bool, out: Any, moments: Any, rest: Any) -> Any:
    loss, aux = _window.pair(out) if has_aux else (out, None)
    return loss, ((moments, aux), rest)


def _as_result(out: Any, moments: Any, rest: Any) -> Any:
    return (out, moments), rest


class _Module:
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
        loss, aux = _window.pair(out) if has_aux else (out, None)
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
        old, moments = nnx.to_pure_dict(self.stats), weighted_mean(_window.over_devices(moments, options))
        nnx.replace_by_pure_dict(self.stats, merge_batch_stats(moments, old, self.momenta(old)))
        nnx.update(self.model, self.stats, rest)


_OWN_OPTIONS = {
    "argnums": "Name the variables to differentiate with wrt.",
    "carry_argnum": "What a micro-batch hands on to the next belongs into a variable of the model.",
}
_ROLES = {"batch_argnums", "rng_argnum", "whole_argnums"}


def _roles(fun: Callable[..., Any], options: Mapping[str, Any]) -> Roles:
    return Roles(fun, **{name: options[name] for name in _ROLES & options.keys()})


def _check_streams(args: Mapping[Name, Any]) -> None:
    """Raises for random streams that nobody would advance."""
    for name, arg in args.items():
        for node in jax.tree.leaves(arg, is_leaf=lambda node: isinstance(node, nnx.Pytree)):
            if isinstance(node, nnx.Rngs):
                raise TypeError(
                    f"An nnx.Rngs beside the model is advanced by nobody: argument {name!r}. Make it an attribute of "
                    "the module; or pass a key, which accumulate needs named by rng_argnum."
                )
