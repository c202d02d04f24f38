"""A step that fits: the program that was planned runs, and runs again in more micro-batches where memory is short."""

import functools
import importlib.util

import chex
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum import plan
from tests import programs
from tests.tiers import sweep

ROWS, WIDTH = 64, 16
TX = optax.sgd(0.1, momentum=0.9)
W = jnp.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
X = jnp.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def in_parts(k):
    """The gradient, of micro-batches of equal size."""

    def compute(w, x):
        add = lambda total, part: (jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(w, part)), None)
        total = jax.lax.scan(add, (0.0, jnp.zeros_like(w)), x.reshape(k, -1, WIDTH))[0]
        return jax.tree.map(lambda leaf: leaf / k, total)

    return compute


@functools.cache
def step_of_k(k):
    def step(w, state, x):
        value, grads = in_parts(k)(w, x)
        updates, state = TX.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def arguments():
    w = jnp.array(W)
    return w, TX.init(w), X


class Short:
    """A step on a device that is out of memory with few micro-batches: it fails once it has run, as XLA may."""

    def __init__(self, step, fails, says="RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."):
        self.step, self.fails, self.says, self.lower, self.calls = step, fails, says, step.lower, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        out = self.step(*args, **kwargs)
        if self.fails(self.calls):
            raise jax.errors.JaxRuntimeError(self.says)
        return out


def short_below(least, make=step_of_k, **how):
    return lambda k: Short(make(k), lambda calls: k < least, **how)


def fitted(make=step_of_k, args=None, **options):
    options = {"batch_argnums": 2, "budget": "1GB", "progress": False, **options}
    return plan.fit(make, *(args or arguments()), **options)


@pytest.fixture
def compilations():
    """The programs that were compiled since, those kept from earlier runs among them."""
    seen = []

    def listen(name, _, **__):
        if "backend_compile" in name:
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.clear_event_listeners()


@pytest.mark.sweep
def test_the_program_that_was_planned_runs_and_nothing_is_compiled_twice(compilations, capsys):
    args = jax.block_until_ready(arguments())
    with programs.as_shipped():
        least = fitted(candidates=[4], args=args).plan.peak
        compilations.clear()
        step = plan.fit(step_of_k.__wrapped__, *args, batch_argnums=2, budget=least * 1.01, safety=1, candidates=[2, 4])
        assert len(compilations) == len(step.plan.rows)
        args = step(*args)[:2]
        args = step(*args, X)[:2]
    assert len(compilations) == len(step.plan.rows) > 1
    assert step.num_microbatches == step.plan.num_microbatches == 4
    assert capsys.readouterr().out == f"{step.plan}\n"
    whole = step_of_k(1)
    expected = whole(*whole(*arguments())[:2], X)[:2]
    chex.assert_trees_all_close(args, expected, rtol=1e-5, atol=1e-7)


def test_out_of_memory_at_the_first_call_the_next_candidate_runs_with_what_was_donated(capsys):
    step, (w, state, x) = fitted(short_below(4), progress=True), arguments()
    assert step.num_microbatches == 1
    capsys.readouterr()
    got = step(w, state, x)
    assert (step.num_microbatches, step.step.calls) == (4, 1)
    assert capsys.readouterr().out.splitlines() == [
        "Out of memory with 1 micro-batch: now 2.",
        "Out of memory with 2 micro-batches: now 4.",
    ]
    assert w.is_deleted()
    chex.assert_trees_all_close(got, step_of_k(1)(*arguments()), rtol=1e-5, atol=1e-7)
    step(*got[:2], x)
    assert step.step.calls == 2


def test_what_was_read_from_a_checkpoint_is_no_array_of_jax():
    step = fitted(short_below(2), candidates=[1, 2])
    got = step(*jax.device_get(arguments()))
    assert step.num_microbatches == 2
    chex.assert_trees_all_close(got, step_of_k(1)(*arguments()), rtol=1e-5, atol=1e-7)


def test_an_error_that_comes_when_the_result_is_there():
    """A call returns before that."""

    def make(k):
        def run(w, x):
            if k < 4:
                raise MemoryError("Out of memory")
            return w

        return jax.jit(lambda w, x: jax.pure_callback(run, w, w, x))

    step = fitted(make, (W, X), batch_argnums=1)
    np.testing.assert_array_equal(step(W, X), W)
    assert step.num_microbatches == 4


@pytest.mark.sweep
def test_keys_and_what_lies_on_several_devices_come_back():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    by_rows = NamedSharding(mesh, P("data"))

    @functools.cache
    def make(k):
        def step(w, key, x):
            grads = in_parts(k)(w, x)[1]
            key, own = jax.random.split(key)
            return w - grads + jax.random.normal(own), key

        return jax.jit(step, donate_argnums=(0, 1))

    put = lambda: (
        jax.device_put(W, by_rows),
        jax.device_put(jax.random.key(0), NamedSharding(mesh, P())),
        jax.device_put(X, by_rows),
    )
    step = fitted(short_below(2, make), put(), candidates=[1, 2])
    assert (step.plan.num_devices, step.plan.rows[0]["rows"]) == (4, ROWS // 4)
    w, key = step(*put())
    assert step.num_microbatches == 2
    expected, other = make(1)(*put())
    np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-6)
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(other))
    assert w.sharding.is_equivalent_to(expected.sharding, 2)


def test_errors_that_are_not_of_the_first_call_or_of_memory_are_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: else"):
        fitted(short_below(4, says="INTERNAL: else"))(*arguments())
    later = lambda k: Short(step_of_k(k), lambda calls: calls == 2)
    step, args = fitted(later), arguments()
    args = step(*args)[:2]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step(*args, X)


def test_where_no_number_is_enough_the_last_error_is_raised():
    step = fitted(short_below(100), candidates=[4, 8])
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step(*arguments())
    assert step.num_microbatches == 8


def test_arrays_of_several_processes_are_not_copied(monkeypatch):
    step, args = fitted(short_below(4)), arguments()
    monkeypatch.setattr(type(X), "is_fully_addressable", property(lambda self: False))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step(*args)
    assert step.num_microbatches == 1


def test_what_is_not_donated_is_not_copied(monkeypatch):
    copied = []
    monkeypatch.setattr("optax_accum.plan._fitted.copied_to_host", lambda leaf: copied.append(leaf))
    fitted()(*arguments())
    assert [leaf.shape for leaf in copied] == [W.shape] * 2
    fitted(candidates=[1])(*arguments())  # there is no other number
    assert len(copied) == 2


def test_what_cannot_be_fitted():
    with pytest.raises(ValueError, match="must be arrays with the same rows: batch_argnums=1. Pass.*batch_argnums=2"):
        fitted(args=(W, (W, X), X), batch_argnums=1)
    with pytest.raises(ValueError, match="positions among the 3 arguments of the step: batch_argnums=3"):
        fitted(batch_argnums=3)
    with pytest.raises(TypeError, match="step_of_k must be a function: step_of_k=8. Pass a function"):
        fitted(8)
    with pytest.raises(TypeError, match="step_of_k must return a jitted step: it returned .*len.*Pass it to jax.jit"):
        fitted(lambda k: len)
    with pytest.raises(TypeError, match="that of jit_step, which runs another.*Pass run=False for its plan"):
        fitted(lambda k: optax_accum.jit_step(lambda w, state, x: (w, state)))
    with pytest.raises(TypeError, match="candidates must be several numbers of micro-batches: candidates=4"):
        fitted(candidates=4)
    with pytest.raises(ValueError, match="candidates must be an integer >= 1: candidates=0"):
        fitted(candidates=[0])
    with pytest.raises(KeyError, match="mine"):
        fitted(lambda k: jax.jit(lambda w, state, x: {}["mine"]))
    with pytest.raises(plan.NothingFitsError, match="must hold what the step is given"):
        fitted(budget="1kB")


@pytest.mark.parametrize("by_keyword", [*sweep([True]), False], ids=["keyword", "position"])
def test_static_arguments_and_a_batch_that_comes_first(by_keyword):
    @functools.cache
    def make(k):
        def step(x, w, how):
            value, grads = in_parts(k)(w, x)
            return w - grads if how == "train" else w, value

        def named(x, w, *, how):
            return step(x, w, how)

        if by_keyword:
            return jax.jit(named, static_argnames="how", donate_argnums=1)
        return jax.jit(step, static_argnums=2, donate_argnums=1)

    static = ((), {"how": "train"}) if by_keyword else (("train",), {})
    args = lambda: (X, jnp.array(W), *static[0])
    how = {"batch_argnums": 0, "budget": "1GB", "progress": False}
    step = plan.fit(short_below(4, make), *args(), **static[1], **how)
    assert step.plan.rows[0]["rows"] == ROWS
    got = step(*args(), **static[1])
    assert step.num_microbatches == 4
    chex.assert_trees_all_close(got, make(1)(*args(), **static[1]), rtol=1e-5, atol=1e-7)


def test_an_option_that_fit_does_not_have_is_an_argument_of_the_step():
    with pytest.raises(TypeError, match="bugdet"):
        fitted(bugdet="1GB")


def test_without_a_budget_a_cpu_has_what_is_free():
    step = fitted(budget=None)
    assert 0 < step.plan.budget <= optax_accum.accelerators.target().memory


needs_flax = pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="needs flax")


def module(twice=False):
    from flax import nnx

    import optax_accum.flax

    class Net(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.drop(self.dense(x))

    net = Net()
    if twice:
        net.again = net.dense
    return net, optax_accum.flax.nnx.Optimizer(net, TX, wrt=nnx.Param, metrics=("loss",))


def of_module(model, x):
    return jnp.mean(jnp.tanh(model(x)) ** 2)


@needs_flax
@pytest.mark.parametrize("twice", sweep([False, True], but=[False]), ids=["a tree", "a graph"])
def test_an_nnx_step_runs_as_it_was_planned_and_gets_its_values_back(twice, compilations, rank_promotion):
    """Also where a module stands in two places."""
    make = functools.cache(lambda k: optax_accum.flax.nnx.train_step(of_module, num_microbatches=k))

    def step_of(k):
        step = Short(make(k), lambda calls: k < 2)
        step.keep = step.step.keep
        return step

    how = {"batch_argnums": 2, "budget": "1GB", "progress": False}
    (model, optimizer), (alone, other) = module(twice), module(twice)
    step = plan.fit(step_of, model, optimizer, X, **how, candidates=[1, 2])
    got = step(model, optimizer, X)
    assert step.num_microbatches == 2
    compilations.clear()
    whole = plan.fit(make.__wrapped__, alone, other, X, **how)
    expected = whole(alone, other, X)
    assert len(compilations) == 1
    chex.assert_trees_all_close(got, expected, rtol=1e-5)
    np.testing.assert_allclose(model.dense.kernel[...], alone.dense.kernel[...], rtol=1e-5)
    assert int(model.drop.rngs.count[...]) == 1


@needs_flax
def test_another_step_that_changes_modules_is_not_repeated(rank_promotion):
    """Its modules may hold what was not computed."""
    from flax import nnx

    step_of = lambda k: nnx.jit(lambda model, x: model(x).sum() * k)
    step = plan.fit(short_below(4, step_of), module()[0], X, budget="1GB", progress=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step(module()[0], X)
