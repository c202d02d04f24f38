"""Where in the user's code an equation comes from: a file and a line, found among the frames of its traceback.

An error inside the engine says the line of the loss, too, whose fault it is, and which call is right meanwhile.
"""

import contextlib
import functools
import pathlib
import sys
import sysconfig
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

_PACKAGES = {"site-packages", "dist-packages"}
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "equinox", "haiku", "numpyro", "optax_accum")


class Place(NamedTuple):
    """A line of code."""

    file: str  # with its folders
    line: int
    function: str

    def __str__(self) -> str:
        return f"{pathlib.PurePath(self.file).name}:{self.line}" if self.line else "an unknown line"


UNKNOWN = Place("", 0, "")


def place_of(eqn: Any) -> Place:
    """The innermost line of the user's code; without one, the outermost line of a library."""
    frames = _frames(eqn)
    return own_place(eqn) or (frames[-1] if frames else UNKNOWN)


def own_place(eqn: Any) -> Place | None:
    """The innermost line of the user's code that an equation comes from; None if it is not known."""
    return _own(_frames(eqn))


def _own(frames: Sequence[Place]) -> Place | None:
    """The first of these frames, the innermost first, that is in the user's code."""
    for is_foreign in (_is_installed, _is_of_library):  # the user's own code may be installed, too
        for frame in frames:
            if not is_foreign(frame.file):
                return frame
    return None


def place_of_error(error: BaseException) -> Place:
    """The innermost line of the user's code that an exception comes from."""
    frames: list[Place] = []
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append(Place(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return _own(frames[::-1]) or UNKNOWN


def calls_library(eqn: Any) -> bool:
    """Whether an equation calls a function of a library, as the jit inside `jnp.where` does.

    JAX traces such a function once: its equations name the line of another call, or none.
    """
    program = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    info = getattr(getattr(program, "jaxpr", program), "debug_info", None)
    _, at, source = str(getattr(info, "func_src_info", "")).partition(" at ")
    return not at or _is_installed(source.rpartition(":")[0])


def _frames(eqn: Any) -> list[Place]:
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    return [Place(frame.file_name, frame.line_num, frame.function_name) for frame in frames]


def is_of(eqn: Any, function: str, file: str) -> bool:
    """Whether the user's line calls a function of JAX, `map` in `loops.py` say, that makes the equation."""
    frames = _frames(eqn)
    own = _own(frames)
    inner = frames[: frames.index(own)] if own else frames
    return any(
        frame.function == function and pathlib.PurePath(frame.file).name == file and _is_installed(frame.file)
        for frame in inner
    )


@functools.cache
def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    path = pathlib.PurePath(file)
    return not _PACKAGES.isdisjoint(path.parts) or _is_of_library(file)


@functools.cache
def _is_of_library(file: str) -> bool:
    """Whether a file belongs to Python or to one of `_LIBRARIES`, which may call the user's code."""
    path = pathlib.PurePath(file)
    return file.startswith("<frozen") or any(path.is_relative_to(folder) for folder in _folders())


def _folders() -> list[pathlib.PurePath]:
    modules = (sys.modules.get(name) for name in _LIBRARIES)
    files = [module.__file__ for module in modules if module is not None and module.__file__]
    packages = [pathlib.PurePath(file).parent for file in files]
    return [*packages, pathlib.PurePath(sysconfig.get_paths()["stdlib"])]


_FAULT = (
    "If jax.value_and_grad does not raise for this loss, this is a fault of optax_accum: please report it. Meanwhile "
    "optax_accum.value_and_grad(loss, num_microbatches=1) gives the exact gradient: it runs all rows at once."
)


@contextlib.contextmanager
def explained(equation: Any) -> Generator[None]:
    """Adds a note to an error in the evaluation of an equation: its line is `equation.place`."""
    try:
        yield
    except Exception as error:
        if not any(_FAULT in note for note in getattr(error, "__notes__", [])):
            error.add_note(f"The loss was computed micro-batch by micro-batch, at {equation.place}. {_FAULT}")
        raise
