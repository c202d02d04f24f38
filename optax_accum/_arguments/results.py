"""Checks of the results of users' functions. Each error says the rule, the value and the remedy."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core.leaves import by_path
from optax_accum._shared.arrays import short


def check_loss(loss: Any) -> None:
    """Raises unless the loss is a real scalar, or a dict of them."""
    if type(loss) is tuple:
        raise TypeError(
            f"fun must return a real scalar loss, or a dict of them: it returned a tuple of {len(loss)}. If that is "
            "(loss, aux), pass has_aux=True; if it holds gradients, use optax_accum.reduce_microbatches."
        )
    for path, leaf in by_path(loss, "the loss"):
        if leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"fun must return a real scalar loss, or a dict of them: {path} is {short(leaf)}. Reduce it with "
                "jnp.mean, say; with has_aux=True the loss comes first."
            )
    if not (isinstance(loss, dict) and loss) and not hasattr(loss, "dtype"):
        raise TypeError(
            f"fun must return a real scalar loss, or a dict of them: it returned {loss!r}. Return one number; "
            "with has_aux=True, return (loss, aux)."
        )


def check_kinds(name: str, tree: Any, like: Any, remedy: str) -> None:
    """Raises if the dtypes of `like` would cut off `tree`: a fraction does not fit into an integer."""
    for (path, leaf), to in zip(by_path(tree), jax.tree.leaves(like), strict=True):
        new, old = (leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf) for leaf in (leaf, to))
        for kind in (jnp.inexact, jnp.complexfloating):
            if jnp.issubdtype(new, kind) and not jnp.issubdtype(old, kind):
                raise TypeError(
                    f"{name} must keep its dtypes: at {path} it began as {old} and became {new}, which would be cut "
                    f"off. {remedy}"
                )


def check_carry(carry: Any, new: Any) -> None:
    """Raises unless the carry that `fun` returns has the tree, shapes and dtypes of the one it was given."""
    old, new_tree = jax.tree.structure(carry), jax.tree.structure(new)
    if old != new_tree:
        raise TypeError(
            f"The carry must keep its tree: it came as {old} and left as {new_tree}. Return from fun a carry of the "
            "first tree."
        )
    for (path, a), b in zip(by_path(carry, "its only leaf"), jax.tree.leaves(new), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise TypeError(
                f"The carry must keep its type: at {path} it came as {short(a)} and left as {short(b)}. Cast it back "
                "in fun."
            )
