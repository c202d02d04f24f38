"""Checkpoints of a train state by `flax.serialization`; one of another model or optimizer is refused."""

import dataclasses
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp

from optax_accum._core.types import Tree
from optax_accum.flax._window import find_window


def to_state_dict(state: Any) -> dict[str, Any]:
    """The fields that are trees; static fields are not saved."""
    trees = [field.name for field in dataclasses.fields(state) if field.metadata.get("pytree_node", True)]
    return {name: flax.serialization.to_state_dict(getattr(state, name)) for name in trees}


def from_state_dict(state: Any, saved: dict[str, Any]) -> Any:
    """Restores a saved state; fields that Flax's own `TrainState` does not have may be missing."""
    mine = to_state_dict(state)
    if unknown := sorted(set(saved) - set(mine)):
        raise ValueError(f"The checkpoint is not one of a TrainState with these fields: it has {unknown}, too.")
    if missing := sorted({"step", "params", "opt_state"} - set(saved)):
        raise ValueError(f"The checkpoint is not one of a TrainState: {missing} are missing.")
    if "window" in saved:
        metrics = mine["window"]["metrics"]
        metrics |= {name: sums for name, sums in saved["window"]["metrics"].items() if name in metrics}
        saved = {**saved, "window": {**saved["window"], "metrics": metrics}}
    restored = {name: _restored(name, getattr(state, name), saved[name]) for name in mine if name in saved}
    window = find_window(restored["opt_state"])
    made = restored["step"] if window is None else window.gradient_step  # Flax's own state counts only calls
    counts = {"step": restored["step"], "updates": restored.get("updates", made)}
    return state.replace(**restored | {name: jnp.asarray(count, jnp.int32) for name, count in counts.items()})


def _restored(field: str, mine: Tree, saved: Tree) -> Tree:
    """Restores one field; raises if its tree, a shape or a dtype differs: it is of another model or optimizer."""
    other = "optimizer" if field == "opt_state" else "model"
    remedy = f"Create the state with the {other} that was saved."
    if (mine is None) != (saved is None):
        has = f"has {field}, and the state has none" if mine is None else f"has no {field}, and the state has some"
        raise ValueError(f"The checkpoint is one of another {other}: it {has}. {remedy}")
    try:
        restored = flax.serialization.from_state_dict(mine, saved, name=field)
        pairs = list(zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(restored), strict=True))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"The checkpoint is one of another {other}: {error} {remedy}") from error
    for (path, old), new in pairs:
        if _kind(old) != _kind(new):
            raise ValueError(
                f"The checkpoint is one of another {other}: at {field}{jax.tree_util.keystr(path)} it has "
                f"{_kind(new)}, and the state {_kind(old)}. {remedy}"
            )
    return restored


def _kind(leaf: Any) -> str:
    """A leaf's shape, preceded by its dtype if that is inexact: `float32 [3, 2]`."""
    dtype = jnp.result_type(leaf)
    name = f"{dtype} " if jnp.issubdtype(dtype, jnp.inexact) else ""
    return f"{name}[{', '.join(map(str, jnp.shape(leaf)))}]"
