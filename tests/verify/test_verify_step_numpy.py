"""Does a step that speaks NumPy get what its batch is made of, untraced, and is it judged as one of JAX?"""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_accum import verify_step
from tests.verify import planted_numpy

pytestmark = pytest.mark.quick

draw = np.random.default_rng(0)
N, K = 12, 4
BATCH = {"x": draw.normal(size=(N, 6)), "label": draw.integers(0, 3, size=N), "a": draw.normal(size=N)}
W = draw.normal(size=(6, 3))


def gradient(w, x, label):
    """Returns the gradient of a mean over rows of cross-entropies."""
    p = np.exp(x @ w)
    p /= p.sum(1, keepdims=True)
    return x.T @ (p - np.eye(3)[label]) / len(x)


class Loop:
    """Momentum in plain NumPy, in place. What it keeps begins as None, or is in the loop itself."""

    def __init__(self, *, divides=True, drops=False, shares=False):
        self.divides, self.drops, self.shares = divides, drops, shares

    def __call__(self, every):
        acc, n, rows = np.zeros_like(W), 0, 0

        def step(carry, batch):
            nonlocal n, rows
            x, label, _ = batch.values()  # in the order of the user's, not sorted
            assert type(x) is type(label) is np.ndarray
            assert (x.dtype, label.dtype) == (np.float64, np.int64)
            if self.drops:
                draws = np.random.default_rng(7) if self.shares else carry["rng"]
                x = x * draws.integers(0, 2, size=x.shape)
            n, rows = n + 1, rows + len(x)
            acc[:] += gradient(carry["w"], x, label) * len(x)
            if n % every == 0:
                old = 0 if carry["m"] is None else 0.9 * carry["m"]
                carry["m"] = old + acc / (rows if self.divides else len(x))
                carry["w"] -= 0.1 * carry["m"]
                acc[:], rows = 0, 0
            return carry

        return step, {"w": W.copy(), "m": None, "rng": np.random.default_rng(0)}


CASES = {
    "sound": (Loop(), {}, []),
    "a sum": (Loop(divides=False), {"uneven": False}, ["sum for a mean"]),
    "dropout": (Loop(drops=True), {}, []),
    "one draw for all": (Loop(drops=True, shares=True), {}, ["shared key"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loop_in_numpy(name):
    """Float64 is judged as such; a moment that comes with the first update is compared, too."""
    make_step, options, kinds = CASES[name]
    report = verify_step(make_step, BATCH, **options)
    assert [cause.kind for cause in report.causes] == kinds, str(report)
    assert report.random == (name in ("dropout", "one draw for all"))
    if name != "one draw for all":
        assert "m" in report.errors
        assert report.random or max(report.limits.values()) < 1e-6


def test_a_carry_keeps_the_order_of_its_dicts():
    """A loop may go through them side by side, as one goes through what a gradient function returns."""

    def make_step(every):
        def step(carry, batch):
            x, label, _ = batch.values()
            grads = (gradient(carry["params"]["w"], x, label), x[:, :2].mean(0))  # of w, and of a
            acc = {name: old + new for (name, old), new in zip(carry["acc"].items(), grads, strict=True)}
            if (n := carry["n"] + 1) < every:
                return carry | {"acc": acc, "n": n}
            params = {name: of - 0.1 * acc[name] / every for name, of in carry["params"].items()}
            return {"params": params, "acc": {name: np.zeros_like(of) for name, of in acc.items()}, "n": 0}

        params = {"w": W, "a": np.zeros(2)}
        return step, {"params": params, "acc": {name: 0 * of for name, of in params.items()}, "n": 0}

    report = verify_step(make_step, BATCH, uneven=False)
    assert report.holds, str(report)


# What an optimizer behind a clip hides from its update: (fault, the optimizer, the number of the loop).
BEHIND = [
    ("tokens", "rmsprop", 284),
    ("rows", "adagrad", 285),
    ("each by norm", "rmsprop", 15),
    ("each by value", "rmsprop", 50),
    ("divided twice", "rmsprop", 7),
    ("divided twice", "adam", 109),  # in the second window alone: in the first the clip acts on both
    ("sums stay", "adagrad", 301),
    ("updates are averaged", "lion", 87),
    ("updates are averaged", "normalised", 53),
    ("other weights", "warm-up", 14),  # no count in the batch is what they would be if each counted the same
    ("other weights", "lion", 329),
    ("each by leaf", "normalised", 69),
]


@pytest.mark.parametrize(("what", "optimizer", "number"), BEHIND, ids=lambda value: str(value))
def test_a_fault_behind_a_clip_that_acts(what, optimizer, number):
    """Second moments tell the gradient by their roots; a factor shows in the first window that is not clipped."""
    loop = planted_numpy.problem(number, what, "norm")
    assert f"{what}, {optimizer}, norm" in loop.name
    assert planted_numpy.verdict(loop) == loop.kind


def test_a_batch_may_hold_keys():
    """They are no counts."""
    loop = planted_numpy.problem(14, "other weights", "norm")
    batch = loop.batch | {"key": jax.random.split(jax.random.key(0), len(loop.batch["x"]))}
    assert planted_numpy.verdict(dataclasses.replace(loop, batch=batch)) == loop.kind


MANY = [
    ("tokens", "adam", "value", 4),
    ("a sum", "nesterov", "value", 3),
    ("six tenths", "adamw", "value", 3),
    ("the full k", "sgd", "value", 0),
    ("the full k", "decayed sgd", "no clip", 20),  # decay is the same whatever the divisor
]


@pytest.mark.parametrize(("what", "optimizer", "clip", "number"), MANY, ids=lambda value: str(value))
def test_a_fault_in_the_entries_that_no_clip_holds(what, optimizer, clip, number):
    """Of many entries those that a clip by value leaves as they are tell the fault."""
    loop = planted_numpy.problem(number, what, clip, hidden=20)
    assert f"{what}, {optimizer}, {clip}" in loop.name
    assert planted_numpy.verdict(loop) == loop.kind


def test_pytorch_is_not_imported():
    """Nobody here has a tensor: PyTorch takes seconds to import."""
    code = "import sys, numpy, optax_accum; from tests.verify.test_verify_step_numpy import BATCH, Loop; "
    code += "optax_accum.verify_step(Loop(), BATCH).check(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.sweep
def test_a_step_of_jax_gets_jax_arrays_of_a_numpy_batch():
    """By what is carried: JAX's arrays alone. It is traced, to see in which dtypes it computes."""
    traced, seen = [], []

    def make_step(every):
        tx = optax.MultiSteps(optax.sgd(0.1), every)

        @jax.jit
        def compiled(carry, batch):
            narrow = lambda w: jnp.mean((batch["x"].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) ** 2)
            updates, state = tx.update(jax.grad(narrow)(carry[0]), carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), state

        def step(carry, batch):
            (traced if isinstance(batch["x"], jax.core.Tracer) else seen).append(type(batch["x"]))
            return compiled(carry, batch)

        params = jnp.asarray(W, jnp.float32)
        return step, (params, tx.init(params))

    report = verify_step(make_step, BATCH, uneven=False)
    assert report.holds, str(report)
    assert min(report.limits.values()) > 0.05  # of bfloat16
    assert len(traced) == 1
    assert all(issubclass(kind, jax.Array) for kind in seen)


def test_a_step_of_jax_may_begin_from_numpy():
    """From float64 numbers, which the first update makes float32."""

    def make_step(every):
        @jax.jit
        def step(carry, batch):
            w, acc, n = carry
            acc = acc + jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w) / every
            return jnp.where(n + 1 == every, w - 0.1 * acc, w), jnp.where(n + 1 == every, 0, acc), (n + 1) % every

        return step, (W, np.zeros_like(W), 0)

    report = verify_step(make_step, BATCH, uneven=False)
    assert report.holds, str(report)
    assert min(report.limits.values()) > 1e-4
