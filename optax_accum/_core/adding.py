"""A traced program whose results are added to sums, each part of them where it arises.

A gradient is a result of the program that computes it. In `sums + program(values)` all gradients would be there at
once, beside the sums. Here each is added as soon as the program has it, and the addition goes into the program: each
term of a sum is added by itself, and a loop over layers, which stacks its gradients, adds each to the slice of its
layer. Nothing needs a rule from the user, and JAX can differentiate and batch the result.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import arithmetic, compilers, dtypes, evaluation

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
        self.is_finished = False

    def add(self, part: Any) -> None:
        part = jnp.asarray(part)
        if self.square is not None:
            self.square = self.square + arithmetic.squared_norm(part, self.square.dtype, self.square.ndim)
        total, part = evaluation.varying_together([self.total, self.scaled(part)])
        self.total = (total + part).astype(total.dtype)

    def scaled(self, part: jax.Array) -> jax.Array:
        """What is added, in the dtype of the sum; a narrow sum adds in float32."""
        part = part.astype(dtypes.wide(self.total.dtype) if dtypes.is_narrow(self.total.dtype) else self.total.dtype)
        return part if self.scale is None else jnp.where(self.scale == 0, 0, part * self.scale.astype(part.dtype))

    def finished(self) -> None:
        """Marks the sum as complete."""
        if self.finish is not None and not self.is_finished:
            found = self.finish(self.total)
            self.is_finished = found is not None
            self.total = self.total if found is None else found


def run(program: Any, values: Sequence[Any], sums: Sequence[Sum | None]) -> list[Any]:
    """Evaluates a traced program. Each result with a sum is added to it, and None is returned in its place."""
    jaxpr, consts = compilers.opened(program)
    return _run(jaxpr, (*consts, *values), dict(enumerate(sums)), {})


def _run(jaxpr: Any, values: Sequence[Any], sums: dict[int, Sum | None], begun: dict[Any, int]) -> list[Any]:
    """`begun`: inputs with which a sum has begun, by the result that it becomes: they are not added again."""
    wanted = {place: one for place, one in sums.items() if one is not None}
    if apart := [place for place, one in wanted.items() if one.square is not None and not _Plan.is_one(jaxpr, place)]:
        return _measured_apart(jaxpr, values, sums, begun, apart)
    plan = _Plan(jaxpr, {place: one.square is not None for place, one in wanted.items()}, begun)
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    left = collections.Counter(place for places in plan.terms.values() for place in places)

    def add(var: Any, part: Any, *, added: bool = False) -> None:
        for place in plan.terms.get(var, ()):
            if not added:
                wanted[place].add(part)
            left[place] -= 1
            if not left[place]:
                wanted[place].finished()

    for var in (*jaxpr.constvars, *jaxpr.invars):
        add(var, env[var])
    for equation in jaxpr.eqns:
        if id(equation) in plan.passed:
            continue
        operands = list(map(read, equation.invars))
        inside = {
            at: wanted[plan.terms[var][0]]
            for at, var in enumerate(equation.outvars)
            if (id(equation), at) in plan.inside
        }
        if inside:
            last = {at for at in inside if left[plan.terms[equation.outvars[at]][0]] == 1}
            results = NESTED[equation.primitive.name].run(equation, operands, inside, last)
        else:
            results = evaluation.bind(equation, operands)
        for at, (var, result) in enumerate(zip(equation.outvars, results, strict=True)):
            env[var] = result
            add(var, result, added=at in inside)
    for place, atom in enumerate(jaxpr.outvars):
        if place in wanted and isinstance(atom, core.Literal):
            wanted[place].add(atom.val)
    return [None if place in wanted else read(atom) for place, atom in enumerate(jaxpr.outvars)]


def _measured_apart(
    jaxpr: Any, values: Sequence[Any], sums: dict[int, Sum | None], begun: dict[Any, int], places: Sequence[int]
) -> list[Any]:
    """Adds up results of several terms before they are added to their sums: the square of a sum is no sum of squares."""
    fresh = {place: Sum(jnp.zeros_like(sums[place].total)) for place in places}  # type: ignore[union-attr]
    results = _run(jaxpr, values, {**sums, **fresh}, begun)
    for place, one in fresh.items():
        whole = sums[place]
        assert whole is not None
        whole.add(one.total)
        whole.finished()
    return results


class _Plan:
    """Where the results of a program are added.

    Attributes:
      terms: for each variable, the results to whose sums it is added.
      passed: the equations that only add terms: they are not evaluated.
      inside: the results of loops over layers that are added inside these, each as (equation, place).
    """

    def __init__(self, jaxpr: Any, measured: dict[int, bool], begun: dict[Any, int]):
        uses = collections.Counter(atom for e in jaxpr.eqns for atom in e.invars if isinstance(atom, core.Var))
        uses.update(atom for atom in jaxpr.outvars if isinstance(atom, core.Var))
        self.terms: dict[Any, list[int]] = {}
        self.passed: set[Any] = set()
        self.inside: set[Any] = set()
        for place in measured:
            if isinstance(jaxpr.outvars[place], core.Var):
                self.terms.setdefault(jaxpr.outvars[place], []).append(place)
        self.zeros = {equation.outvars[0] for equation in jaxpr.eqns if _makes_zeros(equation)}
        self.begun = set()
        for equation in reversed(jaxpr.eqns):
            for at, var in enumerate(equation.outvars):
                if len(self.terms.get(var, ())) == 1 and uses[var] == 1:
                    self._open(equation, at, measured[self.terms[var][0]], uses, begun)
        for var, place in begun.items():
            if self.terms.get(var) == [place]:
                self.begun.add(place)
                del self.terms[var]

    @classmethod
    def is_one(cls, jaxpr: Any, place: int) -> bool:
        """Whether a result is added at one place, as a whole or slice by slice."""
        plan = cls(jaxpr, {place: False}, {})
        found = [(e, at) for e in jaxpr.eqns for at in range(len(e.outvars)) if (id(e), at) in plan.inside]
        are_slices = all(e.primitive.name == "scan" and at >= compilers.sizes_of_scan(e)[1] for e, at in found)
        return len(plan.terms) <= 1 and are_slices

    def _open(self, equation: Any, at: int, is_measured: bool, uses: Any, begun: Any) -> None:
        (place,) = self.terms[equation.outvars[at]]
        name = equation.primitive.name
        if name in ("add_any", "add") and not is_measured and _adds_alike(equation):
            for atom in equation.invars:
                self.terms.setdefault(atom, []).append(place)
            del self.terms[equation.outvars[0]]
            self.passed.add(id(equation))
        elif name == "convert_element_type" and _only_widens(equation):
            self.terms.setdefault(equation.invars[0], []).append(place)
            del self.terms[equation.outvars[0]]
            self.passed.add(id(equation))
        elif name in NESTED and NESTED[name].adds_inside(equation, at, is_measured, self.zeros):
            self.inside.add((id(equation), at))


def _makes_zeros(equation: Any) -> bool:
    if equation.primitive.name != "broadcast_in_dim":
        return False
    atom = equation.invars[0]
    return isinstance(atom, core.Literal) and not np.any(atom.val)


def _only_widens(equation: Any) -> bool:
    """Whether an equation casts floats to a wider dtype, as adding them to a sum does."""
    (atom,), result = equation.invars, equation.outvars[0].aval
    floats = all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in (atom.aval, result))
    return isinstance(atom, core.Var) and floats and dtypes.holds(result.dtype, atom.aval.dtype)


def _adds_alike(equation: Any) -> bool:
    result = equation.outvars[0].aval
    return all(
        isinstance(atom, core.Var) and atom.aval.shape == result.shape and atom.aval.dtype == result.dtype
        for atom in equation.invars
    )


class _Scatter:
    """Rows that are added to zeros, the gradient of a table: they are added to the sum."""

    @staticmethod
    def adds_inside(equation: Any, at: int, is_measured: bool, zeros: set[Any]) -> bool:
        return not is_measured and equation.invars[0] in zeros

    @staticmethod
    def run(equation: Any, values: Sequence[Any], sums: dict[int, Sum], last: set[int]) -> list[Any]:
        (one,) = sums.values()
        _, at, updates = values
        total, at, updates = evaluation.varying_together([one.total, at, one.scaled(updates)])
        options = {key: equation.params[key] for key in ("dimension_numbers", "unique_indices", "mode")}
        one.total = jax.lax.scatter_add(total, at, updates.astype(total.dtype), **options)
        return [None]


class _Slice:
    """A part that zeros fill up, the gradient of a slice: it is added to the slice of the sum."""

    @staticmethod
    def adds_inside(equation: Any, at: int, is_measured: bool, zeros: set[Any]) -> bool:
        if equation.primitive.name == "dynamic_update_slice":
            return equation.invars[0] in zeros
        nothing = equation.invars[1]
        is_zero = isinstance(nothing, core.Literal) and not np.any(nothing.val)
        return is_zero and all(low >= 0 and high >= 0 and not inner for low, high, inner in _padding(equation))

    @staticmethod
    def run(equation: Any, values: Sequence[Any], sums: dict[int, Sum], last: set[int]) -> list[Any]:
        ((at, one),) = sums.items()
        if equation.primitive.name == "pad":
            part, starts = values[0], [low for low, _, _ in _padding(equation)]
        else:
            part, starts = values[1], values[2:]
        before = jax.lax.dynamic_slice(one.total, starts, part.shape)
        inner = Sum(before, one.square, one.scale)
        inner.add(part)
        (total, part), one.square = evaluation.varying_together([one.total, inner.total]), inner.square
        one.total = jax.lax.dynamic_update_slice(total, part, starts)
        return [None]


def _padding(equation: Any) -> list[tuple[int, int, int]]:
    return [tuple(map(int, each)) for each in equation.params["padding_config"]]  # type: ignore[misc]


class _Scan:
    """A loop over layers: what it stacks is added slice by slice, what it carries and only adds to is the sum."""

    @staticmethod
    def adds_inside(equation: Any, at: int, is_measured: bool, zeros: set[Any]) -> bool:
        consts, carried = compilers.sizes_of_scan(equation)
        if not equation.params["length"]:
            return False
        if at >= carried:
            return True
        if is_measured:
            return False
        body = compilers.opened(equation.params["jaxpr"])[0]
        begins = body.invars[consts + at]
        plan = _Plan(body, {at: False}, {begins: at})
        uses = sum(atom is begins for e in body.eqns for atom in e.invars) + sum(
            atom is begins for atom in body.outvars
        )
        return at in plan.begun and uses == 1

    @staticmethod
    def run(equation: Any, values: Sequence[Any], sums: dict[int, Sum], last: set[int]) -> list[Any]:
        params = equation.params
        consts, carried = compilers.sizes_of_scan(equation)
        body, closed = compilers.opened(params["jaxpr"])
        fixed, start, xs = values[:consts], list(values[consts : consts + carried]), list(values[consts + carried :])
        length = params["length"]
        running = [at for at in sums if at < carried]
        stacked = [at for at in sums if at >= carried]
        for at in running:
            sums[at].add(start[at])
        others = [at for at in range(carried) if at not in running]
        finished: set[int] = set()

        # Behind a counter that is carried, no compiler sends a slice while it computes the next; in one that is scanned
        # over, XLA for GPUs keeps another slice.
        is_scanned = any(sums[at].finish is not None and at in last for at in stacked)
        along = jnp.arange(length) if is_scanned else None
        one_on = -1 if params["reverse"] else 1

        def step(state: Any, x: Any) -> Any:
            counter, carry, totals, slices_of, squares = state
            scanned, x = x
            index = scanned if is_scanned else counter
            env = dict(zip(others, carry, strict=True))
            carry_in = [env.get(at) for at in range(carried)]
            inner: dict[int, Sum] = {}
            for at, total in zip(running, totals, strict=True):
                inner[at] = Sum(total, None, sums[at].scale)
                carry_in[at] = jnp.zeros(body.invars[consts + at].aval.shape, body.invars[consts + at].aval.dtype)
            for at, total, square in zip(stacked, slices_of, squares, strict=True):
                one = jax.lax.dynamic_index_in_dim(total, index, 0, keepdims=False)
                inner[at] = Sum(one, _at(square, index), sums[at].scale, sums[at].finish if at in last else None)
            begun = {body.invars[consts + at]: at for at in running}
            results = _run(body, (*closed, *fixed, *carry_in, *x), inner, begun)
            finished.update(at for at in stacked if inner[at].is_finished)
            slices_of = [
                jax.lax.dynamic_update_index_in_dim(total, inner[at].total, index, 0)
                for at, total in zip(stacked, slices_of, strict=True)
            ]
            squares = [_put(square, index, inner[at].square) for at, square in zip(stacked, squares, strict=True)]
            ys = [result for at, result in enumerate(results) if at >= carried and at not in sums]
            after = [results[at] for at in others]
            return (counter + one_on, after, [inner[at].total for at in running], slices_of, squares), ys

        squares = [sums[at].square for at in stacked]
        state = (
            jnp.int32(length - 1 if params["reverse"] else 0),
            [start[at] for at in others],
            [sums[at].total for at in running],
            [sums[at].total for at in stacked],
            squares,
        )
        state = _settled(step, state, (along, xs))
        (_, carry, totals, slices_of, squares), ys = jax.lax.scan(
            step, state, (along, xs), length=length, reverse=params["reverse"], unroll=params["unroll"]
        )
        for at, total in zip(running, totals, strict=True):
            sums[at].total = total
        for at, total, square in zip(stacked, slices_of, squares, strict=True):
            sums[at].total, sums[at].square, sums[at].is_finished = total, square, at in finished
        found = dict(zip(others, carry, strict=True))
        found |= dict(zip([at for at in range(carried, len(equation.outvars)) if at not in sums], ys, strict=True))
        return [found.get(at) for at in range(len(equation.outvars))]


def _settled(step: Any, state: Any, xs: Any) -> Any:
    """The carry, varying along the axes along which it varies after an iteration."""
    after, _ = jax.eval_shape(step, state, jax.tree.map(lambda x: x[0], xs))
    return jax.tree.map(lambda leaf, kind: evaluation.varying_as([leaf], [kind])[0], state, after)


def _at(square: Any, index: Any) -> Any:
    return (
        square if square is None or square.ndim == 0 else jax.lax.dynamic_index_in_dim(square, index, 0, keepdims=False)
    )


def _put(square: Any, index: Any, new: Any) -> Any:
    return new if square is None or square.ndim == 0 else jax.lax.dynamic_update_index_in_dim(square, new, index, 0)


NESTED: dict[str, Any] = {"dynamic_update_slice": _Slice, "pad": _Slice, "scan": _Scan, "scatter-add": _Scatter}
