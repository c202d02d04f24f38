"""The diffs of docs/in_a_trainer.md, applied to small trainers: checked before and after, and against the whole batch."""

import functools
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum.sharding import count_collectives
from tests import ROOT
from tests.examples import ppo, rows
from tests.tiers import sweep

PAGE = (ROOT / "docs/in_a_trainer.md").read_text()

pytestmark = pytest.mark.usefixtures("rank_promotion")


class Trainer(NamedTuple):
    """A script, the heading of its diff, and how `verify_step` is to see it."""

    name: str
    heading: str
    says: str  # what verify_step says before
    step: object  # (module, carry, batch) -> carry
    within: tuple = (False, False)  # whether a call is an update: before, after
    whole: tuple = ()  # what makes it the trainer of the whole batch
    before: tuple = ()  # what makes it accumulate without the diff
    masks: tuple = ()  # what makes that of the whole batch drop what the micro-batches drop
    init: object = lambda module: module["init"]()

    @property
    def without(self):
        """What takes its dropout away."""
        return [] if self.name == "ppo" else [("DROPOUT = 0.3", "DROPOUT = 0.0")]


def from_carry(module, carry, batch):
    return module["train_step"](carry, batch)[0]


def with_key(module, carry, batch):
    state, key = carry
    return module["train_step"](key, state, batch)[0], key


def in_place(module, carry, batch):
    module["train_step"](*carry, batch)
    return carry


ONE = ("MICRO_BATCHES = 4", "MICRO_BATCHES = 1")
WRAPPED = ("tx = optax.adamw(schedule)", "tx = optax.MultiSteps(optax.adamw(schedule), 4)")
BARE = ("optax.MultiSteps(optax.adamw(schedule), MICRO_BATCHES)", "optax.adamw(schedule)")
PPO = ("tx = optax.adam(schedule)", "tx = optax.MultiSteps(optax.adam(schedule), 4)")
KEY = lambda module: (module["init"](), jax.random.key(1))
CONFIG = ('{"accumulate": 4}', '{"accumulate": 1}')
OWN = ("own = jax.random.split(key)", "own = jax.random.split(key)\n    own = folded(own)")
CALLS = ("jax.random.fold_in(key, state.step)", "folded(key, 4 * state.step)")
CHAIN = ("jax.random.split(key)", "chained(key)")
PARTS = ("nnx.Dropout(", "DropoutInParts(")
TRAINERS = [
    Trainer("nnx_script", "Flax NNX", "mean of means", in_place, before=(WRAPPED,), masks=(PARTS,)),
    Trainer("host_loop", "A host loop", "moves while held", with_key, before=(WRAPPED,), masks=(CALLS,), init=KEY),
    Trainer("multi_steps", "`optax.MultiSteps`", "mean of means", from_carry, whole=(CONFIG,), masks=(CHAIN,)),
    Trainer("minibatch_call", "A function that calls", "mean of means", from_carry, (True, True), (ONE,), masks=(OWN,)),
    Trainer("equinox_trainer", "Equinox", "mean of means", from_carry, (True, True), (ONE,), masks=(OWN,)),
    Trainer("context", "Parameters and batch", "moves while held", from_carry, (False, True), (BARE,)),
    Trainer("ppo", "PPO", "coupled examples", from_carry, (False, True), before=(PPO,)),
]


def trainers(*places):
    """All of them, of which each run has these."""
    cases = sweep(map(pytest.param, TRAINERS), but=[TRAINERS[place] for place in places])
    return pytest.mark.parametrize("trainer", cases, ids=lambda trainer: trainer.name)


def diff(trainer):
    """The pairs (old lines, new lines) of the diff under its heading."""
    section = PAGE.split(f"\n## {trainer.heading}")[1].split("\n## ")[0]
    (lines,) = re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    pairs = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", lines, re.MULTILINE)
    return [tuple(re.sub(r"^[-+]", "", side, flags=re.MULTILINE) for side in pair) for pair in pairs]


def script(trainer, *changes):
    """What the module has once the changes are made."""
    if trainer.name == "equinox_trainer":
        pytest.importorskip("equinox", reason="pip install --group ecosystem")
    source = f"import optax_accum.flax\n{(ROOT / 'tests/examples' / f'{trainer.name}.py').read_text()}"
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = {"__name__": trainer.name, "folded": folded, "chained": chained, "DropoutInParts": DropoutInParts}
    exec(compile(source, trainer.name, "exec"), module)
    return module


# What four micro-batches drop, dropped from a whole batch: four keys in the place of one, or four calls.


def folded(key, first=0):
    return jax.vmap(lambda i: jax.random.fold_in(key, first + i))(jnp.arange(4))


def chained(key):
    owns = []
    for _ in range(4):
        key, own = jax.random.split(key)
        owns.append(own)
    return key, jnp.stack(owns)


class DropoutInParts(nnx.Dropout):
    def __call__(self, x):
        return jnp.concatenate([super(DropoutInParts, self).__call__(part) for part in jnp.split(x, 4)])


@pytest.fixture
def drop_in_parts(monkeypatch, trainer):
    """Makes `jax.random.bernoulli` take four keys: micro-batch i is part i of the batch, or its rows r = i mod 4."""
    bernoulli = jax.random.bernoulli

    def drawn(keys, p, shape, **options):
        if keys.ndim == 0:
            return bernoulli(keys, p, shape, **options)
        parts = jax.vmap(lambda key: bernoulli(key, p, (shape[0] // 4, *shape[1:])))(keys)
        return (jnp.moveaxis(parts, 0, 1) if trainer.within[1] else parts).reshape(shape)

    monkeypatch.setattr(jax.random, "bernoulli", drawn)


@pytest.mark.sweep
@trainers(2, 3)
def test_after_the_diff_it_trains_and_logs_as_with_the_whole_batch(trainer, drop_in_parts):
    """With dropout: the average of the parameters, and each line of the log: its number, loss and rate."""
    whole, log = script(trainer, *trainer.masks, *trainer.whole)["main"](16)
    cut, own = script(trainer, *diff(trainer))["main"](16 if trainer.within[1] else 4)
    chex.assert_trees_all_close(cut, whole, atol=1e-6)
    np.testing.assert_allclose(own, log, rtol=1e-5)
    assert len(log) >= 4


def reported(trainer, changes, within_call, without=()):
    batch = (ppo.minibatches() if trainer.name == "ppo" else rows.batches(16))[0]

    def make_step(every):
        module = script(trainer, *without, *(changes if every > 1 else trainer.whole))
        return functools.partial(trainer.step, module), trainer.init(module)

    return optax_accum.verify_step(make_step, batch, within_call=within_call)


@pytest.mark.sweep
@trainers(2)
def test_verify_step_names_the_fault_before_and_finds_none_after(trainer):
    report = reported(trainer, trainer.before, trainer.within[0], trainer.without)
    assert [cause.kind for cause in report.causes] == [trainer.says], str(report)
    reported(trainer, diff(trainer), trainer.within[1], trainer.without).check()


@pytest.mark.sweep
def test_a_script_like_lm1b_before():
    """After: tests/flax/test_flax_examples.py."""
    wrapped = ("optax.sgd(learning_rate_fn, momentum=0.9)", "optax.MultiSteps(optax.sgd(learning_rate_fn, 0.9), 4)")
    linen = Trainer("text_language_model", "", "", None, before=(wrapped,))
    key, tokens = jax.random.key(1), script(linen)["sentences"]()[:16]

    def make_step(every):
        module = script(linen, *(linen.before if every > 1 else ()))
        step = lambda state, tokens: module["train_step"](state, tokens, key)[0]
        return step, module["create_train_state"](jax.random.key(0), 0.0)

    report = optax_accum.verify_step(make_step, tokens)
    assert [cause.kind for cause in report.causes] == ["mean of means"], str(report)


@pytest.mark.slow
@pytest.mark.sweep
def test_with_dropout_it_finds_none_after():
    """Means over keys are compared. Before, one key for all micro-batches is what they show."""
    trainer = TRAINERS[3]
    reported(trainer, diff(trainer), within_call=True).check()
    report = reported(trainer, trainer.before, within_call=True)
    assert [cause.kind for cause in report.causes] == ["shared key"], str(report)


@pytest.mark.sweep
def test_rows_of_a_stack_stay_on_their_devices():
    """The one thing that goes over devices is the sum of the gradient."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    gradient = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    cut = optax_accum.reduce_microbatches(gradient, stacked=True, devices="data")
    stack, w = jax.random.normal(jax.random.key(0), (4, 16, 6)), jnp.ones(6)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(stack, NamedSharding(mesh, P(None, "data")))
        run = jax.jit(cut).lower(w, sharded).compile()
        got = run(w, sharded)
    chex.assert_trees_all_close(jax.device_get(got), gradient(w, stack.reshape(-1, 6)), rtol=1e-5)
    assert count_collectives(run).count == 1
