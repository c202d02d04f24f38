"""The numbers of a carry and of a batch, by path, and how a run changes them."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._shared.arrays import Tree, is_key
from optax_accum.verify import _foreign as foreign

Path = tuple[str, ...]
Numbers = dict[Path, np.ndarray]


def numbers(carry: Tree) -> Numbers:
    """The inexact arrays of a carry, and its signed integers without axes, which may be counters, in 64 bits."""
    return {path: wide(leaf) for path, leaf in leaves_of(carry) if is_inexact(leaf) or _is_count(leaf)}


def aligned(paths: Iterable[Path], others: Iterable[Path]) -> dict[Path, Path]:
    """Pairs each path with the one of `others` that ends most like it, by two names at least, if only one does.

    A place in a list is counted from its end: Keras puts accumulators before the moments.
    """
    ends, other_ends, pairs = _from_end(paths), _from_end(others), dict[Path, Path]()
    for path, end in ends.items():
        shared = {other: common_end(end, other_end) for other, other_end in other_ends.items()}
        best = max(shared.values(), default=0)
        if list(shared.values()).count(best) == 1 and best >= min(2, len(path)):
            pairs[path] = next(other for other, length in shared.items() if length == best)
    return pairs


def counters(carry: Tree) -> list[Path]:
    """The paths of Optax's counters, `count`, in optimizer states alone: metrics have a `count`, too."""
    counts = [path for path, leaf in leaves_of(carry) if _is_count(leaf) and plain(path)[-1:] == ("count",)]
    return inside(counts, states(carry))


def has_keys(tree: Tree) -> bool:
    """Whether a tree holds a random key, or a generator of random numbers."""
    return any(is_key(leaf) or foreign.is_generator(leaf) for leaf in jax.tree.leaves(tree))


def redrawn(tree: Tree, number: int | None) -> Tree:
    """Folds a number into all keys, unless it is None; seeds generators anew in either case."""

    def draw(leaf: Any) -> Any:
        if foreign.is_generator(leaf):
            return foreign.seeded(leaf, number or 0)
        return leaf if number is None or foreign.is_tensor(leaf) or not is_key(leaf) else _folded(leaf, number)

    return jax.tree.map(draw, tree)


def leaves_of(carry: Tree) -> list[tuple[Path, Any]]:
    return [(tuple(map(key_name, path)), leaf) for path, leaf in jax.tree.leaves_with_path(carry)]


def states(carry: Tree) -> list[Path]:
    """The paths of optimizer states: the NamedTuples inside a carry, as Optax's are."""
    nodes = jax.tree.leaves_with_path(carry, is_leaf=lambda node: node is not carry and hasattr(node, "_fields"))
    return [tuple(map(key_name, path)) for path, node in nodes if hasattr(node, "_fields")]


def inside(paths: Iterable[Path], roots: list[Path]) -> list[Path]:
    return [path for path in paths if any(path[: len(root)] == root for root in roots)]


def named(path: Path) -> str:
    """The name of a path in a report."""
    return "/".join(plain(path)) or "params"


def plain(path: Path) -> Path:
    """A path without the `value` in which a variable of NNX ends."""
    return path[:-1] if path[-1:] == ("value",) else path


def key_name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is an array of real or complex numbers, and not empty."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact) and np.size(leaf) > 0


@jax.jit
def _folded(key: Any, number: Any) -> Any:
    """Folds a number into a key, or into each of an array; a key of the old style stays one."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), number))
    return jax.vmap(lambda one: jax.random.fold_in(one, number))(key.reshape(-1)).reshape(key.shape)


def _is_count(leaf: Any) -> bool:
    if isinstance(leaf, bool) or np.ndim(leaf) or is_key(leaf):
        return False
    return type(leaf) is int or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.signedinteger))


def common_end(path: Path, other: Path) -> int:
    """How many names two paths share at their ends."""
    pairs = zip(reversed(path), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(path), len(other)))


def _from_end(paths: Iterable[Path]) -> dict[Path, Path]:
    """Each path -> the same, plain, with a last number that counts from the end of its list."""
    ends = {path: plain(path) for path in paths}
    last = lambda parent: max(int(path[-1]) for path in ends.values() if path[:-1] == parent and path[-1].isdigit())
    end = lambda path: (*path[:-1], str(int(path[-1]) - last(path[:-1]))) if path and path[-1].isdigit() else path
    return {path: end(of) for path, of in ends.items()}


def floats(batch: Tree) -> Iterator[tuple[str, np.ndarray, Callable[[np.ndarray], Tree]]]:
    """Yields `(path, numbers, put)` of each float leaf with rows; `put(new)` is the batch with that leaf replaced."""
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(batch)):
        dtype = getattr(leaf, "dtype", jnp.result_type(leaf))
        if np.ndim(leaf) and np.size(leaf) and jnp.issubdtype(dtype, jnp.floating):
            as_it_came = functools.partial((np if isinstance(leaf, np.ndarray) else jnp).asarray, dtype=dtype)
            put = lambda new, number=number, as_it_came=as_it_came: _put(batch, number, as_it_came(new))
            yield jax.tree_util.keystr(path), wide(leaf), put


def _put(batch: Tree, number: int, leaf: Any) -> Tree:
    leaves, treedef = jax.tree.flatten(batch)
    return jax.tree.unflatten(treedef, [*leaves[:number], leaf, *leaves[number + 1 :]])


def moved(leaf: np.ndarray) -> list[np.ndarray]:
    """A leaf moved by two constants, to means of one and three standard deviations.

    There, rows' weights differ much, even if they were nearly alike before: moving them changes the update.
    """
    return [leaf - np.mean(leaf) + deviations * np.std(leaf) for deviations in (1, 3)]


def moved_apart(leaf: np.ndarray) -> np.ndarray:
    """A leaf with each row moved by another number."""
    return leaf + np.std(leaf) * numbers_by_row(leaf)


def numbers_by_row(leaf: np.ndarray) -> np.ndarray:
    """A random number for each row of a leaf, of a shape that broadcasts."""
    return np.random.default_rng(0).uniform(0.5, 2, (len(leaf), *[1] * (leaf.ndim - 1)))


def wide(leaf: Any) -> np.ndarray:
    """An array in 64 bits: float64 or complex128."""
    return np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64)


def largest(leaf: np.ndarray) -> float:
    """The largest absolute value; 0 for an empty leaf."""
    return float(np.max(np.abs(leaf), initial=0))


def epsilons(text: str) -> list[float]:
    """The machine epsilons of the floats in the text of a traced program."""
    known = {"f64": 2**-52, "c128": 2**-52, "f32": 2**-23, "c64": 2**-23, "f16": 2**-10, "bf16": 2**-7}
    return [known[name] for name in re.findall(r"\b(\w+)\[", text) if name in known]
