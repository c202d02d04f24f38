"""Builders of common steps: a loss and an optimizer, or a train step of the user's, lowered for a target."""

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import optax_accum
from optax_accum._arguments import callables, checks
from optax_accum._arguments.roles import Roles
from optax_accum._core import dtypes
from optax_accum._core.types import Name, Tree
from optax_accum.accelerators._targets import Target


class Builder:
    """The `make_step` that `of_loss` and `of_step` return.

    It is for `optax_accum.plan_microbatches`.

    Attributes:
      rows: the rows of the batch, None where its arrays do not agree.
      copy: the bytes of one copy of the parameters on a device, None where
        the step does not tell which they are.
      sum: the bytes of the sum of their gradients, None in the same case.
      kept: returns the bytes that are kept for all rows, however many
        micro-batches, or None where the loss does not tell.
    """

    def __init__(
        self,
        lower: Callable[[int, Target], Any],
        rows: int | None = None,
        copy: int | None = None,
        sum: int | None = None,
        kept: Callable[[], int | None] = lambda: None,
    ):
        self._lower, self.rows, self.copy, self.sum, self.kept = lower, rows, copy, sum, kept

    def __call__(self, num_microbatches: int, target: Target) -> jax.stages.Lowered:
        return self._lower(num_microbatches, target)


def of_loss(
    loss: Callable[..., Any], tx: optax.GradientTransformation, params: Tree, *args: Any, **options: Any
) -> Builder:
    """Returns the builder of a usual train step.

    The step runs `value_and_grad` in micro-batches and the optimizer, and
    makes the new parameters.

    Args:
      loss: `loss(params, *args)`, as `optax_accum.value_and_grad` takes it.
      tx: the optimizer.
      params: the parameters, or their shapes: on one device, or sharded
        over a mesh of the target (FSDP).
      *args: the other arguments of the loss, the whole batch first, or
        their shapes.
      **options: those of `value_and_grad`, but for the number and the size
        of micro-batches and `argnums`: `batch_argnums`, `has_aux`,
        `accumulator_dtype`, `devices`, `recompute`.

    Returns:
      A builder. Its step donates parameters and state; on several devices
      rows of the batch lie along the mesh's first axis.

    Raises:
      ValueError: an option that the plan or the step sets itself.
      TypeError: a loss that is no function, a `tx` that is no optimizer.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> batch = jax.ShapeDtypeStruct((256, 64), "float32")
      >>> tx = optax.adam(1e-3)
      >>> make_step = optax_accum.plan.of_loss(loss, tx, w, batch)
      >>> plan = optax_accum.plan_microbatches(
      ...     make_step, 256, budget="1GB", progress=False)
      >>> plan.num_microbatches
      1
    """
    if reserved := sorted({"num_microbatches", "microbatch_size", "argnums"} & set(options)):
        raise ValueError(f"of_loss sets this itself: {reserved[0]}={options[reserved[0]]!r}. Leave it out.")
    loss = callables.as_function(loss, remedy="Pass the loss first: of_loss(loss, tx, params, batch).")
    callables.as_optimizer(tx)
    params = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), params)
    roles = Roles(loss, batch_argnums=options.get("batch_argnums", 1), of_whole_batch=True)
    batch = roles.passed_as(1 + len(args))["batch_argnums"]

    def lower(number: int, target: Target) -> Any:
        of_params, *others = _placed(target, (params, *args), batch)
        state, sharding = _state(tx, of_params)
        compute = optax_accum.value_and_grad(loss, num_microbatches=number, **options)

        def step(params: Tree, state: Tree, *args: Any) -> tuple[Tree, Tree, Any]:
            value, grads = compute(params, *args)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=sharding)
        with jax.set_mesh(_mesh(of_params, target)):
            return jitted.lower(of_params, state, *others)

    def kept() -> int | None:
        how = {name: options[name] for name in ("has_aux", "batch_argnums", "recompute") if name in options}
        try:
            return optax_accum.explain(loss, params, *args, **how).kept_bytes
        except (TypeError, ValueError):  # a loss that cannot be read
            return None

    copy, summed = sum(map(_bytes, jax.tree.leaves(params))), _bytes_of_sum(params, options.get("accumulator_dtype"))
    return Builder(lower, rows_of((params, *args), batch), copy, summed, kept)


def of_step(step: Callable[[int], Any], *args: Any, batch_argnums: int | Sequence[int] = 1) -> Builder:
    """Returns the builder of a jitted train step.

    The step may be one of `optax_accum.flax`.

    Args:
      step: `step(num_microbatches)` returns the jitted step.
      *args: its arguments, or their shapes (`jax.eval_shape`,
        `nnx.eval_shape`): state, batch, key; or model, optimizer, batch.
      batch_argnums: which of them hold the batch, whose rows several
        devices share. All else is on each device whole, unless it lies on
        the target's mesh already.

    Returns:
      A builder.

    Example:
      With Flax Linen, and with NNX:

          step = lambda k: linen.train_step(fun, num_microbatches=k)
          of_step(step, state, batch, key)

          step = lambda k: nnx.train_step(fun, num_microbatches=k)
          of_step(step, model, optimizer, batch, batch_argnums=2)

      Without Flax:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w, batch = jnp.ones((8, 8)), jnp.ones((64, 8))
      >>> step = lambda k: jax.jit(optax_accum.value_and_grad(loss, k))
      >>> make_step = optax_accum.plan.of_step(step, w, batch)
      >>> plan = optax_accum.plan_microbatches(
      ...     make_step, 64, budget="1GB", progress=False)
      >>> plan.sizes
      (64,)
    """
    batch = positions(batch_argnums, len(args))

    def lower(number: int, target: Target) -> Any:
        placed = _placed(target, args, batch)
        with jax.set_mesh(_mesh(placed, target)):
            jitted = step(number)
            if not hasattr(jitted, "lower"):
                raise TypeError(f"of_step takes what returns a jitted step: it returned {jitted!r}. Pass it to jax.jit")
            return jitted.lower(*placed)

    return Builder(lower, rows_of(args, batch))


def positions(argnums: Any, count: int) -> tuple[int, ...]:
    """The positions of arguments, counted from 0: a jitted step does not tell the names of its arguments."""
    try:
        numbers = [operator.index(number) for number in (argnums if isinstance(argnums, list | tuple) else [argnums])]
    except TypeError:
        numbers = [count]
    if not all(-count <= number < count for number in numbers):
        raise ValueError(
            f"batch_argnums must be positions among the {count} arguments of the step: batch_argnums={argnums!r}. "
            "Count from 0."
        )
    return tuple(number % count for number in numbers)


def rows_of(args: Sequence[Any], batch: Sequence[Name]) -> int | None:
    """The rows that all arrays of the batch have; None if they differ."""
    leaves = jax.tree.leaves([arg for number, arg in enumerate(args) if number in batch])
    rows = {leaf.shape[0] for leaf in leaves if getattr(leaf, "shape", ())}
    return rows.pop() if len(rows) == 1 else None


def _placed(target: Target, args: Sequence[Any], batch: Sequence[Name]) -> list[Any]:
    """The arguments as shapes on the target: rows of the batch over its devices, all else whole on each."""
    mesh = _mesh(args, target)
    by_rows = jax.sharding.PartitionSpec(mesh.axis_names[0])
    whole = jax.sharding.PartitionSpec()

    def place(leaf: Any, spec: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        if not (isinstance(sharding, NamedSharding) and sharding.mesh == mesh):
            sharding = NamedSharding(mesh, spec if leaf.ndim else whole)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    specs = [by_rows if number in batch else whole for number in range(len(args))]
    return [_mapped(functools.partial(place, spec=spec), arg) for arg, spec in zip(args, specs, strict=True)]


def _mapped(place: Callable[[Any], Any], arg: Any) -> Any:
    """`jax.tree.map`, but a variable that stands in two places of a module stays one."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(arg, nnx.Pytree):
        return jax.tree.map(place, arg)
    graph, state = nnx.split(arg)
    return nnx.merge(graph, jax.tree.map(place, state))


def _mesh(args: Any, target: Target) -> Any:
    """The mesh of the target's devices that some argument lies on, else one of a single axis."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and set(sharding.device_set) == set(target.devices):
            return sharding.mesh
    return target.mesh()


def _state(tx: optax.GradientTransformation, params: Tree) -> tuple[Tree, Any]:
    """The shapes of the optimizer's state, each leaf where its parameter lies, and the shardings of the results."""
    where = optax_accum.sharding.state_sharding(tx, params)
    shapes = jax.eval_shape(tx.init, params)

    def put(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(put, shapes, where), (jax.tree.map(lambda leaf: leaf.sharding, params), where, None)


def _bytes_of_sum(params: Tree, dtype: Tree) -> int:
    """The bytes on a device of a sum of gradients."""

    def wide(leaf: Any, named: Any) -> int:
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return _bytes(leaf, dtypes.accumulator_dtype(leaf.dtype, named)) if inexact else 0

    named = dtypes.named_dtypes(checks.as_float_dtypes("accumulator_dtype", dtype), params)
    return sum(jax.tree.leaves(jax.tree.map(wide, params, named)))


def _bytes(leaf: Any, dtype: Any = None) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * (dtype or leaf.dtype).itemsize
