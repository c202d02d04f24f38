"""How a batch is split for a machine, and how large it should be."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_accum
from optax_accum import batching

counts = st.integers(1, 4000)


@given(counts, st.integers(1, 300), st.integers(1, 64))
def test_no_device_gets_more_than_fits_and_no_row_is_lost(rows, most, devices):
    split = optax_accum.batching.split_global_batch(rows, most, devices)
    assert sum(split.sizes) == rows
    assert min(split.sizes) >= 1
    assert max(split.device_rows) <= most
    assert max(split.device_rows) - min(split.device_rows) <= 1
    assert all(size <= own * devices for size, own in zip(split.sizes, split.device_rows, strict=True))
    assert (split.num_microbatches - 1) * most * devices < rows  # one less would not fit
    assert 0 <= sum(split.padding) < devices
    assert not any(split.padding[:-1])
    assert all((size + pad) % devices == 0 for size, pad in zip(split.sizes, split.padding, strict=True))


def test_a_thousand_rows_of_at_most_64():
    split = optax_accum.batching.split_global_batch(1000, 64)
    assert (split.num_microbatches, max(split.sizes), min(split.sizes)) == (16, 63, 62)


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1.5, 1, 1), (True, 1, 1), (None, 1, 1)])
def test_bad_input(bad):
    with pytest.raises((TypeError, ValueError), match=r"global_batch|max_microbatch_size|num_devices"):
        optax_accum.batching.split_global_batch(*bad)


# Advice.


def test_advice_is_the_least_time():
    for noise, optimizer, communication in itertools.product((1, 40, 700, 9000), (0.001, 0.05, 0.9), (0, 0.3)):
        found = batching.advise(
            microbatch_size=8, micro_step=0.1, optimizer=optimizer, communication=communication, noise_scale=noise
        )
        time = lambda k: (1 + noise / (8 * k)) * (0.1 * k + optimizer + communication)  # noqa: B023
        assert time(found.every) <= (1 + 1e-9) * min(map(time, range(1, 400))), found
        assert found.speedup == pytest.approx(time(1) / time(found.every))
        assert str(found).startswith(f"every={found.every}: ")


def test_advice_is_the_better_of_two_neighbours():
    """1.45 is nearer to 1, and 2 takes less time."""
    found = batching.advise(microbatch_size=1, micro_step=1.0, optimizer=1.45**2, noise_scale=1)
    assert (found.every, round(found.best, 2)) == (2, 1.45)


def test_advice_without_a_noise_scale_with_a_batch_and_at_the_ends():
    known = {"microbatch_size": 8, "micro_step": 0.1}
    assert batching.advise(**known, optimizer=0.01).every == 1
    found = batching.advise(**known, optimizer=0.1)
    assert (found.every, found.overhead, found.best, found.speedup) == (9, pytest.approx(0.1), None, None)
    assert "Measure the noise scale" in str(found)
    kept = batching.advise(**known, optimizer=0.01, noise_scale=8, global_batch=60)
    assert (kept.every, kept.global_batch) == (8, 64)
    assert kept.speedup < 1
    endless = batching.advise(**known, optimizer=0.1, noise_scale=np.inf, max_every=64)
    assert endless.every == 64
    assert 1 < endless.speedup < 2
    assert batching.advise(**known, optimizer=0.0, noise_scale=np.inf).every == 1


def test_a_decay_keeps_its_half_life():
    for size in (1, 64, 4096):
        decay = batching.rescale_decay(0.95, 512, size)
        assert np.log(0.5) / np.log(decay) * size == pytest.approx(np.log(0.5) / np.log(0.95) * 512)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: batching.rescale_decay(1.0, 1, 2), "decay must be in"),
        (lambda: batching.rescale_decay(0.9, 0, 2), "batch_from must be positive"),
        (lambda: batching.advise(microbatch_size=8, micro_step=0, optimizer=1), "micro_step must be positive"),
        (lambda: batching.advise(microbatch_size=8, micro_step=1, optimizer=-1), "optimizer must not be negative"),
        (
            lambda: batching.advise(microbatch_size=8, micro_step=1, optimizer=1, noise_scale=np.nan),
            "negative or NaN",
        ),
    ],
)
def test_bad_advice(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
