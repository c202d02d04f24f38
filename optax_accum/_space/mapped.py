"""`jax.shard_map` over some axes of a mesh, "data" say; the others, "model" say, are left to the partitioner."""

import contextlib
import functools
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from optax_accum._core import compilers, dtypes, evaluation
from optax_accum._core.custom_derivatives import with_backward_pass
from optax_accum._core.equations import all_equations
from optax_accum._core.leaves import parted
from optax_accum._core.traced import Traced
from optax_accum._core.types import Axes, Tree
from optax_accum._space import meshes


def per_device(
    fun: Callable[..., tuple[Tree, Tree]],
    axes: Axes,
    split: Sequence[int],
    args: Sequence[Any],
    shards: Mapping[int, Tree],
) -> tuple[Tree, Tree]:
    """Runs `fun` on each device; mesh axes that are not named are left to the partitioner.

    `fun` returns `(local, same)`: local results come back as rows [d, ...], results that are the same on all devices as
    they are. Arrays in the arguments `split` are dealt out along their first axis. Of arrays in the arguments `shards`,
    a mapping to their shardings, each device has its shard. All other arguments, and constants of `fun`, are whole on
    every device. With shards, the backward pass runs `fun` again: gathered arrays are no residuals.
    """
    mesh = meshes.mesh_of(axes, args)
    arrays, filled = parted(tuple(args), _is_array)
    in_specs = _in_specs(axes, split, args, shards)
    for leaf in jax.tree.leaves([args[number] for number in split]):
        if jnp.ndim(leaf):
            _check_divides(axes, mesh, leaf.shape[0])
    with_integers: list[Any] = []  # put back the gradients of integer parameters, which no array can hold

    def on_device(*local: Any) -> Tree:
        with _explained(axes):
            sums, same = fun(*filled(local))
        arrays, put_back = parted(sums, lambda leaf: not dtypes.is_float0(leaf))
        with_integers.append(put_back)
        return varying(as_row(arrays), axes), same

    out_specs = PartitionSpec(axes), PartitionSpec()
    run = over_axes(on_device, mesh, axes, in_specs=in_specs, out_specs=out_specs)
    run = jax.checkpoint(run) if shards else run
    explicit = tuple(axis for axis in axes if axis in meshes.explicit_axes(mesh))

    def run_placed(*arrays: Any) -> tuple[Tree, Tree]:
        placed = lambda leaf, spec: _placed(leaf, spec, mesh, explicit) if explicit else leaf
        return run(*map(placed, arrays, in_specs))

    traced = any(isinstance(leaf, Tracer) for leaf in arrays)
    # Outside jit, shard_map knows no references, and an array tells how it is sharded over Auto axes, too.
    local, same = run_placed(*arrays) if traced else jax.jit(run_placed)(*arrays)
    return with_integers[-1](local), same


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _in_specs(
    axes: Axes, split: Sequence[int], args: Sequence[Any], shards: Mapping[int, Tree]
) -> tuple[PartitionSpec, ...]:
    """The spec of each array in the arguments: dealt out, sharded, or whole on every device."""

    def specs_of(number: int, arg: Tree) -> Tree:
        if number in shards:
            return jax.tree.map(lambda leaf, to: meshes.only(to.spec, axes), arg, shards[number])
        deal = lambda leaf: PartitionSpec(axes) if number in split and jnp.ndim(leaf) > 0 else PartitionSpec()
        return [deal(leaf) for leaf in jax.tree.leaves(arg) if _is_array(leaf)]

    return tuple(jax.tree.leaves(list(map(specs_of, range(len(args)), args)), is_leaf=meshes.is_spec))


@contextlib.contextmanager
def _explained(axes: Axes) -> Generator[None]:
    """Explains JAX's errors in a function that runs on each device."""
    try:
        yield
    except TypeError as error:
        if re.search("pcast|pvary", str(error)):
            error.add_note(_FROM_ZEROS)
        raise
    except ValueError as error:
        if re.search("should match the mesh passed to shard_map|Tuple subset of `PartitionSpec`", str(error)):
            raise ValueError(_nested(axes)) from error
        if re.search(_OF_CONSTRAINTS, str(error)):
            raise ValueError(_CONSTRAINED.format(axes=axes)) from error
        raise


_FROM_ZEROS = (
    "With devices each has rows of its own, and a loop or a branch in fun begins with an array that is the "
    "same on all, such as zeros. Begin with one that is made of the batch, such as jnp.zeros_like(x[0]); a layer that "
    "makes it itself takes it as an argument (flax.linen.RNN: initial_carry)."
)


_OF_CONSTRAINTS = (
    "with_sharding_constraint|`manual_axis_type`|`vma`|passed to reshard|manual axes|should match the aval mesh"
)
_CONSTRAINED = (
    "With devices each has rows of its own, so that fun cannot constrain shardings over them: "
    "devices={axes}, and jax.lax.with_sharding_constraint or jax.sharding.reshard names one of these, or a mesh. "
    "Constrain over the other axes only, by a PartitionSpec; or leave out devices."
)


def _nested(axes: Axes) -> str:
    return (
        f"With devices the loss runs inside a jax.shard_map over their axes, devices={axes}, and there JAX cannot "
        "differentiate a jax.shard_map of the loss's own over other axes. Either call it inside one jax.shard_map over "
        "all these axes, with the same devices, and let the loss communicate there; or leave out devices: the "
        "gradient is the same, reduced at each micro-batch."
    )


def check_nested(loss: Traced, axes: Axes) -> None:
    """Raises for a loss with a `jax.shard_map` of its own whose backward pass JAX cannot compile here.

    The residuals of that `jax.shard_map` would lie over the axes, which are manual already.
    """
    if not any(equation.primitive.name == "shard_map" for equation in loss.equations):
        return
    types = [evaluation.varying_type(aval, axes) for aval in loss.program.in_avals]
    run = lambda *values: evaluation.run(loss.program, values)
    for equation in all_equations(jax.make_jaxpr(lambda *values: with_backward_pass(run, values))(*types).jaxpr):
        if equation.primitive.name == "shard_map" and any(
            set(axes) & set(meshes.names_of(entry)) for spec in equation.params["out_specs"] for entry in spec
        ):
            raise ValueError(_nested(axes))


def over_axes(fun: Callable[..., Any], mesh: meshes.Mesh, axes: Axes, **options: Any) -> Callable[..., Any]:
    """`jax.shard_map` of a function over the axes; over all others its arguments stay as they are.

    Where the axes are Auto beside Explicit ones they are Explicit while it runs: else JAX 0.12 gathers, at its border,
    arrays that are sharded over the others.
    """
    run = functools.partial(jax.shard_map, fun, axis_names=set(axes), **options)
    explicit = meshes.explicit_axes(mesh)
    if not explicit or set(axes) & set(explicit):
        return run(mesh=mesh)

    def run_explicit(*args: Any) -> Any:
        specs = jax.tree.map(functools.partial(_spec_with, axes=axes), args, options["in_specs"])
        here = lambda *args: run(mesh=jax.sharding.get_abstract_mesh())(*args)
        with contextlib.nullcontext() if meshes.in_reach() else compilers.tracing_on(mesh):
            return jax.sharding.explicit_axes(here, axes=axes, in_sharding=specs)(*args)

    return run_explicit


def joined(rows: Tree, axes: Axes, to: Tree) -> Tree:
    """Arrays [...] made of rows [d, ...]: each device's row is its shard, or its copy of the array."""
    specs = jax.tree.map(lambda _: PartitionSpec(axes), rows)
    to = jax.tree.map(lambda spec: meshes.only(spec, axes), to, is_leaf=meshes.is_spec)
    options = {"in_specs": (specs,), "out_specs": to, "check_vma": False}  # no type says that rows are alike
    return over_axes(as_local, meshes.mesh_of(axes, rows), axes, **options)(rows)


def varying(tree: Tree, axes: Axes) -> Tree:
    """`tree` as values that may differ between devices, inside `jax.shard_map`.

    Where types do not tell such values apart nothing is done: JAX 0.7.2 would add their cotangents over devices.
    """
    if not axes or not types_track_devices(axes):
        return tree
    return jax.tree.map(lambda leaf: compilers.as_varying(leaf, axes), tree)


def differs(leaf: Any, axes: Axes) -> bool:
    """Whether a value inside `jax.shard_map` may differ between devices."""
    return bool(set(axes) & compilers.varying_axes(leaf))


def axes_of(rows: jax.Array) -> Axes:
    """The axes over which rows [1] are dealt out inside `jax.shard_map`; elsewhere there are none."""
    return tuple(sorted(compilers.varying_axes(rows))) if rows.ndim else ()


def types_track_devices(axes: Axes) -> bool:
    """Whether types tell here which values differ between devices: not under `check_vma=False`."""
    return differs(jax.lax.axis_index(axes), axes)


def as_row(local: Tree) -> Tree:
    """A device's partial sums [...] as rows [1, ...]."""
    return jax.tree.map(lambda leaf: leaf if dtypes.is_float0(leaf) else jnp.asarray(leaf)[None], local)


def as_local(rows: Tree) -> Tree:
    """Undoes `as_row`; a scalar, which all devices have, stays."""
    return jax.tree.map(lambda leaf: leaf[0] if jnp.ndim(leaf) and not dtypes.is_float0(leaf) else leaf, rows)


def gathered(leaf: Any, to: NamedSharding, axes: Axes) -> Any:
    """Gathers a leaf from the devices' shards, inside `jax.shard_map`: its gradient is scattered, once.

    The whole leaf differs between devices, so that each adds up its own gradients, also over axes that do not shard it.
    """

    def gather(leaf: Any) -> Any:
        for dim, entry in enumerate(meshes.only(to.spec, axes)):
            if names := meshes.names_of(entry):
                leaf = jax.lax.all_gather(leaf, names, axis=dim, tiled=True)
        return leaf

    return beside_explicit(gather, varying(leaf, axes))


def beside_explicit(gather: Callable[[Any], Any], leaf: Any) -> Any:
    """`gather(leaf)` over manual axes, and over Explicit ones, beside which JAX 0.12 cannot scatter its gradient."""
    if others := meshes.explicit_axes(jax.sharding.get_abstract_mesh()):
        spec = meshes.spec_of(leaf)
        gather = jax.shard_map(gather, in_specs=(spec,), out_specs=spec, axis_names=set(others))
    return gather(leaf)


def _placed(leaf: Any, spec: PartitionSpec, mesh: meshes.Mesh, axes: Axes) -> jax.Array:
    """Reshards an array on an Explicit mesh: over the axes as in `spec`, over all others as it was."""
    leaf = jnp.asarray(leaf)
    return jax.sharding.reshard(leaf, NamedSharding(cast(Any, mesh), _spec_with(leaf, spec, axes)))


def _spec_with(leaf: Any, spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """The spec of a leaf, with the axes as in `spec`."""
    padded = lambda spec: [*(spec or ()), *[None] * jnp.ndim(leaf)][: jnp.ndim(leaf)]
    others = (meshes.names_of(meshes.without(entry, axes)) for entry in padded(meshes.spec_of(leaf)))
    over = map(meshes.names_of, padded(meshes.only(spec, axes)))
    return PartitionSpec(*((*names, *rest) for names, rest in zip(over, others, strict=True)))


def _check_divides(axes: Axes, mesh: meshes.Mesh, rows: int) -> None:
    devices = meshes.num_devices(mesh, axes)
    if rows % devices:
        raise ValueError(
            f"The rows of a batch must divide over the devices: {rows} rows, {devices} devices along "
            f"{axes}. Pad the batch to {-(-rows // devices) * devices} rows, with a mask, and leave the padding out of "
            "the loss: jnp.sum(mask * errors) / jnp.sum(mask)."
        )


def totals(sums: Tree, weight: jax.Array) -> Tree:
    """Adds the sums of a state over all its devices, which `weight` tells: one number, or one for each."""
    weight = jnp.asarray(weight)
    axes = axes_of(weight)
    return jax.tree.map(lambda leaf: jax.lax.psum(jnp.sum(leaf, axis=0) if weight.ndim else leaf, axes), sums)
