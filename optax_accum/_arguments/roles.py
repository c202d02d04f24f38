"""The roles of arguments: which hold the batch, a key or a carry, and which stay whole."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import all_leaves

from optax_accum._arguments import signature
from optax_accum._core import dtypes
from optax_accum._core.leaves import by_path, check_arrays, is_array, parted
from optax_accum._core.types import Name, Tree
from optax_accum._shared.arrays import is_key, short

Names = dict[str, tuple[Name, ...]]  # the arguments in each role


class Roles:
    """Which arguments of `fun` have which role, by position or by name; `bind` finds them in one call."""

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        batch_argnums: Any = 1,
        argnums: Any = 0,
        rng_argnum: Any = None,
        carry_argnum: Any = None,
        whole_argnums: Any = (),
        needs_batch: bool = True,
        needs_params: bool = True,
        of_whole_batch: bool = False,
    ):
        """Takes the roles as users name them; raises if an argument has two.

        With `needs_params=False`, arguments of `argnums` may be missing, or have another role that takes precedence.
        With `of_whole_batch`, keys and arguments that stay whole are not named, and errors name no option for them.
        """
        self.signature, self._needs_params = signature.signature_of(fun), needs_params
        self.of_whole_batch = of_whole_batch
        self.named: Names = {
            "argnums": () if argnums is None else _as_names("argnums", argnums, empty=False),
            "batch_argnums": _as_names("batch_argnums", batch_argnums, empty=not needs_batch),
            "rng_argnum": _at_most_one("rng_argnum", rng_argnum),
            "carry_argnum": _at_most_one("carry_argnum", carry_argnum),
            "whole_argnums": _as_names("whole_argnums", whole_argnums),
        }
        for role, name in self._pairs():
            if not self.signature.takes(name):
                raise ValueError(
                    f"{role} must name a parameter of fun: {role}={name!r}, and fun takes {self.signature}. "
                    f"{self._remedy(role)}"
                )
        if not needs_params:
            others = {self.signature.parameter(name) for role, name in self._pairs() if role != "argnums"}
            free = (name for name in self.named["argnums"] if self.signature.parameter(name) not in others)
            self.named["argnums"] = tuple(free)
        _check_apart((role, name, self.signature.parameter(name)) for role, name in self._pairs())

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Call":
        """Finds the arguments of one call in their roles; checks the batch and the key."""
        names = self.passed_as(len(args), kwargs)
        call = Call(
            arguments={**dict(enumerate(args)), **kwargs},
            params=names["argnums"],
            batch=names["batch_argnums"],
            rng=next(iter(names["rng_argnum"]), None),
            carry=next(iter(names["carry_argnum"]), None),
            whole=names["whole_argnums"],
        )
        for name in call.batch:
            _check_batch(name, call.arguments[name], "" if self.of_whole_batch else " and name it with rng_argnum")
            if call.rng is None and is_key(call.arguments[name]) and call.unnamed:
                both = f"Name both: batch_argnums={call.unnamed[0]!r}, rng_argnum={name!r}."
                raise ValueError(
                    f"The batch must not be a random key: argument {name!r} is one, of the old style, and is named by "
                    f"batch_argnums. {f'Pass batch_argnums={call.unnamed[0]!r}.' if self.of_whole_batch else both}"
                )
        if call.rng is not None:
            _check_rng(call.arguments[call.rng])
        return call

    def passed_as(self, count: int, keywords: Collection[str] = ()) -> Names:
        """For each role, the positions, of `count`, and the keywords by which a call passes its arguments."""
        passed: list[tuple[str, Name, Name]] = []
        for role, name in self._pairs():
            key = self.signature.passed_as(name, count, keywords)
            if key is None and role == "argnums" and not self._needs_params:
                continue
            if key is None:
                raise ValueError(
                    f"{role} must name an argument that is passed: {role}={name!r} is not, in a call with {count} by "
                    f"position and {sorted(keywords) or 'none'} by keyword. Pass that argument, or name another."
                )
            passed.append((role, name, key))
        _check_apart(passed)
        return {wanted: tuple(key for role, _, key in passed if role == wanted) for wanted in self.named}

    def _remedy(self, role: str) -> str:
        """What to do about a role that names no parameter."""
        known = self.signature
        if role == "batch_argnums" and len(known.positions) == 1 and not known.keywords[1:]:
            alone = "" if self._needs_params else "If fun takes the batch alone, pass batch_argnums=0. "
            return (
                f"{alone}A batch that fun closes over is not split: make the batch an argument, "
                f"fun({known.positions[0]}, batch)."
            )
        return "Pass its position, counted from 0, or its name."

    def _pairs(self) -> list[tuple[str, Name]]:
        return [(role, name) for role, names in self.named.items() for name in names]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `fun`: its arguments by position or keyword, and which of them have a role."""

    arguments: dict[Name, Any]
    params: tuple[Name, ...]
    batch: tuple[Name, ...]
    rng: Name | None
    carry: Name | None
    whole: tuple[Name, ...]

    def __getitem__(self, names: tuple[Name, ...]) -> tuple[Any, ...]:
        return tuple(self.arguments[name] for name in names)

    @property
    def unnamed(self) -> list[Name]:
        """The arguments with arrays in them that have no role."""
        known = {*self.params, *self.batch, *self.whole, self.rng, self.carry}
        return [name for name in self.arguments if name not in known and jax.tree.leaves(self.arguments[name])]

    @property
    def carried(self) -> Tree:
        """The carry that the first micro-batch gets; None without `carry_argnum`."""
        return None if self.carry is None else dtypes.strong(self.arguments[self.carry])

    def with_arguments(self, arguments: Mapping[Name, Any]) -> "Call":
        return dataclasses.replace(self, arguments={**self.arguments, **arguments})

    def with_values(self, names: Sequence[Name], values: Sequence[Any]) -> "Call":
        return self.with_arguments(dict(zip(names, values, strict=True)))

    def apply(self, fun: Callable[..., Any]) -> Any:
        """Calls `fun` as the user did."""
        args = [arg for name, arg in self.arguments.items() if isinstance(name, int)]
        return fun(*args, **{name: arg for name, arg in self.arguments.items() if isinstance(name, str)})

    def of_arrays(self, fun: Callable[["Call"], Any]) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
        """`fun(call)` as a function of the arrays among the arguments, and these arrays."""
        names = tuple(self.arguments)
        arrays, filled = parted(self[names], is_array)
        return lambda arrays: fun(self.with_values(names, filled(arrays))), arrays

    def fold_key(self, index: Any) -> "Call":
        """Folds the index of a micro-batch, or of a device, into each key: `jax.random.fold_in`."""
        if self.rng is None:
            return self
        fold = lambda key: jax.random.fold_in(key, index)
        return self.with_arguments({self.rng: jax.tree.map(fold, self.arguments[self.rng])})

    def check_shared(self, rows: int | None, *, of_whole_batch: bool = False) -> None:
        """Raises for arguments that all micro-batches would share by mistake: keys, and arrays with as many rows.

        With `of_whole_batch` they may share keys: each draws the numbers that its rows have in the whole batch.
        """
        known = {*self.params, *self.batch, *self.whole, self.rng, self.carry}
        for name in self.arguments.keys() - known:
            for path, leaf in by_path(self.arguments[name], ""):
                where = f"argument {name!r}{path}"
                if is_key(leaf) and not of_whole_batch:
                    raise ValueError(
                        f"A random key must be named, or every micro-batch would draw the same numbers: {where} is a "
                        f"key. Pass rng_argnum={name!r}; to share it on purpose, pass whole_argnums={name!r}."
                    )
                shape = getattr(leaf, "shape", ())
                if rows is not None and rows > 1 and shape and shape[0] == rows:
                    or_whole = (
                        f" if it holds rows; if every micro-batch needs all of it, as of running statistics, pass "
                        f"whole_argnums={name!r}"
                    )
                    raise ValueError(
                        f"An argument with as many rows as the batch must be split with it, or declared whole: {where} "
                        f"has shape {shape}, the batch {rows} rows. Add {name!r} to batch_argnums"
                        f"{'' if of_whole_batch else or_whole}."
                    )


def _as_names(role: str, named: Any, *, empty: bool = True) -> tuple[Name, ...]:
    """The position or the name of one argument, or several, as a tuple; `empty` allows none."""
    names = (named,) if isinstance(named, int | str) else named
    are_names = isinstance(names, list | tuple) and all(type(name) in (int, str) for name in names)
    if not are_names or not (names or empty):
        raise TypeError(
            f"{role} must be the position or the name of an argument, or a tuple of them: {role}={named!r}. Count from "
            '0, or pass "x".'
        )
    return tuple(names)


def _at_most_one(role: str, named: Any) -> tuple[Name, ...]:
    if named is not None and type(named) not in (int, str):
        raise TypeError(
            f"{role} must be the position or the name of an argument, or None: {role}={named!r}. Count from 0, or pass "
            '"key".'
        )
    return () if named is None else (named,)


def _check_apart(named: Iterable[tuple[str, Name, Name]]) -> None:
    """Raises if two of these `(role, name, argument)` are one argument."""
    taken: dict[Name, str] = {}
    for role, name, argument in named:
        if other := taken.get(argument):
            by_batch = role == "batch_argnums" and other.startswith("argnums")
            raise ValueError(
                f"An argument has one role: {other} and {role}={name!r} name the same one. Pass keys, carries, "
                "parameters and batches as arguments of their own."
                + by_batch
                * " For a gradient by the batch, differentiate optax_accum.microbatched(loss, k)."
            )
        taken[argument] = f"{role}={name!r}"


def _check_batch(name: Name, batch: Tree, and_name_it: str) -> None:
    check_arrays(f"A batch (argument {name!r})", batch, "Pass it as another argument, or make it an array of numbers.")
    for path, leaf in by_path(batch, ""):
        if not jnp.ndim(leaf) and jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            remedy = f"Pass it as an argument of its own{and_name_it}" if path else "Name the batch by batch_argnums"
            raise TypeError(
                f"A key in a batch argument is one for all rows, and is not split: argument {name!r}{path}. {remedy}."
            )
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
    for path, node in jax.tree.leaves_with_path(batch, is_leaf=_is_numbers):
        if _is_numbers(node) and (isinstance(node, list) or len(node) in rows):
            raise TypeError(
                f"Numbers in a {type(node).__name__} are not split, and every micro-batch would have all of them: "
                f"argument {name!r}{jax.tree_util.keystr(path)} holds {len(node)}. Make it an array, with "
                "jnp.asarray; or pass it as another argument."
            )


def _is_numbers(node: Any) -> bool:
    """Whether a node is a list or tuple of numbers alone; in `jit` they are arrays []."""
    return type(node) in (list, tuple) and bool(node) and all_leaves(node) and not any(map(jnp.ndim, node))


def _check_rng(keys: Tree) -> None:
    for path, leaf in by_path(keys, "it"):
        if not is_key(leaf) or (jnp.ndim(leaf) and leaf.dtype != jnp.uint32):
            raise TypeError(
                f"rng_argnum must name a random key, or a tree of them: {path} is {short(leaf)}. Pass "
                "jax.random.key(seed)."
            )
