"""Owns what a leaf may be: an array, a number, a random key; and how errors describe it. Knows no roles."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import tracing

Tree = Any
NOT_ARRAYS = "Pass the arrays alone, such as eqx.partition(model, eqx.is_inexact_array)[0] of Equinox."


def check_arrays(what: str, tree: Tree, remedy: str) -> None:
    """Raises for a leaf that is neither an array nor a number, naming its path."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        is_array = tracing.is_array(leaf) or isinstance(leaf, bool | int | float | complex)
        if not (is_array or isinstance(leaf, jax.ShapeDtypeStruct) or hasattr(leaf, "__jax_array__")):
            raise TypeError(
                f"{what} must hold arrays: at {jax.tree_util.keystr(path) or 'the only leaf'} there is {short(leaf)}. "
                f"{remedy}"
            )


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is a random key, or an array of them; of the old style, one key."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None:
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and shape == _shape_of_old_keys())


def _shape_of_old_keys() -> tuple[int, ...]:
    return (4,) if jax.config.jax_default_prng_impl in ("rbg", "unsafe_rbg") else (2,)  # type: ignore[attr-defined]


def short(leaf: Any) -> str:
    """Describes an array by its dtype and shape, anything else by the beginning of its text."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    text = repr(leaf)
    return f"{text[:57]}..." if len(text) > 60 else text
