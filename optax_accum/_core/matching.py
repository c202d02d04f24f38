"""Whether two trees belong together: gradients, parameters, the state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import all_leaves, keystr

from optax_accum._core import dtypes
from optax_accum._core.types import Tree


def check_sums(acc: Tree, params: Tree) -> None:
    """Raises for sums that are not those of these parameters' gradients."""
    _paired(params, acc, "state", "Call init again with these parameters.", what="parameters")


def check_params(params: Tree, grads: Tree) -> None:
    _paired(grads, params, "parameters", "Pass the parameters that were differentiated.")


def check_mean_arg(name: str, value: Tree, total: Tree, devices: int) -> None:
    """Raises unless a mean argument is a tree like its sum, or if `devices` is 1, like one device's sum."""
    remedy = (
        f"Pass a tree like the example in mean_args[{name!r}], or between two windows begin with another: "
        "state._replace(mean_args=tx.init(params).mean_args)."
    )
    for path, leaf, summed in _paired(value, total, f"example of {name}", remedy, what="leaves", shapes=False):
        shape, expected = jnp.shape(leaf), (summed.shape, summed.shape[devices:])
        if shape not in expected:
            raise ValueError(
                f"A mean argument must have the shapes of its example: {name} at {path} has shape {shape}, and the "
                f"example {expected[1]}. {remedy}"
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) or (
            jnp.iscomplexobj(leaf) and not jnp.iscomplexobj(summed)
        ):
            raise TypeError(
                f"A mean argument must have floating-point leaves like its example: {name} at {path} is "
                f"{jnp.result_type(leaf)}, and its sum {summed.dtype}. {remedy}"
            )


def check(acc: Tree, grads: Tree) -> None:
    """Raises unless every leaf of `grads` can be added to the leaf of `acc` at the same path."""
    remedy = "Call init again with the parameters that these gradients belong to."
    if isinstance(grads, tuple) and len(grads) == 2:
        remedy += " jax.value_and_grad returns (value, grads): pass the second."
    for path, grad, total in _paired(grads, acc, "state", remedy):
        dtype = "float0" if dtypes.is_float0(grad) else jnp.result_type(grad)
        if isinstance(total, optax.MaskedNode):
            if dtype != "float0":
                raise TypeError(
                    f"A gradient must belong to a floating-point parameter: the parameter at {path} had none when the "
                    f"state was made, and its gradient has dtype {dtype}. Call init with parameters of a "
                    "floating-point dtype, or leave this one out with optax.masked."
                )
        elif dtype == "float0" or not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"A gradient must have a floating-point dtype: at {path} it is {dtype} and the state accumulates "
                f"{total.dtype}. {remedy if dtype == 'float0' else 'Pass the gradient as jax.grad returns it.'}"
            )
        elif jnp.iscomplexobj(grad) and not jnp.iscomplexobj(total):
            raise TypeError(
                f"A complex gradient cannot be added to a real accumulator: at {path} the gradient has dtype {dtype} "
                f"and shape {jnp.shape(grad)}, the state has {total.dtype} and {total.shape}. Make the state with "
                "complex parameters."
            )


def _paired(
    tree: Tree, others: Tree, name: str, remedy: str, *, what: str = "gradients", shapes: bool = True
) -> list[tuple[str, Any, Any]]:
    """The leaves of two trees in pairs, with their paths; raises unless trees and shapes are the same.

    A `MaskedNode` in a state stands for a leaf without a gradient.
    """
    leaves, treedef = jax.tree.flatten_with_path(tree)
    mismatch = lambda: ValueError(_tree_mismatch(others, tree, name, remedy, what))
    try:
        paired = treedef.flatten_up_to(others)
    except ValueError as error:
        raise mismatch() from error
    pairs = [(keystr(path) or "the only leaf", leaf, other) for (path, leaf), other in zip(leaves, paired, strict=True)]
    for path, leaf, other in pairs:
        if name == "state" and isinstance(other, optax.MaskedNode):
            continue
        if not all_leaves([other]):
            raise mismatch()
        if shapes and jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                f"{what.capitalize()} must have the shapes of the {name}: at {path} the {what} have shape "
                f"{jnp.shape(leaf)} and the {name} {jnp.shape(other)}. {remedy}"
            )
    return pairs


def _tree_mismatch(acc: Tree, grads: Tree, name: str, remedy: str, what: str) -> str:
    keep = lambda node: name == "state" and isinstance(node, optax.MaskedNode)
    shapes = [
        {keystr(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=keep)}
        for tree in (grads, acc)
    ]
    rule = f"{what.capitalize()} must have the tree of the {name}"
    if grads is None:
        return f"{rule}: {what}=None. Pass {'what jax.grad returned' if what == 'gradients' else 'them'}."
    has = "have" if name.endswith("s") else "has"
    for path in [*shapes[0], *shapes[1]]:
        described = [f"shape {shape[path]}" if path in shape else "no leaf" for shape in shapes]
        if "no leaf" in described:
            path = path or "the only leaf"
            return f"{rule}: at {path} the {what} have {described[0]} and the {name} {has} {described[1]}. {remedy}"
    return f"{rule}: they have {jax.tree.structure(grads)}, the {name} {has} {jax.tree.structure(acc)}. {remedy}"
