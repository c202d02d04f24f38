"""Micro-batches that count nothing: is what their loss divides by zero, is the sum that it divides zero, too?

Else its guard hides a loss that the whole batch has, and a warning says so.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_accum
from tests.tiers import sweep

ROWS, TOKENS, WIDTH, CLASSES = 8, 6, 4, 5
RANDOM = np.random.default_rng(0)
NOTHING = slice(3, 5)  # the rows of the second micro-batch


def normal(*shape):
    return RANDOM.normal(size=shape).astype("f")


def some(*shape):
    """A mask, of which these rows have nothing."""
    mask = RANDOM.random(shape) < 0.6
    mask[NOTHING], mask[0], mask[-1] = False, True, True
    return mask


PARAMS = {"w": normal(WIDTH), "o": normal(WIDTH, CLASSES)}
BATCH = {
    "x": normal(ROWS, WIDTH),
    "h": normal(ROWS, TOKENS, WIDTH),
    "image": normal(ROWS, 4, 4, WIDTH),
    "row": some(ROWS),
    "token": some(ROWS, TOKENS),
    "pixel": some(ROWS, 4, 4),
    "v": 1 + np.abs(normal(ROWS)),
}
BATCH["label"] = np.where(BATCH["token"], RANDOM.integers(0, CLASSES, (ROWS, TOKENS)), -1)
BATCH["object"] = np.where(BATCH["token"], 1 + RANDOM.integers(0, CLASSES - 1, (ROWS, TOKENS)), 0)
BATCH["pad"] = ~BATCH["token"]
BATCH["length"] = np.where(BATCH["row"], RANDOM.integers(1, TOKENS, ROWS), 0)
BATCH["class"] = np.where(BATCH["row"], RANDOM.integers(1, CLASSES, ROWS), 0)
BATCH["known"] = BATCH["v"] * BATCH["row"]
TABLE = np.arange(1, CLASSES + 1, dtype="f")


def rows(p, b):
    return (b["x"] @ p["w"] - 1) ** 2


def logits(p, b):
    return b["h"] @ p["o"]


def tokens(p, b):
    labels = jnp.maximum(b["label"], 0)
    return optax.softmax_cross_entropy_with_integer_labels(logits(p, b), labels)


def focal(p, b):
    return optax.sigmoid_focal_loss(logits(p, b), jax.nn.one_hot(b["label"], CLASSES)).sum(-1)


def pixels(p, b):
    return (b["image"] @ p["w"]) ** 2


def as_float(mask):
    return mask.astype(jnp.float32)


def by(mask):
    """The sum of a loss of each row, or token, times a mask, and of the mask."""
    return lambda p, b, each=None: (
        jnp.sum(mask(b) * (tokens(p, b) if mask(b).ndim > 1 else rows(p, b))),
        mask(b).sum(),
    )


def where(test, count=None):
    """The same by a choice, of a count that is written in another way."""
    return lambda p, b: (jnp.sum(jnp.where(test(b), tokens(p, b), 0)), (count or test)(b).sum())


def before(length):
    return jnp.arange(TOKENS)[None] < length[:, None]


def in_chunks(p, b):
    """As a head in chunks of tokens, whose loop carries both sums."""
    h, labels = b["h"].reshape(-1, 3, WIDTH), b["label"].reshape(-1, 3)

    @jax.checkpoint
    def of_chunk(h, labels):
        each = optax.softmax_cross_entropy_with_integer_labels(h @ p["o"], jnp.maximum(labels, 0))
        return jnp.sum(jnp.where(labels >= 0, each, 0))

    def step(carry, chunk):
        return (carry[0] + of_chunk(*chunk), carry[1] + (chunk[1] >= 0).sum()), None

    return lax.scan(step, (0.0, 0), (h, labels))[0]


def of_each_row(p, b):
    """Means of sequences, of those that have a token."""
    mask = as_float(b["token"])
    means = jnp.sum(mask * tokens(p, b), 1) / jnp.maximum(mask.sum(1), 1)
    return means.sum(), (mask.sum(1) > 0).sum()


def of_layers(p, b):
    """A loop over tokens, of which each adds to what its row has."""

    def step(carry, token):
        h, mask = token
        return carry + mask * (h @ p["w"]) ** 2, None

    along = jnp.moveaxis(b["h"], 1, 0), as_float(b["token"]).T
    return lax.scan(step, jnp.zeros(len(b["x"])), along)[0].sum(), b["token"].sum()


def safe(p, b):
    """What is left out is made harmless before the logarithm."""
    return jnp.sum(jnp.log(jnp.where(b["row"], 1 + rows(p, b), 1.0))), b["row"].sum()


def both_masked(p, b):
    of_rows = lambda x: jnp.where(b["row"][:, None], x, 0)
    return jnp.sum((of_rows(b["x"] * p["w"][None]) - of_rows(b["h"][:, 0])) ** 2), b["row"].sum()


def pairs_of_tokens(p, b):
    """Scores of the tokens of one row, causal."""
    mask = b["token"][:, :, None] & jnp.tri(TOKENS, dtype=bool)[None]
    scores = jnp.einsum("ntd,nsd->nts", b["h"] * p["w"][None, None], b["h"])
    return jnp.sum(jnp.where(mask, scores**2, 0)), mask.sum()


def weighted_classes(p, b):
    logs = jax.nn.log_softmax(b["x"] @ p["o"])
    return -jnp.sum(TABLE[None] * jax.nn.one_hot(b["class"], CLASSES) * logs), jnp.asarray(TABLE)[b["class"]].sum()


def bag_of_words(p, b):
    words = jax.nn.one_hot(b["label"], CLASSES)
    return -jnp.sum(words * jax.nn.log_softmax(logits(p, b))), words.sum()


def transcribed(p, b):
    """CTC of the rows that have a transcript."""
    paddings = jnp.zeros((len(b["x"]), TOKENS)), jnp.zeros((len(b["x"]), 2))
    each = optax.ctc_loss(logits(p, b), paddings[0], jnp.maximum(b["object"][:, :2], 1), paddings[1])
    return jnp.sum(b["row"] * each), b["row"].sum()


def divergence(p, b):
    each = optax.kl_divergence(jax.nn.log_softmax(b["h"] * p["w"][None, None]), jax.nn.softmax(b["h"]))
    return jnp.sum(each, where=b["token"]), b["token"].sum()


VANISH = {  # the sum is 0 where the count is
    "floats": by(lambda b: as_float(b["row"])),
    "bools": by(lambda b: b["row"]),
    "tokens": by(lambda b: as_float(b["token"])),
    "bfloat16": by(lambda b: b["token"].astype(jnp.bfloat16).astype(jnp.float32)),
    "a stopped gradient": by(lambda b: lax.stop_gradient(as_float(b["row"]))),
    "weights": by(lambda b: b["v"] * b["row"]),
    "known or not": by(lambda b: as_float(b["label"] != -1)),
    "ids": by(lambda b: jnp.where(b["object"] > 0, 1, 0).astype(jnp.float32)),
    "two masks": by(lambda b: b["token"] & (b["label"] >= 0)),
    "one less padding": by(lambda b: 1 - as_float(b["pad"])),
    "labels": where(lambda b: b["label"] >= 0),
    "labels, turned": lambda p, b: (jnp.sum(jnp.where(b["label"] < 0, 0, tokens(p, b))), (b["label"] >= 0).sum()),
    "ignored": lambda p, b: (jnp.sum(jnp.where(b["label"] == -1, 0, tokens(p, b))), (b["label"] != -1).sum()),
    "padding": lambda p, b: (jnp.sum(jnp.where(b["pad"], 0, tokens(p, b))), (~b["pad"]).sum()),
    "padding as floats": lambda p, b: (jnp.sum(jnp.where(b["pad"], 0, tokens(p, b))), (1 - as_float(b["pad"])).sum()),
    "not padding": lambda p, b: (jnp.sum((1 - b["pad"]) * tokens(p, b)), (b["pad"] == 0).sum()),
    "lengths": where(lambda b: before(b["length"]), lambda b: b["length"]),
    "beyond lengths": lambda p, b: (
        jnp.sum(jnp.where(jnp.arange(TOKENS)[None] >= b["length"][:, None], 0, tokens(p, b))),
        b["length"].sum(),
    ),
    "next tokens": lambda p, b: (jnp.sum((tokens(p, b) * b["token"])[:, 1:]), b["token"].sum()),
    "targets": lambda p, b: (jnp.sum(tokens(p, b)[:, 1:] * b["token"][:, 1:]), b["token"][:, 1:].sum()),
    "weights, apart": lambda p, b: (jnp.sum(b["row"] * (b["v"] * rows(p, b))), (b["row"] * b["v"]).sum()),
    "weights of rows": lambda p, b: (jnp.sum(b["row"] * b["v"] * rows(p, b)), b["row"].sum()),
    "weights that are not 0": lambda p, b: (jnp.sum(b["known"] * rows(p, b)), (b["known"] > 0).sum()),
    "weights, squared": lambda p, b: (jnp.sum(b["known"] ** 2 * rows(p, b)), b["known"].sum()),
    "a dot product": lambda p, b: (as_float(b["row"]) @ rows(p, b), as_float(b["row"]).sum()),
    "two dot products": lambda p, b: (as_float(b["row"]) @ (b["v"] * rows(p, b)), as_float(b["row"]) @ b["v"]),
    "einsum": lambda p, b: (jnp.einsum("nt,nt->", as_float(b["token"]), tokens(p, b)), b["token"].sum()),
    "rows and tokens": lambda p, b: (
        jnp.sum(b["v"] * jnp.sum(b["token"] * tokens(p, b), 1)),
        jnp.sum(b["v"][:, None] * b["token"]),
    ),
    "one axis after the other": lambda p, b: (
        jnp.sum(jnp.sum(tokens(p, b) * b["token"], 1)),
        jnp.sum(jnp.sum(as_float(b["token"]), -1)),
    ),
    "means of both": lambda p, b: (jnp.mean(b["row"] * rows(p, b)) * len(b["x"]), b["row"].sum()),
    "where=": lambda p, b: (jnp.sum(rows(p, b), where=b["row"]), b["row"].sum()),
    "count_nonzero": lambda p, b: (jnp.sum((b["class"] > 0) * rows(p, b)), jnp.count_nonzero(b["class"])),
    "part of what counts": lambda p, b: (jnp.sum((b["token"] & (b["label"] > 1)) * tokens(p, b)), b["token"].sum()),
    "two counts": lambda p, b: (
        jnp.sum(b["row"] * rows(p, b)) + jnp.sum(b["token"] * tokens(p, b)),
        b["row"].sum() + b["token"].sum(),
    ),
    "any token": lambda p, b: (jnp.sum(b["token"].any(1) * rows(p, b)), b["token"].any(1).sum()),
    "rows for all tokens": lambda p, b: (
        jnp.sum(b["row"][:, None] * tokens(p, b)),
        as_float(b["row"]).sum() * TOKENS,
    ),
    "in vmap": lambda p, b: tuple(
        x.sum() for x in jax.vmap(lambda h, m: (jnp.sum(m * (h @ p["w"]) ** 2), m.sum()))(b["h"], b["token"])
    ),
    "in jit": lambda p, b: jax.jit(lambda each, m: (jnp.sum(each * m), m.sum()))(rows(p, b), b["row"]),
    "segments": lambda p, b: (jnp.zeros(3).at[b["class"] % 3].add(rows(p, b) * b["row"]).sum(), b["row"].sum()),
    "pixels": lambda p, b: (jnp.sum(b["pixel"] * pixels(p, b)), b["pixel"].sum()),
    "boxes": lambda p, b: (
        jnp.sum(b["row"][:, None] * optax.huber_loss(b["x"] * p["w"][None], b["h"][:, 0])),
        b["row"].sum(),
    ),
    "with a z-loss": lambda p, b: (
        jnp.sum(b["token"] * (tokens(p, b) + 1e-2 * jax.nn.logsumexp(logits(p, b), -1) ** 2)),
        b["token"].sum(),
    ),
    "classes, once": lambda p, b: (
        jnp.sum(jnp.asarray(TABLE)[b["class"]] * rows(p, b)),
        jnp.asarray(TABLE)[b["class"]].sum(),
    ),
    "never 0": lambda p, b: (jnp.sum(rows(p, b)), jnp.sum(1 + b["x"] ** 2)),
    "never 0, by exp": lambda p, b: (jnp.sum(rows(p, b)), jnp.sum(jnp.exp(b["v"]))),
    "ones": lambda p, b: (jnp.sum(rows(p, b)), jnp.ones_like(b["v"]).sum()),
}
of_functions = [in_chunks, of_each_row, of_layers, safe, both_masked, pairs_of_tokens, weighted_classes, bag_of_words]
VANISH |= {fun.__name__: fun for fun in (*of_functions, transcribed, divergence)}
LEFT = {  # the sum is not 0 where the count is, or nothing shows it
    "above 0": lambda p, b: (jnp.sum(b["x"][:, 0] * rows(p, b)), jax.nn.relu(b["x"][:, 0]).sum()),
    "a bit": lambda p, b: (jnp.sum((b["object"] > 0) * tokens(p, b)), ((b["object"] & 2) > 0).sum()),
    "one minus exp": lambda p, b: (jnp.sum(rows(p, b)), jnp.sum(1 - jnp.exp(-b["known"]))),
    "whole parts": lambda p, b: (jnp.sum((b["known"] > 0) * rows(p, b)), b["known"].astype(jnp.int32).sum()),
    "all rows": lambda p, b: (jnp.sum(rows(p, b)), b["row"].sum()),
    "focal": lambda p, b: (jnp.sum(focal(p, b)), (b["label"] >= 0).sum()),
    "valid anchors": lambda p, b: (jnp.sum(b["x"][:, :1] ** 2 * focal(p, b)), (b["token"] & (b["label"] > 0)).sum()),
    "boxes beside anchors": lambda p, b: (
        jnp.sum((b["object"] > 0) * (b["h"] @ p["w"]) ** 2) + jnp.sum(tokens(p, b)),
        (b["object"] > 0).sum(),
    ),
    "peaks": lambda p, b: (jnp.sum(jnp.where(b["pixel"], 1, 0.1) * pixels(p, b)), b["pixel"].sum()),
    "the others": lambda p, b: (jnp.sum(jnp.where(b["row"], 0, rows(p, b))), b["row"].sum()),
    "positives and negatives": lambda p, b: (
        jnp.sum(b["token"] * tokens(p, b)) + jnp.sum(~b["token"] * tokens(p, b)),
        b["token"].sum(),
    ),
    "more than what counts": lambda p, b: (jnp.sum((b["v"] > 0) * rows(p, b)), jnp.sum((b["v"] > 0) & b["row"])),
    "another mask": lambda p, b: (jnp.sum((b["x"][:, 0] > -9) * rows(p, b)), b["row"].sum()),
    "1 in place of 0": lambda p, b: (jnp.sum(jnp.where(b["row"], 1.0, 2.0) * rows(p, b)), b["row"].sum()),
    "padding": lambda p, b: (jnp.sum(b["pad"] * tokens(p, b)), (1 - as_float(b["pad"])).sum()),
    "1 more": lambda p, b: (jnp.sum((1 + b["row"]) * rows(p, b)), b["row"].sum()),
    "a factor of two": lambda p, b: (jnp.sum(b["v"] * rows(p, b)), jnp.sum(b["v"] * b["row"])),
}
SHAPES = {
    "beside decay": lambda total, count, decay: total / jnp.maximum(count, 1) + decay,
    "beside decay, by a small number": lambda total, count, decay: total / (count + 1e-6) + decay,
    "two guards": lambda total, count, decay: total / jnp.maximum(count, 1) + 2 * total / (count + 1e-6),
    "0 in its place": lambda total, count, decay: jnp.where(count > 0, total / count, 0),
    "0 and a guard": lambda total, count, decay: jnp.where(count == 0, 0.0, total / jnp.maximum(count, 1)),
    "a branch": lambda total, count, decay: lax.cond(count > 0, lambda: total / count, lambda: 0.0),
    "no NaN": lambda total, count, decay: jnp.nan_to_num(total / count),
}


def shaped(sums, shape):
    def loss(p, b):
        decay = 0.1 * sum(jnp.sum(leaf**2) for leaf in p.values())
        return SHAPES[shape](*sums(p, b), decay)

    return loss


def is_lost(loss):
    """Whether `explain` says that a micro-batch may lose its loss."""
    found = optax_accum.explain(loss, PARAMS, BATCH)
    assert found.verdict == "exact", found.reasons
    (weight,) = found.weights
    assert bool(weight.lost) == ("is left out, and nothing shows" in " ".join(str(found).split()))
    return bool(weight.lost)


def trained(loss, **options):
    """The parameters after three micro-batches, of which the second counts nothing; and the warnings."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 3)
    step, params, state = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, **options)), PARAMS, tx.init(PARAMS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part in (slice(0, 3), NOTHING, slice(5, 8)):
            _, params, state = step(params, state, jax.tree.map(lambda leaf: leaf[part], BATCH))  # noqa: B023
    return params, [str(warning.message) for warning in caught]


def off(loss, params, of=None):
    """How far the update is from that of the whole batch."""
    want = jax.jit(jax.grad(of or loss))(PARAMS, BATCH)
    error = jax.tree.map(lambda new, old, grad: old - new - grad, params, PARAMS, want)
    return float(optax.tree.norm(error) / optax.tree.norm(want))


def cases(table, but):
    """All in each shape; one shape of each, and each shape of a few, in every run."""
    shapes = [(name, shape) for name in table for shape in SHAPES]
    return sweep(shapes, but=[case for case in shapes if case[1] == "beside decay" or case[0] in but])


@pytest.mark.parametrize(("name", "shape"), cases(VANISH, ["labels"]))
def test_a_sum_that_is_zero_where_its_count_is_needs_no_warning(name, shape):
    loss = shaped(VANISH[name], shape)
    assert not is_lost(loss)


def of_many_parts(b):
    """A chain: to follow each of its parts by itself would take Python's whole stack."""
    return sum(as_float(b["row"]) * b["v"] for _ in range(400))


def doubled(b):
    """Each product is of all before, twice: in all 2**40."""
    mask = as_float(b["row"])
    for _ in range(40):
        mask = mask + mask * b["v"] / 8
    return mask


@pytest.mark.sweep
@pytest.mark.parametrize("count", [*sweep([of_many_parts]), doubled])
def test_a_long_count_is_read(count):
    loss = lambda p, b: jnp.sum(count(b) * rows(p, b)) / jnp.maximum(count(b).sum(), 1e-6)
    params, warned = trained(loss)
    assert (warned, off(loss, params) < 1e-4) == ([], True), (warned, off(loss, params))
    assert optax_accum.explain(lambda p, b: loss(p, b) + jnp.sum(p["w"] ** 2), PARAMS, BATCH).verdict == "exact"


@pytest.mark.sweep
@pytest.mark.parametrize("name", sweep(VANISH, but=["safe"]))
def test_it_is_exact(name):
    loss = shaped(VANISH[name], "beside decay")
    params, warned = trained(loss)
    assert (warned, off(loss, params) < 1e-4) == ([], True), (warned, off(loss, params))


@pytest.mark.parametrize(("name", "shape"), cases(LEFT, ["focal"]))
def test_a_sum_that_may_not_be_zero_is_told_of(name, shape):
    assert is_lost(shaped(LEFT[name], shape))


@pytest.mark.parametrize(
    ("name", "shape"),
    sweep(
        [(name, shape) for name in ("focal", "peaks") for shape in SHAPES],
        but=[("focal", "beside decay, by a small number")],
    ),
)
def test_the_step_warns_of_what_is_lost_and_names_its_line(name, shape):
    loss = shaped(LEFT[name], shape)
    params, warned = trained(loss)
    assert off(loss, params) > 0.01
    assert {message[: len(WARNING)] for message in warned} == {WARNING}
    assert "nothing shows that the sum over rows at test_uncounted.py:" in warned[0]


WARNING = "Where the sum over rows at test_uncounted.py:"


@pytest.mark.sweep
@pytest.mark.parametrize("name", sweep(LEFT, but=["focal"]))
def test_the_remedies(name):
    """A Ratio is exact, with other terms times its count; a weight says that nothing is lost."""
    decay = lambda p: 0.1 * sum(jnp.sum(leaf**2) for leaf in p.values())

    def ratio(p, b):
        total, count = LEFT[name](p, b)
        return optax_accum.Ratio(total + count * decay(p), count)

    params, warned = trained(ratio)
    assert not warned
    assert not trained(shaped(LEFT[name], "beside decay"), weight_fn=lambda b: b["row"].sum())[1]
    assert off(ratio, params, of=shaped(LEFT[name], "beside decay")) < 1e-4
