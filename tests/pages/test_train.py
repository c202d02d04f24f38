"""The script to start from: both ways make the whole batch's updates, and a run that was stopped goes on."""

import jax
import numpy as np
import optax
import pytest

from examples import train

pytestmark = [pytest.mark.sweep, pytest.mark.slow, pytest.mark.usefixtures("rank_promotion")]


def test_both_ways_make_the_updates_of_the_whole_batch(monkeypatch):
    whole, losses = train.main(["--updates", "3"])
    within, ours = train.main(["--updates", "3", "--within", "4"])
    np.testing.assert_allclose(ours, losses, rtol=1e-5)  # with the same masks of dropout
    distance = optax.tree.norm(optax.tree.sub(within["ema"], whole["ema"]))
    assert distance < 1e-4 * optax.tree.norm(whole["ema"])
    without = lambda rate, **options: lambda h: h
    monkeypatch.setattr(train.nn, "Dropout", without)
    _, losses = train.main(["--updates", "3"])
    across, ours = train.main(["--updates", "3", "--across", "4"])
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    assert (across["calls"], across["opt"].gradient_step) == (12, 3)


def stop():
    raise KeyboardInterrupt


def test_a_run_goes_on_in_the_middle_of_a_window(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SAVE_EVERY", 6)
    options = ["--across", "4", "--checkpoints", str(tmp_path), "--updates"]
    whole, losses = train.main(["--across", "4", "--updates", "2"])
    batch_of = train.batch_of
    monkeypatch.setattr(train, "batch_of", lambda call, rows: batch_of(call, rows) if call < 7 else stop())
    with pytest.raises(KeyboardInterrupt):  # at the last of eight calls
        train.main([*options, "2"])
    monkeypatch.setattr(train, "batch_of", batch_of)
    again, rest = train.main([*options, "2"])
    assert (len(losses), len(rest)) == (2, 1)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    assert train.main([*options, "2"])[1] == []  # the end is saved, too
