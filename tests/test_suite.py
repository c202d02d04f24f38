"""The suite itself: what it keeps between runs, and what the README's command runs of it."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from tests import paths, programs, test_law, tiers

pytestmark = pytest.mark.quick


# Programs that are kept


@pytest.fixture
def reads(monkeypatch):
    """How many programs have been read from the folder of those that are kept."""
    if not (jax.config.jax_enable_compilation_cache and os.environ.get("JAX_COMPILATION_CACHE_DIR")):
        pytest.skip("no program is kept between runs")
    found = []
    jax.monitoring.register_event_listener(
        lambda event, **_: event == "/jax/compilation_cache/cache_hits" and found.append(event)
    )
    return lambda: len(found)


def window(name, weight=3):
    """The sum of a window, by a function that JAX has never seen."""

    def micro_step(acc, grads):
        return acc + weight * grads

    micro_step.__name__ = name
    return float(jax.jit(micro_step)(jnp.float32(2), jnp.float32(5)))


def test_a_program_is_compiled_once_and_a_change_of_it_is_another(reads):
    """The key is the program: of the same name, with the same arguments, another is not taken for it."""
    window("kept")
    before = reads()
    assert window("kept") == 17
    assert reads() == before + 1
    assert window("kept", weight=1) == 7
    assert reads() in (before + 1, before + 2)  # compiled, or read where an earlier run has tried this


def test_a_program_that_a_killed_process_left_half_written_is_compiled(reads):
    window("half")
    (file,) = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("jit_half-*-cache")
    file.write_bytes(file.read_bytes()[:-100])
    before = reads()
    assert window("half") == 17
    assert reads() == before
    file.unlink()  # JAX would leave it as it is


def test_what_a_test_inspects_is_compiled_anew(reads):
    lowered = lambda: jax.jit(lambda x: x + 1).lower(jnp.float32(1))
    assert programs.compiled(lowered())(jnp.float32(1)) == 2
    before = reads()
    programs.compiled(lowered())
    assert reads() == before


# What each run has


def in_each_run(test, argument):
    """Returns the values of a test's argument that are not in the sweep; none if all of another argument's are."""
    marks = getattr(test, "pytestmark", [])
    kept = {}
    for names, cases in (mark.args[:2] for mark in marks if mark.name == "parametrize"):
        names = names.split(",") if isinstance(names, str) else names
        rows = [getattr(case, "values", case if len(names) > 1 else (case,)) for case in cases if not swept(case)]
        kept |= {name.strip(): [row[place] for row in rows] for place, name in enumerate(names)}
    return kept[argument] if all(kept.values()) and "sweep" not in [mark.name for mark in marks] else []


def swept(case):
    return "sweep" in [mark.name for mark in getattr(case, "marks", [])]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (test_law.test_the_update_equals_the_update_of_the_whole_batch, test_law.PATHS),
        (test_law.test_every_path_makes_the_update_of_the_whole_batch, paths.PATHS),
        (test_law.test_every_path_over_devices, paths.SHARDED | paths.OVERLAPPING),
        (test_law.test_each_device_keeps_a_shard_of_the_sum, paths.TO_SHARDS),
        (test_law.test_every_path_in_a_shard_map, paths.MANUAL),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_run_states_the_law_for_every_path(test, expected):
    assert in_each_run(test, "path") == list(expected)


def test_a_path_that_only_the_sweep_has_would_be_missed():
    """The comparison can fail."""

    @pytest.mark.parametrize("path", ["a", pytest.param("b", marks=pytest.mark.sweep)])
    def case(path):
        pass

    assert in_each_run(case, "path") == ["a"]
    assert in_each_run(pytest.mark.sweep(case), "path") == []


def test_what_stays_out_of_the_sweep_must_be_a_case():
    assert [swept(case) for case in tiers.sweep([1, pytest.param(2, marks=pytest.mark.slow), (3, 4)], but=[2])] == [
        True,
        False,
        True,
    ]
    with pytest.raises(AssertionError, match="no such cases: .5."):
        tiers.sweep([1, 2], but=[5])
    assert tiers.one_of_each([(1, "a"), (2, "a"), (2, "b")]) in ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")])
