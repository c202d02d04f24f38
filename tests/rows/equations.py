"""One equation, traced for rows and for twice as many, with values: what the room says of it, and whether that is true."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers, evaluation
from optax_accum._core.folds import SUM
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
    computed = functools.cache(lambda: evaluation.bind(eqn, [operand() for operand in operands]))
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
    view, whole, units = found.view, evaluation.bind(found.single, found.values), [2, 0]
    values = [some(value, axis, units) for value, axis in zip(found.values, view.ins, strict=True)]
    got = resized.evaluate(found.single, found.double, resized.Some(ROWS, 4), values)
    return list(got), [some(all_rows, axis, units) for all_rows, axis in zip(whole, view.outs, strict=True)]


def of_parts(found):
    """The parts of the equation, joined, and the equation: (got, want). Filled rows count for nothing."""
    return _joined_parts(found, 4, found.values), evaluation.bind(found.single, found.values)


def _joined_parts(found, number, values):
    equation = found.equation
    units = Units(found.units, number, found.rows[0] // found.units)
    store = by_level.Store(units, Device(), dict(zip(equation.ins, values, strict=True)))
    parts = []
    for index in range(number):
        values = [store.whole(value) if value.axis is None else store.cut(value)[index] for value in equation.ins]
        parts.append(partial.part_of(equation, units, values, units.of_part(index)))
    total = partial.reduction_of(equation).fold.along(jnp.stack(parts), axis=0)
    of_sum = partial.reduction_of(equation).fold is SUM and jnp.issubdtype(parts[0].dtype, jnp.inexact)
    assert not of_sum or jnp.finfo(parts[0].dtype).bits >= 32
    return [by_level.finished(equation, total, store)]


# Values and gradients

# What JAX does not differentiate: operations, in reverse, and operands of others.
NO_GRADIENT = {
    *("householder_product", "igamma_grad_a", "nextafter", "random_gamma_grad", "reduce_window", "scatter-mul"),
    *("while", "zeta"),
}
STILL = {"clamp": (0, 2), "polygamma": (0,), "regularized_incomplete_beta": (0, 1)}


def moving(found):
    """The places of the operands that a derivative moves."""
    name, atoms = found.single.primitive.name, zip(found.single.invars, found.values, strict=True)
    inexact = [jnp.issubdtype(value.dtype, jnp.inexact) and not isinstance(atom, core.Literal) for atom, value in atoms]
    still = range(len(inexact)) if name in NO_GRADIENT else STILL.get(name, ())
    return [place for place, is_inexact in enumerate(inexact) if is_inexact and place not in still]


def with_gradient(found, run, cotangents, moves):
    """The results of a function of the equation's operands, and the cotangents of those that move."""

    def fun(given):
        values = list(found.values)
        for place, value in zip(moves, given, strict=True):
            values[place] = value
        return list(run(values))

    results, back = jax.vjp(fun, [found.values[place] for place in moves])
    return results, back(cotangents)[0]


def at_once(found):
    return lambda values: evaluation.bind(found.single, values)


def random_cotangents(found):
    random = np.random.default_rng(len(found.single.outvars))

    def one(aval):
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return np.zeros(aval.shape, jax.dtypes.float0)
        return jnp.asarray(random.normal(size=aval.shape), aval.dtype)

    return [one(var.aval) for var in found.single.outvars]


def true_of_rows(found):
    """Two parts of the units, in another order, against the whole: rows of results, and the sum of their gradients."""
    view, moves, cotangents = found.view, moving(found), random_cotangents(found)
    results, grads = with_gradient(found, at_once(found), cotangents, moves)
    order, half = np.random.default_rng(found.units).permutation(found.units), -(-found.units // 2)
    got, want, sums = [], [], [jnp.zeros_like(grad) for grad in grads]
    for units in (order[:half], order[half:]):
        if not len(units):
            continue

        def cut(leaves, axes, units=units):
            return [some(leaf, axis, units, found.units) for leaf, axis in zip(leaves, axes, strict=True)]

        run = lambda values, units=units, cut=cut: of_units(found, units, cut(values, view.ins))
        rows, more = with_gradient(found, run, cut(cotangents, view.outs), moves)
        sums = [a + b for a, b in zip(sums, more, strict=True)]
        got += rows
        want += cut(results, view.outs)
    return [*got, *sums], [*want, *grads]


def of_units(found, units, values):
    """The equation on some units of its operands."""
    if found.says == "positional":
        (axis,), (made,) = found.view.outs, found.single.outvars
        at = jnp.asarray(places(units, made.aval.shape[axis], found.units))
        return [known(found.single.primitive.name).positional.at(found.single, values, axis, at)]
    size = resized.Some(found.rows, len(units) * (found.rows[0] // found.units))
    return resized.evaluate(found.single, found.double, size, values)


def true_in_parts(found):
    """Parts, joined, against the whole, with the gradient of a sum; an extreme in parts is not differentiated."""
    moves = moving(found) if partial.reduction_of(found.equation).fold is SUM else []
    in_parts = lambda values: _joined_parts(found, min(found.units, 4), values)
    pair = [with_gradient(found, run, random_cotangents(found), moves) for run in (in_parts, at_once(found))]
    return [[*results, *grads] for results, grads in pair]


CLAIMS = {"local": true_of_rows, "alike": true_of_rows, "positional": true_of_rows, "partial": true_in_parts}


def assert_claims(founds):
    """Each claim of the table about these equations is true, and the same of their derivatives."""
    _assert_pairs(CLAIMS, founds)


def assert_true(founds):
    """What the room says of these equations is true."""
    _assert_pairs({"local": of_some, "alike": of_some, "partial": of_parts}, founds)


def _assert_pairs(pair, founds):
    """All equations are one program, which is compiled once."""
    founds = [found for found in founds if found.says in pair]
    pairs = jax.jit(lambda: [pair[found.says](found) for found in founds])()
    for found, (got, want) in zip(founds, pairs, strict=True):
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b, f"{found.says}: {found.single}")


def assert_equal(got, want, equation):
    """Equal, or to rounding."""
    assert (jnp.shape(got), jnp.result_type(got)) == (jnp.shape(want), jnp.result_type(want)), equation
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=equation)
