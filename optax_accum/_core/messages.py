"""Messages to users: counts in words, and warnings at a line of theirs."""

import inspect
import sys
import warnings


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as "1 row", "2 rows", "3 micro-batches"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def there_are(number: int, noun: str) -> str:
    """A clause such as "there is 1 row"."""
    return f"there {'is' if number == 1 else 'are'} {counted(number, noun)}"


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
