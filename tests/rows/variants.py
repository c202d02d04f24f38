"""Random equations of each primitive: where the rows lie, how many there are, which operands have some.

A variant is a function of the number of rows and of arrays, and the arrays as `Operand`s. Sizes often coincide: n may be
a width, or one. No rule is asked while a variant is written: most have rows where a rule must say no.
"""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.rows import equations


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array: a `Fraction` among its dimensions is an axis of so many rows for each row of the batch."""

    kind: str  # as in `equations.operand`
    dims: tuple

    def shape(self, rows):
        return sizes(self.dims, rows)


def sizes(dims, rows):
    return tuple(int(dim * rows) if isinstance(dim, Fraction) else dim for dim in dims)


class Draw:
    """The choices of one variant."""

    def __init__(self, *seed):
        self.random = np.random.default_rng(seed)
        self.n = self.pick(6, 6, 4, 5, 8, 3, 2, 1)
        even = [Fraction(1, 2)] if self.n % 2 == 0 else []
        self.rows = Fraction(self.pick(1, 1, 1, 3, 4, *even))

    def pick(self, *choices):
        return choices[self.random.integers(len(choices))]

    def chance(self, share):
        return self.random.random() < share

    def size(self):
        return self.pick(1, 2, 3, 4, self.n)

    def sizes(self, least, most):
        return [self.size() for _ in range(self.random.integers(least, most + 1))]

    def dims(self, least=0, most=2, trailing=()):
        """Dimensions with one axis of rows anywhere before the trailing ones."""
        dims = self.sizes(least, most)
        dims.insert(self.random.integers(len(dims) + 1), self.rows)
        return (*dims, *trailing)

    def axes(self, count, rank):
        return tuple(map(int, self.random.permutation(rank)[:count]))

    def axis(self, dims):
        return int(self.random.integers(len(dims)))

    def shuffled(self, items):
        return [items[place] for place in self.random.permutation(len(items))]


WRITERS = {}


def of(names):
    """Registers a writer of variants for these names, divided by spaces: a function of `Draw` and the name."""

    def register(writer):
        WRITERS.update(dict.fromkeys(names.split(), writer))
        return writer

    return register


def variant(name, number):
    """The n-th variant of a primitive: the function, its operands, and the numbers of rows of two traces."""
    draw = Draw(*map(ord, name), number)
    fun, *operands = WRITERS[name](draw, name)
    return fun, operands, (draw.n, 2 * draw.n)


# Entry by entry

UNARY = {
    "p": "acos asin atanh erf_inv log sqrt rsqrt digamma lgamma",
    "": "abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh erf erfc exp exp2 expm1 floor is_finite logistic neg "
    "round sign sin sinh square tan tanh stop_gradient",
    "i": "clz population_count",
    "b": "not",
    "c": "conj imag real",
}
BINARY = {
    "": "add atan2 div eq ge gt le lt max min mul ne nextafter rem sub complex",
    "p": "igamma igammac igamma_grad_a pow random_gamma_grad",
    "b": "and or xor",
    "i": "shift_left shift_right_arithmetic shift_right_logical",
}
FUNCTIONS = {  # where JAX names them otherwise
    "not": lax.bitwise_not,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "acosh": lambda x: lax.acosh(1 + x),
    "copy": lambda x: jnp.array(x, copy=True),
    "convert_element_type": lambda x: x.astype(jnp.float16),
    "integer_pow": lambda x: x**3,
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 4),
    "log1p": lax.log1p,
    "name": lambda x: checkpoint_name(x, "kept"),
    "device_put": jax.device_put,
    "random_unwrap": jax.random.key_data,
    "log2": getattr(lax, "log2", jnp.log2),
}
KINDS = {"acosh": "p", "log1p": "p", "log2": "p"}
LITERALS = {"": 0.5, "p": 0.5, "i": 2, "b": True}


def _used_twice(x):
    return jax.vjp(lambda x: (jnp.sin(x), jnp.cos(x)), x)[1]((x, x))


def _entries():
    for table, count in ((UNARY, 1), (BINARY, 2)):
        for kind, names in table.items():
            for name in names.split():
                fun = FUNCTIONS.get(name) or getattr(lax, name, None)
                if fun is not None:
                    yield name, fun, [kind] * count
    for name, fun in FUNCTIONS.items():
        if name in ["acosh", "copy", "convert_element_type", "integer_pow", "log1p", "name", "device_put", "log2"]:
            yield name, fun, [KINDS.get(name, "")]
    yield "reduce_precision", lambda x: lax.reduce_precision(x, 8, 20), [""]
    yield "polygamma", lax.polygamma, ["p", "p"]
    yield "zeta", lambda a, b: lax.zeta(a + 2, b), ["p", "p"]
    yield "regularized_incomplete_beta", lax.betainc, ["p", "p", "p"]
    yield "clamp", lax.clamp, ["", "", ""]
    yield "select_n", lax.select_n, ["b", "", ""]
    yield "add_any", _used_twice, [""]
    yield "one_minus_square", lambda x: jax.jvp(jnp.tanh, (x,), (x,)), [""]


OF_ENTRIES = {name: (fun, kinds) for name, fun, kinds in _entries()}


SPECIAL = """
bessel_i0e bessel_i1e digamma erf_inv igamma igamma_grad_a igammac lgamma polygamma random_gamma_grad
regularized_incomplete_beta zeta
"""


@of(SPECIAL)
def special(draw, name):
    """Functions of many operations each."""
    return entries(draw, name)


@of(" ".join(name for name in OF_ENTRIES if name not in SPECIAL.split()))
def entries(draw, name):
    """All operands have rows; or one is a literal, or a parameter, which is broadcast."""
    fun, kinds = OF_ENTRIES[name]
    dims = draw.dims()
    operands = [Operand(kind, dims) for kind in kinds]
    other = draw.pick("rows", "parameter", *([] if name == "random_gamma_grad" else ["literal"]))
    if len(kinds) == 1 or other == "rows":
        return lambda rows, *xs: fun(*xs), *operands
    place = int(draw.random.integers(len(kinds)))
    if name in ("clamp", "select_n"):
        places = [0, 2] if name == "clamp" else [0]  # may be scalars
        scalars = [Operand(kind, () if i in places else dims) for i, kind in enumerate(kinds)]
        return lambda rows, *xs: fun(*xs), *scalars
    if other == "literal":
        del operands[place]
        literal = LITERALS[kinds[place]]
        return lambda rows, *xs: fun(*xs[:place], literal, *xs[place:]), *operands
    kept = tuple(axis for axis, dim in enumerate(dims) if not isinstance(dim, Fraction))
    operands[place] = Operand(kinds[place], tuple(dims[axis] for axis in kept))

    def with_parameter(rows, *xs):
        xs = list(xs)
        xs[place] = lax.broadcast_in_dim(xs[place], sizes(dims, rows), kept)
        return fun(*xs)

    return with_parameter, *operands


# Reductions


OF_AXES = {
    "reduce_sum": ("", jnp.sum),
    "reduce_max": ("", jnp.max),
    "reduce_min": ("", jnp.min),
    "reduce_prod": ("", jnp.prod),
    "reduce_and": ("b", jnp.all),
    "reduce_or": ("b", jnp.any),
    "reduce_xor": ("b", lambda x, axes: lax.reduce(x, False, lax.bitwise_xor, axes)),
}


@of(" ".join(OF_AXES))
def reductions(draw, name):
    kind, reduce = OF_AXES[name]
    dims = draw.dims(1, 3)
    axes = draw.axes(draw.pick(1, 1, 2), len(dims))
    kind = draw.pick(kind, kind, "i") if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod") else kind
    return lambda rows, x: reduce(x, axes), Operand(kind, dims)


@of("argmax argmin")
def extremes(draw, name):
    dims = draw.dims(1)
    axis = draw.axis(dims)
    return lambda rows, x: getattr(lax, name)(x, axis, jnp.int32), Operand("", dims)


@of("cumsum cumprod cummax cummin cumlogsumexp")
def prefixes(draw, name):
    dims = draw.dims(1)
    options = {"axis": draw.axis(dims), "reverse": draw.chance(0.5)}
    return lambda rows, x: getattr(lax, name)(x, **options), Operand("", dims)


@of("sort")
def orders(draw, name):
    dims = draw.dims(1)
    axis, count = draw.axis(dims), draw.pick(1, 2, 3)
    keys = draw.pick(1, count)

    def fun(rows, *xs):
        return lax.sort(xs, dimension=axis, num_keys=keys)

    return fun, *[Operand("", dims) for _ in range(count)]


@of("top_k")
def best(draw, name):
    dims = draw.dims(1, 2)
    dims = draw.pick(dims, (*(dim for dim in dims if not isinstance(dim, Fraction)), draw.rows))
    return lambda rows, x: lax.top_k(x, 1), Operand("", dims)


# Products


@of("dot_general")
def products(draw, name):
    """Labels stand for dimensions; one of them, or two, are rows."""
    batch, summed = "ab"[: draw.pick(0, 1, 2)], "uv"[: draw.pick(0, 1, 1, 2)]
    left, right = "xy"[: draw.pick(0, 1, 2)], "st"[: draw.pick(0, 1)]
    labels = batch + summed + left + right
    if not labels:
        batch = labels = "a"
    of_rows = set(draw.shuffled(list(labels))[: draw.pick(1, 1, 1, 1, 2)])
    dims = {label: draw.rows if label in of_rows else draw.size() for label in labels}
    first, second = ("".join(draw.shuffled(list(batch + summed + free))) for free in (left, right))
    numbers = (
        ([first.index(label) for label in summed], [second.index(label) for label in summed]),
        ([first.index(label) for label in batch], [second.index(label) for label in batch]),
    )
    of_labels = [Operand("", tuple(dims[label] for label in each)) for each in (first, second)]
    return lambda rows, a, b: lax.dot_general(a, b, numbers), *of_labels


@of("conv_general_dilated")
def convolutions(draw, name):
    """The rows are the images, or their places, or the kernels; or features over which it adds."""
    groups = draw.pick(*[{}] * 3, {"feature_group_count": 2}, {"batch_group_count": 2})
    apart = draw.pick("images", "images", "images", "places", "kernels", "features", "features", "gradient", "gradient")
    features, kernels = draw.pick(2, 4), draw.pick(2, 4)
    images = {"N": 2, "C": features, "W": draw.pick(3, 4, 6)}
    kernel = {"O": kernels, "I": features // groups.get("feature_group_count", 1), "W": draw.pick(1, 2, 3)}
    one = Fraction(draw.pick(1, 2)) if not groups else Fraction(2)
    if apart == "kernels":
        kernel["O"] = one
    elif apart == "features":
        images["C"], kernel["I"] = one, one / groups.get("feature_group_count", 1)
    elif apart == "gradient":
        images["N"] = one
    else:
        images["N" if apart == "images" else "W"] = one if apart == "images" else Fraction(4)
    layouts = ["".join(draw.shuffled(list(letters))) for letters in ("NCW", "OIW", "NCW")]
    strides, padding = (draw.pick(1, 2),), draw.pick([(0, 0)], [(1, 1)], [(2, 0)])
    operands = [Operand("", tuple(images[c] for c in layouts[0])), Operand("", tuple(kernel[c] for c in layouts[1]))]
    dilations = {"lhs_dilation": (draw.pick(1, 2),), "rhs_dilation": (draw.pick(1, 1, 2),)}
    options = {"dimension_numbers": tuple(layouts), **dilations, **groups}
    convolve = lambda rows, x, w: lax.conv_general_dilated(x, w, strides, padding, **options)
    return (_of_kernel(convolve) if apart == "gradient" else convolve), *operands


def _of_kernel(convolve):
    """The gradient of a kernel, by JAX's rule: a convolution of images with cotangents, whose features are the rows."""

    def gradient(rows, x, w):
        result = jax.eval_shape(lambda x, w: convolve(rows, x, w), x, w)
        cotangent = jnp.sin(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape)
        return jax.linear_transpose(lambda w: convolve(rows, x, w), w)(cotangent)

    return gradient


def square(x):
    return x @ jnp.swapaxes(x, -1, -2) + jnp.eye(x.shape[-2])[(None,) * (x.ndim - 2)]


OF_MATRICES = {
    "cholesky": lambda x: lax.linalg.cholesky(square(x)),
    "eigh": lambda x: lax.linalg.eigh(square(x)),
    "lu": lax.linalg.lu,
    "qr": lax.linalg.qr,
    "svd": lambda x: lax.linalg.svd(x, compute_uv=False),
    "geqrf": lax.linalg.qr,
    "triangular_solve": lambda x: lax.linalg.triangular_solve(square(x), x, left_side=True),
}


@of(" ".join(OF_MATRICES))
def matrices(draw, name):
    inside = draw.chance(0.25)
    dims = (draw.size(), draw.rows) if inside else draw.dims(0, 1, draw.pick((3, 3), (4, 2), (2, 2)))
    return lambda rows, x: OF_MATRICES[name](x), Operand("", dims)


@of("householder_product")
def reflections(draw, name):
    dims = draw.dims(0, 1)
    return lambda rows, x, t: lax.linalg.householder_product(x, t), Operand("", (*dims, 4, 3)), Operand("", (*dims, 3))


@of("fft")
def transforms(draw, name):
    kind = draw.pick("fft", "rfft", "fftn")
    dims = draw.dims(1, 2)
    dims = draw.pick(dims, (*dims, 4))
    lengths = [1] if kind != "fftn" else [min(2, len(dims))]
    axes = tuple(range(-lengths[0], 0))
    of_kind = {"fft": jnp.fft.fft, "rfft": jnp.fft.rfft}.get(kind)
    return lambda rows, x: of_kind(x) if of_kind else jnp.fft.fftn(x, axes=axes), Operand("", dims)


# Shapes


@of("reshape")
def reshapes(draw, name):
    """Another division of the dimensions before the rows, and after, and of the rows among them."""
    before, after = draw.sizes(0, 2), draw.sizes(0, 2)
    dims = (*before, draw.rows, *after)
    first, last = math.prod(before), math.prod(after) * draw.rows
    if draw.chance(0.3):  # some factor goes to the other side
        factor = draw.pick(*(f for f in range(1, first + 1) if first % f == 0))
        first, last = first // factor, last * factor
    elif draw.chance(0.2) and last.denominator == 1:
        factor = draw.pick(*(f for f in range(1, int(last) + 1) if last % f == 0))
        first, last = first * factor, last / factor
    halves = [Fraction(1, 2)] if draw.n % 2 == 0 else []
    shares = [f for f in map(Fraction, (1, 2, 3, 4, 1, *halves)) if (last / f).denominator == 1]
    share = draw.pick(*shares) if shares else last
    new = (*_factors(draw, first), share, *_factors(draw, int(last / share)))
    return lambda rows, x: lax.reshape(x, sizes(new, rows)), Operand("", dims)


def _factors(draw, product):
    """Dimensions with this product."""
    factor = draw.pick(*(f for f in range(1, product + 1) if product % f == 0))
    return draw.pick([product], [factor, product // factor], [product, 1]) if product > 1 else draw.pick([], [1])


@of("transpose")
def transpositions(draw, name):
    dims = draw.dims(1, 3)
    order = draw.axes(len(dims), len(dims))
    return lambda rows, x: lax.transpose(x, order), Operand("", dims)


@of("squeeze")
def squeezes(draw, name):
    dims = draw.dims(1, 2)
    axis = draw.pick(0, len(dims))
    dims = (*dims[:axis], 1, *dims[axis:])
    return lambda rows, x: lax.squeeze(x, (axis,)), Operand("", dims)


@of("rev")
def reversals(draw, name):
    dims = draw.dims(1, 2)
    axes = draw.axes(draw.pick(1, 2), len(dims))
    return lambda rows, x: lax.rev(x, axes), Operand("", dims)


@of("broadcast_in_dim")
def broadcasts(draw, name):
    """Of rows, of a parameter without that axis or with a length of one along it, of a number."""
    dims = draw.dims(0, 3)
    axis = next(axis for axis, dim in enumerate(dims) if isinstance(dim, Fraction))
    kept = sorted(draw.axes(draw.random.integers(len(dims) + 1), len(dims)))
    lengths = [draw.pick(1, dims[place]) for place in kept]
    if draw.chance(0.4) and axis in kept:
        lengths[kept.index(axis)] = draw.rows
    return lambda rows, x: lax.broadcast_in_dim(x, sizes(dims, rows), kept), Operand("", tuple(lengths))


@of("iota")
def counts(draw, name):
    dims = draw.dims(0, 2)
    axis = draw.axis(dims)
    dtype = draw.pick(jnp.int32, jnp.float32)
    return lambda rows, _: lax.broadcasted_iota(dtype, sizes(dims, rows), axis), Operand("", (Fraction(1),))


@of("concatenate")
def concatenations(draw, name):
    dims = draw.dims(1, 2)
    axis = draw.axis(dims)
    others = [(*dims[:axis], draw.pick(dims[axis], 2, draw.rows), *dims[axis + 1 :]) for _ in range(draw.pick(1, 2))]
    return lambda rows, *xs: lax.concatenate(xs, axis), *[Operand("", each) for each in (dims, *others)]


@of("pad")
def pads(draw, name):
    dims = draw.dims(1, 2)
    config = [(draw.pick(0, 0, 1), draw.pick(0, 0, 2), draw.pick(0, 0, 1)) for _ in dims]
    for axis, dim in enumerate(dims):
        if isinstance(dim, Fraction) and draw.chance(0.7):
            config[axis] = draw.pick((0, 0, 0), (1, -1, 0), (1, 0, 1), (0, 2, 2), (1, 1, 1))
    return lambda rows, x, fill: lax.pad(x, fill, config), Operand("", dims), Operand("", ())


@of("slice")
def slices(draw, name):
    dims = draw.dims(1, 2)
    whole = draw.chance(0.6)
    part = draw.pick((0, 2, 1), (1, 1, 1), (0, 1, 2), (0, 1, -1), (1, 1, 2), (2, 1, 3))

    def bounds(dim, length):
        if isinstance(dim, Fraction) and whole:
            return 0, length, 1
        start, share, stride = part
        start, stride = min(start, length - 1), abs(stride)
        limit = max(start + 1, length if share == 1 else length // share)
        return start, limit, stride

    def fun(rows, x):
        return lax.slice(x, *zip(*map(bounds, dims, x.shape), strict=True))

    return fun, Operand("", dims)


@of("dynamic_slice dynamic_update_slice")
def dynamic_slices(draw, name):
    dims = draw.dims(1, 2)
    half = [Fraction(draw.rows, 2)] if draw.rows.numerator % 2 == 0 or draw.n % 2 == 0 else [1]
    if (half[0] * draw.n if isinstance(half[0], Fraction) else Fraction(1)).denominator != 1:
        half = [1]
    inner = tuple(draw.pick(dim, dim, dim, *half) if isinstance(dim, Fraction) else draw.pick(dim, 1) for dim in dims)
    starts = [Operand("i", ()) for _ in dims]
    if name == "dynamic_slice":
        return lambda rows, x, *at: lax.dynamic_slice(x, at, sizes(inner, rows)), Operand("", dims), *starts
    update = Operand("", inner)
    return lambda rows, x, u, *at: lax.dynamic_update_slice(x, u, at), Operand("", dims), update, *starts


@of("split")
def splits(draw, name):
    dims = draw.dims(1, 2)
    axis = draw.axis(dims)
    return lambda rows, x: lax.split(x, _in_two(x.shape[axis]), axis), Operand("", dims)


def _in_two(length):
    return (length,) if length < 2 else (length // 2, length - length // 2)


@of("stack unstack")
def stacks(draw, name):
    dims = draw.dims(1, 2)
    axis = draw.axis(dims)
    if name == "unstack":
        return lambda rows, x: jnp.unstack(x, axis=axis), Operand("", dims)
    return lambda rows, *xs: jnp.stack(xs, axis), *[Operand("", dims) for _ in range(draw.pick(1, 2, 3))]


@of("tile")
def tiles(draw, name):
    """Of rows, or of a parameter as often as there are rows."""
    dims = draw.dims(1, 2)
    if draw.chance(0.5):
        reps = tuple(draw.pick(1, 1, 2) for _ in dims)
        return lambda rows, x: jnp.tile(x, reps), Operand("", dims)
    lengths = tuple(draw.pick(1, 1, 2) if isinstance(dim, Fraction) else dim for dim in dims)
    reps = tuple(dim if isinstance(dim, Fraction) else draw.pick(1, 2) for dim in dims)
    return lambda rows, x: jnp.tile(x, sizes(reps, rows)), Operand("", lengths)


@of("bitcast_convert_type")
def bits(draw, name):
    dims = draw.dims(0, 2)
    dtype = draw.pick(jnp.uint8, jnp.uint32, jnp.int16)
    return lambda rows, x: lax.bitcast_convert_type(x, dtype), Operand("", dims)


@of("optimization_barrier")
def barriers(draw, name):
    operands = [Operand("", draw.dims()) for _ in range(draw.pick(1, 2))]
    return lambda rows, *xs: lax.optimization_barrier(xs), *operands


def alone(kind):
    """The one device, as a mesh."""
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((1,), ("data",), axis_types=types, devices=jax.devices()[:1])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


@of("sharding_constraint reshard")
def shardings(draw, name):
    there = alone("Auto" if name == "sharding_constraint" else "Explicit")
    put = lax.with_sharding_constraint if name == "sharding_constraint" else getattr(jax.sharding, "reshard", None)
    return lambda rows, x: put(x, there) if put else x, Operand("", draw.dims(0, 2))


# Windows


@of("reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add")
def windows(draw, name):
    dims = draw.dims(1, 2)
    free = draw.chance(0.6)  # whether rows are left alone

    def each(dim, one, other):
        return one if isinstance(dim, Fraction) and free else draw.pick(one, other)

    window = tuple(each(dim, 1, 2) for dim in dims)
    strides = tuple(each(dim, 1, 2) for dim in dims)
    options = {"padding": [each(dim, (0, 0), (1, 0)) for dim in dims]}
    dilations = {key: tuple(each(dim, 1, 2) for dim in dims) for key in ("base_dilation", "window_dilation")}
    of_name = {
        "reduce_window": (1.0, lambda a, b: a * b + 1),
        "reduce_window_sum": (0.0, lax.add),
        "reduce_window_min": (jnp.inf, lax.min),
    }
    start, combine = of_name.get(name, (-jnp.inf, lax.max))
    if name == "reduce_window":
        options["padding"] = "VALID"
        window = tuple(
            min(size, 1 if isinstance(dim, Fraction) and free else 2) for size, dim in zip(window, dims, strict=True)
        )
    pool = lambda x: lax.reduce_window(x, start, combine, window, strides, **options)
    if name == "reduce_window_sum":  # of the others JAX has no gradient then
        pool = lambda x: lax.reduce_window(x, start, combine, window, strides, **options, **dilations)
    funs = {
        "select_and_scatter_add": lambda rows, x: jax.vjp(pool, x)[1](pool(x)),
        "select_and_gather_add": lambda rows, x: jax.jvp(pool, (x,), (x,)),
    }
    return funs.get(name, lambda rows, x: pool(x)), Operand("", dims)


# By index


def places(draw, batched):
    """The sizes of an array of indices, in any order, and where among them the batched ones are."""
    free = [draw.pick(draw.rows, draw.size()) for _ in range(draw.pick(0, 1, 1, 2))]
    order = draw.shuffled(range(len(batched) + len(free)))
    return [(batched + free)[place] for place in order], tuple(order.index(place) for place in range(len(batched)))


@of("gather")
def gathers(draw, name):
    """Dimension numbers of every form: batched, collapsed, named by an index or not."""
    rank = draw.pick(1, 2, 2, 3)
    jobs = [draw.pick("batched", "collapsed", "window", "window") for _ in range(rank)]
    operand, slices, named, batched, collapsed = [], [], [], [], []
    for axis, job in enumerate(jobs):
        operand.append(draw.pick(draw.rows, draw.size(), draw.size()))
        full = draw.chance(0.6)
        slices.append(operand[axis] if job == "window" and full else 1)
        if job == "batched":
            batched.append(axis)
        elif job == "collapsed":
            collapsed.append(axis)
            named.append(axis)
        elif draw.chance(0.4):
            named.append(axis)
    named = draw.shuffled(named)
    indices, batching = places(draw, [operand[axis] for axis in batched])
    offsets = len(jobs) - len(batched) - len(collapsed)
    rank_out = len(indices) + offsets
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(sorted(draw.axes(offsets, rank_out))),
        collapsed_slice_dims=tuple(collapsed),
        start_index_map=tuple(named),
        operand_batching_dims=tuple(batched),
        start_indices_batching_dims=batching,
    )
    mode = draw.pick("clip", "fill", "promise_in_bounds")
    fill = draw.pick(None, 1.0) if mode == "fill" else None

    def fun(rows, x, i):
        return lax.gather(x, i, numbers, sizes(slices, rows), mode=mode, fill_value=fill)

    return (
        fun,
        Operand("", tuple(operand)),
        Operand("z" if mode == "promise_in_bounds" else "i", (*indices, len(named))),
    )


SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
    "scatter-max": lax.scatter_max,
    "scatter-min": lax.scatter_min,
    "scatter-sub": getattr(lax, "scatter_sub", None),
}


@of(" ".join(SCATTERS))
def scatters(draw, name):
    rank = draw.pick(1, 2, 2, 3)
    jobs = [draw.pick("batched", "inserted", "window", "window") for _ in range(rank)]
    operand, window, named, batched, inserted = [], [], [], [], []
    for axis, job in enumerate(jobs):
        operand.append(draw.pick(draw.rows, draw.size(), draw.size()))
        if job == "batched":
            batched.append(axis)
        elif job == "inserted":
            inserted.append(axis)
            named.append(axis)
        else:
            window.append(operand[axis] if draw.chance(0.7) else 1)
            if draw.chance(0.3):
                named.append(axis)
    named = draw.shuffled(named)
    indices, batching = places(draw, [operand[axis] for axis in batched])
    windows = sorted(draw.axes(len(window), len(window) + len(indices)))
    updates, rest, inner = [], iter(indices), iter(window)
    for axis in range(len(window) + len(indices)):
        updates.append(next(inner) if axis in windows else next(rest))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(windows),
        inserted_window_dims=tuple(inserted),
        scatter_dims_to_operand_dims=tuple(named),
        operand_batching_dims=tuple(batched),
        scatter_indices_batching_dims=batching,
    )
    mode = draw.pick("clip", "drop")

    def fun(rows, x, i, u):
        return SCATTERS[name](x, i, u, numbers, mode=mode)

    return fun, Operand("", tuple(operand)), Operand("i", (*indices, len(named))), Operand("", tuple(updates))


# Keys


@of("random_wrap")
def wraps(draw, name):
    return lambda rows, x: jax.random.wrap_key_data(x), Operand("u", (*draw.dims(0, 1), 2))


@of("random_unwrap")
def unwraps(draw, name):
    return lambda rows, key: jax.random.key_data(key), Operand("k", draw.dims(0, 1))


@of("random_split random_fold_in threefry2x32")
def keys(draw, name):
    dims = draw.dims(0, 1)
    over = lambda fun: functools.reduce(lambda fun, _: jax.vmap(fun), dims, fun)
    if name == "threefry2x32":
        return lambda rows, a, b: over(fixed_bits)(a, b), Operand("u", dims), Operand("u", dims)
    if name == "random_fold_in":
        return lambda rows, key, i: over(jax.random.fold_in)(key, i), Operand("k", dims), Operand("u", dims)
    return lambda rows, key: over(jax.random.split)(key), Operand("k", dims)


def fixed_bits(a, b):
    return jax.extend.random.threefry_2x32(jnp.stack([a, b]), jnp.arange(4, dtype=jnp.uint32))


@of("random_bits")
def drawn(draw, name):
    """By keys of rows, or by one key for all rows."""
    dims, dtype = draw.dims(0, 2), draw.pick(jnp.uint8, jnp.uint16, jnp.uint32)
    if draw.chance(0.5):
        return lambda rows, key: jax.random.bits(key, sizes(dims, rows), dtype), Operand("k", ())
    return lambda rows, key: jax.vmap(lambda key: jax.random.bits(key, (3,), dtype))(key), Operand("k", (draw.rows,))


# Programs inside equations


def _row(x, w):
    return jnp.tanh(x @ w) + jnp.sum(w)


def _together(x, w):
    return (x - jnp.mean(x, 0, keepdims=True)) @ w


def _numbered(x, w):
    return x * jnp.arange(len(x))[:, None] @ w


def _grouped(x, w):
    return jnp.flip(x.reshape(-1, 2, len(w)), 1).reshape(x.shape) @ w


def _by_the_number_of_rows(x, w):
    return x @ w / len(x)


def _body(draw):
    bodies = [_row, _row, _row, _together, _numbered, _by_the_number_of_rows]
    return draw.pick(*bodies, *([_grouped] * 2 if (draw.rows * draw.n) % 2 == 0 else []))


def _with_forward(fun):
    called = jax.custom_jvp(fun)
    called.defjvp(lambda primals, tangents: (called(*primals), 2 * jax.jvp(fun, primals, tangents)[1]))
    return called


def _with_backward(fun):
    called = jax.custom_vjp(fun)

    def backward(kept, ct):
        return tuple(2 * grad for grad in jax.vjp(fun, *kept)[1](ct))

    called.defvjp(lambda *xs: (called(*xs), xs), backward)
    return called


def _in_a_branch(fun):
    return lambda x, w: lax.cond(w[0, 0] > 0, fun, lambda x, w: x + w[:1], x, w)


def _in_a_while(fun):
    def run(x, w):
        return lax.while_loop(lambda c: c[1] < 2, lambda c: (fun(c[0], w), c[1] + 1), (x, jnp.sum(w[:1, 0] * 0)))[0]

    return run


def _in_a_scan(fun):
    return lambda x, w: lax.scan(lambda c, s: (fun(c, w) * s, c), x, jnp.arange(1.0, 4.0))


NESTS = {
    "jit": jax.jit,
    "pjit": jax.jit,
    "checkpoint": jax.checkpoint,
    "remat2": jax.checkpoint,
    "cond": _in_a_branch,
    "scan": _in_a_scan,
    "while": _in_a_while,
    "custom_jvp_call": _with_forward,
    "custom_vjp_call": _with_backward,
    "custom_vjp_call_jaxpr": _with_backward,
}


@of(" ".join(NESTS))
def nests(draw, name):
    width, body = draw.pick(2, 3, draw.n), _body(draw)
    matrix = Operand("", (width, width))
    if name == "scan" and draw.chance(0.4):  # over rows
        one = draw.pick(lambda rows, x, w: jnp.tanh(x @ w), lambda rows, x, w: jnp.sum(jnp.full(rows, 2.0)) * x @ w)
        return lambda rows, x, w: lax.map(lambda x: one(rows, x, w), x), Operand("", (draw.rows, width)), matrix
    if name == "cond" and draw.chance(0.3):
        return (
            lambda rows, x, w: lax.cond(jnp.mean(x) > 0, body, lambda x, w: x, x, w),
            Operand("", (draw.rows, width)),
            matrix,
        )
    return lambda rows, x, w: NESTS[name](body)(x, w), Operand("", (draw.rows, width)), matrix


def traced(name, number):
    """The equation of a variant; None where JAX traces no such equation."""
    fun, operands, rows = variant(name, number)

    def arrays(rows):
        random = np.random.default_rng(number)
        return [equations.array(operand.kind, operand.shape(rows), random) for operand in operands]

    return equations.traced_for(name, lambda rows: functools.partial(fun, rows), arrays, rows)
