"""Runs of a train step, each from the same carry, and their results."""

import inspect
import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum._shared.arrays import Tree, placed_like, short
from optax_accum._shared.checks import as_function
from optax_accum._shared.hidden_draws import hidden_draws
from optax_accum.verify import _carries as carries
from optax_accum.verify import _foreign as foreign
from optax_accum.verify._carries import Numbers, Path, epsilons, is_inexact, wide


def as_is(carry: Tree) -> Tree:
    return carry


class StepRunner:
    """A step from `make_step(every)`, run as often as needed, each time from the carry that it begins with."""

    def __init__(self, make_step: Callable[[int], Any], batch: Tree, every: int) -> None:
        """`batch` tells which kinds of arrays the step gets."""
        _check_make_step(make_step, every)
        self.make_step, self.every, self._batch = make_step, every, batch
        self.step, self._carry, self.last = self._made()
        self.is_jax = foreign.is_jax(self._carry)
        self.carry = self._end = foreign.opened("carry", self._carry)
        self._began = carries.numbers(self.carry)
        self._later: Numbers = {}  # zeros for arrays that the first update adds to the carry
        self._fresh = not all(map(_is_copied, jax.tree.leaves(self._carry)))

    def run(
        self,
        *windows: Sequence[Tree],
        last: bool = False,
        draw: int | None = None,
        start: Callable[[Tree], Tree] = as_is,
        back: Collection[Path] = (),
    ) -> list[Numbers]:
        """The numbers of the carry at first and after each window.

        With `last`, the last call of each window is `last_step`'s. `start` changes the carry first. Arrays at the paths
        `back` are put back after each window.
        """
        step, carry, last_step = self._made() if self._fresh else (self.step, _copied(self._carry), self.last)
        carry = foreign.ordered_like(start(carries.redrawn(carry, draw)), self._carry)
        same = start is as_is and not (self._fresh and self.is_jax)  # the numbers are known, in their later dtypes
        seen = [self._later | self._began if same else self._numbers(carry)]
        for window in windows:
            for number, batch in enumerate(window, start=1):
                take = last_step if last and number == len(window) else step
                carry = self._checked(take(carry, self._given(carries.redrawn(batch, draw))))  # type: ignore[misc]
            seen.append(self._numbers(carry))
            if back:
                carry = foreign.ordered_like(put_back(carry, {path: seen[0][path] for path in back}), self._carry)
        return seen

    def settle(self, batches: Sequence[Tree]) -> None:
        """Runs the same calls twice. If results differ, the step has hidden state: each run builds it anew."""
        runs = [self.run(*([batch] for batch in (*batches, batches[0]))) for _ in range(2)]
        same = lambda a, b: a.keys() == b.keys() and all(np.array_equal(a[path], b[path], equal_nan=True) for path in a)
        self._fresh = self._fresh or not all(map(same, *runs))
        if not self.is_jax:
            self.carry = foreign.begun(self.carry, self._end)
            self._began = carries.numbers(self.carry)
            self._later = {path: leaf for path, leaf in self._began.items() if path not in runs[0][0]}

    def rounding(self, batch: Tree) -> float:
        """The machine epsilon of the narrowest float in the step, or in its arguments if it is not traced.

        A step of JAX's is traced for this, once; any other is not.
        """
        given = [float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves((self.carry, batch)) if is_inexact(leaf)]
        try:
            text = str(jax.make_jaxpr(self.step)(_copied(self._carry), self._given(batch))) if self.is_jax else ""
        except Exception:  # a step may be a loop on the host
            text = ""
        return max(epsilons(text) or given, default=2**-23)

    def may_hide_a_key(self, batch: Tree) -> bool:
        """Whether the step may draw from a key that is neither in the carry nor in the batch."""
        if not self.is_jax:
            return True
        try:
            return bool(hidden_draws(self.step, _copied(self._carry), self._given(batch)))
        except Exception:  # a step may be a loop on the host
            return True

    @property
    def puts_back(self) -> bool:
        """Whether arrays of the carry can be put back: no object holds them, and no variable of NNX stands twice."""
        return not (_stands_twice(self._carry) or any(map(foreign.is_held, jax.tree.leaves(self._carry))))

    def longer(self, times: int) -> "StepRunner":
        """The same for windows `times` as long."""
        steps = StepRunner(self.make_step, self._batch, times * self.every)
        steps._later = self._later
        return steps

    def _given(self, batch: Tree) -> Tree:
        """A batch for the step: JAX's arrays if the step is JAX's, else arrays of the user's kind."""
        return foreign.as_jax(batch) if self.is_jax else foreign.given(batch, self._batch)

    def _numbers(self, carry: Tree) -> Numbers:
        self._end = foreign.opened("carry", carry)
        numbers = carries.numbers(self._end)
        objects = any(map(foreign.is_held, jax.tree.leaves(self._carry)))  # an optimizer may drop its state
        if not objects and (lost := self._began.keys() - numbers.keys()):
            raise TypeError(
                f"step must return the whole carry: {', '.join(sorted(map(carries.named, lost)))} is not in what it "
                "returned. Return it as it came, if the step does not change it."
            )
        return self._later | numbers

    def _made(self) -> tuple[Callable[..., Any], Tree, Callable[..., Any] | None]:
        made = self.make_step(self.every)
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
            raise TypeError(
                f"make_step must return (step, carry), or (step, carry, last_step): make_step({self.every}) returned "
                f"{short(made)}. Let step(carry, micro_batch) return the next carry."
            )
        step, carry, *last = made
        if last and not callable(last[0]):
            raise TypeError(f"last_step must be a function of (carry, micro_batch): it is {short(last[0])}.")
        return step, carry, last[0] if last else None

    def _checked(self, new: Tree) -> Tree:
        if new is None:
            raise TypeError(
                "step must return the next carry: it returned None. Where it changes the carry in place, as NNX and "
                "PyTorch do, return that."
            )
        structure = jax.tree.structure(self._carry)
        if isinstance(new, tuple) and new and jax.tree.structure(new) != structure == jax.tree.structure(new[0]):
            raise TypeError(
                "step must return the next carry alone: it returned a tuple that begins with it. Pass "
                "lambda carry, micro_batch: step(carry, micro_batch)[0]."
            )
        return new


def _check_make_step(make_step: Any, every: int) -> None:
    """Raises if a step, or the result of `make_step`, was passed as `make_step`."""
    remedy = "Pass make_step itself: make_step(every) returns (step, carry)."
    as_function(make_step, "make_step", remedy)
    try:
        inspect.signature(make_step).bind(every)
    except TypeError as error:
        raise TypeError(f"make_step is called with the length of a window: {error}. {remedy}") from None
    except ValueError:
        return  # its signature is not known


def reference(optimizer: Any, loss: Any, params: Tree) -> Callable[[int], Any]:
    """The `make_step` of a plain step on the whole batch."""
    if optimizer is None or loss is None:
        given, other = ("loss", "optimizer") if optimizer is None else ("optimizer", "loss")
        raise TypeError(f"A reference needs both: {given}= was given, {other}= was not. Pass both, or neither.")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer must be an optax.GradientTransformation: optimizer={short(optimizer)}. Pass what a factory "
            "returned, such as optax.adam(1e-3)."
        )
    as_function(loss, "loss")
    params = foreign.as_jax(params)

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        params, state = carry["params"], carry["state"]
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optax.with_extra_args_support(optimizer).update(grads, state, params, value=value)
        return {"params": optax.apply_updates(params, updates), "state": state}

    return lambda every: (step, {"params": params, "state": optimizer.init(params)})


def nudged(batch: Tree, number: int) -> Tree:
    """Moves floats by a few of their last digits; for number 0, not at all.

    Whole numbers stay, since they may be labels or paddings: a part of the step may round them down.
    """
    random = np.random.default_rng(number)
    whole = lambda leaf: np.array_equal(wide(leaf), np.round(wide(leaf)))
    return jax.tree.map(
        lambda leaf: _off(leaf, random) if number and _is_fine(leaf) and not whole(leaf) else leaf, batch
    )


def nudged_at(carry: Tree, paths: Collection[Path], number: int) -> Tree:
    """Moves arrays at these paths by a few of their last digits; for number 0, none."""
    random = np.random.default_rng(number)
    asked = lambda path, leaf: number and _is_fine(leaf) and tuple(map(carries.key_name, path)) in paths
    nudge = lambda path, leaf: _off(leaf, random) if asked(path, leaf) else leaf
    return carry if _stands_twice(carry) else jax.tree.map_with_path(nudge, carry)


def put_back(carry: Tree, numbers: Numbers) -> Tree:
    """A carry whose arrays at these paths are those numbers, in its dtypes and shardings."""

    def put(path: Any, leaf: Any) -> Any:
        if (at := tuple(map(carries.key_name, path))) not in numbers:
            return leaf
        new = numbers[at].astype(leaf.dtype)
        return placed_like(leaf, new) if isinstance(leaf, jax.Array) else new

    return jax.tree.map_with_path(put, carry)


def _is_fine(leaf: Any) -> bool:
    """Whether a leaf is an array of floats of 32 bits or more: a few last digits of narrower floats are percents."""
    return isinstance(leaf, jax.Array | np.ndarray) and _is_float(leaf) and leaf.dtype.itemsize >= 4


def _off(leaf: Any, random: np.random.Generator) -> Any:
    by = 4 * float(jnp.finfo(leaf.dtype).eps) * random.uniform(-1, 1, np.shape(leaf))
    new = (wide(leaf) * (1 + by)).astype(leaf.dtype)
    return placed_like(leaf, new) if isinstance(leaf, jax.Array) else new


def spoilt(batch: Tree, rows: slice) -> Tree:
    """A copy of the batch with NaN in all floats of some rows."""

    def spoil(leaf: Any) -> Any:
        leaf = leaf.copy()
        leaf[rows] = math.nan
        return leaf

    return jax.tree.map(lambda leaf: spoil(leaf) if _is_float(leaf) else leaf, batch)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and np.ndim(leaf) > 0


def _copied(carry: Tree) -> Tree:
    """Copies the arrays of a carry: a step may donate them, or change the objects that hold them."""
    if not _stands_twice(carry):
        return _with_own_arrays(carry)
    nnx = sys.modules["flax.nnx"]
    graph, state = nnx.split(carry)  # type: ignore[union-attr]  # a variable that stands twice is still one afterwards
    return nnx.merge(graph, _with_own_arrays(state))  # type: ignore[union-attr]


def _stands_twice(carry: Tree) -> bool:
    """Whether a variable of NNX stands in two places of a carry."""
    nnx = sys.modules.get("flax.nnx")
    is_variable = lambda node: nnx is not None and isinstance(node, nnx.Variable)
    variables = list(filter(is_variable, jax.tree.leaves(carry, is_leaf=is_variable)))
    return len(set(map(id, variables))) < len(variables)


def _with_own_arrays(carry: Tree) -> Tree:
    leaves, treedef = jax.tree.flatten(carry)
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    copies = dict(zip(at, _copies([leaves[n] for n in at]), strict=True))
    return jax.tree.unflatten(treedef, [copies.get(n, foreign.copied(leaf)) for n, leaf in enumerate(leaves)])


@jax.jit
def _copies(arrays: list[jax.Array]) -> list[jax.Array]:
    return [array.copy() for array in arrays]


def _is_copied(leaf: Any) -> bool:
    """Whether `_copied` is enough for a leaf: it is an array, or a value that does not change."""
    numbers = np.generic | bool | int | float | complex
    return foreign.is_array(leaf) or isinstance(leaf, numbers) or (callable(leaf) and not foreign.is_held(leaf))
