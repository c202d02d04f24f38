"""What a command says of an error: its message, and the line of the user's own code that it comes from."""

import pathlib
import sysconfig
import traceback
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).parent.parent
OTHERS = (PACKAGE, *map(pathlib.Path, {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}))


def said(error: BaseException) -> Iterator[str]:
    """Yields what an error says, with its type if the user's code raised it, and then where."""
    place = next(filter(None, map(_place, _chain(error))), None)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = bool(frames) and _is_users(frames[-1].filename)
    yield f"{type(error).__name__}: {error}" if theirs else str(error)
    if place:
        yield f"At {place}."


def _chain(error: BaseException | None) -> list[BaseException]:
    """Returns an error and its causes, the first cause first."""
    return [*_chain(error.__cause__), error] if error else []


def _place(error: BaseException) -> str:
    """Returns the last line of the user's code that an error passed, or ""."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{lines[-1].filename}, line {lines[-1].lineno}, in {lines[-1].name}" if lines else ""


def _is_users(filename: str) -> bool:
    file = pathlib.Path(filename)
    return file.is_absolute() and not any(file.is_relative_to(folder) for folder in OTHERS)
