"""Where versions of Flax differ: each difference once."""

import re
from collections.abc import Iterator
from typing import Any

import flax
from flax import nnx

if tuple(map(int, re.findall(r"\d+", flax.__version__)[:3])) < (0, 11, 2):
    raise ImportError(
        f"optax_accum.flax needs Flax 0.11.2 or later: this is Flax {flax.__version__}. Install a newer "
        "one; all else of optax_accum works without it.",
        name="flax",
    )

as_pure: Any = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure  # before Flax 0.12.8
_OLD = not hasattr(nnx.Variable, "get_raw_value")  # Flax 0.11 and 0.12.0: metadata are a dict
_SHARDING = ("out_sharding", "sharding_names")  # before Flax 0.12.4 the latter


def modules(model: Any) -> Iterator[tuple[tuple[Any, ...], nnx.Module]]:
    """Yields each module in a model, itself included, with its path."""
    return ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))


def value_of(variable: Any) -> Any:
    """The stored value, without Flax's hooks, from any trace."""
    return variable.raw_value if _OLD else variable.get_raw_value()


def set_value(variable: Any, value: Any) -> None:
    if _OLD:
        variable.raw_value = value
    else:
        variable.set_raw_value(value)


def _copied_metadata(variable: Any) -> dict[str, Any]:
    return dict(variable.get_metadata())  # the dict itself changes with the variable


metadata_of: Any = _copied_metadata if _OLD else nnx.Variable.get_metadata  # a function: a lookup takes Python longer


def sharding_of(variable: Any) -> Any:
    """The axis names in a variable's metadata: `()` if there are none."""
    metadata = variable.get_metadata()
    return next((metadata[name] for name in _SHARDING if name in metadata), ())


def set_sharding(variable: Any, names: tuple[Any, ...] | None) -> None:
    """Changes the axis names in a variable's metadata; None deletes them."""
    metadata = variable.get_metadata()
    name = next(name for name in _SHARDING if name in metadata)
    if _OLD:
        metadata.update({name: names}) if names else metadata.pop(name)
    elif names:
        variable.set_metadata(name, names)
    else:
        variable.del_metadata(name)
