"""Messages to users: warnings at a line of theirs, and counts in words."""

import inspect
import sys
import warnings

_LIBRARIES = {"optax_accum", "jax", "jaxlib", "optax", "flax"} | sys.stdlib_module_names


def warn(message: str) -> None:
    """Warns at the innermost line that is in no library between the user and this package."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)
