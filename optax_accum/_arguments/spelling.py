"""Misspelt arguments, which would pass for one of the inner optimizer's and be lost."""

import difflib
from collections.abc import Iterable, Sequence


def misspelt(names: Iterable[str], words: Sequence[str]) -> dict[str, str]:
    """Maps each name that looks like one of these words to it: `weigth`, `sample_weight`, `wt`."""
    meant = {name: _containing(name, words) or closest(name, words, 0.65) for name in names}
    return {name: word for name, word in sorted(meant.items()) if word}


def closest(name: str, words: Sequence[str], cutoff: float) -> str | None:
    """The word that a name is most like; None if it is like none."""
    return next(iter(difflib.get_close_matches(name.lower(), words, n=1, cutoff=cutoff)), None)


def _containing(name: str, words: Sequence[str]) -> str | None:
    """The word that a name contains, or of which it has the first letter and the last."""
    name = name.lower()
    ends = (name[:1], name[1:])
    return next((word for word in words if word in name or ends == (word[0], word[-1])), None)
