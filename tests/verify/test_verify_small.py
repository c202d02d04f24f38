"""Where fewer parameters move than micro-batches can be told apart: no wrong cause is named, and no fault passes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from optax_accum import verify_step
from tests.tiers import sweep
from tests.verify import test_verify_step as large
from tests.verify.test_verify_step import AGAIN, FAULTS, SOUND, Loop, in_windows

UNNAMED = {  # few entries tell no shares of micro-batches, and of a mean no more than that it is one
    "clipping at each micro-step",
    "clipping the running sum",
    "emptied in mid-window",
    "wrong weights",
    "weighed by place",
}
NOT_OURS = {"apply_every after Adam", "a key in the step", "a key that the parts of a sum share"}


RANDOM = {"shared key", "dropout"}
marked = lambda names: [pytest.param(name, marks=[pytest.mark.slow] * (name in RANDOM)) for name in names]


def problem(parameters, seed=0):
    """What the loops of that module are run with: a linear model of so many parameters."""
    rng = np.random.default_rng([seed, parameters])
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    batch = {"x": draw(12, parameters), "y": draw(12, 1), "mask": rng.uniform(0.2, 3, size=12).astype(np.float32)}
    return {"W": draw(parameters, 1), "D": 1, "BATCH": batch, "BEST": np.linalg.lstsq(batch["x"], batch["y"])[0]}


@pytest.fixture
def three(monkeypatch):
    for name, value in problem(3).items():
        monkeypatch.setattr(large, name, value)
    return large.BATCH


@pytest.mark.parametrize(
    "kind", sweep(marked(FAULTS), but=["never closes", "sum for a mean", "clipping at each micro-step"])
)
def test_a_fault_is_found_and_called_by_its_own_name_or_by_none(kind, three):
    report = verify_step(FAULTS[kind], three, **large.OPTIONS.get(kind, {}))
    assert [cause.kind for cause in report.causes] == ["not known" if kind in UNNAMED else kind], str(report)
    assert not report.holds


@pytest.mark.parametrize("name", sweep(marked(sorted(AGAIN.keys() - NOT_OURS))))
def test_so_is_another_way_to_it(name, three):
    kind, make_step = AGAIN[name]
    report = verify_step(make_step, three, uneven=False)
    found = [cause.kind for cause in report.causes]
    assert len(found) == 1, str(report)
    assert set(found) <= {kind, "not known"}, str(report)


@pytest.mark.parametrize(
    "name", sweep(marked(name for name in SOUND if name != "dropout, of a sum"), but=["squares", "a weighted mean"])
)
def test_nothing_is_found_in_a_sound_loop(name, three):
    assert verify_step(SOUND[name], three).holds


def test_the_remedy_names_it(three):
    """More parameters."""
    report = verify_step(FAULTS["clipping at each micro-step"], three, uneven=False)
    assert "Check a model of more parameters" in report.causes[0].remedy
    assert "Fewer numbers change than tell 4 micro-batches apart" in report.causes[0].evidence


def test_a_smaller_window_names_it(three, monkeypatch):
    for name, value in problem(6).items():
        monkeypatch.setattr(large, name, value)
    clipped = FAULTS["clipping at each micro-step"]
    named = lambda every: [cause.kind for cause in verify_step(clipped, large.BATCH, every=every).causes]
    assert (named(4), named(2)) == (["not known"], ["clipping at each micro-step"])


@pytest.mark.parametrize(("parameters", "seed"), [(8, 1), (12, 0)])
def test_entries_that_are_all_clipped_are_no_weights(parameters, seed, monkeypatch):
    """The whole batch's clipped gradient is that of one micro-batch: as if that alone counted."""
    for name, value in problem(parameters, seed).items():
        monkeypatch.setattr(large, name, value)
    kind, make_step = AGAIN["clipped by value"]
    assert [cause.kind for cause in verify_step(make_step, large.BATCH, uneven=False).causes] == [kind]


def test_what_one_window_hides_shows_in_another(three, monkeypatch):
    """Both halves of the batch, and the whole of it, are clipped to the same; others are not."""
    monkeypatch.setattr(large, "W", np.zeros((3, 1), np.float32))
    y = np.where(np.arange(12) % 6 < 5, 1, -4)[:, None].astype(np.float32)
    batch = three | {"x": 1 + three["x"] / 100, "y": y}
    clipped = Loop(clip=lambda g: np.clip(g, -1e-3, 1e-3))
    halves = [{name: leaf[rows] for name, leaf in batch.items()} for rows in (slice(6), slice(6, 12))]
    assert all(np.all(large.squared(large.W, half, None) < -1e-3) for half in halves)
    report = verify_step(clipped, batch, every=2, uneven=False)
    assert [cause.kind for cause in report.causes] == ["not known"], str(report)


def test_an_update_that_cancels_is_no_window_that_stays_open(three, monkeypatch):
    signs = np.repeat([1, -1, 1, -1], 3).astype(np.float32)
    batch = three | {"x": np.ones((12, 3), np.float32), "y": -signs[:, None] - 0.01}
    monkeypatch.setattr(large, "W", np.zeros((3, 1), np.float32))
    report = verify_step(Loop(clip=np.sign), batch, uneven=False)
    assert [cause.kind for cause in report.causes] == ["not known"], str(report)
    stays = in_windows(closes=lambda n, k: False)
    assert [cause.kind for cause in verify_step(stays, batch).causes] == ["never closes"]


@pytest.mark.parametrize("parameters", [1, 2])
def test_one_or_two_parameters_are_refused(parameters, monkeypatch):
    for name, value in problem(parameters).items():
        monkeypatch.setattr(large, name, value)
    with pytest.raises(ValueError, match=f"must move 3 numbers .* it moves {parameters}. Pass a wider model"):
        verify_step(Loop(), large.BATCH)


def test_entries_that_never_change_do_not_count(three):
    """A model of many parameters, of which the batch moves three."""
    batch = three | {"x": np.pad(three["x"], [(0, 0), (0, 9)])}
    wide = lambda make_step: lambda every: padded(make_step(every))

    def padded(made):
        step, carry, last = made
        pad = lambda leaf: np.pad(leaf, [(0, 9), (0, 0)])
        return step, carry | {name: jax.tree.map(pad, carry[name]) for name in ("params", "m", "acc")}, last

    report = verify_step(wide(FAULTS["clipping at each micro-step"]), batch, uneven=False)
    assert [cause.kind for cause in report.causes] == ["not known"], str(report)
    assert verify_step(wide(Loop()), batch).holds


@pytest.mark.sweep
@pytest.mark.parametrize("shared", [False, True])
def test_behind_a_clip_a_few_numbers_vary_less_by_less_than_k(shared):
    """Keys of their own are none that is shared: two draws of a clipped gradient vary nearly as one does."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 3)).astype(np.float32), "y": 2 * rng.normal(size=(8, 1)).astype(np.float32)}
    params = jnp.asarray(rng.normal(size=(3, 1)), jnp.float32)

    def loss(w, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return jnp.mean((jnp.where(kept, batch["x"], 0) @ w - batch["y"]) ** 2)

    def make_step(every):
        clipped = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9))
        tx = optax_accum.accumulate_gradients(clipped, every)

        @jax.jit
        def step(carry, micro_batch):
            w, state, key = carry
            grads = jax.grad(loss)(w, micro_batch, key if shared else jax.random.fold_in(key, state.mini_step))
            w, state = optax_accum.apply_gradients(tx, grads, state, w)
            return w, state, jnp.where(state.emitted, jax.random.fold_in(key, 99), key)

        return step, (params, tx.init(params), jax.random.key(0))

    report = verify_step(make_step, batch, every=2, uneven=False)
    assert [cause.kind for cause in report.causes] == ["shared key"] * shared, str(report)
