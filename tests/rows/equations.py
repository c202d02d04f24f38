"""One equation, traced for rows and for twice as many, with values: what the table says of it, and whether that is true.

It is true if `optax_accum.microbatched` computes the equation alone, micro-batch by micro-batch: its results, and their
derivatives.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

import optax_accum
from tests import engine

ROWS = (8, 16)
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")
IN_LOOPS = ("local", "alike", "positional", "partial")  # what the table says of an equation that micro-batches run


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
        return engine.view_of(self.single, self.double, self.rows)

    @property
    def says(self):
        """What the table says of it."""
        return engine.says(self.view)

    @property
    def units(self):
        """The number of blocks of rows that it treats together."""
        pairs = zip((*self.single.invars, *self.single.outvars), (*self.view.ins, *self.view.outs), strict=True)
        return math.gcd(self.rows[0], *(var.aval.shape[axis] for var, axis in pairs if axis is not None))


def traced(name, fun, *specs):
    """The last equation of this name in a function of operands; None where this JAX traces no such equation."""
    random = np.random.default_rng(sum(map(ord, name)))
    arrays = lambda rows: [operand(spec, rows, random) for spec in specs]
    return traced_for(name, lambda rows: fun, arrays, ROWS)


def traced_for(name, fun, arrays, rows):
    """The same of functions, and of arrays, of the number of rows."""
    single, double = rows
    values, twice = arrays(single), jax.eval_shape(lambda: arrays(double))
    traces = jax.make_jaxpr(fun(single))(*values), jax.make_jaxpr(fun(double))(*twice)
    found = [each for each in every(*traces, values, rows) if each.single.primitive.name == name]
    return found[-1] if found else None


def every(single, double, values, rows):
    """All equations of a program and of the functions it calls; nothing is computed before somebody asks for a value."""
    found = []
    _walk(single, double, list(map(_known, values)), rows, found)
    return found


def _walk(single, double, values, rows, found):
    consts, single, double = getattr(single, "consts", ()), *(getattr(each, "jaxpr", each) for each in (single, double))
    env = dict(zip((*single.constvars, *single.invars), (*map(_known, consts), *values), strict=True))
    read = lambda atom: _known(atom.val) if isinstance(atom, core.Literal) else env[atom]
    for a, b in zip(single.eqns, double.eqns, strict=True):
        operands = list(map(read, a.invars))
        is_pair = _sort_of(a) == _sort_of(b)
        found += [Found(a, b, operands, rows)] * is_pair
        if a.primitive.name in CALLS and is_pair:
            inner = [eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"] for eqn in (a, b)]
            results = _walk(*inner, operands, rows, found)
        else:
            results = _results(a, operands)
        env.update(zip(a.outvars, results, strict=True))
    return list(map(read, single.outvars))


def _sort_of(eqn):
    return eqn.primitive, len(eqn.invars), len(eqn.outvars)


def _known(value):
    return lambda: value


def _results(eqn, operands):
    computed = functools.cache(lambda: bind(eqn, [operand() for operand in operands]))
    return [lambda i=i: computed()[i] for i in range(len(eqn.outvars))]


def bind(eqn, values):
    """Evaluates an equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


# Values and gradients

# What JAX does not differentiate: operations, in reverse, and operands of others.
NO_GRADIENT = {
    *("householder_product", "igamma_grad_a", "nextafter", "random_gamma_grad", "reduce_window", "scatter-mul"),
    *("while", "zeta"),
}
STILL = {"clamp": (0, 2), "polygamma": (0,), "regularized_incomplete_beta": (0, 1)}


def perturbed_operands(found):
    """The places of the operands that a derivative perturbs: none of an extreme, which is then no reduction in parts."""
    name, atoms = found.single.primitive.name, zip(found.single.invars, found.values, strict=True)
    if found.says == "partial" and engine.known(name).partial.fold is not optax_accum.primitives.Fold.SUM:
        return []
    inexact = [jnp.issubdtype(value.dtype, jnp.inexact) and not isinstance(atom, core.Literal) for atom, value in atoms]
    still = range(len(inexact)) if name in NO_GRADIENT else STILL.get(name, ())
    return [place for place, is_inexact in enumerate(inexact) if is_inexact and place not in still]


def in_micro_batches(found):
    """The equation as a function of its operands, of which those with rows are the batch of `microbatched`.

    As in a loss, parameters decide what it takes, or, where it takes no rows, what becomes of those that it makes: what
    the batch alone decides would run on all rows.
    """
    units, view, perturbed = found.units, found.view, perturbed_operands(found)

    def decided(params, place, leaf):
        if place in perturbed:
            return leaf * params["one"].astype(leaf.dtype)
        return jax.lax.stop_gradient(jnp.where(params["one"] > 0, leaf, leaf))

    def fun(params, batch):
        equation = found.single if len(batch["units"]) == units else found.double
        rows = {place: _rows_along(view.ins[place], leaf) for place, leaf in batch["rows"].items()}
        values = params["values"] | {place: decided(params, place, leaf) for place, leaf in rows.items()}
        results = bind(equation, [values[place] for place in range(len(values))])
        if rows:
            return results
        made = [_units(leaf, axis, len(batch["units"])) for leaf, axis in zip(results, view.outs, strict=True)]
        kept = batch["units"] * params["one"] > 0
        made = [jnp.where(kept.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, leaf) for leaf in made]
        return [_rows_along(axis, leaf) for leaf, axis in zip(made, view.outs, strict=True)]

    def run(values):
        values = dict(enumerate(values))
        rows = {
            place: _units(values.pop(place), axis, units) for place, axis in enumerate(view.ins) if axis is not None
        }
        batch = {"rows": rows, "units": jnp.ones(units)}
        return optax_accum.microbatched(fun, _parts_of(units))({"values": values, "one": jnp.ones([])}, batch)

    return run


def _parts_of(units):
    """Of so many micro-batches the last is filled up with rows that count for nothing, where that can be."""
    return next((parts for parts in (4, 3, 2) if units % math.ceil(units / parts)), min(units, 4))


def _units(array, axis, units):
    """The axis of rows comes first, cut into units."""
    first = jnp.moveaxis(array, axis, 0)
    return first.reshape(units, len(first) // units, *first.shape[1:])


def _rows_along(axis, units):
    return jnp.moveaxis(units.reshape(units.shape[0] * units.shape[1], *units.shape[2:]), 0, axis)


def both(found, perturbed):
    """The results of an equation, and the gradients of operands: (micro-batch by micro-batch, all rows at once)."""
    cotangents = random_cotangents(found)

    def differentiated(run):
        def replaced(given):
            values = list(found.values)
            for place, value in zip(perturbed, given, strict=True):
                values[place] = value
            return list(run(values))

        results, back = jax.vjp(replaced, [found.values[place] for place in perturbed])
        return [*results, *back(cotangents)[0]]

    return differentiated(in_micro_batches(found)), differentiated(lambda values: bind(found.single, values))


def random_cotangents(found):
    random = np.random.default_rng(len(found.single.outvars))

    def one(aval):
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return np.zeros(aval.shape, jax.dtypes.float0)
        return jnp.asarray(random.normal(size=aval.shape), aval.dtype)

    return [one(var.aval) for var in found.single.outvars]


def assert_true(founds, tolerance=2e-5, perturbed=perturbed_operands):
    """What the table says of these equations is true, and the same of their derivatives: all are one program."""
    founds = [found for found in founds if found.says in IN_LOOPS]
    pairs = jax.jit(lambda: [both(found, perturbed(found)) for found in founds])()
    for found, (got, want) in zip(founds, pairs, strict=True):
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b, f"{found.says}: {found.single}", tolerance)


def assert_equal(got, want, equation, tolerance=2e-5):
    """Equal, or to rounding."""
    assert (jnp.shape(got), jnp.result_type(got)) == (jnp.shape(want), jnp.result_type(want)), equation
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if jnp.issubdtype(got.dtype, jnp.inexact):
        tolerance = max(tolerance, 8 * float(jnp.finfo(got.dtype).eps))  # rows are added in float32, and rounded once
    if got.dtype != jax.dtypes.float0:
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=equation)
