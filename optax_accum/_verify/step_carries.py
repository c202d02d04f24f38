"""The numbers of what a step carries, by path, and of its batch, as a run changes them."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arguments.rows import is_split
from optax_accum._core.leaves import is_key
from optax_accum._core.types import Tree
from optax_accum._verify import foreign

Path = tuple[str, ...]
Numbers = dict[Path, np.ndarray]


def numbers(carry: Tree) -> Numbers:
    """Returns the numbers of a carry: its inexact arrays, and its signed integers of no axis, which may be counters."""
    return {path: wide(leaf) for path, leaf in leaves_of(carry) if is_inexact(leaf) or _is_count(leaf)}


def aligned(paths: Iterable[Path], others: Iterable[Path]) -> dict[Path, Path]:
    """Returns for each path the one of `others` that ends most like it, by two names at least, if there is one.

    What stands in a list is counted from its end: Keras puts accumulators before the moments.
    """
    ends, other_ends, pairs = _from_end(paths), _from_end(others), dict[Path, Path]()
    for path, end in ends.items():
        shared = {other: common_end(end, other_end) for other, other_end in other_ends.items()}
        best = max(shared.values(), default=0)
        if list(shared.values()).count(best) == 1 and best >= min(2, len(path)):
            pairs[path] = next(other for other, length in shared.items() if length == best)
    return pairs


def counters(carry: Tree) -> list[Path]:
    """Returns the paths of what Optax's transformations call `count`: in their states, for metrics count, too."""
    counts = [path for path, leaf in leaves_of(carry) if _is_count(leaf) and plain(path)[-1:] == ("count",)]
    return inside(counts, states(carry))


def has_keys(tree: Tree) -> bool:
    """Whether there is a random key in a tree, or a generator of random numbers."""
    return any(is_key(leaf) or foreign.is_generator(leaf) for leaf in jax.tree.leaves(tree))


def redrawn(tree: Tree, number: int | None) -> Tree:
    """Returns a tree whose keys are `number`'s own, or the same for None; generators begin anew in either case."""

    def draw(leaf: Any) -> Any:
        if foreign.is_generator(leaf):
            return foreign.seeded(leaf, number or 0)
        return leaf if number is None or foreign.is_tensor(leaf) or not is_key(leaf) else _folded(leaf, number)

    return jax.tree.map(draw, tree)


def leaves_of(carry: Tree) -> list[tuple[Path, Any]]:
    """Returns the leaves of a carry, and their paths."""
    return [(tuple(map(key_name, path)), leaf) for path, leaf in jax.tree.leaves_with_path(carry)]


def states(carry: Tree) -> list[Path]:
    """Returns the paths of what an optimizer keeps: the NamedTuples inside a carry, as Optax's states are."""
    nodes = jax.tree.leaves_with_path(carry, is_leaf=lambda node: node is not carry and hasattr(node, "_fields"))
    return [tuple(map(key_name, path)) for path, node in nodes if hasattr(node, "_fields")]


def inside(paths: Iterable[Path], roots: list[Path]) -> list[Path]:
    """Returns the paths that begin with one of the roots."""
    return [path for path in paths if any(path[: len(root)] == root for root in roots)]


def named(path: Path) -> str:
    """Returns the name of a path, as a report shows it."""
    return "/".join(plain(path)) or "params"


def plain(path: Path) -> Path:
    """Returns a path without the `value` in which a variable of NNX ends."""
    return path[:-1] if path[-1:] == ("value",) else path


def key_name(key: Any) -> str:
    """Returns one key of a path as text."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is an array of real or complex numbers."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact) and np.size(leaf) > 0


@jax.jit
def _folded(key: Any, number: Any) -> Any:
    """Returns a key, or an array of them, with a number folded in; one of the old style stays so."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), number))
    return jax.vmap(lambda one: jax.random.fold_in(one, number))(key.reshape(-1)).reshape(key.shape)


def _is_count(leaf: Any) -> bool:
    if isinstance(leaf, bool) or np.ndim(leaf) or is_key(leaf):
        return False
    return type(leaf) is int or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.signedinteger))


def common_end(path: Path, other: Path) -> int:
    """Returns how many names two paths share at their ends."""
    pairs = zip(reversed(path), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(path), len(other)))


def _from_end(paths: Iterable[Path]) -> dict[Path, Path]:
    """Returns for each path the same, plain, in which the last number counts from the end of its list."""
    ends = {path: plain(path) for path in paths}

    def last(parent: Any) -> Any:
        return max(int(path[-1]) for path in ends.values() if path[:-1] == parent and path[-1].isdigit())

    def end(path: Any) -> Any:
        return (*path[:-1], str(int(path[-1]) - last(path[:-1]))) if path and path[-1].isdigit() else path

    return {path: end(of) for path, of in ends.items()}


def floats(batch: Tree) -> Iterator[tuple[str, np.ndarray, Callable[[np.ndarray], Tree]]]:
    """Yields for each leaf of real numbers in rows its path, its numbers, and what puts others in their place."""
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(batch)):
        dtype = getattr(leaf, "dtype", jnp.result_type(leaf))
        if is_split(leaf) and np.size(leaf) and jnp.issubdtype(dtype, jnp.floating):
            as_it_came = functools.partial((np if isinstance(leaf, np.ndarray) else jnp).asarray, dtype=dtype)

            def put(new: Any, number: Any = number, as_it_came: Any = as_it_came) -> Any:
                return _put(batch, number, as_it_came(new))

            yield jax.tree_util.keystr(path), wide(leaf), put


def _put(batch: Tree, number: int, leaf: Any) -> Tree:
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
