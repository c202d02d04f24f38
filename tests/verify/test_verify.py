"""Is each planted cause found, by name, and is nothing found in sound losses?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.verify import KINDS, fault, sound_loss
from optax_accum import verify
from optax_accum._loss import ratio
from optax_accum._verify.report import Report
from tests.tiers import sweep

rng = np.random.default_rng(0)
N, D = 8, 3
X = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
Y = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
W = {"w": jnp.asarray(rng.normal(size=(D, D)), jnp.float32), "b": jnp.full((D,), 0.1, jnp.float32)}
LENGTHS = jnp.array([1, 3, 2, 3, 1, 1, 2, 3])
MASK = (jnp.arange(D)[None, :] < LENGTHS[:, None]).astype(jnp.float32)
BATCH = {"x": X, "y": Y, "mask": MASK, "label": jnp.arange(N) % D, "token": jnp.arange(N * 2).reshape(N, 2) % 5}


def outputs(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"][None])


def mse(params, batch):
    return jnp.mean((outputs(params, batch) - batch["y"]) ** 2)


def masked(params, batch):
    return jnp.sum(batch["mask"] * (outputs(params, batch) - batch["y"]) ** 2) / jnp.sum(batch["mask"])


def tokens(batch):
    return batch["mask"].sum()


def batch_norm(params, batch):
    h = outputs(params, batch)
    h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)
    return jnp.mean((h - batch["y"]) ** 2)


def info_nce(params, batch):
    logits = outputs(params, batch) @ batch["y"].T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


def dropout(params, batch, key):
    keep = jax.random.bernoulli(key, 0.8, batch["x"].shape)
    return mse(params, batch | {"x": jnp.where(keep, batch["x"] / 0.8, 0)})


def two_means(params, batch):
    return masked(params, batch) + mse(params, batch)


def ranking(params, batch):
    scores = params["table"][batch["token"]].sum((1, 2))
    return jnp.mean(jax.nn.softplus(scores[:, None] - scores[None, :]))


def with_carry(params, batch, carry):
    loss = mse(params, batch)
    return loss * (1 + carry), jax.lax.stop_gradient(loss)


def statistics(params, batch, carry):
    return mse(params, batch), 0.9 * carry + 0.1 * jnp.mean(batch["x"])


def policy_gradient(params, batch):
    logp = jax.nn.log_softmax(outputs(params, batch))[jnp.arange(len(batch["x"])), batch["label"]]
    return -jnp.mean(batch["advantage"] * jnp.exp(logp - jax.lax.stop_gradient(logp)))


def cancelling(params, batch):
    """Rows that are alike, and advantages that add up to 0: what is left of the gradient is rounding, and 1e-5."""
    each = jnp.mean(outputs(params, batch | {"x": 1 + 1e-5 * batch["x"]}) ** 2, axis=1)
    return jnp.mean(batch["advantage"] * each)


def stochastic_depth(rate):
    def loss(params, batch, key):
        h = outputs(params, batch)
        h = jnp.where(jax.random.bernoulli(key, rate), h @ params["w"] + h, h)
        return jnp.mean((h - batch["y"]) ** 2)

    return loss


def drop_path(params, batch, key):
    keep = jax.random.bernoulli(key, 0.99, (len(batch["x"]), 1))
    return jnp.mean((jnp.where(keep, outputs(params, batch), 0) - batch["y"]) ** 2)


def group_relative(params, batch):
    scores = outputs(params, batch).sum(1).reshape(-1, 2)
    rewards = batch["advantage"].reshape(-1, 2)
    return jnp.mean((rewards - rewards.mean(1, keepdims=True)) * scores)


def normalised(how):
    """Advantages as PPO and GRPO normalise them, in the loss."""

    def loss(params, batch):
        rewards = batch["reward"]
        center = 0 if how == "scaled" else rewards.mean()
        scale = 1 if how == "centred" else rewards.std() + 1e-8
        return policy_gradient(params, batch | {"advantage": (rewards - center) / scale})

    return loss


def advantages_and_values(params, batch):
    """The rewards stand in a second term, too: moved by a constant, that changes."""
    values = outputs(params, batch)[:, 0]
    return normalised("normalised")(params, batch) + jnp.mean((values - batch["reward"]) ** 2)


def closed_over(params, batch):
    return dropout(params, batch, KEY)


def in_a_loop(params, batch):
    """The key is made inside, and used in a scan: no argument, and no constant of the program."""
    key = jax.random.PRNGKey(3)
    layer = lambda h, number: (
        jnp.where(jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, h.shape), h, 0),
        None,
    )
    return mse(params, batch | {"x": jax.lax.scan(layer, batch["x"], jnp.arange(2))[0]})


def fixed_noise(params, batch):
    """Drawn from a key that is no argument, and not for rows."""
    noise = jax.random.normal(jax.random.key(4), params["w"].shape)
    return mse(params | {"w": params["w"] + 0.1 * noise}, batch)


def class_weighted(params, batch, table):
    return jnp.mean(table[batch["label"]] * (outputs(params, batch) ** 2).sum(1))


def table_in_batch(params, batch):
    return class_weighted(params, batch, batch["table"])


def noisy_masked(params, batch, key):
    return masked(params, batch | {"x": batch["x"] + jax.random.normal(key, batch["x"].shape)})


def neighbours(params, batch):
    scores = outputs(params, batch).sum(1)
    return jnp.mean(jax.nn.softplus(scores - jnp.roll(scores, 1)))


def largest_row(params, batch):
    return jnp.max((batch["x"] @ params["w"] - 1) ** 2)


@jax.custom_vjp
def clipped(params):
    return params


clipped.defvjp(lambda params: (params, None), lambda _, grads: (jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grads),))


def clipped_inside(params, batch):
    return mse(clipped(params), batch)


TABLE = {"table": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)}
ADVANTAGES = jnp.asarray((lambda a: (a - a.mean()) / a.std())(rng.normal(size=N)), jnp.float32)
REWARDS = BATCH | {"reward": jnp.asarray(rng.normal(1, 2, size=N), jnp.float32)}
NORMALISED = "normalised", "centred", "scaled"
KEY = jax.random.key(1)
MANY = {name: jnp.concatenate([leaf] * 8) for name, leaf in BATCH.items()}

PLANTED = {
    "masked mean": ("weights", masked, W, BATCH, (), {}),
    "two denominators": ("weights", two_means, W, BATCH, (), {}),
    "sum": ("sum", lambda p, b: N * jnp.sum((outputs(p, b) - b["y"]) ** 2), W, BATCH, (), {}),
    "BatchNorm": ("coupled examples", batch_norm, W, BATCH, (), {}),
    "InfoNCE": ("coupled examples", info_nce, W, BATCH, (), {}),
    "ranking of integer tokens": ("coupled examples", ranking, TABLE, {"token": BATCH["token"]}, (), {}),
    "dropout, one key": ("shared key", dropout, W, BATCH, (KEY,), {}),
    "bfloat16 sums": (
        "low-precision sum",
        mse,
        W,
        MANY,
        (),
        {"accumulator_dtype": jnp.bfloat16, "num_microbatches": 64},
    ),
    "masked mean in noise": ("weights", noisy_masked, W, BATCH, (KEY,), {"rng_argnum": 2}),
    "a table cut like rows": ("not rows", table_in_batch, W, BATCH | {"table": jnp.arange(1.0, 9.0)}, (), {}),
    **{f"{how} advantages": ("coupled examples", normalised(how), W, REWARDS, (), {}) for how in NORMALISED},
    "advantages, and values of them": ("coupled examples", advantages_and_values, W, REWARDS, (), {}),
    "a key in a closure": ("shared key", closed_over, W, BATCH, (), {}),
    "a key that is made inside": ("shared key", in_a_loop, W, BATCH, (), {}),
    "weights that are none": ("weights", mse, W, BATCH, (), {"weight_fn": lambda batch: 1.0}),
    "the largest row": ("coupled examples", largest_row, {"w": W["w"][:, 0]}, BATCH, (), {}),
    "neighbours": ("coupled examples", neighbours, W, BATCH, (), {}),
    "a clip of the gradient in the loss": ("nonlinear derivative", clipped_inside, W, BATCH, (), {}),
    "carry in the loss": ("mutable state", with_carry, W, BATCH, (jnp.float32(0.5),), {"carry_argnum": 2}),
}


# One of each kind, and those that hide it best.
EACH = [
    *("masked mean", "sum", "BatchNorm", "normalised advantages", "dropout, one key", "bfloat16 sums"),
    *("a table cut like rows", "a clip of the gradient in the loss", "carry in the loss"),
]


@pytest.mark.parametrize("name", sweep(PLANTED, but=EACH))
def test_each_planted_cause_is_found(name):
    kind, fun, params, batch, args, options = PLANTED[name]
    report = verify(fun, params, batch, *args, **options)
    assert not report.holds
    assert [cause.kind for cause in report.causes] == [kind]
    assert report.causes[0].remedy in " ".join(str(report).split())
    assert max(map(len, str(report).splitlines())) <= 80
    assert len(str(report).splitlines()) <= 24


def half(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float32 else leaf, tree)


def cross_entropy(params, batch):
    chosen = jax.nn.log_softmax(outputs(params, batch)) * jax.nn.one_hot(batch["label"], D)
    return -jnp.mean(chosen.sum(1)), {"correct": jnp.sum(batch["label"])}


def layer_norm(params, batch):
    h = outputs(params, batch)
    h = (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-3)
    return jnp.mean((h - batch["y"]) ** 2)


def embedding(params, batch):
    return jnp.mean(params["table"][batch["token"]] ** 3)


def complex_loss(params, batch):
    return jnp.mean(jnp.abs(batch["x"] @ params - batch["y"]) ** 2)


def terms(params, batch):
    return {"data": masked(params, batch), "rows": mse(params, batch)}


def term_weights(batch):
    return {"data": tokens(batch), "rows": jnp.float32(len(batch["x"]))}


SOUND = {
    "mse": (mse, W, BATCH, (), {}),
    "cross-entropy": (cross_entropy, W, BATCH, (), {"has_aux": True}),
    "masked mean": (masked, W, BATCH, (), {"weight_fn": tokens}),
    "terms": (terms, W, BATCH, (), {"weight_fn": term_weights}),
    "dropout": (dropout, W, BATCH, (KEY,), {"rng_argnum": "key"}),
    "bfloat16": (mse, half(W, jnp.bfloat16), half(BATCH, jnp.bfloat16), (), {}),
    "bfloat16 inside": (
        lambda p, b: mse(half(p, jnp.bfloat16), half(b, jnp.bfloat16)).astype("float32"),
        W,
        BATCH,
        (),
        {},
    ),
    "embedding": (embedding, TABLE, {"token": BATCH["token"]}, (), {}),
    "LayerNorm": (layer_norm, W, BATCH, (), {}),
    "complex": (complex_loss, W["w"] + 1j, BATCH, (), {}),
    "running statistics": (statistics, W, BATCH, (jnp.float32(0.0),), {"carry_argnum": "carry"}),
    "policy gradient, a loss of 0": (policy_gradient, W, BATCH | {"advantage": ADVANTAGES}, (), {}),
    "a gradient that cancels": (cancelling, W, BATCH | {"advantage": ADVANTAGES}, (), {"num_microbatches": 4}),
    "a layer dropped now and then, not at first": (stochastic_depth(0.8), W, BATCH, (KEY,), {"rng_argnum": 2}),
    "a layer dropped rarely, many micro-batches": (
        stochastic_depth(0.99),
        W,
        MANY,
        (KEY,),
        {"rng_argnum": 2, "num_microbatches": 64},
    ),
    "rows dropped rarely": (drop_path, W, MANY, (KEY,), {"rng_argnum": 2, "num_microbatches": 64}),
    "noise of no rows, of one key": (fixed_noise, W, BATCH, (), {}),
    "pairs": (group_relative, W, BATCH | {"advantage": ADVANTAGES}, (), {"group_size": 2}),
    "a table, whole": (class_weighted, W, BATCH, (jnp.arange(1.0, 9.0),), {"whole_argnums": "table"}),
    "one key, on purpose": (stochastic_depth(0.5), W, BATCH, (KEY,), {"whole_argnums": (2,)}),
}


@pytest.mark.parametrize(
    "name",
    sweep(SOUND, but=["mse", "masked mean", "terms", "dropout", "bfloat16", "a gradient that cancels", "pairs"]),
)
def test_nothing_is_found_in_a_sound_loss(name):
    fun, params, batch, args, options = SOUND[name]
    report = verify(fun, params, batch, *args, **options)
    assert report.holds, str(report)
    assert not report.causes
    assert len(report.errors) == 1 + len(jax.tree.leaves(params))
    says = "Holds: the gradient of micro-batches is that of the whole batch"
    assert " ".join(str(report).split()).startswith(says)


def test_an_impure_function_is_found_before_anything_is_compared():
    calls = []

    def counting(params, batch):
        calls.append(None)
        return mse(params, batch) * len(calls)

    report = verify(counting, W, BATCH)
    assert not report.holds
    assert not report.errors
    assert [cause.kind for cause in report.causes] == ["mutable state"]


def test_the_leaf_that_is_normalised_is_named_and_the_remedy_helps():
    report = verify(normalised("normalised"), W, REWARDS)
    assert "The leaf ['reward'] of the batch is normalised over its rows" in report.causes[0].evidence
    assert "before the call" in report.causes[0].remedy
    rewards = REWARDS["reward"]
    assert verify(policy_gradient, W, REWARDS | {"advantage": (rewards - rewards.mean()) / rewards.std()}).holds


def test_a_report_in_an_assert_is_whether_the_law_holds():
    assert verify(mse, W, BATCH)
    assert not verify(masked, W, BATCH)


def test_two_causes_are_both_found():
    report = verify(masked, W, MANY, accumulator_dtype=jnp.bfloat16, num_microbatches=16)
    assert [cause.kind for cause in report.causes] == ["low-precision sum", "weights"]


def test_dtypes_by_leaf_are_named():
    dtypes = {"w": jnp.bfloat16, "b": None}
    report = verify(mse, W, MANY, accumulator_dtype=dtypes, num_microbatches=64)
    assert [cause.kind for cause in report.causes] == ["low-precision sum"]
    assert "Added in bfloat16, the gradient is off" in " ".join(str(report).split())


@pytest.mark.parametrize(
    ("fun", "params", "batch", "options", "message"),
    [
        (mse, W, jax.tree.map(lambda leaf: leaf[:3], BATCH), {}, "needs 4 rows or more.*has 3. Pass a batch of 4"),
        (mse, W, jax.tree.map(lambda leaf: leaf[None], BATCH), {}, "has 1.*of stacked micro-batches, check the step"),
        (mse, W, BATCH, {"num_microbatches": 9}, "needs 9 rows or more.*has 8"),
        (mse, W, BATCH, {"num_microbatches": 1}, "a cut to compare: num_microbatches=1. Pass 2"),
        (outputs, W, BATCH, {}, "must return a real scalar loss"),
        (lambda p, b: mse(p, b) * jnp.nan, W, BATCH, {}, "must have a finite loss"),
        (lambda p, b: 0 * mse(p, b), W, BATCH, {}, "0 everywhere"),
        (mse, W, BATCH, {"group_size": 4}, "needs 16 rows or more of group_size=4, 4 groups.*has 8"),
        (mse, W, BATCH, {"group_size": 0}, "group_size must be an integer >= 1"),
        (mse, W, BATCH, {"group_size": None}, "group_size must be an integer >= 1: group_size=None"),
        (mse, W, BATCH, {"rtol": "0.1"}, "rtol must be a finite number above 0: rtol='0.1'"),
        (mse, W, BATCH, {"rtol": -1.0}, "rtol must be a finite number above 0: rtol=-1.0. Leave it out"),
        (mse, W, jax.tree.map(lambda leaf: leaf[:7], MANY), {"group_size": 3}, "needs 12 rows"),
        (
            mse,
            W,
            jax.tree.map(lambda leaf: leaf[:13], MANY),
            {"group_size": 3},
            "group_size=3, and the batch has 13 rows. Pass 12 or 15",
        ),
        (
            lambda p, b: mse(p, {"x": b["x"].reshape(8, 3), "y": b["y"]}),
            W,
            BATCH,
            {},
            "a number of rows that is written",
        ),
    ],
)
def test_bad_input(fun, params, batch, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        verify(fun, params, batch, **options)


def test_leaves_that_hold_no_number_are_no_matter():
    """Empty ones, and a key for each row."""

    def ranked(params, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (D,)))(batch["key"])
        scores = outputs(params, batch | {"x": batch["x"] + 0.1 * noise}).sum(1)
        return jnp.mean(jax.nn.softplus(scores[:, None] - scores[None])) + mse(params, batch)

    empty = BATCH | {"none": jnp.zeros((N, 0))}
    assert verify(mse, W, empty).holds
    assert [cause.kind for cause in verify(masked, W, empty).causes] == ["weights"]
    report = verify(ranked, W, empty | {"key": jax.random.split(jax.random.key(0), N)})
    assert [cause.kind for cause in report.causes] == ["coupled examples"]


def test_a_carry_that_becomes_nan_is_named():
    """Later micro-batches begin with it."""
    fun = lambda params, batch, carry: (mse(params, batch) * carry, carry * jnp.nan)
    report = verify(fun, W, BATCH, jnp.float32(1.0), carry_argnum=2)
    assert [cause.kind for cause in report.causes] == ["mutable state"]


@pytest.mark.parametrize("size", [2, 4])
def test_groups_that_were_not_declared_are_refused_with_their_size(size):
    def loss(params, batch):
        scores = outputs(params, batch).sum(1).reshape(-1, size)
        return jnp.mean(jax.nn.softplus(scores[:, 0] - scores[:, -1]))

    batch = jax.tree.map(lambda leaf: leaf[: 4 * size], MANY)
    with pytest.raises(ValueError, match=f"it raised.*pass group_size={size}, with which it runs"):
        verify(loss, W, batch)
    assert verify(loss, W, batch, group_size=size).holds


def test_a_leaf_without_rows_that_fun_cannot_take_cut_is_named():
    def loss(params, batch):
        return jnp.mean((batch["x"] @ batch["table"] @ params["w"] - batch["y"]) ** 2)

    batch = {"x": jnp.ones((N, N)), "y": BATCH["y"], "table": BATCH["x"]}
    with pytest.raises(ValueError, match=r"With all of the leaf \['table'\] it takes.*whole_argnums"):
        verify(loss, {"w": W["w"]}, batch)


def test_an_argument_as_long_as_the_batch_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"argument 2\['t'\] has shape \(8,\), the batch 8 rows.*to batch_argnums.*whole_argnums=2"
    ):
        verify(lambda p, b, a: class_weighted(p, b, a["t"]), W, BATCH, {"t": jnp.arange(1.0, 9.0)})


@pytest.mark.parametrize("number", range(3, 4))
def test_nothing_is_found_in_a_sample_of_the_benchmark(number):
    report = sound_loss(number).report()
    assert report.holds, str(report)


@pytest.mark.parametrize("kind", KINDS[:1])
def test_a_sample_of_the_faults_of_the_benchmark_is_found(kind):
    report = fault(kind, 0).report()
    assert [cause.kind for cause in report.causes] == [kind]


def test_the_losses_of_the_benchmark_differ():
    assert len({sound_loss(number).name for number in range(48)}) == 48


@pytest.mark.parametrize(("leaves", "says"), [(8, None), (9, "and 1 other, nearer"), (10, "and 2 others, nearer")])
def test_a_report_shows_the_eight_leaves_that_are_farthest(leaves, says):
    errors = {f"leaf {number}": 1.0 + number for number in range(leaves)}
    lines = str(Report(True, errors, dict.fromkeys(errors, 1.0), (), 8, 2, False)).splitlines()
    rows = lines[1 + [line.split()[:2] for line in lines].index(["error", "limit"]) :]
    assert [line.split()[-1] for line in rows[:8]] == [str(number) for number in range(leaves)][:-9:-1]
    assert [line.strip() for line in rows[8:]] == [says] * (says is not None)


# Several arguments that hold the batch.


def of_two(params, x, key, target):
    return dropout(params, {"x": x, "y": target["y"]}, key)


def masked_of_two(params, x, target):
    return masked(params, {"x": x} | target)


TARGET = {name: BATCH[name] for name in ("y", "mask")}
SEVERAL = {
    "a key between them": (of_two, (KEY, TARGET), {"batch_argnums": (1, "target"), "rng_argnum": "key"}, []),
    "a key for all": (of_two, (KEY, TARGET), {"batch_argnums": (1, 3)}, ["shared key"]),
    "a mean of means": (masked_of_two, (TARGET,), {"batch_argnums": (1, 2)}, ["weights"]),
    "weighed": (
        masked_of_two,
        (TARGET,),
        {"batch_argnums": (1, 2), "weight_fn": lambda x, target: target["mask"].sum()},
        [],
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_arguments_may_hold_the_batch(name):
    fun, args, options, kinds = SEVERAL[name]
    report = verify(fun, W, BATCH["x"], *args, **options)
    assert [cause.kind for cause in report.causes] == kinds, str(report)
    assert ("the key in argument 2" in " ".join(str(report).split())) == (kinds == ["shared key"])


def test_a_batch_that_is_one_array_is_named():
    report = verify(lambda w, x: jnp.mean(((x - x.mean(0, keepdims=True)) @ w - 1) ** 2), jnp.ones(D), BATCH["x"])
    assert report.causes[0].evidence.startswith("The batch is normalised over its rows")


def test_a_leaf_of_one_of_them_is_named():
    def loss(params, x, target):
        reward = (target["reward"] - target["reward"].mean()) / target["reward"].std()
        return policy_gradient(params, REWARDS | {"x": x, "advantage": reward} | target)

    target = {name: REWARDS[name] for name in ("reward", "label")}
    report = verify(loss, W, REWARDS["x"], target, batch_argnums=(1, 2))
    assert "The leaf ['target']['reward'] of the batch is normalised over its rows" in " ".join(str(report).split())


class Metric:
    """A record of a trainer, which is no pytree."""

    def __init__(self, params, batch):
        self.total, self.count = masked(params, batch) * tokens(batch), tokens(batch)


def test_a_loss_may_bring_its_weight(monkeypatch):
    """By `weight_of`, which has to be named, or as a record that counts as a Ratio."""
    options = {"has_aux": True}
    with_tokens = lambda params, batch: (masked(params, batch), tokens(batch))
    report = verify(with_tokens, W, BATCH, **options)
    assert [cause.kind for cause in report.causes] == ["weights"]
    verify(with_tokens, W, BATCH, weight_of=lambda value, aux: aux, **options).check()
    monkeypatch.setattr(ratio, "_RECORDS", {Metric: ("total", "count")})
    verify(Metric, W, BATCH).check()


def test_messages_name_options_that_verify_has():
    with pytest.raises(ValueError, match=r"argument 2 has shape \(8, 3\).*batch_argnums.*whole_argnums=2"):
        verify(lambda params, x, y: mse(params, {"x": x, "y": y}), W, BATCH["x"], BATCH["y"])
    with pytest.raises(TypeError, match=r"params must be of floating point.*\['n'\] there is int32\[\]. Pass it in"):
        verify(mse, W | {"n": jnp.int32(3)}, BATCH)


def test_a_micro_batch_without_a_token_is_no_randomness():
    """Its loss is 0 / 0, in the cut batch alone: no key is asked for, and no mean over keys is taken."""
    x = jnp.arange(1.0, 17).reshape(16, 1) * jnp.array([[1.0, 0.5]]) / 9
    loss = lambda params, batch: (
        jnp.sum(batch["m"] * jnp.tanh(batch["x"] @ params["w"]) ** 2) / batch["m"].sum(),
        batch["m"].sum(),
    )
    batch = {"x": x, "m": jnp.array([1.0, 1, 0, 1] * 4)}
    options = {"num_microbatches": 4, "has_aux": True, "weight_of": lambda value, aux: aux}
    report = verify(loss, {"w": jnp.ones(2)}, batch, **options)
    assert not report.holds
    assert not report.random
    assert "Has a micro-batch no tokens?" in str(report)


def test_a_report_tells_what_it_could_not_see():
    """The mean of means of a bfloat16 loss may be within its rounding."""
    narrow = lambda params, batch: masked(*half((params, batch), jnp.bfloat16)).astype(jnp.float32)
    for loss, sees in ((narrow, False), (masked, True)):
        report = verify(loss, W, BATCH, weight_fn=tokens)
        assert report.holds
        assert ("Check once in float32." not in " ".join(str(report).split())) == sees


# What is said of losses that are no means over rows.


def shifts(params, batch):
    """TD learning: a row needs the value of the next one."""
    v = (batch["x"] @ params["w"])[:, 0]
    return jnp.mean((batch["y"][:-1, 0] + 0.9 * jax.lax.stop_gradient(v[1:]) - v[:-1]) ** 2)


def importance(params, batch):
    weights = batch["mask"][:, 0] / jnp.max(batch["mask"][:, 0])
    return jnp.mean(weights * jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, 1))


def discrepancy(params, batch):
    """MMD, but for what no parameter moves."""
    near = lambda a, b: jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1)).mean()
    h = batch["x"] @ params["w"]
    return near(h, h) - 2 * near(h, batch["y"])


@jax.custom_vjp
def injected(h, term):
    return h


injected.defvjp(lambda h, term: (h, ()), lambda _, g: (g, jnp.ones(())))


def with_injected_term(params, batch):
    h = batch["x"] @ params["w"]
    return jnp.mean((injected(h, jnp.mean(h.mean(0) ** 2)) - batch["y"]) ** 2)


COUPLED = {
    "rows that are shifted": (shifts, "coupled examples", "what a row needs of the next one, as in TD learning"),
    "weights over their maximum": (importance, "weights", "Importance weights that are divided by their maximum"),
    "MMD": (discrepancy, "not rows", "as in MMD, that would keep all of them whole"),
    "an injected term": (with_injected_term, "nonlinear derivative", "add that term to the loss instead"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_the_remedy_fits_a_loss_that_is_no_mean_over_rows(name):
    loss, kind, says = COUPLED[name]
    rows = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rows.normal(size=shape), jnp.float32)
    batch = {"x": draw(8, 4), "y": draw(8, 3), "mask": jnp.exp(draw(8, 3))}
    (cause,) = verify(loss, {"w": draw(4, 3)}, batch).causes
    assert cause.kind == kind, cause
    assert says in cause.remedy
