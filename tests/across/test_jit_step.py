"""Two programs for a train step: the results of one, which of them runs, and what goes in and out."""

import functools
import inspect
import itertools
import logging
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests.tiers import sweep

INNER = optax.adam(0.1)
assert_equal = functools.partial(chex.assert_trees_all_close, rtol=0, atol=0)


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"][None]) ** 2)


def start():
    return {"w": jnp.ones((3, 3)) / 3, "b": jnp.arange(3.0)}


BATCHES = [np.float32(np.random.default_rng(i).normal(size=(2, 3))) for i in range(7)]


def of_loss(tx):
    return optax_accum.value_and_apply_gradients(loss, tx)


def of_gradients(tx):
    """A step of the user's own, which reads the optimizer's state, too."""

    def step(params, state, x, flush=None):
        value, grads = jax.value_and_grad(loss)(params, x)
        count = optax.tree_utils.tree_get(state, "count")
        return (value, count), *optax_accum.apply_gradients(tx, grads, state, params, weight=len(x), flush=flush)

    return step


def run(step, tx, batches=BATCHES, flushes=()):
    """Returns what each call returned, copied before it is overwritten."""
    params, state, found = start(), tx.init(start()), []
    for number, x in enumerate(batches):
        flush = {"flush": flushes[number]} if flushes else {}
        value, params, state = step(params, state, x, **flush)
        found.append(jax.tree.map(np.array, (value, params, state)))
    return found


def in_one(step, **options):
    return jax.jit(step, **options)


def accumulate(every=3, **options):
    return optax_accum.accumulate_gradients(INNER, every, **options)


def programs(step):
    """The programs of a step by the windows that they close."""
    return {key[0]: program for kinds in step._kinds.values() for each in kinds for key, program in each.known.items()}


@pytest.mark.quick
@pytest.mark.parametrize("step", [of_loss, of_gradients])
def test_two_programs_make_the_updates_of_one_bit_for_bit(step):
    tx = accumulate()
    two = optax_accum.jit_step(step(tx))
    assert_equal(run(two, tx), run(in_one(step(tx)), tx))
    assert two.one_program is None
    assert set(programs(two)) == {(False,), (True,)}


@pytest.mark.quick
def test_a_call_that_only_adds_is_given_neither_optimizer_nor_new_parameters():
    """Of 14 arrays beside the batch it takes 2 parameters, 2 sums and 4 numbers, and returns no parameter."""
    tx = accumulate()
    step = optax_accum.jit_step(of_loss(tx))
    lowered = step.lower(start(), tx.init(start()), BATCHES[0])
    shapes = lambda info: sorted(leaf.shape for leaf in jax.tree.leaves(info))
    assert shapes(lowered.adds.out_info).count((3, 3)) == 1  # the sum
    assert shapes(lowered.adds.args_info).count((3, 3)) == 2  # the sum, a parameter
    assert shapes(lowered.updates.args_info).count((3, 3)) == shapes(lowered.updates.out_info).count((3, 3)) == 4
    donated = [leaf.donated for leaf in jax.tree.leaves(lowered.adds.args_info) if leaf.shape == (3, 3)]
    assert sorted(donated) == [False, True]
    params, state = start(), tx.init(start())
    _, after, new = step(params, state, BATCHES[0])
    assert after is params and new.inner_opt_state is state.inner_opt_state  # noqa: PT018
    assert state.acc_grads["w"].is_deleted()


@pytest.mark.quick
def test_flush_of_python_says_which_program_runs():
    tx = accumulate(None, nonfinite="skip")
    flushes = [False, False, True, True, False, True, False]
    batches = [BATCHES[0] * (np.nan if i == 1 else 1) for i in range(7)]
    two = optax_accum.jit_step(of_loss(tx))
    one = in_one(of_loss(tx), static_argnames="flush")
    assert_equal(run(two, tx, batches, flushes), run(one, tx, batches, flushes))
    assert two.one_program is None
    with pytest.raises(ValueError, match="With every=None the caller closes the window: flush=None"):
        run(two, tx)


@pytest.mark.sweep
def test_an_epoch_may_end_early_and_windows_may_be_left():
    tx = accumulate()
    two, one = optax_accum.jit_step(of_gradients(tx)), in_one(of_gradients(tx), static_argnames="flush")
    flushes = [None, True, None, None, None, None, True]
    assert_equal(run(two, tx, flushes=flushes), run(one, tx, flushes=flushes))
    params, state = start(), tx.init(start())
    _, params, state = two(params, state, BATCHES[0])
    state = optax_accum.discard_window(state)
    for x in BATCHES[:3]:
        assert not optax_accum.has_updated(state)
        _, params, state = two(params, state, x)
    assert optax_accum.has_updated(state)


@pytest.mark.parametrize("every", sweep([2, 5], but=[5]))
def test_a_run_goes_on_in_the_middle_of_a_window(every):
    """As after a checkpoint, with the same or another length of windows."""
    tx, other = accumulate(5), accumulate(every)
    saved = run(optax_accum.jit_step(of_loss(tx)), tx, BATCHES[:3])[-1][1:]
    found = []
    for step in (optax_accum.jit_step(of_loss(other)), in_one(of_loss(other))):
        params, state = jax.tree.map(jnp.array, saved)
        for x in BATCHES[3:]:
            value, params, state = step(params, state, x)
        found.append((value, params, state))
    assert_equal(*found)


@pytest.mark.quick
def test_the_device_is_asked_only_for_states_from_elsewhere(monkeypatch):
    tx, asked = accumulate(), []
    step = optax_accum.jit_step(of_loss(tx))
    counters, read = step._counters, step._counters.read
    from_elsewhere = lambda arrays: list(map(id, arrays)) != list(map(id, counters._last))
    monkeypatch.setattr(counters, "read", lambda arrays: asked.append(from_elsewhere(arrays)) or read(arrays))
    run(step, tx)
    assert asked == [True] + [False] * 6
    run(step, tx, BATCHES[:2])  # another state
    assert asked[7:] == [True, False]


@pytest.mark.quick
def test_a_window_inside_a_chain_is_flushed():
    """The loss is read for it, which traces the optimizer once more: that decides nothing."""
    tx = optax.chain(optax.identity(), accumulate(3))
    two = optax_accum.jit_step(of_loss(tx))
    found = run(two, tx, BATCHES[:2], (False, True))
    assert [bool(optax_accum.has_updated(state)) for _, _, state in found] == [False, True]
    assert two.one_program is None


ONE = {
    "every=1": (accumulate(1), r"each call makes an update \(every=1\)"),
    "a function": (accumulate(lambda step: 2), r"only the device knows when a window closes \(every=a schedule\)"),
    "tokens": (accumulate(optax_accum.batching.every_by_tokens({0: 2})), "only the device knows when a window closes"),
    "skip": (accumulate(nonfinite="skip"), r'only the device knows which micro-batches count \(nonfinite="skip"\)'),
    "another optimizer": (INNER, "no argument holds a state of accumulate_gradients"),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", ONE)
def test_what_only_the_device_knows_is_one_program_and_says_so(case, caplog):
    tx, reason = ONE[case]
    step = optax_accum.jit_step(of_loss(tx))
    with caplog.at_level(logging.INFO, "optax_accum"):
        found = run(step, tx, BATCHES[:4])
    assert_equal(found, run(in_one(of_loss(tx)), tx, BATCHES[:4]))
    said = [record.getMessage() for record in caplog.records if "jit_step" in record.getMessage()]
    (message,) = said
    assert message.startswith("jit_step compiles one program, and not two: ")
    assert step.one_program in message
    assert re.search(reason, step.one_program)


def several(tx, params, state, x):
    for _ in range(2):
        params, state = optax_accum.apply_gradients(tx, jax.grad(loss)(params, x), state, params)
    return 0.0, params, state


def in_a_scan(tx, params, state, x):
    def body(carry, x):
        return optax_accum.apply_gradients(tx, jax.grad(loss)(carry[0], x), *carry[::-1]), None

    (params, state), _ = jax.lax.scan(body, (params, state), x[None])
    return 0.0, params, state


def in_a_branch(tx, params, state, x):
    make = lambda: optax_accum.apply_gradients(tx, jax.grad(loss)(params, x), state, params)
    return 0.0, *jax.lax.cond(x.sum() > 0, make, lambda: (params, state))


def that_leaves(tx, params, state, x):
    params, state = optax_accum.apply_gradients(tx, jax.grad(loss)(params, x), state, params)
    return 0.0, params, optax_accum.discard_window(state, x.sum() > 0)


@pytest.mark.quick
@pytest.mark.parametrize("step", [several, in_a_scan, in_a_branch, that_leaves])
def test_a_step_that_the_host_cannot_count_is_one_program(step):
    tx = accumulate()
    step = functools.partial(step, tx)
    two = optax_accum.jit_step(step)
    assert_equal(run(two, tx, BATCHES[:4]), run(in_one(step), tx, BATCHES[:4]))
    assert two.one_program


@pytest.mark.quick
def test_an_array_as_flush_is_one_program():
    tx = accumulate()
    two = optax_accum.jit_step(of_loss(tx))
    flushes = [jnp.array(number == 1) for number in range(4)]
    assert not optax_accum.has_updated(run(two, tx, BATCHES[:4], flushes)[0][2])
    assert run(two, tx, BATCHES[:4], flushes)[1][2].emitted
    assert two.one_program == "flush is an array, not a bool of Python"


@pytest.mark.parametrize(
    "options", [{"nonfinite": "omit"}, *sweep([{"nonfinite": "discard"}, {"statistics": True}])], ids=str
)
def test_policies_statistics_and_a_nan(options):
    tx = accumulate(**options)
    batches = [BATCHES[0] * (np.nan if i == 1 else 1) for i in range(6)]
    two = optax_accum.jit_step(of_gradients(tx))
    chex.assert_trees_all_close(run(two, tx, batches), run(in_one(of_gradients(tx)), tx, batches), rtol=1e-6)
    assert two.one_program is None


@pytest.mark.quick
def test_compiled_ahead_of_time():
    tx = accumulate()
    two = optax_accum.jit_step(of_loss(tx))
    shapes = jax.eval_shape(lambda: (start(), tx.init(start()), jnp.zeros((2, 3))))
    compiled = two.lower(*shapes).compile()
    batches = [BATCHES[0]] * 4
    assert_equal(run(compiled, tx, batches), run(two, tx, batches))
    assert (
        compiled.adds.memory_analysis().argument_size_in_bytes
        < compiled.updates.memory_analysis().argument_size_in_bytes
    )
    with pytest.raises(ValueError, match="A compiled step takes arguments of the trees, shapes and dtypes"):
        run(compiled, tx, [BATCHES[0][:1]])
    with pytest.raises(ValueError, match="No program was compiled for a call with flush=True"):
        run(compiled, tx, batches[:1], [True])
    last = two.lower(*shapes, flush=True)
    assert last.adds is None
    assert run(last.compile(), tx, batches[:1], [True])[0][2].emitted


@pytest.mark.quick
def test_two_models_and_a_part_of_a_program():
    """Parameters of other shapes have programs of their own; inside jit the step is a part of that."""
    tx, x = accumulate(2), BATCHES[0]
    step = optax_accum.jit_step(lambda params, state, x: optax_accum.apply_gradients(tx, params, state, params))
    models = [(jnp.ones(size), tx.init(jnp.ones(size))) for size in (2, 3)]
    for _ in range(2):
        models = [step(*model, x) for model in models]
    assert [bool(optax_accum.has_updated(state)) for _, state in models] == [True, True]
    _, state = jax.jit(step)(jnp.ones(2), tx.init(jnp.ones(2)), x)
    assert state.mini_step == 1


def closing(tx):
    """Steps that close a window at each call, each in its way."""
    step = of_gradients(tx)
    return {
        "partial": functools.partial(step, flush=True),
        "default": lambda params, state, x, flush=True: step(params, state, x, flush=flush),
        "inside": lambda params, state, x: step(params, state, x, flush=True),
    }


@pytest.mark.parametrize(
    ("every", "way"),
    sweep(itertools.product([None, 3], ["partial", "default", "inside"]), but=[(3, "default"), (None, "partial")]),
)
def test_a_step_that_closes_windows_by_itself_is_traced_once(every, way):
    """Compiled ahead, too, it closes them."""
    tx, traced = accumulate(every), []
    step = closing(tx)[way]

    def counted(params, state, x, **flush):
        traced.append(flush)
        return step(params, state, x, **flush)

    counted.__signature__ = inspect.signature(step)
    two = optax_accum.jit_step(counted, donate_argnums=())
    state = run(two, tx, BATCHES[:3])[-1][-1]
    assert state.gradient_step == 3
    assert len(traced) == 1
    compiled = two.lower(start(), tx.init(start()), BATCHES[0]).compile()
    assert run(compiled, tx, BATCHES[:3])[-1][-1].gradient_step == 3


@pytest.mark.sweep
def test_a_plan_takes_it():
    """It counts the program that updates, which holds all that the other does."""
    tx = accumulate()
    step, x = optax_accum.jit_step(of_loss(tx)), jax.ShapeDtypeStruct((8, 3), jnp.float32)
    args = start(), tx.init(start()), x
    updates = step.lower(*args).compile().updates.memory_analysis()
    how = {"batch_argnums": 2, "budget": "1GB", "progress": False, "candidates": [1]}
    found = optax_accum.plan.fit(lambda _: step, *args, run=False, **how)
    assert found.rows[0]["arguments"] == updates.argument_size_in_bytes


@pytest.mark.quick
def test_what_cannot_be_a_step_is_refused():
    with pytest.raises(TypeError, match="step must be a function"):
        optax_accum.jit_step(accumulate())
    with pytest.raises(ValueError, match=r"donate_argnums must be positions of arguments: donate_argnums=\(9,\)"):
        run(optax_accum.jit_step(of_loss(accumulate()), donate_argnums=9), accumulate())
    with pytest.raises(TypeError, match=r"must hold arrays: at \[0\]\[2\] there is 'mean'. Close over all else"):
        optax_accum.jit_step(of_gradients(accumulate()))(start(), accumulate().init(start()), "mean")


@pytest.mark.sweep
def test_a_linen_train_step():
    linen = optax_accum.flax.linen

    def fun(params, batch, key, state):
        return loss(params, batch), {}

    def state():
        return linen.TrainState.create(apply_fn=None, params=start(), tx=accumulate(2), metrics=("loss",))

    step = linen.train_step(fun, num_microbatches=1)
    two, found = optax_accum.jit_step(step), []
    for each in (two, step):
        now = state()
        for x in BATCHES[:4]:
            now, metrics = each(now, x, jax.random.key(0))
        found.append(jax.tree.map(np.array, (now.params, now.opt_state, now.updates, metrics)))
    assert_equal(*found)
    assert two.one_program is None


@pytest.mark.quick
def test_a_module_of_nnx_is_refused():
    from flax import nnx

    step = optax_accum.jit_step(lambda model, optimizer, x: None)
    with pytest.raises(TypeError, match="For a step of a model and an optimizer.* take optax_accum.flax.nnx.jit_step"):
        step(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), None, BATCHES[0])
