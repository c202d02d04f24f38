"""Owns a loss in one form, over rows that are never cut, and what is done to its batch. Compares nothing."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arguments.rows import is_split, of_rows
from optax_accum._core.leaves import is_key
from optax_accum._core.types import Name, Tree
from optax_accum._loss import ratio
from optax_accum._loss.parts import Parts, Returns
from optax_accum._within.value_and_grad import one_by_one, value_and_grad

# A row here is what is never cut: an example, or with group_size a group of g. Batches have leaves [n, g, ...].


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss in one form, over rows [n, g, ...], whatever stands beside it."""

    fun: Callable[..., Any]
    params: Tree
    args: tuple[Any, ...]
    returns: Returns
    weight_fn: Callable[..., Any] | None
    rng_argnum: Name | None
    carry_argnum: Name | None
    argnums: tuple[Name, ...]  # where the user's function takes `args`

    def terms(self, params: Tree, batch: Tree, *args: Any) -> Any:
        """Returns the loss, or the dict of its terms."""
        return self._parts(params, batch, *args).loss

    def total(self, params: Tree, batch: Tree, *args: Any, term: str | None = None) -> jax.Array:
        """Returns the sum of all terms, or one of them; a Ratio divided."""
        terms = ratio.checked(self.terms(params, batch, *args))
        terms = terms if term is None else terms[term]
        divided = lambda part: ratio.divided(jnp.asarray(part.total), part.count) if ratio.is_ratio(part) else part
        return sum(map(divided, jax.tree.leaves(terms, is_leaf=ratio.is_ratio)))  # type: ignore[return-value]

    def threaded(self, params: Tree, batch: Tree, *args: Any) -> Any:
        """Returns the loss, or the dict of its terms, with the carry beside it."""
        parts = self._parts(params, batch, *args)
        return parts.loss, parts.carry

    def _parts(self, params: Tree, batch: Tree, *args: Any) -> Parts:
        return self.returns.parts(self.fun(params, _flat(batch), *args))

    def weights(self, batch: Tree) -> Any:
        """Returns what `weight_fn` says that a batch counts."""
        return self.weight_fn(_flat(batch))  # type: ignore[misc]

    def counts(self, params: Tree, batch: Tree, *args: Any) -> Any:
        """Returns what a batch counts, or each of its terms: by its Ratio, or by `weight_fn`; or 1."""
        if self.weight_fn is not None:
            return self.weights(batch)
        count = lambda term: jnp.asarray(term.count, float) if ratio.is_ratio(term) else 1.0
        return jax.tree.map(count, self.terms(params, batch, *args), is_leaf=ratio.is_ratio)

    def share(self, params: Tree, batch: Tree, of: Tree, *args: Any) -> Any:
        """Returns what a batch counts as a part of what another of as many rows counts."""
        return jax.tree.map(jnp.divide, self.counts(params, batch, *args), self.counts(params, of, *args))

    def draw(self, number: Any, among: tuple[int, ...] | None = None) -> tuple[Any, ...]:
        """Returns the arguments with keys that are `number`'s own: all, or those of the arguments `among`."""
        own = lambda leaf: jax.random.fold_in(leaf, number) if is_key(leaf) else leaf
        return tuple(
            jax.tree.map(own, arg) if among is None or n in among else arg for n, arg in enumerate(self.args, start=2)
        )

    def accumulated(self, *, held: bool, own_keys: bool, **options: Any) -> Callable[..., tuple[Any, Any]]:
        """Returns `value_and_grad` of the loss, the carry held or threaded, a key for each micro-batch or for all."""
        fun, carry = (self.terms, None) if held or self.carry_argnum is None else (self.threaded, self.carry_argnum)
        rng = self.rng_argnum if own_keys else None
        whole = tuple(n for n in range(2, 2 + len(self.args)) if n not in (rng, carry))
        roles = {"rng_argnum": rng, "carry_argnum": carry, "whole_argnums": whole}
        weight_fn = None if self.weight_fn is None else self.weights
        cut = one_by_one(value_and_grad(fun, weight_fn=weight_fn, **roles, **options))

        def loss_and_grads(*args: Any) -> tuple[Any, Any]:
            out, grads = cut(*args)
            return (out if carry is None else out[0]), grads

        return loss_and_grads

    def shapes(self, batch: Tree) -> Any:
        """Returns the shapes of the loss, or of its terms."""
        return jax.eval_shape(lambda params, batch: self.terms(params, batch, *self.args), self.params, batch)

    def refusal(self, batch: Tree, rows: int) -> Exception | None:
        """Returns what `fun` raises for the first rows of a batch, if it does."""
        try:
            self.shapes(take(batch, np.arange(rows)))
        except Exception as error:  # whatever a user's function raises
            return error
        return None

    def holding(self, batch: Tree) -> Iterator[tuple[str, "Loss", Tree]]:
        """Yields for each leaf the loss and its batch with that leaf as a constant, which is not cut."""
        for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(batch)):
            rest = _put(batch, number, 0.0)
            if is_split(leaf) and any(map(is_split, jax.tree.leaves(rest))):
                yield jax.tree_util.keystr(path), self._with_leaf(number, _flat(leaf)), rest

    def _with_leaf(self, number: int, leaf: Any) -> "Loss":
        put = lambda batch: _put(batch, number, leaf)
        fun = lambda params, batch, *args: self.fun(params, put(batch), *args)
        weight_fn = None if self.weight_fn is None else lambda batch: self.weight_fn(put(batch))  # type: ignore[misc]
        return dataclasses.replace(self, fun=fun, weight_fn=weight_fn)


def floats(batch: Tree) -> Iterator[tuple[str, np.ndarray, Callable[[np.ndarray], Tree]]]:
    """Yields for each leaf of real numbers in rows its path, its numbers, and what puts others in their place."""
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(batch)):
        dtype = getattr(leaf, "dtype", jnp.result_type(leaf))
        if is_split(leaf) and np.size(leaf) and jnp.issubdtype(dtype, jnp.floating):
            as_it_came = functools.partial((np if isinstance(leaf, np.ndarray) else jnp).asarray, dtype=dtype)
            put = lambda new, number=number, as_it_came=as_it_came: _put(batch, number, as_it_came(new))
            yield jax.tree_util.keystr(path), wide(leaf), put


def _put(batch: Tree, number: int, leaf: Any) -> Tree:
    """Returns a batch with another leaf in one place."""
    leaves, treedef = jax.tree.flatten(batch)
    return jax.tree.unflatten(treedef, [*leaves[:number], leaf, *leaves[number + 1 :]])


def moved(leaf: np.ndarray) -> list[np.ndarray]:
    """Returns a leaf moved by two constants, to means of one and three standard deviations.

    There weights of rows, though nearly alike before, are not: moved they change what they weigh.
    """
    return [leaf - np.mean(leaf) + deviations * np.std(leaf) for deviations in (1, 3)]


def moved_apart(leaf: np.ndarray) -> np.ndarray:
    """Returns a leaf with each row moved by a number of its own."""
    return leaf + np.std(leaf) * numbers_by_row(leaf)


def numbers_by_row(leaf: np.ndarray) -> np.ndarray:
    """Returns a number of its own for each row of a leaf."""
    return np.random.default_rng(0).uniform(0.5, 2, (len(leaf), *[1] * (leaf.ndim - 1)))


def take(batch: Tree, rows: Any) -> Tree:
    """Returns these rows of a batch."""
    return of_rows(lambda leaf: jnp.asarray(leaf)[rows], batch)


def grouped(batch: Tree, size: int) -> Tree:
    """Returns a batch of rows [n * size, ...] as one of groups [n, size, ...]."""
    return of_rows(lambda leaf: jnp.asarray(leaf).reshape(len(leaf) // size, size, *jnp.shape(leaf)[1:]), batch)


def _flat(batch: Tree) -> Tree:
    """Returns a batch of groups as one of rows."""
    return of_rows(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), batch)


def wide(leaf: Any) -> np.ndarray:
    """Returns an array of 64-bit numbers."""
    return np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64)


def largest(leaf: np.ndarray) -> float:
    """Returns the largest absolute value."""
    return float(np.max(np.abs(leaf), initial=0))


def epsilons(text: str) -> list[float]:
    """Returns the machine epsilons of the floats in the text of a traced program."""
    known = {"f64": 2**-52, "c128": 2**-52, "f32": 2**-23, "c64": 2**-23, "f16": 2**-10, "bf16": 2**-7}
    return [known[name] for name in re.findall(r"\b(\w+)\[", text) if name in known]


def uneven(rows: int, parts: int) -> int:
    """Returns the smallest size above that of `parts` equal micro-batches which leaves a remainder."""
    return next(size for size in range(-(-rows // parts) + 1, rows) if rows % size)


def scaled(leaves: list[np.ndarray], scales: list[float]) -> np.ndarray:
    """Returns the loss and the leaves of a gradient, one of each [m, ...], as one row of numbers [m, entries]."""
    flat = [leaf.reshape(len(leaf), -1) / scale for leaf, scale in zip(leaves, scales, strict=True)]
    return np.concatenate([part for leaf in flat for part in (leaf.real, leaf.imag)], axis=1)
