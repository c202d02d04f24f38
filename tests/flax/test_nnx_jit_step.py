"""Two programs for a train step of NNX modules: the variables are those after one, and what a call hands in and out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_accum
from optax_accum.flax._versions import as_pure
from optax_accum.flax.nnx import Optimizer, jit_step, train_step
from tests.tiers import sweep
from tests.versions import flax_before

needs_masked = pytest.mark.skipif(flax_before(0, 12), reason="Flax 0.12: a masked state")
BATCHES = [np.float32(np.random.default_rng(i).normal(size=(4, 3))) for i in range(6)]


class Net(nnx.Module):
    """With statistics, random streams, and one variable in two places."""

    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(3, 4, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.outer.bias = self.inner.bias

    def __call__(self, x):
        return self.drop(self.norm(jnp.tanh(self.inner(x)))) * self.outer(x)


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def made(every, net=Net, of=Optimizer, **options):
    model = net(nnx.Rngs(0))
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), every, **options)
    return model, of(model, tx, wrt=nnx.Param, **({"metrics": ("loss",)} if of is Optimizer else {}))


def of_package():
    return train_step(loss, num_microbatches=1, exact=False)  # BatchNorm of each call


def of_user(model, optimizer, x, flush=None):
    """A step of the user's own, which reads the model's gradients by Flax's function."""
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads, flush=flush, metrics={"loss": value})
    return optimizer.window_metrics()


def variables(model, optimizer):
    def number(leaf):
        return np.array(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return jax.tree.map(number, [as_pure(nnx.state(node)) for node in (model, optimizer)])


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)


def after(step, nodes, flushes=(None,) * 6):
    found = []
    for x, flush in zip(BATCHES, flushes, strict=True):
        told = step(*nodes, x) if flush is None else step(*nodes, x, flush=flush)
        found.append(jax.tree.map(np.array, (told, *variables(*nodes))))
    return found


FLUSHES = (False, True, False, False, True, False)


@pytest.mark.parametrize(("every", "flushes"), [*sweep([(2, (None,) * 6)]), (None, FLUSHES)], ids=["every=2", "flush"])
def test_the_variables_are_those_after_one_program(every, flushes):
    two = jit_step(of_package())
    same(after(two, made(every), flushes), after(of_package(), made(every), flushes))
    assert two.one_program is None


@pytest.mark.sweep
def test_a_step_of_the_user_s_own():
    two, one = jit_step(nnx.jit(of_user)), nnx.jit(of_user)
    nodes = made(3)
    got = after(two, nodes)
    same(got, after(one, made(3)))
    assert two.one_program is None
    assert int(nodes[1].updates[...]) == 2


@pytest.mark.sweep
@needs_masked
@pytest.mark.parametrize("within", [True, *sweep([False])], ids=["in the window", "around the window"])
def test_a_state_with_masked_parameters(within):
    """Flax keeps what stands for one as the value of a variable, a tree without leaves."""

    def nodes():
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        labels = lambda params: jax.tree.map_with_path(lambda path, _: "b" if "bias" in str(path) else "w", params)
        of = lambda inner: optax.partition({"w": inner, "b": optax.sgd(0.1)}, labels)
        accumulating = functools.partial(optax_accum.accumulate_gradients, every=2)
        tx = accumulating(of(optax.adam(0.1))) if within else of(accumulating(optax.adam(0.1)))
        return model, Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))

    same(after(jit_step(of_user), nodes()), after(nnx.jit(of_user), nodes()))


@pytest.mark.sweep
def test_a_program_that_only_adds_takes_no_moments_and_returns_no_parameters():
    nodes = made(2)
    lowered = jit_step(of_package()).lower(*nodes, BATCHES[0])
    numbers = [len(jax.tree.leaves(program.args_info)) for program in (lowered.adds, lowered.updates)]
    inner = len(jax.tree.leaves(as_pure(nodes[1].opt_state.inner_opt_state)))
    assert numbers[1] - numbers[0] >= inner
    results = [len(jax.tree.leaves(program.out_info)) for program in (lowered.adds, lowered.updates)]
    assert results[1] - results[0] >= inner + len(jax.tree.leaves(as_pure(nnx.state(nodes[0], nnx.Param))))
    compiled = lowered.compile()
    assert (
        compiled.adds.memory_analysis().argument_size_in_bytes
        < compiled.updates.memory_analysis().argument_size_in_bytes
    )


@pytest.mark.sweep
def test_a_restored_window_goes_on():
    """The number of micro-steps is read from the state that comes from elsewhere."""
    nodes, whole = made(4), made(4)
    same_step = of_package()
    for x in BATCHES[:3]:
        jit_step(of_package())(*nodes, x)  # another program each time, as after a restart
    for x in BATCHES[:3]:
        same_step(*whole, x)
    two = jit_step(of_package())
    two(*nodes, BATCHES[3]), same_step(*whole, BATCHES[3])
    same(variables(*nodes), variables(*whole))
    assert int(nodes[1].updates[...]) == 1
    nodes[1].discard_window()
    two(*nodes, BATCHES[4])
    assert int(nodes[1].opt_state.mini_step[...]) == 1


class Tied(Net):
    """With a module in two places."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.outer = self.inner


REASONS = {
    "a module in two places": (lambda: made(2, Tied), "a module stands in two places"),
    "a schedule": (lambda: made(lambda step: 2 + step), "only the device knows when a window closes"),
    "an optimizer of Flax": (lambda: made(2, of=nnx.Optimizer), "does not make one micro-step of each state"),
}


@pytest.mark.parametrize("what", sweep(REASONS, but=["a module in two places", "an optimizer of Flax"]))
def test_one_program_says_why(what):
    make, reason = REASONS[what]

    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        options = {"metrics": {"loss": value}} if isinstance(optimizer, Optimizer) else {}
        optimizer.update(model, grads, **options)
        return value

    two = jit_step(step)
    same(after(two, make()), after(nnx.jit(step), make()))
    assert reason in two.one_program


def test_what_is_no_optimizer():
    model, optimizer = made(2)
    with pytest.raises(TypeError, match=r"must be an optax_accum.flax.nnx.Optimizer: it is a .*Net. The order is"):
        jit_step(of_package())(optimizer, model, BATCHES[0])


def test_it_is_planned_with_its_largest_program():
    nodes = made(2)
    fit = functools.partial(optax_accum.plan.fit, lambda k: jit_step(of_package()), *nodes, BATCHES[0], batch_argnums=2)
    assert fit(run=False, budget="1GB", candidates=[1], progress=False).num_microbatches == 1
    with pytest.raises(TypeError, match="that of jit_step, which runs another"):
        fit(progress=False)
