"""One equation, traced for rows and for twice as many, with values: what the room says of it, and whether that is true."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers, evaluation
from optax_accum._rows import locality, resized
from optax_accum._rows.program import Equation, Value
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
    shape = tuple(sizes.get(dim) or int(dim) for dim in dims)
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

    @functools.cached_property
    def values(self):
        """The values that it takes; what is computed of them is computed in the program, not by its compiler."""
        return jax.lax.optimization_barrier([operand() for operand in self.operands])

    @property
    def view(self):
        return view_of(self.single, self.double, ROWS)

    @property
    def says(self):
        """What the room says of it."""
        view = self.view
        if locality.is_local(view):
            return "local"
        if locality.is_partial(view):
            return "partial"
        if locality.is_positional(view):
            return "positional"
        return "alike" if locality.is_alike(view) else "together"


def traced(name, fun, *specs):
    """The last equation of this name in a function of operands; None where this JAX traces no such equation."""
    random = np.random.default_rng(sum(map(ord, name)))
    values = [operand(spec, ROWS[0], random) for spec in specs]
    twice = [jax.eval_shape(lambda spec=spec: operand(spec, ROWS[1], np.random.default_rng(0))) for spec in specs]
    found = []
    _walk(name, jax.make_jaxpr(fun)(*values), jax.make_jaxpr(fun)(*twice), list(map(_known, values)), found)
    return found[-1] if found else None


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


def some(array, axis, units):
    """The rows of some units: three in all, in blocks where rows are in groups."""
    if axis is None:
        return array
    block = array.shape[axis] // 3
    places = np.concatenate([np.arange(unit * block, (unit + 1) * block) for unit in units])
    return array[(slice(None),) * axis + (places,)]


def of_some(found):
    """The results of the equation for some rows, and these rows of its results for all: (got, want)."""
    view, whole, units = found.view, evaluation.bind(found.single, found.values), [2, 0]
    values = [some(value, axis, units) for value, axis in zip(found.values, view.ins, strict=True)]
    got = resized.evaluate(found.single, found.double, resized.Some(ROWS, 4), values)
    return list(got), [some(all_rows, axis, units) for all_rows, axis in zip(whole, view.outs, strict=True)]


def of_parts(found):
    """The parts of the equation, joined, and the equation: (got, want). Filled rows count for nothing."""
    view = found.view
    axes = zip((found.single.invars, found.single.outvars), (view.ins, view.outs), strict=True)
    ins, outs = ([Value(var.aval, axis) for var, axis in zip(vars, of, strict=True)] for vars, of in axes)
    equation = Equation(found.single, found.double, ins, outs, ROWS)
    units = Units(ROWS[0], 4)
    store = by_level.Store(units, Device(), dict(zip(ins, found.values, strict=True)))
    parts = []
    for index in range(4):
        values = [store.whole(value) if value.axis is None else store.cut(value)[index] for value in ins]
        parts.append(partial.part_of(equation, units, values, units.of_part(index)))
    total = partial.reduction_of(equation).over(jnp.stack(parts), axis=0)
    assert parts[0].dtype == partial.type_of_part(equation).dtype
    return [by_level.finished(equation, total, store)], evaluation.bind(found.single, found.values)


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
