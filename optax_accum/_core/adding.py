"""A traced program whose results are added to sums, each part of them where it arises.

A gradient is a result of the program that computes it. In `sums + program(values)` all gradients would be there at
once, beside the sums. Here each is added as soon as the program has it, and the addition goes into the program: each
term of a sum is added by itself, and a loop over layers, which stacks its gradients, adds each to the slice of its
layer. Nothing needs a rule from the user, and JAX can differentiate and batch the result.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import arithmetic, compilers, dtypes, evaluation
from optax_accum._core.terms import Terms, is_one, padding

Finish = Callable[[jax.Array], jax.Array | None]  # of a sum, or of a slice of it, to which nothing more is added


class Sum:
    """What a result is added to, and what becomes of it.

    Attributes:
      total: the sum so far; its dtype may be wider than the result's.
      square: takes `|result|^2`: [], or None where it is not measured.
      scale: multiplies what is added, if it is not None: zeros for a scale of 0, whatever the result is.
      finish: what the finished sum, or each slice of it, is mapped to; it returns None for one that must wait.
    """

    def __init__(self, total: Any, square: Any = None, scale: Any = None, finish: Finish | None = None):
        self.total, self.square, self.scale, self.finish = total, square, scale, finish
        self.has_ended = False  # where a loop over layers has finished each slice, its caller must not finish the sum

    @property
    def state(self) -> Any:
        """What changes where something is added."""
        return self.total, self.square

    def add(self, part: Any) -> None:
        part = jnp.asarray(part)
        if self.square is not None:
            self.square = self.square + arithmetic.squared_norm(part, self.square.dtype, self.square.ndim)
        total, part = evaluation.varying_together([self.total, self.scaled(part)])
        self.total = (total + part).astype(total.dtype)

    def scaled(self, part: jax.Array) -> jax.Array:
        """What is added, in the dtype of the sum; a narrow sum adds in float32."""
        part = part.astype(dtypes.of_sum(self.total.dtype))
        return part if self.scale is None else jnp.where(self.scale == 0, 0, part * self.scale.astype(part.dtype))

    def end(self) -> None:
        """Finishes the sum: nothing more is added to it."""
        if self.finish is not None and not self.has_ended:
            found = self.finish(self.total)
            self.has_ended = found is not None
            self.total = self.total if found is None else found


def run(program: Any, values: Sequence[Any], sums: Sequence[Sum | None]) -> list[Any]:
    """Evaluates a traced program. Each result with a sum is added to it, and None is returned in its place."""
    jaxpr, consts = compilers.opened(program)
    wanted = {place: one for place, one in enumerate(sums) if one is not None}
    return _run(jaxpr, (*consts, *values), wanted, {})


def _run(jaxpr: Any, values: Sequence[Any], sums: dict[int, Sum], begun: dict[Any, int]) -> list[Any]:
    """`sums` by the places of results; `begun`: inputs with which a sum has begun, by that place: see `Terms`."""
    several = [place for place, one in sums.items() if one.square is not None and not is_one(jaxpr, place)]
    if several:
        return _together_first(jaxpr, values, sums, begun, several)
    terms = Terms(jaxpr, {place: one.square is not None for place, one in sums.items()}, begun)
    left = collections.Counter(place for places in terms.of.values() for place in places)
    left.update(slice_.place for slices in terms.slices.values() for slice_ in slices)
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))

    def add(var: Any, part: Any, *, is_added: bool = False) -> None:
        for place in terms.of.get(var, ()):
            if not is_added and var not in terms.zeros:
                sums[place].add(part)
            end(place)
        for place, axis, start, is_new in terms.slices.get(var, ()):
            part_of = jnp.expand_dims(part, axis) if is_new else part
            _add_to_slice(sums[place], part_of, [start if at == axis else 0 for at in range(part_of.ndim)])
            end(place)

    def end(place: int) -> None:
        left[place] -= 1
        if not left[place]:
            sums[place].end()

    def bind(equation: Any, operands: list[Any]) -> Sequence[Any]:
        places = [at for at in range(len(equation.outvars)) if (id(equation), at) in terms.inside]
        inside = {at: terms.of[equation.outvars[at]][0] for at in places}
        last = {at for at, place in inside.items() if left[place] == 1}
        sums_there = {at: sums[place] for at, place in inside.items()}
        if inside:
            results = _INSIDE[equation.primitive.name](equation, operands, sums_there, last)
        else:
            results = evaluation.bind(equation, operands)
        for at, (var, result) in enumerate(zip(equation.outvars, results, strict=True)):
            add(var, result, is_added=at in inside)
        return results

    for var in (*jaxpr.constvars, *jaxpr.invars):
        add(var, env[var])
    equations = [equation for equation in jaxpr.eqns if id(equation) not in terms.skipped]
    others = [atom for place, atom in enumerate(jaxpr.outvars) if place not in sums]
    found = iter(evaluation.in_order(equations, env, others, bind))
    for place, one in sums.items():
        if isinstance(jaxpr.outvars[place], core.Literal):
            one.add(jaxpr.outvars[place].val)
            one.end()
    return [None if place in sums else next(found) for place in range(len(jaxpr.outvars))]


def _together_first(
    jaxpr: Any, values: Sequence[Any], sums: dict[int, Sum], begun: dict[Any, int], places: Sequence[int]
) -> list[Any]:
    """Adds up the terms of some results before their sums: the square of a sum is no sum of squares."""
    fresh = {place: Sum(jnp.zeros_like(sums[place].total)) for place in places}
    results = _run(jaxpr, values, sums | fresh, begun)
    for place, one in fresh.items():
        sums[place].add(one.total)
        sums[place].end()
    return results


# Results that are added inside an equation: its operands, the sums by the places of its results, and the places of
# those to which nothing more is added.


def _scattered(equation: Any, values: Sequence[Any], sums: dict[int, Sum], last: set[int]) -> list[Any]:
    """Rows that are added to zeros, the gradient of a table: they are added to the sum."""
    (one,), (_, at, updates) = sums.values(), values
    total, at, updates = evaluation.varying_together([one.total, at, one.scaled(updates)])
    options = {key: equation.params[key] for key in ("dimension_numbers", "unique_indices", "mode")}
    one.total = jax.lax.scatter_add(total, at, updates.astype(total.dtype), **options)
    return [None]


def _to_a_slice(equation: Any, values: Sequence[Any], sums: dict[int, Sum], last: set[int]) -> list[Any]:
    """A part that zeros fill up, the gradient of a slice: it is added to the slice of the sum."""
    (one,) = sums.values()
    part, starts = values[1], values[2:]
    if equation.primitive.name == "pad":
        part, starts = values[0], [low for low, _, _ in padding(equation)]
    _add_to_slice(one, part, starts)
    return [None]


def _add_to_slice(one: Sum, part: jax.Array, starts: Sequence[Any]) -> None:
    slice_of = lambda leaf: jax.lax.dynamic_slice(leaf, starts[: leaf.ndim], part.shape[: leaf.ndim])
    put = lambda leaf, new: jax.lax.dynamic_update_slice(
        *evaluation.varying_together([leaf, new]), start_indices=starts[: leaf.ndim]
    )
    inner = Sum(*jax.tree.map(slice_of, one.state), scale=one.scale)
    inner.add(part)
    one.total, one.square = jax.tree.map(put, one.state, inner.state)


def _run_layers(equation: Any, values: Sequence[Any], sums: dict[int, Sum], last: set[int]) -> list[Any]:
    """A loop over layers: what it stacks is added slice by slice, what it only adds to is the sum itself."""
    params, (consts, carried) = equation.params, compilers.sizes_of_scan(equation)
    body, closed = compilers.opened(params["jaxpr"])
    fixed, start, xs = values[:consts], values[consts : consts + carried], list(values[consts + carried :])
    running, stacked = [at for at in sums if at < carried], [at for at in sums if at >= carried]
    for at in running:
        sums[at].add(start[at])
    # Where slices are finished, a counter that is scanned over lets XLA send one while it computes the next; elsewhere
    # it keeps one slice more than with a counter that is carried.
    is_scanned = any(sums[at].finish is not None and at in last for at in stacked)
    along = jnp.arange(params["length"]) if is_scanned else None
    first, step_by = (params["length"] - 1, -1) if params["reverse"] else (0, 1)
    ended: set[int] = set()

    def step(state: Any, x: Any) -> Any:
        counter, carry, states = state
        scanned, x = x
        index = scanned if is_scanned else counter
        # A square that is one number for all slices stays whole.
        slice_of = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) if leaf.ndim else leaf
        put = lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0) if leaf.ndim else new
        given, inner = list(carry), dict[int, Sum]()
        for at in running:
            given[at] = jnp.zeros(body.invars[consts + at].aval.shape, body.invars[consts + at].aval.dtype)
            inner[at] = Sum(*states[at], scale=sums[at].scale)
        for at in stacked:
            finish = sums[at].finish if at in last else None
            inner[at] = Sum(*jax.tree.map(slice_of, states[at]), scale=sums[at].scale, finish=finish)
        begun = {body.invars[consts + at]: at for at in running}
        results = _run(body, (*closed, *fixed, *given, *x), inner, begun)
        ended.update(at for at in stacked if inner[at].has_ended)
        new = {at: one.state for at, one in inner.items()}
        new |= {at: jax.tree.map(put, states[at], new[at]) for at in stacked}
        return (counter + step_by, results[:carried], new), results[carried:]

    start = [None if at in sums else leaf for at, leaf in enumerate(start)]
    state = jnp.int32(first), start, {at: one.state for at, one in sums.items()}
    state = evaluation.settled(step, state, (along, xs), fixed)
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    (_, carry, states), ys = jax.lax.scan(step, state, (along, xs), **options)
    for at, one in sums.items():
        (one.total, one.square), one.has_ended = states[at], at in ended
    return [*carry, *ys]


def _run_branch(equation: Any, values: Sequence[Any], sums: dict[int, Sum], last: set[int]) -> list[Any]:
    """A `lax.cond` or `lax.switch`: each branch takes the sums and returns them; the one that runs adds its gradient.

    `finish` is called after the branch, for another device may be in another one.
    """
    index, *operands = values

    def run_one(program: Any, operands: Sequence[Any], given: dict[int, Any]) -> Any:
        inner = {at: Sum(*state, scale=sums[at].scale) for at, state in given.items()}
        results = run(program, operands, [inner.get(at) for at in range(len(equation.outvars))])
        others = [value for at, value in enumerate(results) if at not in inner]
        kinds = [var.aval for at, var in enumerate(equation.outvars) if at not in inner]
        leaves, treedef = jax.tree.flatten({at: one.state for at, one in inner.items()})
        states = treedef.unflatten(evaluation.varying_together(leaves, like=varying))
        return evaluation.varying_as(others, kinds, more), states

    given = {at: one.state for at, one in sums.items()}
    varying = jax.tree.leaves((values, given, [one.scale for one in sums.values()]))
    more = evaluation.varying_more(values, [atom.aval for atom in equation.invars])
    branches = [functools.partial(run_one, program) for program in equation.params["branches"]]
    others, found = jax.lax.switch(jnp.asarray(index).astype(jnp.int32), branches, operands, given)
    for at, one in sums.items():
        one.total, one.square = found[at]
    rest = iter(others)
    return [None if at in sums else next(rest) for at in range(len(equation.outvars))]


_INSIDE: dict[str, Callable[..., list[Any]]] = {
    "cond": _run_branch,
    "dynamic_update_slice": _to_a_slice,
    "pad": _to_a_slice,
    "scan": _run_layers,
    "scatter-add": _scattered,
}
