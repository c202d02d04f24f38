"""Where the results of a traced program are added to sums: each at the terms of which it is made.

A term may be a part that zeros fill up, rows that are scattered over zeros, one of several arrays that are put side by
side, or what a loop over layers stacks, or adds to what it carries: these are added where they arise, without the zeros
and without the stack.
"""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers, dtypes


class Slice(NamedTuple):
    """The slice of a sum to which a variable is added."""

    place: int  # of the result whose sum it is
    axis: int
    start: int
    is_new: bool  # whether the variable has no such axis


class Terms:
    """The terms of a program's results.

    Attributes:
      of: for each variable, the results to whose sums it is added.
      slices: for each variable, the slices of sums to which it is added.
      skipped: the ids of equations that only add or cast terms: they are not evaluated.
      inside: results of equations that are added inside these, each as (id of the equation, place); of the terms of
        one sum that an equation makes, one.
      begun: the results whose sum has begun with an input, which is not added again.
    """

    def __init__(self, jaxpr: Any, measured: Mapping[int, bool], begun: Mapping[Any, int]):
        """Takes which results have sums, and whether they are measured; and inputs with which a sum may have begun."""
        self.uses = collections.Counter(atom for e in jaxpr.eqns for atom in e.invars if isinstance(atom, core.Var))
        self.uses.update(atom for atom in jaxpr.outvars if isinstance(atom, core.Var))
        self.zeros = {equation.outvars[0] for equation in jaxpr.eqns if _makes_zeros(equation)}
        self.of: dict[Any, list[int]] = {}
        self.slices: dict[Any, list[Slice]] = {}
        self.skipped: set[int] = set()
        self.inside: set[tuple[int, int]] = set()
        self.sums_inside: set[tuple[int, int]] = set()  # (id of the equation, result)
        for place in measured:
            if isinstance(jaxpr.outvars[place], core.Var):
                self.of.setdefault(jaxpr.outvars[place], []).append(place)
        for equation in reversed(jaxpr.eqns):
            for at, var in enumerate(equation.outvars):
                if len(self.of.get(var, ())) == 1 and self.uses[var] == 1:
                    self._open(equation, at, measured[self.of[var][0]])
        self.begun = {place for var, place in begun.items() if self.of.get(var) == [place] and self.uses[var] == 1}
        self.of = {var: places for var, places in self.of.items() if begun.get(var) not in self.begun}

    def _open(self, equation: Any, at: int, is_measured: bool) -> None:
        """Goes on to the terms of a result, if it is a sum of some or one that may be added inside an equation."""
        (place,) = self.of[equation.outvars[at]]
        is_sum = equation.primitive.name in ("add", "add_any") and not is_measured and _adds_alike(equation)
        if is_sum or _only_widens(equation):
            del self.of[equation.outvars[0]]
            for atom in equation.invars:
                self.of.setdefault(atom, []).append(place)
            self.skipped.add(id(equation))
        elif not is_measured and _is_put_together(equation):
            del self.of[equation.outvars[0]]
            for atom, slice_ in zip(equation.invars, _slices(equation, place), strict=True):
                self.slices.setdefault(atom, []).append(slice_)
            self.skipped.add(id(equation))
        elif (id(equation), place) not in self.sums_inside and self._adds_inside(equation, at, is_measured):
            self.inside.add((id(equation), at))
            self.sums_inside.add((id(equation), place))

    def _adds_inside(self, equation: Any, at: int, is_measured: bool) -> bool:
        name, params = equation.primitive.name, equation.params
        if is_measured and not _adds_apart(equation, at):
            return False
        if name == "scan" and params["length"]:
            return _adds_apart(equation, at) or _only_adds(equation, at)
        if name in ("scatter-add", "dynamic_update_slice"):
            return equation.invars[0] in self.zeros
        if name == "pad":
            within = (low >= 0 and high >= 0 and not inner for low, high, inner in padding(equation))
            return _is_zero(equation.invars[1]) and all(within)
        return name == "cond"


def is_one(jaxpr: Any, place: int) -> bool:
    """Whether a result is added at one place, as a whole or slice by slice: then its square is the sum of theirs.

    Branches are one place, for one of them runs.
    """
    found = Terms(jaxpr, {place: False}, {})
    apart = {(id(e), at) for e in jaxpr.eqns for at in range(len(e.outvars)) if _adds_apart(e, at)}
    return len(found.of) <= 1 and found.inside <= apart


def _adds_apart(equation: Any, at: int) -> bool:
    """Whether nothing is added twice to an entry: a loop that stacks does so, one that adds up its turns does not."""
    name = equation.primitive.name
    return at >= compilers.sizes_of_scan(equation)[1] if name == "scan" else name != "scatter-add"


def padding(equation: Any) -> list[tuple[int, int, int]]:
    """What a `pad` puts before, behind and between the entries of each axis."""
    return [(int(low), int(high), int(inner)) for low, high, inner in equation.params["padding_config"]]


def _only_adds(scan: Any, at: int) -> bool:
    """Whether a loop only adds to what it carries at a place."""
    body, begins = compilers.opened(scan.params["jaxpr"])[0], compilers.sizes_of_scan(scan)[0] + at
    return at in Terms(body, {at: False}, {body.invars[begins]: at}).begun


def _makes_zeros(equation: Any) -> bool:
    return equation.primitive.name == "broadcast_in_dim" and _is_zero(equation.invars[0])


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, core.Literal) and not np.any(atom.val)


def _only_widens(equation: Any) -> bool:
    """Whether an equation casts floats to a wider dtype, as adding them to a sum does."""
    if equation.primitive.name != "convert_element_type" or not isinstance(equation.invars[0], core.Var):
        return False
    before, after = _dtype(equation.invars[0]), _dtype(equation.outvars[0])
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (before, after))
    return floats and dtypes.holds(after, before)


def _is_put_together(equation: Any) -> bool:
    """Whether an equation puts arrays side by side: each is added to its slice of the sum."""
    alike = len({_dtype(atom) for atom in (*equation.invars, *equation.outvars)}) == 1
    is_of_vars = all(isinstance(atom, core.Var) for atom in equation.invars)
    return equation.primitive.name in _AXIS and alike and is_of_vars


_AXIS = {"stack": "axis", "concatenate": "dimension"}


def _slices(equation: Any, place: int) -> list[Slice]:
    """Where each of the arrays lies in the sum."""
    axis, is_new = equation.params[_AXIS[equation.primitive.name]], equation.primitive.name == "stack"
    start, found = 0, list[Slice]()
    for atom in equation.invars:
        found.append(Slice(place, axis, start, is_new))
        start += 1 if is_new else atom.aval.shape[axis]
    return found


def _adds_alike(equation: Any) -> bool:
    kinds = {(atom.aval.shape, _dtype(atom)) for atom in (*equation.invars, *equation.outvars)}
    return len(kinds) == 1 and all(isinstance(atom, core.Var) for atom in equation.invars)


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype
