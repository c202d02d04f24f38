"""Gradient accumulation for JAX, Optax and Flax.

The update equals the update of the whole batch: within a call for any
loss, across calls if micro-batches that differ are weighted.

Most users need only the functions here. The submodules:

* `sharding`: train on several devices.
* `checkpoint`: save and resume in the middle of a window.
* `batching`: choose batch sizes, pack rows by tokens.
* `statistics`: measure the noise of gradients.
* `accelerators`: read programs compiled for a GPU or a TPU.
* `primitives`: tell how primitives of your library treat rows.
* `plan`: find what fits in memory.
* `verify`: check a train step against the whole batch.
* `flax.linen`, `flax.nnx`: train states, optimizers and train steps.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from optax_accum._across.apply import apply_gradients
from optax_accum._across.jit_step import jit_step
from optax_accum._across.metrics import mean_grads, metrics
from optax_accum._across.policy import discard_if
from optax_accum._across.state_changes import discard_window, from_multi_steps
from optax_accum._across.train_step import value_and_apply_gradients
from optax_accum._across.transformation import accumulate_gradients
from optax_accum._core.state import AccumulationState, has_updated
from optax_accum._loss.ratio import Ratio
from optax_accum._space.devices import Devices
from optax_accum._within.microbatched import microbatched
from optax_accum._within.reduce_microbatches import reduce_microbatches
from optax_accum._within.value_and_grad import value_and_grad

if _TYPE_CHECKING:
    from optax_accum import accelerators, batching, checkpoint, primitives, sharding, statistics
    from optax_accum import flax as flax
    from optax_accum import plan as plan
    from optax_accum import verify as verify
    from optax_accum._explain.explain import explain
    from optax_accum.verify._verify_step import verify_step

__version__ = "0.1.0"

__all__ = [
    "AccumulationState",
    "Devices",
    "Ratio",
    "accelerators",
    "accumulate_gradients",
    "apply_gradients",
    "batching",
    "checkpoint",
    "discard_if",
    "discard_window",
    "explain",
    "from_multi_steps",
    "has_updated",
    "jit_step",
    "mean_grads",
    "metrics",
    "microbatched",
    "primitives",
    "reduce_microbatches",
    "sharding",
    "statistics",
    "value_and_apply_gradients",
    "value_and_grad",
    "verify_step",
]


# Loaded when first asked for: a training run needs little of it, and Flax need not be installed.
_FACES = {"accelerators", "batching", "checkpoint", "flax", "plan", "primitives", "sharding", "statistics", "verify"}
_FUNCTIONS = {
    "explain": "_explain.explain",
    "verify_step": "verify._verify_step",
}


def __getattr__(name: str) -> _Any:
    """Loads a face, or a function, that is asked for the first time."""
    if name in _FACES:
        return _importlib.import_module(f"optax_accum.{name}")
    if name in _FUNCTIONS:
        return globals().setdefault(name, getattr(_importlib.import_module(f"optax_accum.{_FUNCTIONS[name]}"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "flax", "plan", "verify"])
