"""Owns the roles of arguments: which hold the batch, a key, a carry, and which stay whole. Cuts nothing."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import all_leaves

from optax_accum._core import tracing

Tree = Any
Name = int | str  # of an argument: its position, or its keyword
NOT_ARRAYS = "Pass the arrays alone, such as eqx.partition(model, eqx.is_inexact_array)[0] of Equinox."


class Roles:
    """What a factory was told of the arguments of `fun`; `of` finds them in one call."""

    def __init__(
        self,
        *,
        batch_argnums: Any = None,
        batch_argnames: Any = (),
        argnums: Any = 0,
        rng_argnum: Any = None,
        carry_argnum: Any = None,
        whole_argnums: Any = (),
        whole_argnames: Any = (),
        has_batch: bool = True,
    ):
        """Takes the roles as users name them: where no batch is named, argument 1 is it."""
        self.batch_argnames = as_argnames("batch_argnames", batch_argnames)
        self.whole_argnames = as_argnames("whole_argnames", whole_argnames)
        if batch_argnums is None:
            batch_argnums = () if self.batch_argnames else 1
        needs_batch = has_batch and not self.batch_argnames
        self.numbers = {
            "argnums": () if argnums is None else as_argnums("argnums", argnums),
            "batch_argnums": as_argnums("batch_argnums", batch_argnums, empty=not needs_batch),
            "rng_argnum": _at_most_one("rng_argnum", rng_argnum),
            "carry_argnum": _at_most_one("carry_argnum", carry_argnum),
            "whole_argnums": as_argnums("whole_argnums", whole_argnums, empty=True),
        }

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Call":
        """Returns one call with its arguments in their roles, each in one at most."""
        if both := sorted(set(self.batch_argnames) & set(self.whole_argnames)):
            raise ValueError(f"An argument has one role: {both[0]!r} is in batch_argnames and in whole_argnames.")
        if missing := [name for name in self.batch_argnames if name not in kwargs]:
            raise ValueError(
                f"batch_argnames must name arguments that are passed by keyword: {missing[0]!r} is not, and "
                f"{sorted(kwargs) or 'none'} are. Pass {missing[0]}=, or name it by position with batch_argnums."
            )
        placed = _placed(self.numbers, len(args))
        call = Call(
            arguments={**dict(enumerate(args)), **kwargs},
            params=placed["argnums"],
            batch=(*placed["batch_argnums"], *self.batch_argnames),
            rng=next(iter(placed["rng_argnum"]), None),
            carry=next(iter(placed["carry_argnum"]), None),
            whole=(*placed["whole_argnums"], *self.whole_argnames),
        )
        for name in call.batch:
            _check_batch(name, call.arguments[name])
        if call.rng is not None:
            _check_rng(call.arguments[call.rng])
        return call


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call of `fun`, by position or keyword, and the names of those that have a role."""

    arguments: dict[Name, Any]
    params: tuple[int, ...]
    batch: tuple[Name, ...]
    rng: int | None
    carry: int | None
    whole: tuple[Name, ...]

    def __getitem__(self, names: tuple[Name, ...]) -> tuple[Any, ...]:
        return tuple(self.arguments[name] for name in names)

    def with_arguments(self, arguments: Mapping[Name, Any]) -> "Call":
        """Returns the call with other values for some of its arguments."""
        return dataclasses.replace(self, arguments={**self.arguments, **arguments})

    def apply(self, fun: Callable[..., Any]) -> Any:
        """Calls `fun` as the user did."""
        args = [arg for name, arg in self.arguments.items() if isinstance(name, int)]
        return fun(*args, **{name: arg for name, arg in self.arguments.items() if isinstance(name, str)})

    def own_key(self, index: Any) -> "Call":
        """Returns the call with the key of micro-batch `index`, or of a device: `jax.random.fold_in` of each key."""
        if self.rng is None:
            return self
        fold = lambda key: jax.random.fold_in(key, index)
        return self.with_arguments({self.rng: jax.tree.map(fold, self.arguments[self.rng])})

    def check_shared(self, rows: int | None, *, keys: bool = True, named: bool = True) -> None:
        """Raises for what every micro-batch would share unasked: keys, and arguments with as many rows.

        `named` says that the caller names the batch, by `batch_argnums`.
        """
        known = {*self.params, *self.batch, *self.whole, self.rng, self.carry}
        for name in self.arguments.keys() - known:
            for path, leaf in jax.tree.leaves_with_path(self.arguments[name]):
                where = f"argument {name!r}{jax.tree_util.keystr(path)}"
                if keys and is_key(leaf):
                    raise ValueError(_unnamed_key(name, where))
                _check_rows(name, where, leaf, rows, named=named)


def as_argnums(role: str, argnums: Any, *, empty: bool = False) -> tuple[int, ...]:
    """Returns one number or several as a tuple."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    are_numbers = isinstance(numbers, list | tuple) and all(type(number) is int for number in numbers)
    if not are_numbers or not (numbers or empty):
        raise TypeError(f"{role} must be an integer or a tuple of integers: {role}={argnums!r}. Count from 0.")
    return tuple(numbers)


def as_argnames(role: str, argnames: Any) -> tuple[str, ...]:
    """Returns one name or several as a tuple."""
    names = (argnames,) if isinstance(argnames, str) else argnames
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f'{role} must be the name of an argument or a tuple of names: {role}={argnames!r}. Pass "x".')
    return tuple(names)


def as_mean_args(names: Any) -> tuple[str, ...]:
    """Returns the names of `mean_args` as a tuple."""
    several = isinstance(names, Iterable) and not isinstance(names, str)
    if not several or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f'mean_args must be a tuple of names: mean_args={names!r}. Write mean_args=("value",), or () for none.'
        )
    reserved = [name for name in names if name in ("weight", "flush", "params")]
    if reserved:
        raise ValueError(
            f"mean_args must name extra arguments of the inner optimizer: mean_args={names!r}. "
            f"Leave out {reserved[0]!r}."
        )
    return tuple(names)


def keywords_of(fun: Callable[..., Any], bound: int = 0) -> list[str]:
    """Returns what a function takes by keyword, by name, where its first arguments come by position."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # it does not tell
        return []
    by_position = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return [one.name for one in parameters if one.kind in kinds and one not in by_position[:bound]]


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is a random key, or an array of them; of the old style, one key."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None:
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and shape == _shape_of_old_keys())


def _shape_of_old_keys() -> tuple[int, ...]:
    return (4,) if jax.config.jax_default_prng_impl in ("rbg", "unsafe_rbg") else (2,)  # type: ignore[attr-defined]


def check_arrays(what: str, tree: Tree, remedy: str) -> None:
    """Raises for a leaf that is neither an array nor a number, naming its path."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        is_array = tracing.is_array(leaf) or isinstance(leaf, bool | int | float | complex)
        if not (is_array or isinstance(leaf, jax.ShapeDtypeStruct) or hasattr(leaf, "__jax_array__")):
            raise TypeError(
                f"{what} must hold arrays: at {jax.tree_util.keystr(path) or 'the only leaf'} there is {short(leaf)}. "
                f"{remedy}"
            )


def _at_most_one(role: str, number: Any) -> tuple[int, ...]:
    if number is not None and type(number) is not int:
        raise TypeError(f"{role} must be an integer or None: {role}={number!r}. Count from 0.")
    return () if number is None else (number,)


def _placed(numbers: Mapping[str, Sequence[int]], count: int) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of each role counted from the front of `count` arguments, each in one role."""
    by_keyword = "; a batch that comes by keyword is named by batch_argnames"
    taken: dict[int, str] = {}
    for role, given in numbers.items():
        for number in given:
            if not -count <= number < count:
                raise ValueError(
                    f"{role} must name an argument by position: {role}={number}, and there are {count}. Pass that "
                    f"argument by position{by_keyword if role == 'batch_argnums' else ''}."
                )
            if other := taken.get(number % count):
                raise ValueError(
                    f"An argument has one role: argument {number % count} is named by {other} and by {role}. "
                    "Pass keys, carries, parameters and batches as arguments of their own."
                )
            taken[number % count] = role
    return {role: tuple(number for number in taken if taken[number] == role) for role in numbers}


def _check_batch(name: Name, batch: Tree) -> None:
    check_arrays(f"A batch (argument {name!r})", batch, "Pass it as another argument, or make it an array of numbers.")
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not jnp.ndim(leaf) and jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            raise TypeError(
                f"A key in a batch argument would be the same for every micro-batch: {jax.tree_util.keystr(path)}. "
                "Pass it as an argument of its own and name it with rng_argnum."
            )
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
    for path, node in jax.tree.leaves_with_path(batch, is_leaf=_is_numbers):
        if _is_numbers(node) and (isinstance(node, list) or len(node) in rows):
            raise TypeError(
                f"Numbers in a {type(node).__name__} are not cut, and every micro-batch would have all of them: "
                f"argument {name!r}{jax.tree_util.keystr(path)} holds {len(node)}. Make it an array, with "
                "jnp.asarray; or pass it as another argument."
            )


def _is_numbers(node: Any) -> bool:
    """Returns whether this is a list or tuple of numbers alone; in `jit` they are arrays []."""
    return type(node) in (list, tuple) and bool(node) and all_leaves(node) and not any(map(jnp.ndim, node))


def _check_rng(keys: Tree) -> None:
    for path, leaf in jax.tree.leaves_with_path(keys):
        if not is_key(leaf) or (jnp.ndim(leaf) and leaf.dtype != jnp.uint32):
            raise TypeError(
                f"rng_argnum must name a random key, or a tree of them: {jax.tree_util.keystr(path) or 'it'} is "
                f"{short(leaf)}. Pass jax.random.key(seed)."
            )


def _unnamed_key(name: Name, where: str) -> str:
    named = f"Pass rng_argnum={name}" if isinstance(name, int) else "Pass it by position and name it by rng_argnum"
    return (
        f"A random key must be named, or every micro-batch would draw the same numbers: {where} is a key. {named}; to "
        f"share it on purpose, {_declare(name)}."
    )


def _check_rows(name: Name, where: str, leaf: Any, rows: int | None, *, named: bool) -> None:
    shape = getattr(leaf, "shape", ())
    if rows is not None and rows > 1 and shape and shape[0] == rows:
        role = f" ({'batch_argnums' if isinstance(name, int) else 'batch_argnames'})" if named else ""
        raise ValueError(
            f"An argument with as many rows as the batch must be cut with it, or declared whole: {where} has shape "
            f"{shape}, the batch {rows} rows. Put it into the batch{role}; if every micro-batch needs all of it, "
            f"{_declare(name)}."
        )


def _declare(name: Name) -> str:
    return f"pass whole_argnums={name}" if isinstance(name, int) else f"pass whole_argnames={name!r}"


def short(leaf: Any) -> str:
    """Describes an array by its dtype and shape, anything else by the beginning of its text."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    text = repr(leaf)
    return f"{text[:57]}..." if len(text) > 60 else text
