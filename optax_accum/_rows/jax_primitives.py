"""JAX's own primitives: the row of each in the registry.

`neg` treats rows one by one wherever they lie; `reduce_sum` does along other axes, and over rows it adds parts; `sort`
along rows has no rule, and so takes all of them at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, evaluation
from optax_accum._core.folds import MAX, MIN
from optax_accum._rows import draws, rules
from optax_accum._rows.registry import FIRST, PRODUCT, REST, TOGETHER, Positional, Reduction, register

# How parts are reduced


def _product(equation: Any, values: Sequence[Any], wide: Callable[[Any], Any], along: Any) -> jax.Array:
    (left, right), params = values, equation.params
    dtype = wide(equation.outvars[0].aval.dtype)
    options = {key: params[key] for key in ("out_sharding",) if params.get(key) is not None}
    product = jax.lax.dot_general(
        left, right, params["dimension_numbers"], params["precision"], preferred_element_type=dtype, **options
    )
    return compilers.as_written(product, left, right)


def _added(equation: Any, values: Sequence[Any], wide: Callable[[Any], Any], along: Any) -> jax.Array:
    operand, at, updates = values
    zeros = jnp.zeros(operand.shape, wide(operand.dtype))
    options = {key: equation.params[key] for key in ("dimension_numbers", "unique_indices", "mode")}
    return jax.lax.scatter_add(zeros, at, updates.astype(zeros.dtype), **options)  # filled rows are not in order


def _convolved(equation: Any, values: Sequence[Any], wide: Callable[[Any], Any], along: Any) -> jax.Array:
    dtype = wide(equation.outvars[0].aval.dtype)
    (result,) = evaluation.bind(equation.replace(params=equation.params | {"preferred_element_type": dtype}), values)
    return result


def _as_it_is(equation: Any, values: Sequence[Any], wide: Any, along: Callable[..., jax.Array]) -> jax.Array:
    return along(values[0], axis=equation.params["axes"])


_SUM = Reduction(rules.reduced)
_MAX = Reduction(rules.reduced, MAX, _as_it_is)
_MIN = Reduction(rules.reduced, MIN, _as_it_is)
_AND = Reduction(rules.flags, MIN, _as_it_is)
_OR = Reduction(rules.flags, MAX, _as_it_is)

# The table

register(
    """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz conj cos cosh digamma eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le lgamma log log1p
    log2 logistic lt max min ne nextafter not one_minus_square or polygamma population_count pow random_gamma_grad
    regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square tan tanh threefry2x32 xor zeta
    """,
    local=rules.elementwise,
    is_cheap=True,
)
register(
    "convert_element_type copy device_put imag name neg real reduce_precision stop_gradient",
    local=rules.elementwise,
    linear=FIRST,
    is_cheap=True,
)
register("add add_any complex sub", local=rules.elementwise, linear=TOGETHER, is_cheap=True)
register("mul", local=rules.elementwise, linear=PRODUCT, is_cheap=True)
register("div", local=rules.elementwise, linear=FIRST, is_cheap=True)
register("select_n", local=rules.elementwise, linear=REST, is_cheap=True)

register("reduce_sum", local=rules.not_reduced, partial=_SUM, linear=FIRST)
register("reduce_max", local=rules.not_reduced, partial=_MAX)
register("reduce_min", local=rules.not_reduced, partial=_MIN)
register("reduce_and", local=rules.not_reduced, partial=_AND)
register("reduce_or", local=rules.not_reduced, partial=_OR)
register("argmax argmin reduce_prod reduce_xor", local=rules.not_reduced)
register("cumsum", local=rules.not_along("axis"), linear=FIRST)
register("cumlogsumexp cummax cummin cumprod", local=rules.not_along("axis"))
register("reduce_window_sum", local=rules.window, linear=FIRST)
register("reduce_window reduce_window_max reduce_window_min", local=rules.window)
register("select_and_gather_add select_and_scatter_add", local=rules.window, linear=FIRST)

register("dot_general", local=rules.dot, partial=Reduction(rules.contracted, part=_product), linear=PRODUCT)
register(
    "conv_general_dilated",
    local=rules.convolution,
    partial=Reduction(rules.sums_to_kernel, part=_convolved),
    linear=PRODUCT,
)
register("triangular_solve", local=rules.leading_axes(2), linear=((1,),))
register("cholesky eigh geqrf householder_product lu qr svd", local=rules.leading_axes(2))
register("fft", local=rules.fft, linear=FIRST)

register("broadcast_in_dim", local=rules.broadcast, alike=rules.repeated, linear=FIRST, is_cheap=True)
register("reshape", local=rules.reshape, linear=FIRST, is_cheap=True)
register("squeeze", local=rules.not_reduced, linear=FIRST, is_cheap=True)
register("tile", local=rules.tile, alike=rules.tiled, linear=FIRST)
register("iota", alike=lambda view: view.outs[0] != view.params["dimension"])
register("transpose", local=lambda view: view.params["permutation"][view.outs[0]] == view.ins[0], linear=FIRST)
register("rev", local=rules.not_reduced, linear=FIRST)
register("slice dynamic_slice", local=rules.sliced, linear=FIRST)
register("split", local=rules.split, linear=FIRST)
register("unstack", local=rules.unstack, linear=FIRST)
register("concatenate", local=rules.concatenate, linear=TOGETHER)
register("stack", local=rules.stack, linear=TOGETHER)
register("pad", local=rules.pad, linear=TOGETHER)
register("dynamic_update_slice", local=rules.dynamic_update, linear=((0, 1),))
register("optimization_barrier", local=rules.each_alike, is_cheap=True)
register("reshard sharding_constraint", local=rules.each_alike, linear=FIRST)
register("pcast pvary", local=rules.elementwise, linear=FIRST)
register("psum psum_invariant", local=rules.joined, linear=TOGETHER)
register("pmax pmin", local=rules.joined)
register("all_gather all_gather_invariant all_gather_reduced", local=rules.all_gathered, linear=FIRST)
register("reduce_scatter", local=rules.reduce_scattered, linear=FIRST)
register("all_to_all", local=rules.all_to_all, linear=FIRST)
register("pbroadcast ppermute", local=rules.elementwise, linear=FIRST)
register("bitcast_convert_type", local=rules.bitcast)

register("gather", local=rules.gather, linear=FIRST, is_affine=lambda equation: bool(equation.params["fill_value"]))
register("scatter-add", local=rules.scatter, partial=Reduction(rules.scattered, part=_added), linear=((0, 2),))
register("scatter", local=rules.scatter, linear=((0, 2),))
register("scatter-max scatter-min scatter-mul scatter-sub", local=rules.scatter)
register("sort", local=rules.sorting)
register("top_k", local=lambda view: view.ins[0] != view.params.get("axis", len(view.shape_in(0)) - 1))

register("random_wrap random_unwrap", local=rules.wrapped)
register("random_fold_in", local=rules.drawn(rules.elementwise))
register("random_split", local=rules.drawn(rules.wrapped))
register("random_bits", local=rules.drawn(rules.wrapped), positional=Positional(draws.is_drawn_by_rows, draws.at))
