"""The steps that are planned: one of the user's, or one made of a loss and an optimizer, lowered for its arguments."""

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import optax_accum
from optax_accum._shared import checks
from optax_accum._shared.arrays import Tree, short
from optax_accum.accelerators._targets import Target


class Steps:
    """The steps by their number of micro-batches: each is made once, lowered once, and is the one that runs.

    Attributes:
      target: where the arguments are placed as shapes; None for arguments that are lowered as they are, to run.
    """

    def __init__(
        self,
        step_of_k: Callable[[int], Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batch: tuple[int, ...],
        target: Target | None,
    ):
        self._step_of_k, self.target = step_of_k, target
        if isinstance(step_of_k, OfLoss):
            self._step_of_k = step_of_k.with_batch(batch)
            args = [_arrays(args[0]), *args[1:]]
        self._mesh: Any = None
        if target:
            self._mesh = _mesh((args, kwargs), target)
            args, (kwargs,) = _placed(self._mesh, args, batch), _placed(self._mesh, [kwargs], ())
        self._args: Sequence[Any] = args
        self._kwargs = kwargs
        self._steps: dict[int, Any] = {}
        self._lowered: dict[int, Any] = {}

    def step(self, number: int) -> Any:
        if number not in self._steps:
            step = self._step_of_k(number)
            if not hasattr(step, "lower"):
                raise TypeError(f"step_of_k must return a jitted step: it returned {step!r}. Pass it to jax.jit.")
            if self.target is None and (hasattr(step, "one_program") or not callable(step)):
                which = "that of of_loss" if isinstance(step, _LossStep) else "that of jit_step, which runs another"
                raise TypeError(
                    f"step_of_k must return a step that runs as one program: it returned {which}. Pass run=False "
                    "for its plan alone, or a step of jax.jit."
                )
            self._steps[number] = step
        return self._steps[number]

    def lowered(self, number: int) -> Any:
        """The step lowered for the arguments: to run, its first call compiles the same program."""
        if number not in self._lowered:
            step = self.step(number)
            if self._mesh is None:
                self._lowered[number] = step.lower(*self._args, **self._kwargs)
            else:
                with jax.set_mesh(self._mesh):
                    self._lowered[number] = step.lower(*self._args, **self._kwargs)
        return self._lowered[number]

    def known(self, shards: int, *, in_loops: bool) -> dict[str, int]:
        """What only a loss tells: the bytes of the parameters, of their gradients' sum, and those kept for all rows."""
        if not isinstance(self._step_of_k, OfLoss):
            return {}
        kept = self._step_of_k.kept(*self._args) if in_loops else 0
        return {**self._step_of_k.copies(self._args[0]), "kept": -(-kept // shards)}

    def forget(self) -> None:
        """Drops the arguments and all that was lowered."""
        self._args, self._kwargs, self._lowered = [], {}, {}


def of_loss(loss: Callable[..., Any], tx: optax.GradientTransformation, **options: Any) -> "OfLoss":
    """Returns what `plan.fit(..., run=False)` takes, of a loss and an optimizer.

        plan.fit(plan.of_loss(loss, tx), params, batch, run=False)

    The step runs `value_and_grad` in micro-batches and the optimizer, and
    makes the new parameters. It donates parameters and state, which it makes
    itself; on several devices rows of the batch lie along the mesh's first
    axis.

    Args:
      loss: `loss(params, *args)`, as `optax_accum.value_and_grad` takes it.
      tx: the optimizer.
      **options: those of `value_and_grad`, but for the number and the size
        of micro-batches, `argnums` and `batch_argnums`, which `fit` takes:
        `has_aux`, `accumulator_dtype`, `devices`, `recompute`.

    Raises:
      ValueError: an option that the plan or the step sets itself.
      TypeError: a loss that is no function, a `tx` that is no optimizer.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> batch = jax.ShapeDtypeStruct((256, 64), "float32")
      >>> step_of_k = optax_accum.plan.of_loss(loss, optax.adam(1e-3))
      >>> plan = optax_accum.plan.fit(
      ...     step_of_k, w, batch, run=False, budget="1GB", progress=False)
      >>> plan.num_microbatches
      1
    """
    if reserved := sorted({"num_microbatches", "microbatch_size", "argnums", "batch_argnums"} & set(options)):
        raise ValueError(f"The plan sets this itself: {reserved[0]}={options[reserved[0]]!r}. Leave it out.")
    checks.as_function(loss, "loss", "Pass the loss first: of_loss(loss, tx).")
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise TypeError(f"tx must be an optimizer, such as optax.adam(1e-3): tx={short(tx)}. Pass it second.")
    return OfLoss(loss, tx, options)


class OfLoss:
    """The steps of a loss and an optimizer, by their number of micro-batches."""

    def __init__(self, loss: Callable[..., Any], tx: optax.GradientTransformation, options: dict[str, Any]):
        self._loss, self._tx, self._options = loss, tx, options

    def with_batch(self, batch: tuple[int, ...]) -> "OfLoss":
        return OfLoss(self._loss, self._tx, {**self._options, "batch_argnums": batch})

    def __call__(self, number: int) -> "_LossStep":
        return _LossStep(optax_accum.value_and_grad(self._loss, number, **self._options), self._tx)

    def copies(self, params: Tree) -> dict[str, int]:
        """The bytes on a device of the parameters, and of the sum of their gradients."""
        dtype = self._options.get("accumulator_dtype")
        tx = optax_accum.accumulate_gradients(optax.identity(), 2, accumulator_dtype=dtype)
        shapes = jax.tree.map(_shard_of, params)
        sums = jax.eval_shape(tx.init, shapes).acc_grads
        return {"copy": _bytes(shapes), "sum": _bytes(sums)}

    def kept(self, *args: Any) -> int:
        """The bytes that are kept for all rows, however many micro-batches; 0 where the loss does not tell."""
        how = {name: self._options[name] for name in ("has_aux", "batch_argnums", "recompute") if name in self._options}
        try:
            return optax_accum.explain(self._loss, *args, **how).kept_bytes or 0
        except (TypeError, ValueError):  # a loss that cannot be read
            return 0


class _LossStep:
    def __init__(self, compute: Callable[..., Any], tx: optax.GradientTransformation):
        self._compute, self._tx = compute, tx

    def lower(self, params: Tree, *args: Any) -> jax.stages.Lowered:
        state, sharding = _state(self._tx, params)

        def step(params: Tree, state: Tree, *args: Any) -> tuple[Tree, Tree, Any]:
            value, grads = self._compute(params, *args)
            updates, state = self._tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return jax.jit(step, donate_argnums=(0, 1), out_shardings=sharding).lower(params, state, *args)


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


def rows_of(args: Sequence[Any], batch: Sequence[int]) -> int | None:
    """The rows that all arrays of the batch have; None if they differ."""
    leaves = jax.tree.leaves([args[number] for number in batch])
    rows = {leaf.shape[0] for leaf in leaves if getattr(leaf, "shape", ())}
    return rows.pop() if len(rows) == 1 else None


def _placed(mesh: jax.sharding.Mesh, args: Sequence[Any], batch: Sequence[int]) -> list[Any]:
    """The arguments as shapes on the mesh: rows of the batch over its first axis, all else whole on each device."""
    by_rows, whole = PartitionSpec(mesh.axis_names[0]), PartitionSpec()

    def place(leaf: Any, spec: PartitionSpec) -> Any:
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
    put = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(put, shapes, where), (jax.tree.map(lambda leaf: leaf.sharding, params), where, None)


def _arrays(params: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), params)


def _shard_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _bytes(tree: Tree) -> int:
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
