"""Optax's own tests of `MultiSteps` and `microbatch`, which are installed with it, with this library in their place."""

import re
import unittest

import jax
import jax.numpy as jnp
import pytest

import optax_accum
from tests.tiers import sweep


class MultiSteps:
    """`accumulate_gradients` with the names of `optax.MultiSteps`."""

    def __init__(self, opt, every_k_schedule, use_grad_mean=True, should_skip_update_fn=None, accumulator_dtype=None):
        self.tx = optax_accum.accumulate_gradients(
            opt,
            every_k_schedule,
            reduction="mean" if use_grad_mean else "sum",
            nonfinite=should_skip_update_fn or "propagate",
            accumulator_dtype=accumulator_dtype,
        )

    def gradient_transformation(self):
        return self.tx

    def has_updated(self, state):
        return optax_accum.has_updated(state)


NAMES = {"SUM": "sum", "MEAN": "mean", "RUNNING_MEAN": "mean", "CONCAT": "concat"}


def microbatch(fun, argnums, microbatch_size, accumulator=None, *, argnames=(), in_axes=0, num_real_microbatches=None):
    """`reduce_microbatches` with the names of `optax.microbatch`: batch axes are moved, and what is not real weighs nothing."""
    if microbatch_size is None:
        return fun
    several = lambda names: (names,) if isinstance(names, int | str) else tuple(names)
    batch = [*several(argnums), *several(argnames)]
    axes = [in_axes] * len(batch) if isinstance(in_axes, int) else in_axes
    move = lambda tree, here, there: jax.tree.map(lambda leaf: jnp.moveaxis(leaf, here, there), tree)

    def run(*args, **kwargs):
        given = {**dict(enumerate(args)), **kwargs}

        def one(rows, real):
            own = given | {name: move(leaf, 0, axis) for name, axis, leaf in zip(batch, axes, rows, strict=True)}
            return fun(*(own[n] for n in range(len(args))), **{name: own[name] for name in kwargs})

        rows = [move(given[name], axis, 0) for name, axis in zip(batch, axes, strict=True)]
        count = len(jax.tree.leaves(rows)[0])
        limit = count if num_real_microbatches is None else num_real_microbatches
        real = jnp.arange(count) % max(count // microbatch_size, 1) < limit
        reduction = "sum" if accumulator is None else jax.tree.map(lambda kind: NAMES[kind.name], accumulator)
        options = {"batch_argnums": (0, 1), "weight_fn": lambda rows, real: 1.0 * real[0], "reduction": reduction}
        return optax_accum.reduce_microbatches(one, microbatch_size=microbatch_size, **options)(rows, real)

    return run


SUITES = {
    "optax.transforms._accumulation": ("_accumulation_test", {"MultiSteps": MultiSteps}, {}),
    "optax.microbatching._microbatching": (
        "_microbatching_test",
        {"microbatch": microbatch},
        {
            "test_raises_on_invalid_microbatches": "rows that are left over make one smaller micro-batch",
            "test_in_axes_invariant3": '"concat" takes one row for each example',
            "test_in_axes_with_argnames3": '"concat" takes one row for each example',
        },
    ),
}


@pytest.mark.parametrize("name", sweep(SUITES))
def test_the_tests_of_optax_pass(name, monkeypatch):
    """But for what the library documents otherwise."""
    tests, ours, otherwise = SUITES[name]
    room = name.rpartition(".")[0]
    module = pytest.importorskip(name)
    suite = pytest.importorskip(f"{room}.{tests}", reason="this Optax comes without its tests")
    for attribute, replacement in ours.items():
        monkeypatch.setattr(module, attribute, replacement)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(suite).run(result)
    failed = {re.findall(r"test_\w+", test.id())[-1]: text for test, text in [*result.failures, *result.errors]}
    assert failed.keys() == otherwise.keys(), "\n".join(failed.values())
    assert result.testsRun > 10
