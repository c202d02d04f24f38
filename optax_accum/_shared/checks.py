"""Messages, and checks of what users pass. Each error says the rule, the value and the remedy."""

import operator
from typing import Any

import jax.numpy as jnp

from optax_accum._shared.arrays import short


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as "1 row", "2 rows", "3 micro-batches"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def there_are(number: int, noun: str) -> str:
    """A clause such as "there is 1 row"."""
    return f"there {'is' if number == 1 else 'are'} {counted(number, noun)}"


def as_count(name: str, count: Any) -> int:
    """A Python integer >= 1."""
    return as_integer(f"{name} must be an integer >= 1", name, count, "Pass 1 or more.")


def as_positive(name: str, count: Any) -> int | None:
    return None if count is None else as_count(name, count)


def as_integer(rule: str, name: str, value: Any, remedy: str) -> int:
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == jnp.bool_:
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{rule}: {name}={value!r}. Pass an int, such as {name}=4.") from None
    if number < 1:
        raise ValueError(f"{rule}: {name}={number}. {remedy}")
    return number


def one_of(name: str, value: Any, allowed: tuple[str, ...], otherwise: str = "") -> str:
    if not isinstance(value, str) or value not in allowed:
        words = ", ".join(f'"{word}"' for word in allowed)
        raise ValueError(f"{name} must be one of {words}{otherwise}: {name}={value!r}. Choose one of these.")
    return value


def as_function(fun: Any, name: str = "fun", remedy: str = "Pass the function itself, not what it returns.") -> Any:
    if not callable(fun):
        raise TypeError(f"{name} must be a function: {name}={short(fun)}. {remedy}")
    return fun


def check_groups(where: str, rows: int, group: int) -> None:
    if rows % group:
        less, more = rows - rows % group, rows - rows % group + group
        raise ValueError(
            f"group_size must divide the rows that are together: group_size={group}, and {where} "
            f"{counted(rows, 'row')}. Pass {f'{less} or {more}' if less else more} rows."
        )
