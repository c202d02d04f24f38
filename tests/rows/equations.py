"""One equation, traced for rows and for twice as many, with values: what the room says of it, and whether that is true."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._rows import locality, resized
from optax_accum._rows.program import Equation, Program, Value
from optax_accum._rows.registry import known
from optax_accum._rows.traces import view_of
from optax_accum._rows.units import Units
from optax_accum._space.device import Device
from optax_accum._within import by_level, partial

ROWS = (6, 12)
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")


def operand(spec, rows, random):
    """An array as a word says it: `n3` is float32 [n, 3], `i:2n` integers [2, n], `k:n` keys, `m:3n` [3, 4 n]."""
    kind, _, dims = spec.rpartition(":")
    sizes = {"n": rows, "m": 4 * rows, "h": rows // 2}
    return array(kind, tuple(sizes.get(dim) or int(dim) for dim in dims), random)


def array(kind, shape, random):
    """Random numbers: keys, integers small, large or zero, flags, shares of one, complex numbers, or any."""
    if kind == "z":
        return jnp.zeros(shape, jnp.int32)
    if kind == "k":
        return jax.random.split(jax.random.key(0), shape)
    if kind == "i":
        return jnp.asarray(random.integers(0, 4, shape), jnp.int32)
    if kind == "u":
        return jnp.asarray(random.integers(0, 2**32, shape), jnp.uint32)
    if kind == "b":
        return jnp.asarray(random.random(shape) < 0.5)
    if kind == "p":
        return jnp.asarray(random.uniform(0.1, 0.9, shape), jnp.float32)
    if kind == "c":
        return jnp.asarray(random.normal(size=shape) + 1j * random.normal(size=shape), jnp.complex64)
    return jnp.asarray(random.normal(size=shape), jnp.float32)


@dataclasses.dataclass
class Found:
    """An equation for n rows and for 2 n."""

    single: Any
    double: Any
    operands: list
    rows: tuple = ROWS

    @functools.cached_property
    def values(self):
        """The values that it takes; what is computed of them is computed in the program, not by its compiler."""
        return jax.lax.optimization_barrier([operand() for operand in self.operands])

    @property
    def view(self):
        return view_of(self.single, self.double, self.rows)

    @property
    def says(self):
        """What the room says of it."""
        view = self.view
        kept = [axis for axis in view.outs if axis is not None] if view.name in locality.NESTED else view.outs
        if locality.is_local(view._replace(outs=kept)):
            return "local"
        if locality.is_partial(view):
            return "partial"
        if locality.is_positional(view):
            return "positional"
        return "alike" if locality.is_alike(view) else "together"

    @functools.cached_property
    def equation(self):
        """As the engine has it."""
        view = self.view
        pairs = zip((self.single.invars, self.single.outvars), (view.ins, view.outs), strict=True)
        ins, outs = ([Value(var.aval, axis) for var, axis in zip(*pair, strict=True)] for pair in pairs)
        return Equation(self.single, self.double, ins, outs, self.rows)

    @property
    def units(self):
        """The number of blocks of rows that it treats together."""
        equation = self.equation
        return Program(equation.ins, [equation], equation.outs, self.rows).units


def traced(name, fun, *specs):
    """The last equation of this name in a function of operands; None where this JAX traces no such equation."""
    random = np.random.default_rng(sum(map(ord, name)))
    arrays = lambda rows: [operand(spec, rows, random) for spec in specs]
    return traced_for(name, lambda rows: fun, arrays, ROWS)


def traced_for(name, fun, arrays, rows):
    """The same of functions, and of arrays, of the number of rows."""
    single, double = rows
    values, twice = arrays(single), jax.eval_shape(lambda: arrays(double))
    found = []
    _walk(
        name,
        jax.make_jaxpr(fun(single))(*values),
        jax.make_jaxpr(fun(double))(*twice),
        list(map(_known, values)),
        found,
    )
    if not found or len(found[-1].single.outvars) != len(found[-1].double.outvars):
        return None  # no pair
    return dataclasses.replace(found[-1], rows=rows)


def _walk(name, long, short, values, found):
    """Finds equations; nothing is computed before somebody asks for a value."""
    (of_long, consts), (of_short, _) = compilers.opened(long), compilers.opened(short)
    env = dict(zip((*of_long.constvars, *of_long.invars), (*map(_known, consts), *values), strict=True))
    read = lambda atom: _known(atom.val) if isinstance(atom, core.Literal) else env[atom]
    for a, b in zip(of_long.eqns, of_short.eqns, strict=True):
        operands = list(map(read, a.invars))
        if a.primitive.name == name:
            found.append(Found(a, b, operands))
        if a.primitive.name in CALLS and a.primitive.name != name:
            inner = [eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"] for eqn in (a, b)]
            results = _walk(name, *inner, operands, found)
        else:
            results = _results(a, operands)
        env.update(zip(a.outvars, results, strict=True))
    return list(map(read, of_long.outvars))


def _known(value):
    return lambda: value


def _results(eqn, operands):
    computed = functools.cache(lambda: compilers.bind(eqn, [operand() for operand in operands]))
    return [lambda i=i: computed()[i] for i in range(len(eqn.outvars))]


def some(array, axis, units, number=3):
    """The rows of some units, of a number of them: in blocks where rows are in groups."""
    if axis is None:
        return array
    return array[(slice(None),) * axis + (places(units, array.shape[axis], number),)]


def places(units, length, number):
    block = length // number
    return np.concatenate([np.arange(unit * block, (unit + 1) * block) for unit in units])


def of_some(found):
    """The results of the equation for some rows, and these rows of its results for all: (got, want)."""
    view, whole, units = found.view, compilers.bind(found.single, found.values), [2, 0]
    values = [some(value, axis, units) for value, axis in zip(found.values, view.ins, strict=True)]
    got = resized.evaluate(found.single, found.double, resized.Some(ROWS, 4), values)
    return list(got), [some(all_rows, axis, units) for all_rows, axis in zip(whole, view.outs, strict=True)]


def of_parts(found):
    """The parts of the equation, joined, and the equation: (got, want). Filled rows count for nothing."""
    return _joined_parts(found, 4, found.values), compilers.bind(found.single, found.values)


def _joined_parts(found, number, values):
    equation = found.equation
    units = Units(found.units, number, found.rows[0] // found.units)
    store = by_level.Store(units, Device(), dict(zip(equation.ins, values, strict=True)))
    parts = []
    for index in range(number):
        values = [store.whole(value) if value.axis is None else store.cut(value)[index] for value in equation.ins]
        parts.append(partial.part_of(equation, units, values, units.of_part(index)))
    total = partial.reduction_of(equation).over(jnp.stack(parts), axis=0)
    assert parts[0].dtype == partial.type_of_part(equation).dtype
    return [by_level.finished(equation, total, store)]


# Values and gradients

# What JAX does not differentiate: operations, in reverse, and operands of others.
NO_GRADIENT = {
    "while",
    "householder_product",
    "igamma_grad_a",
    "zeta",
    "random_gamma_grad",
    "reduce_window",
    "scatter-mul",
}
STILL = {"clamp": (0, 2), "polygamma": (0,), "regularized_incomplete_beta": (0, 1)}


def _moves(found):
    """Which operands a derivative moves."""
    if found.single.primitive.name in NO_GRADIENT:
        return [False] * len(found.values)
    still = STILL.get(found.single.primitive.name, ())
    atoms = zip(found.single.invars, found.values, strict=True)
    inexact = [jnp.issubdtype(value.dtype, jnp.inexact) and not isinstance(atom, core.Literal) for atom, value in atoms]
    return [is_inexact and place not in still for place, is_inexact in enumerate(inexact)]


def _moved(found, run):
    """A function of values as one of those that move."""
    moves = _moves(found)

    def fun(given):
        rest = iter(given)
        return list(run([next(rest) if m else value for value, m in zip(found.values, moves, strict=True)]))

    return fun


def _with_gradient(found, run, given, cotangents):
    """The results, and the cotangents of the operands that move."""
    results, back = jax.vjp(_moved(found, run), given)
    return results, back(cotangents)[0]


def _cotangents(found, results):
    random = np.random.default_rng(len(results))

    def one(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.zeros(leaf.shape, jax.dtypes.float0)
        return jnp.asarray(random.normal(size=leaf.shape), leaf.dtype)

    return list(map(one, results))


def _of(axes, moves):
    return [axis for axis, m in zip(axes, moves, strict=True) if m]


def true_of_rows(found):
    """Two parts of the rows, in another order, against the whole: results, rows of cotangents, sums of cotangents."""
    view, number, moves = found.view, found.units, _moves(found)
    order = np.random.default_rng(number).permutation(number)
    parts = [part for part in (order[: -(-number // 2)], order[-(-number // 2) :]) if len(part)]
    given = _of(found.values, moves)
    results = compilers.bind(found.single, found.values)
    cotangents = _cotangents(found, results)
    grads = (
        _with_gradient(found, lambda values: compilers.bind(found.single, values), given, cotangents)[1]
        if given
        else []
    )
    got, want, sums = [], [], [0] * len(given)
    for units in parts:
        cut = lambda leaves, axes, units=units: [
            some(leaf, axis, units, number) for leaf, axis in zip(leaves, axes, strict=True)
        ]
        size = resized.Some(found.rows, len(units) * (found.rows[0] // number))
        run = lambda values, units=units, size=size, cut=cut: _of_rows(found, units, size, cut(values, view.ins))
        got += run(found.values)
        want += cut(results, view.outs)
        if given:
            more = _with_gradient(
                found,
                run,
                given,
                [_cut(ct, axis, units, number) for ct, axis in zip(cotangents, view.outs, strict=True)],
            )[1]
            sums = [a + b for a, b in zip(sums, more, strict=True)]
    return [*got, *(sums if given else [])], [*want, *grads]


def _cut(cotangent, axis, units, number):
    return some(cotangent, axis, units, number)


def _of_rows(found, units, size, values):
    positional = known(found.single.primitive.name).positional
    if found.says == "positional":
        (axis,), (made,) = found.view.outs, found.single.outvars
        return [
            positional.at(found.single, values, axis, jnp.asarray(places(units, made.aval.shape[axis], found.units)))
        ]
    return list(resized.evaluate(found.single, found.double, size, values))


def true_in_parts(found):
    """Parts, joined, against the whole, with the gradient of a sum; an extreme in parts is not differentiated."""
    number = min(found.units, 4)
    results = compilers.bind(found.single, found.values)
    given = _of(found.values, _moves(found)) if partial.reduction_of(found.equation).joins == "sum" else []
    if not given:
        return _joined_parts(found, number, found.values), list(results)
    cotangents, pairs = _cotangents(found, results), []
    for run in (functools.partial(_joined_parts, found, number), lambda values: compilers.bind(found.single, values)):
        found_results, grads = _with_gradient(found, run, given, cotangents)
        pairs.append([*found_results, *grads])
    return pairs


CLAIMS = {"local": true_of_rows, "alike": true_of_rows, "positional": true_of_rows, "partial": true_in_parts}


def assert_claims(founds):
    """Each claim of the table about these equations is true, and the same of their derivatives: one program."""
    founds = [found for found in founds if found.says in CLAIMS]
    pairs = jax.jit(lambda: [CLAIMS[found.says](found) for found in founds])()
    for found, (got, want) in zip(founds, pairs, strict=True):
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b, f"{found.says}: {found.single}")


def assert_true(founds):
    """What the room says of these equations is true: all of them are one program, which is compiled once."""
    pair = {"local": of_some, "alike": of_some, "partial": of_parts}
    founds = [found for found in founds if found.says in pair]
    pairs = jax.jit(lambda: [pair[found.says](found) for found in founds])()
    for found, (got, want) in zip(founds, pairs, strict=True):
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b, str(found.single))


def assert_equal(got, want, equation):
    """Equal, or to rounding."""
    assert (jnp.shape(got), jnp.result_type(got)) == (jnp.shape(want), jnp.result_type(want)), equation
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=equation)
