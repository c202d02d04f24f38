"""How a batch is split for a machine, and how large it should be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_accum

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
