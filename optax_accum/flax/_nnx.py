"""The gradient of an NNX module within a call."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

import optax_accum
from optax_accum._arguments.roles import Call, Roles
from optax_accum._core.types import Tree
from optax_accum._space.device import Device
from optax_accum._space.devices import with_replicated
from optax_accum.flax import _calls
from optax_accum.flax._nnx_module import Module


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
      * With `Devices(to="partial")` each device normalises its own rows and
        has random numbers of its own, and the model gets the running
        statistics of all rows (`merge_batch_stats`), the mean of the
        devices' other floats, the largest of their integers, and its keys.
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
    _calls.check_options("optax_accum.flax.nnx.value_and_grad", options, _OWN_OPTIONS)
    options |= {"num_microbatches": num_microbatches}
    optax_accum.value_and_grad(fun, has_aux=True, **options)  # raises its errors when this is built
    roles = _roles(fun, options, of_whole_batch=True)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return Module(roles.bind(args, kwargs), wrt, Device()).differentiate(fun, has_aux, options)

    return run


def loss_of_arrays(fun: Callable[..., Any], model: Any, batch: Tree, wrt: Any) -> tuple[Callable[..., Any], Call]:
    """`fun`, which has auxiliary outputs, as a function of arrays, and its call.

    It takes the model's parameters, the batch, running statistics, the rest.
    """
    call = Roles(fun).bind((model, batch), {})
    module = Module(call, wrt, Device())

    def loss(params: Any, batch: Tree, stats: Any, rest: Any) -> tuple[Any, Any]:
        return module.loss(fun, True, (params, stats, rest), {1: batch})

    arguments = {0: module.params, 1: batch, 2: module.stats, 3: module.rest}
    return loss, dataclasses.replace(call, arguments=arguments)


def reduce_microbatches(
    fun: Callable[..., Any], num_microbatches: int | None = None, *, wrt: Any = nnx.Param, **options: Any
) -> Callable[..., Any]:
    """Does what `optax_accum.reduce_microbatches` does, with an NNX module.

    Pass an `nnx.value_and_grad(loss)`, an evaluation, or any other function
    of a batch. If you have the loss, `value_and_grad` needs less memory.

    Args:
      fun: a function `fun(model, batch, *args, **kwargs)` of an NNX module,
        as in `value_and_grad`.
      num_microbatches: as in `optax_accum.reduce_microbatches`; or
        `microbatch_size`.
      wrt: the variables that `fun` differentiates, or only reads.
      **options: those of `optax_accum.reduce_microbatches`:
        `microbatch_size`, `weight_fn`, `reduction`, ...; the positions in
        them are those in `fun`, the model being 0.

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
      >>> cut = optax_accum.flax.nnx.reduce_microbatches(grad_fn, 2)
      >>> value, grads = cut(model, jnp.ones((4, 2)))
      >>> grads["kernel"].shape
      (2, 1)
    """
    carry = {"carry_argnum": _OWN_OPTIONS["carry_argnum"]}
    _calls.check_options("optax_accum.flax.nnx.reduce_microbatches", options, carry)
    devices = _calls.devices_of(options)
    options |= {"num_microbatches": num_microbatches, "reduction": (options.get("reduction", "mean"), "sum")}
    options["devices"] = with_replicated(devices)
    optax_accum.reduce_microbatches(fun, **options)  # raises its errors when this is built
    roles = _roles(fun, options)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        return Module(roles.bind(args, kwargs), wrt, Device(devices.axes)).reduce(fun, options)

    return run


_OWN_OPTIONS = {
    "argnums": "Name the variables to differentiate with wrt.",
    "carry_argnum": "What a micro-batch hands on to the next belongs into a variable of the model.",
}


_ROLES = {"batch_argnums", "rng_argnum", "whole_argnums"}


def _roles(fun: Callable[..., Any], options: Mapping[str, Any], *, of_whole_batch: bool = False) -> Roles:
    return Roles(fun, of_whole_batch=of_whole_batch, **{name: options[name] for name in _ROLES & options.keys()})
