"""Misspelt arguments: a `weight` or a `flush` that would pass for one of the inner optimizer's."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def misspelt(names: Iterable[str], inner: Callable[..., Any]) -> dict[str, str]:
    """Maps each name that looks like a misspelt `weight` or `flush` to it, unless `inner` has such a parameter."""
    named = inspect.signature(inner).parameters
    meant = {name: word for name in names if name not in named for word in ("weight", "flush") if _means(name, word)}
    return dict(sorted(meant.items()))


def _means(name: str, word: str) -> bool:
    """Whether a name contains a word (sample_weight), is within two letters of it, or short for it (wgt)."""
    name = name.lower()
    letters = iter(word)
    short_for = name[:1] == word[0] and name[-1] == word[-1] and all(letter in letters for letter in name)
    return word in name or short_for or _letters_apart(name, word) <= 2


def _letters_apart(name: str, word: str) -> int:
    """The Levenshtein distance: the number of letters to insert, leave out or change."""
    row = list(range(len(word) + 1))
    for letter in name:
        above, row = row, [row[0] + 1]
        for j, other in enumerate(word):
            row.append(min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1))
    return row[-1]
