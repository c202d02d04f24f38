"""What an error inside the engine says: the line of the loss, whose fault it is, and which call is right meanwhile."""

import contextlib
from collections.abc import Generator
from typing import Any

_FAULT = (
    "If jax.value_and_grad does not raise for this loss, this is a fault of optax_accum: please report it. Meanwhile "
    "optax_accum.value_and_grad(loss, 1) gives the exact gradient: it runs all rows at once."
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
