"""The diffs of the README and the docs of Flax, applied to scripts: small batches then make the updates of large ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests import ROOT
from tests.tiers import sweep

README, FLAX, TRAINERS = (
    re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    for page in ("README.md", "docs/flax.md", "docs/in_a_trainer.md")
)

pytestmark = pytest.mark.usefixtures("rank_promotion")


def changes(diff):
    """The pairs (old line, new lines) of a diff."""
    return [
        (old, new.replace("\n+", "\n")) for old, new in re.findall(r"^-(.*)\n\+((?:.*\n\+)*.*)$", diff, re.MULTILINE)
    ]


def script(name, changes=()):
    """What the module has once the changes are made."""
    source = (ROOT / "tests" / "examples" / f"{name}.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = {}
    exec(compile(f"import optax_accum.flax\n{source}", name, "exec"), module)
    return module


def run(name, batch_size, changes=(), **options):
    return script(name, changes)["main"](batch_size, **options)


def calls(counter):
    """The calls that the state or the optimizer of a script has counted."""
    return counter if isinstance(counter, int) else int(counter.step[...])


def gap(a, b):
    return max(np.max(np.abs(a - b)) for a, b in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "one_line", "counting"),
    [
        ("optax_digits", README[0], None),
        ("linen_digits", README[1], FLAX[0]),
        *sweep([("nnx_digits", README[2], FLAX[1])]),
    ],
)
def test_one_line_makes_small_batches_into_large_ones(name, one_line, counting):
    """The first diff of each kind is one line; the second counts updates, too."""
    assert len(changes(one_line)) == 1
    assert one_line.count("\n") == 2
    whole, once = run(name, 64)
    naive, _ = run(name, 16)
    cut, counter = run(name, 16, changes(one_line))
    assert (calls(once), calls(counter)) == (16, 64)
    assert gap(cut, whole) < 2e-4
    if counting:
        counted, counter = run(name, 16, changes(counting))
        assert (calls(counter), int(counter.updates[...])) == (64, 16)  # `step` is what Flax's is
        assert gap(counted, whole) < 2e-4
    assert gap(naive, whole) > 0.05  # what the one line is for


@pytest.mark.sweep
def test_where_one_line_is_not_enough():
    """Sentences of many lengths: with one line a mean of means, with the whole diff the update of the whole batch."""
    joined = lambda diff: [(old, re.sub(r"\s", "", new)) for old, new in changes(diff)]
    assert joined(TRAINERS[0]) == joined(README[3])  # one has shorter lines
    (one_line,) = (change for change in changes(README[3]) if "accumulate_gradients" in change[1])
    whole, rates = run("text_language_model", 64)
    short, _ = run("text_language_model", 16, [one_line])
    full, log = run("text_language_model", 16, changes(TRAINERS[0]))
    assert (whole.step, full.step, full.updates) == (8, 32, 8)
    assert gap(short.params, whole.params) > 1e-3
    assert gap(full.params, whole.params) < 1e-6
    logged = lambda log: [float(metrics["learning_rate"]) for metrics in log]
    assert logged(log) == [rate for rate in logged(rates) for _ in range(4)]  # that of the update, four times
    assert len(set(logged(rates))) == 8


@pytest.mark.sweep
def test_with_dropout_each_micro_batch_draws_units_of_its_own():
    """The diff alone: the script folds its key with `state.step`, as it did. By hand: plain JAX and Optax."""
    keys = ("    return new_state, {", '    return new_state, {"key": jax.random.key_data(dropout_key), ')
    state, log = run("text_language_model", 16, [*changes(README[3]), keys], dropout_rate=0.5)
    assert state.updates == 8
    assert len({tuple(metrics["key"].tolist()) for metrics in log}) == 32
    plain = script("text_language_model")
    tokens, model, key = plain["sentences"](), plain["Model"](0.5), jax.random.key(1)
    params = plain["create_train_state"](jax.random.key(0), 0.5).params
    inner = optax.sgd(plain["learning_rate_fn"], momentum=0.9)

    @jax.jit
    @jax.grad
    def gradient_of_sum(params, rows, number):
        rngs = {"dropout": jax.random.fold_in(key, number)}
        logits = model.apply({"params": params}, rows[:, :-1], rngs=rngs)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
        return jnp.sum(each * (rows[:, 1:] > 0))

    opt_state, update = inner.init(params), jax.jit(inner.update)
    for first in range(0, 32, 4):
        micro_steps = range(first, first + 4)
        parts = [tokens[16 * number : 16 * number + 16] for number in micro_steps]
        sums = [gradient_of_sum(params, rows, number) for rows, number in zip(parts, micro_steps, strict=True)]
        count = sum((rows[:, 1:] > 0).sum() for rows in parts)
        grads = jax.tree.map(lambda *leaves, count=count: sum(leaves) / count, *sums)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert gap(state.params, params) < 1e-6


@pytest.mark.slow
@pytest.mark.sweep
def test_verify_step_finds_nothing_in_the_script():
    """With dropout its mean over keys is compared; with a key that counts updates, one mask serves a whole window."""
    short = ("LENGTH = 64", "LENGTH = 16")
    tokens = script("text_language_model", [short])["sentences"]()[:16]

    def make_step(every, folded=()):
        module = script("text_language_model", [short, *(*changes(README[3]), *folded) * (every > 1)])
        key = jax.random.key(1)

        def step(carry, tokens):
            state, key = carry
            return module["train_step"](state, tokens, key)[0], key

        return step, (module["create_train_state"](jax.random.key(0), 0.5), key)

    optax_accum.verify_step(make_step, tokens, every=4).check()
    shared = ("fold_in(dropout_key, state.step)", "fold_in(dropout_key, state.updates)")
    report = optax_accum.verify_step(lambda every: make_step(every, [shared]), tokens, every=4)
    assert [cause.kind for cause in report.causes] == ["shared key"]
