"""Which numbers of a carry are parameters, and which mirror them (moments)."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._shared.arrays import Tree
from optax_accum.verify import _carries as carries
from optax_accum.verify._carries import Path, inside, is_inexact, leaves_of, named, plain, states, wide

Find = Callable[[Tree], Tree] | None  # a user's function that finds the parameters
AVERAGES = ("ema", "average", "avg", "shadow", "target")  # in names of parts that begin equal to the parameters


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf to compare in two carries: a parameter, or a leaf of the optimizer's state that mirrors one."""

    slot: str  # "params", or the path of a mirror of them, or of some of them
    one: Path
    cut: Path
    epsilon: float  # of its dtype
    start: np.ndarray
    drift: np.ndarray  # its parameter at first: decay moves along it
    param: str = ""  # the parameter that it mirrors


def common(one: Tree, cut: Tree, find_one: Find, find_cut: Find) -> dict[str, Leaf]:
    """The leaves to compare, by name: all parameters, and mirrors of them in the optimizer's state of both carries."""
    (root, params), (other_root, others) = params_of(one, find_one), params_of(cut, find_cut)
    start, then = carries.numbers(one), carries.numbers(cut)
    epsilons = {path: float(jnp.finfo(leaf.dtype).eps) for path, leaf in leaves_of(one) if is_inexact(leaf)}
    leaf = lambda slot, path, other, drift, param="": Leaf(slot, path, other, epsilons[path], start[path], drift, param)
    leaves = {name: leaf("params", path, others[name], start[path]) for name, path in params.items()}
    for path, other in carries.aligned(state_of(one, root, params), state_of(cut, other_root, others)).items():
        if start[path].shape == then[other].shape:
            ends = {name: (plain(of[len(root) :]), np.shape(start[of])) for name, of in params.items()}
            stem, name = _owner(plain(path), np.shape(start[path]), ends)
            alike = name and start[path].shape == start[params[name]].shape
            drift = start[params[name]] if alike else np.zeros_like(start[path])
            leaves[named(path)] = leaf("/".join((*stem, "")), path, other, drift, name)
    return leaves


def check(one: Tree, cut: Tree, find_one: Find, find_cut: Find) -> None:
    """Raises unless both carries begin with the same parameters."""
    (_, params), (_, others) = params_of(one, find_one), params_of(cut, find_cut)
    start, then = carries.numbers(one), carries.numbers(cut)
    same = lambda name: np.array_equal(start[params[name]], then[others[name]], equal_nan=True)
    if params.keys() != others.keys() or not all(map(same, params)):
        what = f"other values of {_listed(params)}" if params.keys() == others.keys() else _listed(others)
        raise ValueError(
            f"make_step must begin with the same parameters whatever it is called with: 1 gives {_listed(params)}, the "
            f"window's length {what}. Make them once, or from the same seed; params=lambda carry: ... finds them."
        )


def params_of(carry: Tree, find: Find) -> tuple[Path, dict[str, Path]]:
    """The path at which the parameters stand, and the path of each by its name in there.

    They are the result of `find`; or all `nnx.Param`; or all leaves under the name "params"; or the first part of the
    carry that is not all zeros, as optimizer states are at first; or the carry, where it has no parts.
    """
    leaves = {path: leaf for path, leaf in leaves_of(carry) if is_inexact(leaf)}
    root, found = _asked(carry, find) if find else _in_nnx(carry) or _under_params(leaves) or _first_part(carry, leaves)
    found = [path for path in found if path in leaves]
    if not found:
        remedy = "Return them from make_step, or say where they are, params=lambda carry: ..."
        if leaves_of(carry) and not hasattr(carry, "dtype") and jax.tree.structure(carry).num_nodes == 1:
            remedy = f"It is one object, of {type(carry).__name__}: return (model, optimizer), say."
        raise ValueError(f"The carry must hold the parameters: no inexact array was found in it. {remedy}")
    return root, {named(path[len(root) :]): path for path in found}


def subtree(carry: Tree, find: Find) -> Tree:
    """The parameters in a carry, as a tree."""
    tree, (root, _) = carry, params_of(carry, find)
    if find:
        return find(carry)
    for key in root:
        children = jax.tree.leaves_with_path(tree, is_leaf=lambda node, above=tree: node is not above)
        tree = next(child for (name, *_), child in children if carries.key_name(name) == key)
    return tree


def state_of(carry: Tree, root: Path, params: dict[str, Path]) -> set[Path]:
    """The paths of mirrors of the parameters, as moments are: zero at first, or equal to the parameters.

    Inside an optimizer's state also leaves that belong to one parameter alone, of any shape, as factored moments do.
    """
    everything = dict(leaves_of(carry))
    initial = {name: everything.pop(path) for name, path in params.items()}
    leaves = {path: leaf for path, leaf in everything.items() if is_inexact(leaf)}
    ends = {name: plain(path[len(root) :]) for name, path in params.items()}
    shapes = {name: np.shape(leaf) for name, leaf in initial.items()}
    mirrors: set[Path] = set()
    for candidate in leaves:  # a leaf that ends like the first parameter starts a mirror
        first = next(iter(params))
        stem = _stem(plain(candidate), ends[first])
        if stem is None:
            continue
        mirror = {
            path
            for path, leaf in leaves.items()
            for name in params
            if plain(path) == stem + ends[name] and np.shape(leaf) == shapes[name]
        }
        mirrors |= mirror if len(mirror) == len(params) or not ends[first] else set()
    mirrors |= _lists(leaves, Counter(shapes.values()))
    both = {name: (end, shapes[name]) for name, end in ends.items()}
    owner = {path: _owner(plain(path), np.shape(leaf), both)[1] for path, leaf in leaves.items()}
    mirrors |= {path for path, name in owner.items() if name and np.shape(leaves[path]) == shapes[name]}
    starts = list(map(wide, initial.values()))
    begins = lambda leaf: not np.any(leaf) or any(np.array_equal(leaf, start) for start in starts)
    owned = {path for path in inside(leaves, states(carry)) if owner[path]}
    return owned | {path for path in mirrors if begins(wide(leaves[path]))}


def _listed(params: dict[str, Path]) -> str:
    names = sorted(params)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _owner(path: Path, shape: tuple[int, ...], ends: dict[str, tuple[Path, tuple[int, ...]]]) -> tuple[Path, str]:
    """`(start, name)`: the parameter whose path ends this one, but for its place in a list.

    If no whole path does, as where each of two networks has an optimizer: the only parameter of its shape that ends
    most like it; "" without one.
    """
    for end in (path, path[:-1]) if path and path[-1].isdigit() else (path,):
        owners = [name for name, (of, _) in ends.items() if of and end[-len(of) :] == of]
        if owners:
            name = max(owners, key=lambda name: len(ends[name][0]))
            return end[: -len(ends[name][0])], name
    shared = {name: carries.common_end(path, of) for name, (of, like) in ends.items() if like == shape}
    most = max(shared.values(), default=0)
    owners = [name for name, length in shared.items() if length == most]
    alone = most and len(owners) == 1 and not path[-1].isdigit()
    return (path[:-most], owners[0]) if alone else (path, "")


def _stem(path: Path, end: Path) -> Path | None:
    """The path before `end`; None if it ends otherwise."""
    if not end:
        return path
    return path[: -len(end)] if path[-len(end) :] == end else None


def _asked(carry: Tree, find: Callable[[Tree], Tree]) -> tuple[Path, list[Path]]:
    """The paths of the leaves that `find` returns, which must be the carry's own objects."""
    asked = {id(leaf) for leaf in jax.tree.leaves(find(carry))}
    return _under_root([path for path, leaf in leaves_of(carry) if id(leaf) in asked])


def _in_nnx(carry: Tree) -> tuple[Path, list[Path]] | None:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    nodes = jax.tree.leaves_with_path(carry, is_leaf=lambda node: isinstance(node, nnx.Variable))
    starts = {tuple(map(carries.key_name, path)) for path, node in nodes if isinstance(node, nnx.Param)}
    found = {path: leaf for path, leaf in leaves_of(carry) if any(path[: len(start)] == start for start in starts)}
    return _under_root(_without_mirrors(carry, found)) if found else None


def _without_mirrors(carry: Tree, found: dict[Path, Any]) -> list[Path]:
    """The paths of the parameters without their sums and moments, which have the same types.

    These stand in a NamedTuple inside the carry, as Optax's states are, or in a part of it that is all zeros and
    otherwise like another.
    """
    kept = inside(found, states(carry))
    outside = [path for path in found if path not in kept] or kept
    if not isinstance(carry, tuple | list | dict):
        return outside
    parts: dict[str, list[Path]] = {}
    for path in outside:
        parts.setdefault(path[0], []).append(path)
    shapes = {part: {path[1:]: np.shape(found[path]) for path in paths} for part, paths in parts.items()}
    filled = [part for part, paths in parts.items() if any(np.any(wide(found[path])) for path in paths)]
    mirrors = {part for part in parts if part not in filled and any(shapes[part] == shapes[other] for other in filled)}
    return [path for path in outside if path[0] not in mirrors]


def _under_root(paths: list[Path]) -> tuple[Path, list[Path]]:
    """The longest common start of the paths, and the paths."""
    columns = list(zip(*(path[:-1] for path in map(plain, paths)), strict=False))
    shared = next((n for n, names in enumerate(columns) if len(set(names)) > 1), len(columns))
    return paths[0][:shared] if paths else (), paths


def _under_params(leaves: dict[Path, Any]) -> tuple[Path, list[Path]] | None:
    roots = [path[: path.index("params") + 1] for path in leaves if "params" in path]
    root = min(roots, key=len, default=())
    return (root, [path for path in leaves if path[: len(root)] == root]) if root else None


def _first_part(carry: Tree, leaves: dict[Path, Any]) -> tuple[Path, list[Path]]:
    """The first part of the carry that is not all zeros; of a dict all but copies, of a dict of arrays all."""
    parts: dict[str, list[Path]] = {}
    for path in leaves:
        parts.setdefault(path[0] if path else "", []).append(path)
    filled = [paths for paths in parts.values() if any(np.any(wide(leaves[path])) for path in paths)]
    if not isinstance(carry, tuple | list) and all(len(path) <= 1 for path in leaves):
        return (), list(leaves)
    counted = {path[:1] for path in carries.counters(carry)}  # an optimizer's state, though it may hold constants
    filled = [paths for paths in filled if paths[0][:1] not in counted] or filled
    if isinstance(carry, dict):
        filled = _without_copies(filled, leaves)
    if len(filled) > 1 and isinstance(carry, dict):
        return (), [path for paths in filled for path in paths]
    first = next(iter([*filled, *parts.values()]), [])
    return (first[0][:1], first) if first else ((), [])


def _without_copies(parts: list[list[Path]], leaves: dict[Path, Any]) -> list[list[Path]]:
    """The parts that hold more than zeros and copies of other parts' arrays; an average begins as such a copy."""
    kept: list[list[Path]] = []
    is_average = lambda part: any(word in part[0][0].lower() for word in AVERAGES)
    for part in sorted(parts, key=lambda part: (is_average(part), len(part))):
        known = [wide(leaves[path]) for paths in kept for path in paths]
        values = [wide(leaves[path]) for path in part]
        if any(np.any(value) and not any(np.array_equal(value, other) for other in known) for value in values):
            kept.append(part)
    return [part for part in parts if part in kept]


def _lists(leaves: dict[Path, Any], shapes: Counter[Any]) -> set[Path]:
    """The paths in lists of as many arrays of each shape as the parameters have, or a multiple."""
    listed: set[Path] = set()
    for parent in {path[:-1] for path in leaves if path and path[-1].isdigit()}:
        siblings = {path: np.shape(leaf) for path, leaf in leaves.items() if path[:-1] == parent}
        many = Counter(shape for shape in siblings.values() if shape)
        times = {many[shape] / count for shape, count in shapes.items() if shape}
        if set(many) <= set(shapes) and len(times) == 1 and min(times) >= 1 and min(times).is_integer():
            listed |= {path for path, shape in siblings.items() if shape}
    return listed
