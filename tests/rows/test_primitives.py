"""What the table of primitives says of an equation: whether micro-batches compute it, or all rows run at once."""

import collections
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.engine import claims_of, compilers, registered
from tests.rows import equations, variants
from tests.versions import since


def entries():
    """Beside scalars; of keys. What is computed entry by entry has variants."""
    yield "clamp", lambda x: lax.clamp(-0.5, x, 0.5), ("n3",), "local"
    yield "select_n", lax.select_n, ("b:", "n3", "n3"), "local"
    yield "random_fold_in", jax.vmap(jax.random.fold_in), ("k:n", "u:n"), "local"
    yield "threefry2x32", jax.vmap(variants.fixed_bits), ("u:n", "u:n"), "local"
    yield "random_wrap", jax.random.wrap_key_data, ("u:n2",), "local"
    yield "random_unwrap", jax.random.key_data, ("k:n",), "local"
    yield "random_bits", jax.vmap(lambda k: jax.random.bits(k, (3,))), ("k:n",), "local"
    yield "random_split", jax.vmap(jax.random.split), ("k:n",), "local"
    yield "random_bits", lambda k, y: jax.random.bits(k, y.shape), ("k:", "n"), "positional"


def reductions():
    """Over other axes, and over rows."""
    reduced = {name: lambda x, axis, fun=fun: fun(x, (axis,)) for name, (_, fun) in variants.OF_AXES.items()}
    reduced |= {name: functools.partial(getattr(lax, name), index_dtype=jnp.int32) for name in ("argmax", "argmin")}
    for name, fun in reduced.items():
        kind, along = variants.OF_AXES.get(name, [""])[0], lambda axis, fun=fun: lambda x: fun(x, axis=axis)
        over_rows = "partial" if "partial" in claims_of(name) else "together"
        for spec, axis, says in [
            ("n3", 1, "local"),
            ("3n", 0, "local"),
            ("2n3", 2, "local"),
            ("n3", 0, over_rows),
            ("2n3", 1, over_rows),
            ("m3", 0, over_rows),
        ]:
            yield name, along(axis), (f"{kind}:{spec}",), says
    yield "reduce_sum", lambda x: jnp.sum(x, (0, 2)), ("n32",), "partial"
    yield "reduce_and", lambda x: lax.reduce(x, np.int32(-1), lax.bitwise_and, (0,)), ("i:n3",), "together"
    yield "reduce_or", lambda x: lax.reduce(x, np.int32(0), lax.bitwise_or, (0,)), ("i:n3",), "together"
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        for reverse in (False, True):
            fun = functools.partial(getattr(lax, name), axis=1, reverse=reverse)
            yield name, fun, ("n3",), "local"
            yield name, fun, ("3n",), "together"


def linear_algebra():
    """Of matrices of each row, and of the matrix of all."""
    for name, fun in variants.OF_MATRICES.items():
        yield name, fun, ("n33",), "local"
        yield name, fun, ("2n34",), "local"
        yield name, fun, ("3n",), "together"
    yield "householder_product", lambda x, t: lax.linalg.householder_product(x, t), ("n243", "n23"), "local"
    yield "householder_product", lambda x, t: lax.linalg.householder_product(x, t), ("n3", "3"), "together"
    yield (
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(variants.square(a), b, left_side=True),
        ("33", "3n"),
        "together",
    )
    yield "fft", lambda x: jnp.fft.fft(x), ("n4",), "local"
    yield "fft", lambda x: jnp.fft.rfft2(x), ("2n44",), "local"
    yield "fft", lambda x: jnp.fft.irfft(x), ("c:n5",), "local"
    yield "fft", lambda x: jnp.fft.fft(x), ("4n",), "together"
    yield "fft", lambda x: jnp.fft.fft2(x), ("n4",), "together"


def products():
    """Matrix products and convolutions."""
    for subscripts, specs, says in [
        ("nd,de->ne", ("n3", "34"), "local"),
        ("de,nd->en", ("34", "n3"), "local"),
        ("nd,nd->n", ("n3", "n3"), "local"),
        ("dn,ne->nde", ("3n", "n4"), "together"),  # a transposition of one of them is left to `transpose`
        ("dn,en->nde", ("3n", "4n"), "local"),
        ("dn,ne->de", ("3n", "n4"), "partial"),
        ("nd,ne->de", ("n3", "n4"), "partial"),
        ("n,n->", ("n", "n"), "partial"),
        ("nd,md->nm", ("n3", "n3"), "together"),
        ("nd,n->d", ("n3", "n"), "partial"),
        ("nd,nde->ne", ("n3", "n34"), "local"),
    ]:
        yield (
            "dot_general",
            functools.partial(jnp.einsum, subscripts),
            specs,
            None if says == "together" and "nde" in subscripts else says,
        )
    across = lambda numbers: lambda a, b: lax.dot_general(a, b, numbers)
    yield "dot_general", across((((), ()), ((0,), (0,)))), ("n3", "n3"), "local"
    yield "dot_general", across((((1,), (1,)), ((), ()))), ("n3", "n3"), "together"
    yield "dot_general", across((((0, 1), (0, 1)), ((), ()))), ("n3", "n3"), "partial"
    conv = lambda x, w, **kw: lax.conv_general_dilated(x, w, (1,), "SAME", **kw)
    yield "conv_general_dilated", conv, ("n25", "423"), "local"
    yield (
        "conv_general_dilated",
        functools.partial(conv, dimension_numbers=("WNC", "WIO", "WNC")),
        ("5n2", "324"),
        "local",
    )
    yield "conv_general_dilated", functools.partial(conv, feature_group_count=2), ("n45", "623"), "local"
    yield "conv_general_dilated", functools.partial(conv, batch_group_count=2), ("n25", "423"), "together"
    yield "conv_general_dilated", conv, ("22n", "423"), "together"  # rows as a dimension of space
    yield "conv_general_dilated", conv, ("225", "n23"), "together"  # rows as kernels


def shapes():
    """Shapes and orders."""
    take = lambda *shape: lambda x: lax.reshape(x, tuple(len(x) if s is None else s for s in shape))
    yield "reshape", take(None, 12), ("n34",), "local"
    yield "reshape", lambda x: x.reshape(-1, 4), ("n34",), "local"
    yield "reshape", lambda x: x.reshape(-1, 2, 3), ("n3",), "local"
    yield "reshape", lambda x: x.reshape(2, -1, 2, 3), ("2n3",), "local"
    yield "reshape", lambda x: x.reshape(-1, 2), ("3n",), "together"
    yield "reshape", lambda x: x.reshape(3, -1), ("n3",), "together"
    yield "reshape", lambda x: x.reshape(2, -1), ("n",), "together"
    yield "reshape", lambda x: x.reshape(-1), ("3n",), "together"
    yield "transpose", lambda x: x.transpose(2, 0, 1), ("n34",), "local"
    yield "transpose", lambda x: x.transpose(1, 2, 0), ("3n4",), "local"
    yield "squeeze", lambda x: lax.squeeze(x, (0, 2)), ("1n1",), "local"
    yield "rev", lambda x: lax.rev(x, (1,)), ("n3",), "local"
    yield "rev", lambda x: lax.rev(x, (0,)), ("n3",), "together"
    yield "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (2, len(x), 3), (1, 2)), ("n3",), "local"
    yield "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (3, x.shape[1]), (0, 1)), ("1n",), "local"
    yield "broadcast_in_dim", lambda x, y: lax.broadcast_in_dim(x, (len(y), 3), (1,)), ("3", "n"), "alike"
    yield "broadcast_in_dim", lambda y: lax.full((2, len(y), 3), 4.0), ("n",), "alike"
    yield "broadcast_in_dim", lambda x, y: lax.broadcast_in_dim(x, (len(y), 3), (0, 1)), ("13", "n"), "alike"
    yield "iota", lambda y: lax.broadcasted_iota(jnp.int32, (len(y), 3), 1), ("n",), "alike"
    yield "iota", lambda y: lax.broadcasted_iota(jnp.int32, (len(y), 3), 0), ("n",), "together"
    yield "concatenate", lambda a, b: lax.concatenate([a, b], 1), ("n3", "n2"), "local"
    yield "concatenate", lambda a, b: lax.concatenate([a, b], 0), ("n3", "n3"), "together"
    yield "concatenate", lambda a, b: lax.concatenate([a, b], 0), ("n3", "23"), "together"
    yield "pad", lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, 2, 1)]), ("n3",), "local"
    yield "pad", lambda x: lax.pad(x, 0.0, [(1, 0, 0), (0, 0, 0)]), ("n3",), "together"
    yield "pad", lambda x: lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 0)]), ("n3",), "together"
    yield "pad", lambda x: lax.pad(x, 0.0, [(1, 1, 2), (0, 0, 0)]), ("n3",), "local"
    yield "pad", lambda x: lax.pad(x, 0.0, [(0, 1, 2), (0, 0, 0)]), ("n3",), "together"
    yield "slice", lambda x: lax.slice_in_dim(x, 1, 3, axis=1), ("n4",), "local"
    yield "slice", lambda x: lax.slice(x, (0, 0), (len(x), 4), (1, 2)), ("n4",), "local"
    yield "slice", lambda x: lax.slice_in_dim(x, 1, len(x)), ("n4",), "together"
    yield "slice", lambda x: lax.slice_in_dim(x, 0, len(x) // 2), ("n4",), "together"
    yield "slice", lambda x: lax.slice_in_dim(x, 0, len(x), 2), ("n4",), "local"
    yield "slice", lambda x: lax.slice_in_dim(x, 1, len(x), 2), ("n4",), "local"
    yield "slice", lambda x: lax.slice_in_dim(x, 2, len(x), 2), ("n4",), "together"
    yield "slice", lambda x, y: lax.slice_in_dim(x, len(y) // 6, len(y) // 6 + 1, axis=1), ("n4", "n"), "together"
    yield "slice", lambda x, y: lax.slice(x, (0, 0), (len(x), 2 + len(y) // 6), (1, 2)), ("n4", "n"), "together"
    yield "dynamic_slice", lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, axis=1), ("n4", "i:"), "local"
    yield "dynamic_slice", lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, axis=0), ("n4", "i:"), "together"
    yield "dynamic_slice", lambda x, i: lax.dynamic_slice_in_dim(x, i, len(x) // 2, axis=0), ("n4", "i:"), "together"
    yield "dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)), ("n4", "n2", "i:"), "local"
    yield "dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), ("n4", "24", "i:"), "together"
    yield "dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), ("n4", "h4", "i:"), "together"
    yield "split", lambda x: lax.split(x, (1, 2), axis=1), ("n3",), "local"
    yield "split", lambda x: lax.split(x, (len(x) // 2,) * 2, axis=0), ("n3",), "together"
    yield "bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint8), ("n3",), "local"
    yield "bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint32), ("3n",), "local"
    yield "optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), ("n3", "3n"), "local"
    yield "optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), ("n3", "3"), "together"
    yield "sharding_constraint", lambda x: lax.with_sharding_constraint(x, variants.alone("Auto")), ("n3",), "local"
    reshards = getattr(jax.sharding, "reshard", None)
    yield "reshard", reshards and (lambda x: reshards(x, variants.alone("Explicit"))), ("n3",), "local"
    for spec, axis, says in [("n3", 1, "local"), ("n3", 0, "local"), ("3n", 2, "local"), ("3n", 0, "local")]:
        yield "stack", functools.partial(_stacked, axis), (spec, spec), says
    yield "unstack", lambda x: jnp.unstack(x, axis=1), ("n3",), "local"
    yield "unstack", lambda x: jnp.unstack(x, axis=0), ("3n",), "local"
    yield "tile", lambda x: jnp.tile(x, (1, 2)), ("n3",), "local"
    yield "tile", lambda x: jnp.tile(x, (2, 1)), ("n3",), "together"
    yield "sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), ("n3", "n3"), "local"
    yield "sort", lambda x: lax.sort(x, dimension=0), ("n3",), "together"
    yield "top_k", lambda x: lax.top_k(x, 2), ("2n3",), "local"
    yield "top_k", lambda x: lax.top_k(x, 2), ("3n",), "together"
    yield "top_k", lambda x, y: lax.top_k(x, len(y) // 6), ("n3", "n"), "together"


def _stacked(axis, *arrays):
    return jnp.stack(arrays, axis)


def windows():
    """Windows over other axes, and over rows."""
    pool = lambda *window, pad="VALID": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, (1,) * x.ndim, pad)
    sums = lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID")
    least = lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 1), "VALID")
    own = lambda window: lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b + 1, window, (1, 1), "VALID")
    yield "reduce_window_max", pool(1, 2), ("n4",), "local"
    yield "reduce_window_max", pool(2, 1), ("n4",), "together"
    yield "reduce_window_max", pool(2, 1, pad="SAME"), ("n4",), "together"
    yield "reduce_window_max", pool(1, 2, pad=((1, 0), (0, 0))), ("n4",), "together"
    yield "reduce_window_sum", sums, ("n4",), "local"
    yield "reduce_window_sum", sums, ("4n",), "together"
    yield "reduce_window_min", least, ("n4",), "local"
    yield "reduce_window", own((1, 2)), ("n4",), "local"
    yield "reduce_window", own((2, 1)), ("n4",), "together"
    strided = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1), (2, 1), "VALID")
    yield "reduce_window_max", strided, ("n4",), "together"
    back = lambda window: lambda x: jax.vjp(pool(*window), x)[1](pool(*window)(x))
    yield "select_and_scatter_add", back((1, 2)), ("n4",), "local"
    yield "select_and_scatter_add", back((2, 1)), ("n4",), "together"
    forward = lambda window: lambda x: jax.jvp(pool(*window), (x,), (x,))
    yield "select_and_gather_add", forward((1, 2)), ("n4",), "local"
    yield "select_and_gather_add", forward((2, 1)), ("n4",), "together"


def places():
    """Gathers and scatters: by index of each row, into a table, by number of row."""
    yield "gather", lambda t, i: t[i], ("53", "i:n"), "local"
    yield "gather", lambda t, i: t[i], ("53", "i:2n"), "local"
    yield "gather", lambda x, i: x[:, i], ("n5", "i:3"), "local"
    yield "gather", lambda x, i: jnp.take_along_axis(x, i, axis=1), ("n5", "i:n2"), "local"
    yield "gather", lambda x, i: jax.vmap(lambda x, i: x[i])(x, i), ("n53", "i:n2"), "local"
    yield "gather", lambda x, i: x[i], ("n3", "i:n"), "together"
    yield "gather", lambda x, i: x[i], ("n3", "i:2"), "together"
    yield "gather", lambda x, i: x[jnp.arange(len(i)), i], ("n5", "i:n"), "together"
    yield "gather", lambda x, i: jnp.take_along_axis(x, i, axis=0), ("n5", "i:n5"), "together"
    for name, method in [
        ("scatter", "set"),
        ("scatter-add", "add"),
        ("scatter-mul", "multiply"),
        ("scatter-max", "max"),
        ("scatter-min", "min"),
        ("scatter-sub", "subtract"),
    ]:
        put = lambda x, i, u, method=method: getattr(x.at[i], method)(u)
        each = jax.vmap(put)
        yield name, each, ("n5", "i:n2", "n2"), "local"
        yield name, lambda x, u, method=method: getattr(x.at[:, 1], method)(u), ("n5", "n"), "local"
        yield name, lambda x, u, method=method: getattr(x.at[:, 1:3], method)(u), ("n5", "n2"), "local"
        yield name, put, ("n5", "i:n", "n5"), "together"
        yield name, put, ("53", "i:n", "n3"), "partial" if name == "scatter-add" else "together"
        yield name, lambda x, u, method=method: getattr(x.at[: len(u)], method)(u), ("n5", "h5"), "together"
        yield name, lambda x, u, method=method: getattr(x.at[1], method)(u), ("n5", "5"), "together"
        yield name, functools.partial(_over_a_part, name), ("n5", "h5"), "together"
    yield "scatter-add", lambda i, u: jax.ops.segment_sum(u, i, 4), ("i:n", "n3"), "partial"
    yield "scatter-add", lambda i, u: jnp.zeros(4).at[i].add(u), ("i:n2", "n2"), "partial"


def _over_a_part(name, x, u):
    """A scatter of a window that holds the first half of the rows, along an axis that no index tells."""
    numbers = lax.ScatterDimensionNumbers((0, 1), (), (1,))
    return variants.SCATTERS[name](x, jnp.zeros(1, jnp.int32), u, numbers)


def nested():
    """Programs inside equations."""
    couples = lambda x, w: (x - jnp.mean(x, 0, keepdims=True)) @ w
    for name, nest in variants.NESTS.items():
        yield name, nest(lambda x, w: jnp.tanh(x @ w)), ("n3", "33"), None if name == "while" else "local"
        yield name, nest(couples), ("n3", "33"), "together"
    yield "while", jax.vmap(lambda x: lax.while_loop(lambda x: x[0] < 3, lambda x: x + 1, x)), ("n3",), "local"
    yield "while", lambda x: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + 1, x), ("n3",), "together"
    yield "cond", lambda x: lax.cond(jnp.mean(x) > 0, jnp.sin, jnp.cos, x), ("n3",), "local"
    yield "scan", lambda x: lax.map(jnp.sin, x), ("n23",), "local"
    yield "scan", lambda x: lax.scan(lambda c, x: (c + x, x), jnp.zeros(3), x), ("n3",), "together"


def of_other_types():
    """What variants have of float32 alone: sums of parts are as wide as they must be."""
    for name in ("reduce_max", "reduce_min", "reduce_sum"):
        yield name, lambda x, fun=variants.OF_AXES[name][1]: fun(x, 0), ("i:n3",), "partial"
    for name in ("reduce_max", "reduce_min"):
        yield name, lambda x, fun=variants.OF_AXES[name][1]: fun(x, 0), ("b:n3",), None
    yield "reduce_sum", lambda x: jnp.sum(x.astype(jnp.bfloat16), 0), ("n3",), "partial"
    yield "reduce_max", lambda x: jnp.max(x.astype(jnp.float8_e4m3fn), 0), ("n3",), "partial"
    yield "reduce_max", lambda x: jnp.max(x, 0), ("c:n3",), "partial"
    yield "dot_general", lambda a, b: jnp.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)), ("3n", "n4"), "partial"
    yield "dot_general", lambda a, b: lax.dot(a, b), ("i:3n", "i:n4"), "partial"
    yield "scatter-add", lambda i, u: jax.ops.segment_sum(u.astype(jnp.bfloat16), i, 4), ("i:n", "n3"), "partial"


KINDS_OF_CASES = [entries, reductions, linear_algebra, products, shapes, windows, places, nested]
OF_OTHER_VERSIONS = {  # names that no function of this JAX traces, or another one does
    *("pjit", "jit", "checkpoint", "remat2", "custom_vjp_call", "custom_vjp_call_jaxpr", "closed_call"),
    *(
        "random_gamma_grad",
        "log2",
        "geqrf",
        "qr",
        "scatter-sub",
        "stack",
        "unstack",
        "tile",
        "square",
        "exp2",
        "one_minus_square",
    ),
}


COLLECTIVES = {  # see tests/space/test_other_axes.py
    *("pcast", "pvary", "psum", "psum_invariant", "pmax", "pmin", "ppermute", "pbroadcast", "reduce_scatter"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all"),
}
EQUINOX = {  # see tests/rows/test_equinox.py
    *("maybe_set", "nonbatchable", "nondifferentiable_backward", "nontraceable", "select_if_vmap", "vprim"),
    *("unvmap_all", "unvmap_any", "unvmap_max"),
}


TABLE = registered()  # before a test adds a row


def founds_of(cases):
    """The equations, of which the table says what it should."""
    founds = []
    for name, fun, specs, says in cases():
        found = equations.traced(name, fun, *specs) if fun else None
        if found is None:
            assert name in OF_OTHER_VERSIONS
            continue
        assert says in (None, found.says), (name, specs, says, found.says)
        founds.append(found)
    return founds


@pytest.mark.parametrize("cases", KINDS_OF_CASES, ids=lambda cases: cases.__name__)
def test_what_the_table_says(cases):
    """No rule is too careful, which changes no number. What is claimed is true of random equations: test_variants."""
    said = collections.defaultdict(set)
    for found in founds_of(cases):
        said[found.single.primitive.name].add(found.says)
    assert [name for name in said if "local" in claims_of(name) and "local" not in said[name]] == []


def test_what_it_says_of_other_types_is_true():
    equations.assert_true(founds_of(of_other_types), perturbed=lambda found: [])


def transposed_product(add):
    product = lambda a, b: jax.lax.dot_general(a, b, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
    a, b = jnp.ones((4, 4, 8), jnp.bfloat16), jnp.ones((4, 4, 16), jnp.bfloat16)
    return jax.jit(lambda a, b: add(product(a, b), a, b).T)(a, b)


def test_a_float32_product_of_bfloat16_arrays_is_written_as_it_is():
    np.testing.assert_array_equal(transposed_product(compilers.as_written), np.full((16, 8), 16))
    gradient = jax.jit(jax.grad(lambda x: compilers.as_written(jnp.dot(x, x), *[x.astype(jnp.bfloat16)] * 2)))
    np.testing.assert_allclose(gradient(jnp.arange(3.0)), 2 * jnp.arange(3.0))


MULTIPLIES_BFLOAT16 = (
    pathlib.Path("/proc/cpuinfo").exists() and "avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text()
)


@since(0, 12, why="a version to look at")
@pytest.mark.skipif(not MULTIPLIES_BFLOAT16, reason="for other CPUs XLA widens the arrays first")
def test_xla_still_runs_no_transposed_product_of_bfloat16_arrays():
    with pytest.raises(jax.errors.JaxRuntimeError, match="BF16 x BF16 = F32"):
        transposed_product(lambda product, a, b: product).block_until_ready()
