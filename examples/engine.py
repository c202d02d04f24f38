"""Two verbs of a training service: `forward_backward` any number of times, then `optim_step`, for each adapter.

Run `python -m examples.engine`. docs/engine.md has more.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum import accumulate_gradients, apply_gradients, has_updated, value_and_apply_gradients

Tree = Any


class Engine:
    """Trains adapters of one frozen model. Whoever sends the batches says when the optimizer steps."""

    def __init__(self, loss: Callable[..., Any], optimizer: optax.GradientTransformation, base: Tree, weight_fn: Any):
        """`loss(adapter, batch, base)` is a mean over `weight_fn(batch)` tokens."""
        self.base, self.adapters = base, dict[str, tuple[Tree, Tree]]()
        self._tx = tx = accumulate_gradients(optimizer, every=None)  # a window is open until it is flushed
        add = value_and_apply_gradients(loss, tx, weight_fn=weight_fn, whole_argnums=2)
        self._add = jax.jit(functools.partial(add, flush=False), donate_argnums=(0, 1))
        self._close = jax.jit(self._closed, donate_argnums=(0, 1))

    def create(self, name: str, adapter: Tree) -> None:
        """Takes in a copy of an adapter, with a window and an optimizer state of its own."""
        adapter = jax.tree.map(jnp.array, adapter)  # a copy: each call overwrites the last one's
        self.adapters[name] = adapter, self._tx.init(adapter)

    def forward_backward(self, name: str, batch: Tree) -> jax.Array:
        """Returns the loss of a batch, and adds its gradient to the window of the adapter."""
        loss, *adapter_and_state = self._add(*self.adapters[name], batch, self.base)
        self.adapters[name] = tuple(adapter_and_state)
        return loss

    def optim_step(self, name: str, **hyperparams: float) -> bool:
        """Makes an update of all that was added since the last; returns False if that was nothing."""
        self.adapters[name] = self._close(*self.adapters[name], hyperparams)
        return bool(has_updated(self.adapters[name][1]))

    def _closed(self, adapter: Tree, state: Tree, hyperparams: dict[str, Any]) -> tuple[Tree, Tree]:
        state = optax.tree.set(state, **hyperparams)
        return apply_gradients(self._tx, jax.tree.map(jnp.zeros_like, adapter), state, adapter, weight=0, flush=True)


if __name__ == "__main__":
    loss = lambda adapter, batch, base: jnp.mean((batch @ (base + adapter["a"] @ adapter["b"])) ** 2)
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    engine = Engine(loss, adam, base=jnp.ones((8, 8)), weight_fn=len)
    engine.create("mine", {"a": jnp.ones((8, 2)), "b": jnp.zeros((2, 8))})
    for request in range(8):
        print("loss:", engine.forward_backward("mine", jax.random.normal(jax.random.key(request), (4 + request, 8))))
        if request % 4 == 3:
            print("updated:", engine.optim_step("mine", learning_rate=0.1))
