"""Train steps in the shapes of public ones, each against its own whole batch: three updates, their logs, checkpoints."""

import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests import ROOT
from tests.tiers import sweep

pytestmark = pytest.mark.usefixtures("rank_promotion")

EVERY, ROWS, LENGTH, WORDS, WIDTH = 3, 12, 6, 11, 8
KEY = jax.random.key(0)


def data(seed=0):
    """Three batches: sentences that are padded, images, graphs of which some labels are NaN."""
    rng = np.random.default_rng(seed)
    for _ in range(3):
        lengths = rng.integers(2, LENGTH + 1, (ROWS, 1))
        labels = rng.normal(size=(ROWS, 2)).astype("f")
        labels[rng.uniform(size=labels.shape) < 0.4] = np.nan
        yield {
            "tokens": rng.integers(1, WORDS, (ROWS, LENGTH)) * (np.arange(LENGTH) < lengths),
            "x": rng.normal(size=(ROWS, 4, 4, 2)).astype("f"),
            "labels": labels,
        }


def matrices(**shapes):
    keys = jax.random.split(KEY, len(shapes))
    return {name: 0.5 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}


def saved(carry):
    """What a checkpoint gives back."""
    return pickle.loads(pickle.dumps(jax.device_get(carry)))


def trained(trainer, every):
    """Trains on the whole batches, or on their parts; all is saved and restored after each call."""
    carry, step = trainer(every)
    step, log = jax.jit(step), []
    for batch in data():
        for part in range(every):
            rows = slice(part * ROWS // every, (part + 1) * ROWS // every)
            carry, metrics = step(saved(carry), {name: leaf[rows] for name, leaf in batch.items()})
        log.append(metrics)
    return carry[0], log


# Across calls: a call is a micro-step.


def optimizer(inner, every):
    return inner if every == 1 else optax_accum.accumulate_gradients(inner, every)


def updated(tx, grads, carry, weight, loss):
    """Returns the new parameters and state, and the loss to log: the window's, where `tx` accumulates."""
    params, state = carry
    if isinstance(state, optax_accum.AccumulationState):
        params, state = optax_accum.apply_gradients(tx, grads, state, params, weight=weight, value=loss)
        return (params, state), state.mean_args["value"].mean
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss


def cross_entropy(logits, tokens):
    """The mean over the tokens that are no padding; logits [rows, length - 1, words]."""
    errors = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(errors * (tokens[:, 1:] > 0)) / jnp.sum(tokens[:, 1:] > 0)


def words_that_count(batch):
    return jnp.sum(batch["tokens"][:, 1:] > 0)


def bigrams(params, tokens):
    return jnp.tanh(params["embed"][tokens[:, :-1]]) @ params["out"]


def nanodo(every):
    """It logs norms of the gradient, of the parameters and of the update: inside the wrapper, these are the window's."""
    norm = lambda name: optax.snapshot(name, optax.tree.norm)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 1, 4)
    inner = optax.chain(norm("grad"), optax.clip_by_global_norm(0.1), optax.adamw(schedule), norm("step"))
    params, tx = matrices(embed=(WORDS, WIDTH), out=(WIDTH, WORDS)), optimizer(inner, every)

    def step(carry, batch):
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(bigrams(p, batch["tokens"]), batch["tokens"]))(
            carry[0]
        )
        carry, loss = updated(tx, grads, carry, words_that_count(batch), loss)
        norms = {name: optax.tree.get(carry[1], name) for name in ("grad", "step")}
        return carry, {"loss": loss, "params": optax.tree.norm(carry[0]), **norms}

    return (params, tx.init(params)), step


def gpt_with_apply_every(every):
    """`optax.apply_every` stood at the end of its chain; the wrapper stands around the chain."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-0.05))
    params, tx = matrices(embed=(WORDS, WIDTH), out=(WIDTH, WORDS)), optimizer(inner, every)

    def step(carry, batch):
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(bigrams(p, batch["tokens"]), batch["tokens"]))(
            carry[0]
        )
        return updated(tx, grads, carry, words_that_count(batch), loss)

    return (params, tx.init(params)), step


def lm_with_a_schedule_outside(every):
    """The learning rate multiplies what the optimizer returns: by the number of updates, before it moves on."""
    params, tx = matrices(embed=(WORDS, WIDTH), out=(WIDTH, WORDS)), optimizer(optax.scale_by_adam(), every)
    schedule = optax.linear_schedule(0.1, 0.01, 3)

    def step(carry, batch):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(bigrams(p, batch["tokens"]), batch["tokens"]))(params)
        accumulates = isinstance(state, optax_accum.AccumulationState)
        rate = schedule(state.gradient_step if accumulates else state.count)
        extra = {"weight": words_that_count(batch), "value": loss} if accumulates else {}
        updates, state = tx.update(grads, state, params, **extra)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return (params, state), {"loss": state.mean_args["value"].mean if accumulates else loss, "rate": rate}

    return (params, tx.init(params)), step


def graphs_with_nan_labels(every):
    """Nodes of all graphs stand in one array; a label that is NaN counts for nothing, in the loss and in the weight."""
    params, tx = matrices(node=(2, WIDTH), out=(WIDTH, 2)), optimizer(optax.adam(0.05), every)

    def step(carry, batch):
        nodes, graph = batch["x"].reshape(-1, 2), jnp.repeat(jnp.arange(len(batch["x"])), 16)
        known = ~jnp.isnan(batch["labels"])

        def loss(params):
            h = jax.ops.segment_sum(jnp.tanh(nodes @ params["node"]), graph, len(batch["x"]))
            error = (h @ params["out"] - jnp.where(known, batch["labels"], 0)) ** 2
            return jnp.sum(jnp.where(known, error, 0)) / jnp.sum(known)

        value, grads = jax.value_and_grad(loss)(carry[0])
        return updated(tx, grads, carry, known.sum(), value)

    return (params, tx.init(params)), step


def haiku_transformer(every):
    """Attention that masks what is padded. With SGD: the true gradient of a key's bias is zero."""
    hk = pytest.importorskip("haiku", reason="pip install --group ecosystem")

    def forward(tokens):
        h = hk.Embed(WORDS, WIDTH)(tokens)
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None, None] & (tokens > 0)[:, None, None]
        h += hk.MultiHeadAttention(2, WIDTH // 2, w_init=hk.initializers.VarianceScaling(1.0))(h, h, h, causal)
        return hk.Linear(WORDS)(hk.LayerNorm(-1, True, True)(h))[:, :-1]

    net, tx = hk.without_apply_rng(hk.transform(forward)), optimizer(optax.sgd(0.3, 0.9), every)
    params = net.init(KEY, jnp.ones((1, LENGTH), int))

    def step(carry, batch):
        tokens = batch["tokens"]
        loss, grads = jax.value_and_grad(lambda params: cross_entropy(net.apply(params, tokens), tokens))(carry[0])
        return updated(tx, grads, carry, words_that_count(batch), loss)

    return (params, tx.init(params)), step


ACROSS = [nanodo, gpt_with_apply_every, lm_with_a_schedule_outside, graphs_with_nan_labels, haiku_transformer]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "trainer", sweep(ACROSS, but=[nanodo, haiku_transformer]), ids=lambda trainer: trainer.__name__
)
def test_a_public_trainer_across_calls(trainer):
    whole, log = trained(trainer, 1)
    cut, own = trained(trainer, EVERY)
    chex.assert_trees_all_close(cut, whole, atol=2e-6)
    chex.assert_trees_all_close(own, log, rtol=2e-5)
    assert not np.allclose(*(jax.tree.leaves(tree)[0] for tree in (whole, trainer(1)[0][0])), atol=1e-2)


# Within a call: a call is an update.


def vae(gradient):
    """Noise is drawn for the whole batch, from the key of the call."""
    params = matrices(encode=(32, 2 * WIDTH), decode=(WIDTH, 32))

    def loss(params, batch, key):
        x = batch["x"].reshape(-1, 32)
        mean, log_scale = jnp.split(x @ params["encode"], 2, -1)
        z = mean + jnp.exp(log_scale) * jax.random.normal(key, mean.shape)
        apart = 0.5 * jnp.sum(mean**2 + jnp.exp(2 * log_scale) - 1 - 2 * log_scale, -1)
        return jnp.mean(jnp.sum((z @ params["decode"] - x) ** 2, -1) + apart)

    tx, compute = optax.adam(1e-3), gradient(loss)

    def step(carry, batch):
        params, state, count = carry
        value, grads = compute(params, batch, jax.random.fold_in(KEY, count))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, count + 1), value

    return (params, tx.init(params), 0), step


def rnn(gradient):
    """A scan over time, from zeros."""
    params = matrices(embed=(WORDS, WIDTH), cell=(WIDTH, WIDTH), out=(WIDTH, WORDS))

    def loss(params, batch):
        tokens = batch["tokens"]
        cell = lambda h, x: (h := jnp.tanh(x + h @ params["cell"]), h)
        inputs = jnp.moveaxis(params["embed"][tokens[:, :-1]], 1, 0)
        _, hidden = jax.lax.scan(cell, jnp.zeros((len(tokens), WIDTH)), inputs)
        return cross_entropy(jnp.moveaxis(hidden, 0, 1) @ params["out"], tokens)

    tx, compute = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05)), gradient(loss)

    def step(carry, batch):
        value, grads = compute(carry[0], batch)
        return updated(tx, grads, carry, None, value)

    return (params, tx.init(params)), step


@pytest.mark.sweep
@pytest.mark.parametrize("trainer", sweep([vae, rnn], but=[vae]), ids=lambda trainer: trainer.__name__)
def test_a_public_trainer_within_a_call(trainer):
    """In micro-batches of 5, 5 and 2 rows."""
    whole, log = trained(lambda _: trainer(jax.value_and_grad), 1)
    cut, own = trained(lambda _: trainer(lambda loss: optax_accum.value_and_grad(loss, microbatch_size=5)), 1)
    chex.assert_trees_all_close(cut, whole, atol=5e-6)
    np.testing.assert_allclose(own, log, rtol=1e-5)


@pytest.mark.sweep
def test_a_resnet_under_pmap_with_batch_norm():
    """Each device normalises over its own rows, of which it takes two at a time; gradients and statistics are averaged."""
    params = matrices(stem=(3, 3, 2, WIDTH), block=(3, 3, WIDTH, WIDTH), out=(WIDTH, 2))
    convolve = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

    def normed(x):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5), (mean, variance)

    def loss(params, batch):
        x, first = normed(convolve(batch["x"], params["stem"]))
        y, second = normed(convolve(jax.nn.relu(x), params["block"]))
        labels = jnp.nan_to_num(batch["labels"])
        return jnp.mean((jax.nn.relu(x + y).mean((1, 2)) @ params["out"] - labels) ** 2), (first, second)

    def run(compute):
        def step(params, statistics, batch):
            (value, new), grads = jax.lax.pmean(compute(params, batch), "batch")
            statistics = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, statistics, new)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), statistics, value

        step, log = jax.pmap(step, "batch", devices=jax.devices()[:2]), []
        twice = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), tree)
        carry = twice(params), twice([(jnp.zeros(WIDTH), jnp.ones(WIDTH))] * 2)
        carry = carry[0], tuple(carry[1])
        for batch in data():
            *carry, value = step(*carry, {name: leaf.reshape(2, 6, *leaf.shape[1:]) for name, leaf in batch.items()})
            log.append(value)
        return carry, log

    whole = run(jax.value_and_grad(loss, has_aux=True))
    chex.assert_trees_all_close(run(optax_accum.value_and_grad(loss, 3, has_aux=True)), whole, atol=1e-5)


def test_an_equinox_score_model_through_accumulate():
    """The gradient function is Equinox's own; each row has a time and a key of its own, drawn for the whole batch."""
    eqx = pytest.importorskip("equinox", reason="pip install --group ecosystem")
    model = eqx.nn.MLP(33, 32, WIDTH, 1, key=KEY)
    tx = optax.adam(1e-2)

    def score(model, x, t, key):
        noise = jax.random.normal(key, x.shape)
        return jnp.mean((model(jnp.append(x + t * noise, t)) * t + noise) ** 2)

    loss = lambda model, x, t, keys: jnp.mean(jax.vmap(score, (None, 0, 0, 0))(model, x, t, keys))

    def run(gradient):
        @eqx.filter_jit
        def step(model, state, x, key):
            times, keys = jax.random.uniform(key, (ROWS,)), jax.random.split(key, ROWS)
            value, grads = gradient(model, x, times, keys)
            updates, state = tx.update(grads, state)
            return eqx.apply_updates(model, updates), state, value

        now, state, log = model, tx.init(eqx.filter(model, eqx.is_inexact_array)), []
        for i, batch in enumerate(data()):
            now, state, value = step(now, state, batch["x"].reshape(-1, 32), jax.random.fold_in(KEY, i))
            log.append(value)
        return eqx.filter(now, eqx.is_array), log

    def in_parts(model, *batch):
        params, static = eqx.partition(model, eqx.is_inexact_array)
        of = lambda params, *part: eqx.filter_value_and_grad(loss)(eqx.combine(params, static), *part)
        return optax_accum.reduce_microbatches(of, microbatch_size=5, batch_argnums=(1, 2, 3))(params, *batch)

    whole = run(eqx.filter_value_and_grad(loss))
    chex.assert_trees_all_close(run(in_parts), whole, atol=5e-6)


def test_numpyro_svi_over_three_updates():
    """Rows are scaled by the number of micro-batches, as docs/other_libraries.md says; what it logs is scaled alike."""
    numpyro = pytest.importorskip("numpyro", reason="pip install --group ecosystem")
    from numpyro.infer import SVI, Trace_ELBO, autoguide

    def model(x, y, scale):
        w = numpyro.sample("w", numpyro.distributions.Normal(jnp.zeros((32, 2)), 1.0).to_event(2))
        with numpyro.handlers.scale(scale=scale):
            numpyro.sample("y", numpyro.distributions.Normal(x @ w, 1.0).to_event(2), obs=y)

    def run(every):
        inner = optax.adam(0.05)
        tx = optax_accum.accumulate_gradients(inner, every) if every > 1 else inner
        svi = SVI(model, autoguide.AutoDelta(model), numpyro.optim.optax_to_numpyro(tx), Trace_ELBO())
        rows = [(batch["x"].reshape(-1, 32), np.nan_to_num(batch["labels"])) for batch in data()]
        state, step, log = svi.init(KEY, *rows[0], 1.0), jax.jit(svi.update), []
        for x, y in rows:
            losses = []
            for part in zip(np.split(x, every), np.split(y, every), strict=True):
                state, loss = step(state, *part, float(every))
                losses.append(loss)
            log.append(np.mean(losses))  # of one window
        return svi.get_params(state), log

    chex.assert_trees_all_close(run(EVERY), run(1), atol=2e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras, of NumPy 2
def test_the_fit_of_keras(monkeypatch):
    """The class on the page, with weights of rows, a callback, a metric, BatchNorm and dropout."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="pip install --group ecosystem")
    page = (ROOT / "docs" / "coming_from.md").read_text()
    (code,) = re.findall(r"^(class Model\(keras\.Model\):\n(?:    .*\n|\n)*)", page, re.MULTILINE)
    scope = {"keras": keras, "optax_accum": optax_accum}
    exec(code, scope)
    (x, y), weight = (
        next((batch["x"].reshape(-1, 32), batch["x"][:, 0, 0]) for batch in data()),
        np.linspace(0, 1, ROWS),
    )

    def run(kind):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((32,))
        h = keras.layers.BatchNormalization()(keras.layers.Dense(WIDTH, "tanh")(inputs))
        model = kind(inputs, keras.layers.Dense(2)(keras.layers.Dropout(0.3, seed=1)(h)))
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        how = {"batch_size": ROWS, "epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [rates]}
        history = model.fit(x, y, sample_weight=weight, **how).history
        return model.get_weights(), history

    chex.assert_trees_all_close(run(scope["Model"]), run(keras.Model), rtol=1e-5, atol=1e-6)
