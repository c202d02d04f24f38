"""The parameters of a function, read from its signature; and names that are spelt like one, but for a slip."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from optax_accum._core.types import Name


@dataclasses.dataclass(frozen=True)
class Signature:
    """The parameters of a function; a function without a signature takes anything."""

    positions: tuple[str, ...] = ()  # the parameters that may come by position, in their order
    keywords: tuple[str, ...] = ()  # those that may come by keyword
    any_position: bool = True  # it has *args
    any_keyword: bool = True  # it has **kwargs

    def takes(self, name: Name) -> bool:
        """Whether an argument can have this position or this name."""
        if isinstance(name, int):
            return self.any_position or -len(self.positions) <= name < len(self.positions)
        return self.any_keyword or name in (*self.positions, *self.keywords)

    def parameter(self, name: Name) -> Name:
        """The name of the parameter at a position; the position itself if there is no parameter."""
        if isinstance(name, str):
            return name
        if name < 0 and not self.any_position:
            name += len(self.positions)
        return self.positions[name] if 0 <= name < len(self.positions) else name

    def passed_as(self, name: Name, count: int, keywords: Collection[str]) -> Name | None:
        """The position, of `count`, or the keyword by which a call passes an argument; None if it does not."""
        name = self.parameter(name)
        position = self.positions.index(name) if name in self.positions else name
        if isinstance(position, int) and -count <= position < count:
            return position % count
        return name if name in keywords else None  # type: ignore[return-value]

    def keywords_after(self, count: int) -> set[str]:
        """The parameters that may come by keyword if `count` arguments come by position."""
        return set(self.keywords) - set(self.positions[:count])

    def __str__(self) -> str:
        others = [name for name in self.keywords if name not in self.positions]
        star = ["*args"] if self.any_position else ["*"] if others else []
        return f"({', '.join([*self.positions, *star, *others, *['**kwargs'] * self.any_keyword])})"


def signature_of(fun: Callable[..., Any]) -> Signature:
    """The signature of a function, or of the function inside a wrapper with `*args` or `**kwargs`."""
    try:
        parameters = inspect.signature(fun, follow_wrapped=False).parameters.values()
        wrapped = getattr(fun, "__wrapped__", None)
        if wrapped and any(param.kind in (param.VAR_POSITIONAL, param.VAR_KEYWORD) for param in parameters):
            return signature_of(wrapped)
    except (TypeError, ValueError):  # it has none
        return Signature()
    names_of = lambda *kinds: tuple(param.name for param in parameters if param.kind in kinds)
    kind = inspect.Parameter
    return Signature(
        names_of(kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD),
        names_of(kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY),
        bool(names_of(kind.VAR_POSITIONAL)),
        bool(names_of(kind.VAR_KEYWORD)),
    )


def misspelt(names: Iterable[str], words: Sequence[str]) -> dict[str, str]:
    """Maps each name that looks like one of these words to it: `weigth`, `sample_weight`, `wt`.

    Such an argument would pass for one of the inner optimizer's, and be lost.
    """
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
