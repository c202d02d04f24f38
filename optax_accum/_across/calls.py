"""The arguments of a call, taken apart at the states of windows: trees that a program may take or leave as a whole."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_accum._across import on_host
from optax_accum._arguments import checks
from optax_accum._arguments.signature import signature_of
from optax_accum._core.state import states_in
from optax_accum._core.types import Tree

_OF_MODULES = "For a step of a model and an optimizer, its first arguments, take optax_accum.flax.nnx.jit_step."


class SplitCall(NamedTuple):
    """The arguments of a call, taken apart.

    Attributes:
      kind: calls of one kind have arguments of the same form.
      trees: of donated arguments: counters, sum, parameters; then the arrays of the others.
      may_donate: so many of the trees, which come first.
      arguments: puts trees together again.
      flush: the argument of the step; None if there is none, or an array.
    """

    kind: Any
    trees: list[Tree]
    may_donate: int
    arguments: Callable[[Sequence[Any]], tuple[list[Any], dict[str, Any]]]
    flush: bool | None


class Calls:
    """How the calls of a step are taken apart.

    Attributes:
      takes_flush: whether the step has an argument `flush`.
      donated: positions of arguments that a call may overwrite; None until a call has shown where the state is.
    """

    def __init__(self, step: Callable[..., Any], donate_argnums: int | Sequence[int] | None):
        signature = signature_of(step)
        self.takes_flush, self._positions = signature.takes("flush"), signature.positions
        self._flush = True if _flushes_by_default(step) else None
        given = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
        self.donated = None if given is None else tuple(given)
        self._around: set[type] | None = None  # the types of nodes in which a state stands

    def taken_apart(self, args: Sequence[Any], kwargs: dict[str, Any]) -> SplitCall:
        args, kwargs = self._flush_by_keyword(args, kwargs)
        flush = kwargs.get("flush", self._flush)
        kwargs |= {"flush": flush} if flush is True else {}
        flush = bool(kwargs.pop("flush")) if flush is not None and on_host.is_known(flush) else None
        places = self._donated(args)
        if self._around is None:
            checks.check_no_module(args, _OF_MODULES)
            self._around = {type(node) for place in places for node in around_states(args[place])}
        carried, of_carried = [], []
        for place in places:
            trees, tree = jax.tree.flatten(args[place], is_leaf=self.is_whole)
            carried += trees
            of_carried.append(tree)
            args[place] = None
        others, of_others = jax.tree.flatten((args, kwargs))

        def arguments(trees: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
            args, kwargs = of_others.unflatten(trees[len(carried) :])
            rest = iter(trees)
            for place, tree in zip(places, of_carried, strict=True):
                args[place] = tree.unflatten(itertools.islice(rest, tree.num_leaves))
            return args, kwargs

        kind = *of_carried, of_others, tuple(map(_type_of, others))
        return SplitCall(kind, carried + others, len(carried), arguments, flush)

    def is_whole(self, node: Any) -> bool:
        """Whether a node of arguments or results is not taken apart."""
        return type(node) not in self._around  # type: ignore[operator]

    def _flush_by_keyword(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Passes `flush`, and the positional arguments behind it, by keyword."""
        names = self._positions
        first = names.index("flush") if "flush" in names[: len(args)] else len(args)
        return list(args[:first]), kwargs | dict(zip(names[first:], args[first:], strict=False))

    def _donated(self, args: Sequence[Any]) -> tuple[int, ...]:
        if self.donated is None:
            holds = [bool(states_in(arg)) for arg in args[:2]]
            self.donated = tuple(range(holds.index(True) + 1)) if any(holds) else ()
        if not all(0 <= place < len(args) for place in self.donated):
            raise ValueError(
                f"donate_argnums must be positions of arguments: donate_argnums={self.donated}, and the step got "
                f"{len(args)} by position. Count from 0, and pass these by position."
            )
        return self.donated


def around_states(tree: Tree) -> list[Any]:
    """The states of windows, and all nodes that contain one."""
    nodes = []

    def is_apart(node: Any) -> bool:
        holds = bool(states_in(node))
        if holds:
            nodes.append(node)
        return not holds

    jax.tree.flatten(tree, is_leaf=is_apart)
    return nodes


def counters_of(joined: Callable[[Sequence[Any]], Tree], count: int) -> list[int]:
    """For each window, which of the trees that `joined` puts together is its number of micro-steps."""
    return [state.mini_step for state in states_in(joined(range(count)))]


def _flushes_by_default(step: Callable[..., Any]) -> bool:
    with contextlib.suppress(TypeError, ValueError):  # a function without a signature
        flush = inspect.signature(step, follow_wrapped=False).parameters.get("flush")
        return flush is not None and flush.default is True
    return False


def _type_of(leaf: Any) -> tuple[Any, ...]:
    """What a program is compiled for; an array of NumPy counts as one of JAX, and a Python number has its type."""
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf)), getattr(leaf, "weak_type", False)
