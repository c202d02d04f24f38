"""What `explain` finds: the lines that take rows together, passes, bytes, and weights across calls."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_accum import Ratio, explain
from tests.rows import losses

RNG = np.random.RandomState(0)


def normal(*shape):
    return jnp.asarray(RNG.randn(*shape), jnp.float32)


PARAMS = {"w": normal(6, 5), "v": normal(6, 1)}
ROWS = 16
BATCH = {
    "x": normal(ROWS, 6),
    "y": normal(ROWS),
    "label": jnp.asarray(RNG.randint(0, 5, ROWS)),
    "mask": jnp.asarray([1.0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1]),
    "tokens": jnp.asarray(RNG.rand(ROWS, 4) < 0.7, jnp.float32),
}
TOKENS = 8.0


def text_of(found):
    """What it prints, which fits a terminal of 80 columns."""
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    return text


def line_of(loss):
    """The line of a loss that says "here", as the explanation names it."""
    lines, first = inspect.getsourcelines(loss)
    (at,) = [number for number, line in enumerate(lines, start=first) if "# here" in line]
    return f"losses.py:{at}"


WEIGHED = {  # a loss, and its weight on BATCH
    losses.mean: ROWS,
    losses.masked: TOKENS,
    losses.masked_before: TOKENS,
    losses.masked_means: TOKENS,
    losses.mean_where: TOKENS,
    losses.by_product: TOKENS,
    losses.by_reciprocal: TOKENS,
    losses.guarded_by_maximum: TOKENS,
    losses.guarded_by_where: TOKENS,
    losses.guarded_by_a_small_number: TOKENS,
    losses.with_decay: ROWS,
    losses.two_sums_one_count: TOKENS,
    losses.means_of_sequences: ROWS,
    losses.all_tokens: float(BATCH["tokens"].sum()),
    losses.groups: ROWS,
    losses.rows_in_vmap: ROWS,
    losses.clipped_ratios: ROWS,
    losses.rounded: ROWS,
}


@pytest.mark.parametrize("loss", WEIGHED, ids=lambda loss: loss.__name__)
def test_a_weight_is_read_off_the_loss(loss):
    found = explain(loss, PARAMS, BATCH)
    assert (found.reasons, found.reduction, len(found.weights)) == ((), "mean", 1)
    assert float(found.weight(BATCH)) == pytest.approx(WEIGHED[loss], rel=1e-6)
    (weight,) = found.weights
    if WEIGHED[loss] == ROWS:
        assert "number of rows" in text_of(found)
        assert weight.place is None
    else:
        leaf = "batch['tokens']" if loss is losses.all_tokens else "batch['mask']"
        assert (str(weight.place), weight.of) == (line_of(loss), (leaf,))
        assert f"{line_of(loss)}, computed from {leaf}" in " ".join(text_of(found).split())


def test_a_weight_names_the_arrays_of_the_batch_that_it_is_computed_from():
    table = jnp.arange(1.0, 6)

    def loss(params, batch):
        weights = table[batch["label"]]
        return (weights * losses.nll(params, batch)).sum() / weights.sum()

    (weight,) = explain(loss, PARAMS, BATCH).weights
    assert weight.of == ("batch['label']",)
    assert re.search(r"the sum over rows at test_explain.py:\d+, computed from batch\['label'\]$", str(weight))


def test_two_sums_in_one_weight_are_named_by_their_arrays():
    loss = lambda p, b: (b["mask"] * losses.nll(p, b)).sum() / (b["mask"].sum() + b["tokens"].sum())
    (weight,) = explain(loss, PARAMS, BATCH).weights
    assert str(weight).endswith(", computed from b['mask'] and b['tokens']")


def count_on_a_line_of_its_own(params, batch):
    count = batch["mask"].sum()  # here
    return (losses.nll(params, batch) * batch["mask"]).sum() / count


@pytest.mark.parametrize(
    "loss", [count_on_a_line_of_its_own, losses.normalised_advantages], ids=lambda loss: loss.__name__
)
def test_lines_of_the_batch_alone_that_the_text_names_are_in_the_table(loss):
    found = explain(loss, PARAMS, BATCH)
    line = line_of(loss) if loss is losses.normalised_advantages else line_of(loss).replace("losses", "test_explain")
    (coupling,) = [each for each in found.couplings if each.of_batch]
    assert (str(coupling.place), coupling.primitives, coupling.in_parts) == (line, ("reduce_sum",), False)
    assert coupling not in found.whole
    text = str(found)
    assert f"{line}  reduce_sum  once, before" in text
    assert line in text[text.index("Across calls") :]


def guarded_on_a_line_of_its_own(params, batch):
    count = jnp.maximum(batch["mask"].sum(), 1)  # here
    return (losses.nll(params, batch) * batch["mask"]).sum() / count


def numbered_on_a_line_of_its_own(params, batch):
    number = jnp.arange(len(batch["mask"]))  # here
    return (losses.nll(params, batch) * number).mean()


def mixed_on_a_line_of_its_own(params, batch):
    turned = losses.nll(params, batch)[::-1]
    mixed = losses.nll(params, batch) + turned  # here
    return (mixed**2).mean()


BESIDE_THE_TABLE = {
    guarded_on_a_line_of_its_own: "A function of the sum divides the loss: max, {}.",
    numbered_on_a_line_of_its_own: "iota depends on the place of a row in its batch, {}",
    mixed_on_a_line_of_its_own: "add where each row meets other rows, {}",
}


@pytest.mark.parametrize("loss", BESIDE_THE_TABLE, ids=lambda loss: loss.__name__)
def test_what_takes_no_rows_together_is_named_with_its_operation(loss):
    """The table has no line of it: the text alone says what is there."""
    line = line_of(loss).replace("losses", "test_explain")
    assert BESIDE_THE_TABLE[loss].format(line) in " ".join(str(explain(loss, PARAMS, BATCH)).split())


PARTS = (slice(0, 4), slice(4, 16))  # whole groups


def part_of(rows):
    return jax.tree.map(lambda leaf: leaf[rows], BATCH)


@pytest.fixture(scope="module")
def gradients():
    """Values and gradients of all losses: of the whole batch, and of the parts. One compilation."""
    of = lambda batch: {loss.__name__: jax.value_and_grad(loss)(PARAMS, batch) for loss in WEIGHED}
    return jax.jit(lambda whole, parts: (of(whole), list(map(of, parts))))(BATCH, list(map(part_of, PARTS)))


@pytest.mark.sweep
@pytest.mark.parametrize("loss", WEIGHED, ids=lambda loss: loss.__name__)
def test_parts_weighed_so_add_up_to_the_whole_batch(loss, gradients):
    whole, parts = gradients
    found = explain(loss, PARAMS, BATCH)
    weights = [float(found.weight(part_of(rows))) for rows in PARTS]
    mean = lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)) / sum(weights)
    mixed = jax.tree.map(mean, *(part[loss.__name__] for part in parts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mixed, whole[loss.__name__])
    assert weights[0] != weights[1]  # else an equal mean would do


REFUSED = {  # a loss, and why it has no weight
    losses.normalised_rows: "each row takes a mean over rows",
    losses.batch_norm: "each row takes a mean over rows",
    losses.largest_weight: "the largest of all rows",
    losses.normalised_advantages: "each row takes a mean over rows",
    losses.log_sum: "reduce_max of all rows at once",
    losses.log_of_a_sum: "log of a sum over rows",
    losses.contrastive: "dot_general of all rows at once",
    losses.model_counts: "the model decides: return a Ratio",
    losses.one_row_less: "the number 15 depends on the number of rows",
    losses.by_class: "each entry is divided by a sum over rows of its own",
    losses.divided_twice: "several counts divide",
    losses.sum_with_decay: "nothing divides, beside a term that takes no rows",
    losses.sum_and_mean: "nothing divides, beside a mean",
    losses.numbered: "depends on the place of a row in its batch",
    losses.clipped_rows: "a derivative of yours that is not linear",
    losses.clipped_params: "a derivative of yours that is not linear",
    losses.rows_with_a_term: "a derivative of yours that is not linear",
    losses.other_test: "select_n of a sum over rows",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_a_reason_against_a_weight_names_its_line(loss):
    found = explain(loss, PARAMS, BATCH)
    assert found.weight is None
    assert found.weights == ()
    assert any(REFUSED[loss] in reason and reason.endswith(line_of(loss)) for reason in found.reasons), found.reasons
    text = {"not exact": "no weight gives the whole batch's gradient", "cannot be read": "it cannot be read how much"}
    assert text[found.verdict] in text_of(found)


def test_a_plain_sum_is_added():
    found = explain(lambda params, batch: losses.nll(params, batch).sum(), PARAMS, BATCH)
    assert found.reduction == "sum"
    assert found.weight(BATCH) == 1
    assert 'reduction="sum"' in str(found)


def test_a_loss_without_rows_takes_any_weight():
    found = explain(lambda params, batch: (params["w"] ** 2).sum(), PARAMS, BATCH)
    assert found.weight(BATCH) == 1
    assert found.couplings == ()
    assert found.loops == 0
    assert "any weight is right" in str(found)


def test_two_terms_have_a_weight_each():
    found = explain(losses.two_terms, PARAMS, BATCH)
    assert [float(count) for count in found.weight(BATCH)] == [16, TOKENS]
    assert "one weight is not enough" in text_of(found)


def test_terms_of_a_dict_have_weights_by_name():
    def loss(params, batch):
        return {
            "plain": losses.mean(params, batch),
            "masked": losses.masked(params, batch),
            "decay": losses.decay(params),
        }

    found = explain(loss, PARAMS, BATCH)
    assert jax.tree.map(float, found.weight(BATCH)) == {"plain": 16, "masked": TOKENS, "decay": 1}
    assert [weight.term for weight in found.weights] == ["masked", "plain"]


def test_terms_that_share_a_denominator_share_a_weight():
    found = explain(lambda p, b: {"one": losses.mean(p, b), "other": losses.means_of_sequences(p, b)}, PARAMS, BATCH)
    assert "the weight of a micro-batch is its number of rows" in str(found)


@pytest.mark.parametrize("other", [losses.mean, lambda params, batch: losses.decay(params)], ids=["mean", "decay"])
def test_a_plain_sum_beside_other_terms_has_no_weight(other):
    found = explain(lambda p, b: {"sum": losses.nll(p, b).sum(), "z": other(p, b)}, PARAMS, BATCH)
    assert found.weight is None
    assert "nothing divides, beside other terms" in found.reasons[0]


def test_one_row_has_a_weight():
    row = jax.tree.map(lambda leaf: leaf[4:5], BATCH)
    assert float(explain(losses.masked, PARAMS, BATCH).weight(row)) == 1
    assert float(explain(losses.mean, PARAMS, BATCH).weight(row)) == 1
    assert float(explain(losses.all_tokens, PARAMS, BATCH).weight(row)) == row["tokens"].sum()


def test_a_ratio_says_itself_what_it_counts():
    found = explain(lambda p, b: Ratio(losses.nll(p, b).sum(), jnp.float32(16)), PARAMS, BATCH)
    assert found.weight is None
    assert "Ratio" in found.reasons[0]


def test_another_argument_in_a_denominator_is_named():
    def loss(params, batch, class_weights):
        weights = class_weights[batch["label"]]
        return (weights * losses.nll(params, batch)).sum() / weights.sum()

    found = explain(loss, PARAMS, BATCH, jnp.arange(1.0, 6))
    assert "the argument class_weights" in found.reasons[0]


# Within a call


def test_a_masked_mean_needs_one_pass_and_keeps_nothing():
    found = explain(losses.masked, PARAMS, BATCH)
    assert (found.rows, found.loops, found.one_pass) == (16, 1, True)
    assert found.kept_bytes == 0
    assert found.whole == ()
    (coupling,) = found.couplings
    assert str(coupling.place) == line_of(losses.masked)
    assert (coupling.primitives, coupling.in_parts, coupling.shape) == (("reduce_sum",), True, ())


def test_batch_norm_keeps_its_rows_between_loops():
    found = explain(losses.batch_norm, PARAMS, BATCH)
    assert not found.one_pass
    assert found.loops == 5  # forward two sums and the loss, then backward
    line = line_of(losses.batch_norm)
    (coupling,) = [coupling for coupling in found.couplings if str(coupling.place) == line]
    assert coupling.in_parts
    assert coupling.kept_bytes == 16 * 5 * 4
    assert found.kept_bytes >= coupling.kept_bytes
    assert "Between loops" in str(found)


def test_loops_are_those_of_the_gradient():
    """Of the loss alone there are one and one: the variance's gradient needs the mean of all rows before its rows' own."""
    variance = explain(lambda p, b: losses.nll(p, b).var(), PARAMS, BATCH)
    assert not variance.one_pass
    assert f"{variance.loops} loops go through the micro-batches, one after the other." in " ".join(
        str(variance).split()
    )
    mean = explain(losses.mean, PARAMS, BATCH)
    assert mean.one_pass
    assert "Each micro-batch runs once, forward and backward." in str(mean)


@pytest.mark.parametrize("what", ["a while_loop", "a rule that raises"])
def test_a_loss_without_a_gradient_is_explained_itself(what):
    @jax.custom_jvp
    def same(x):
        return x

    @same.defjvp
    def _(primals, tangents):
        raise RuntimeError("It has no derivative.")

    def loss(params, batch):
        h = batch["x"] @ params["w"]
        h = same(h) if what == "a rule that raises" else jax.lax.while_loop(lambda h: h.sum() > 1e9, lambda h: h, h)
        return (h * batch["mask"][:, None]).sum() / batch["mask"].sum()

    found = explain(loss, PARAMS, BATCH)
    assert found.couplings
    assert found.loops >= 1
    with pytest.raises((ValueError, RuntimeError)):
        jax.grad(loss)(PARAMS, BATCH)


def test_contrastive_rows_are_compared_on_all_rows():
    found = explain(losses.contrastive, PARAMS, BATCH)
    (coupling,) = [coupling for coupling in found.whole if "dot_general" in coupling.primitives]
    assert coupling.shape == (16, 16)
    assert coupling.kept_bytes >= 16 * 16 * 4


def test_layers_in_a_scan_are_looked_into():
    def layer(h, w):
        h = h @ w
        return jnp.tanh(h - h.mean(0, keepdims=True)), None  # rows meet

    def loss(params, batch):
        return (jax.lax.scan(layer, batch["x"], params)[0] ** 2).mean()

    found = explain(loss, normal(3, 6, 6), BATCH)
    (inside,) = [coupling for coupling in found.couplings if coupling.times == 3]
    _lines, first = inspect.getsourcelines(layer)
    assert inside.place.line == first + 2
    assert inside.in_parts
    assert found.kept_bytes >= inside.kept_bytes >= 3 * 16 * 6 * 4
    assert found.reasons == (f"rows are taken together in a loop over layers, {inside.place}",)
    assert "3 times" in str(found)


def test_an_unknown_operation_is_named():
    def loss(params, batch):
        sorted_rows = jnp.linalg.eig(batch["x"][:, None] * params["v"][None])[0].real
        return sorted_rows.mean()

    text = " ".join(str(explain(loss, PARAMS, BATCH)).split())
    assert "eig" in text
    assert "it is not known to treat rows one by one" in text


def test_groups_stay_together():
    found = explain(losses.groups, PARAMS, BATCH)
    assert found.group == 4
    assert "4 consecutive ones together" in str(found)


def test_nothing_runs_and_types_are_enough():
    def loss(params, batch, *, scale):
        return scale * losses.masked(params, batch)

    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (PARAMS, BATCH))
    found = explain(loss, *types, scale=jax.ShapeDtypeStruct((), jnp.float32))
    assert str(found) == str(explain(loss, PARAMS, BATCH, scale=jnp.float32(2)))
    assert float(jax.jit(found.weight)(BATCH)) == TOKENS


def test_auxiliary_outputs_and_other_places_of_arguments():
    def loss(batch, params):
        value = losses.masked(params, batch)
        return value, losses.nll(params, batch)

    found = explain(loss, BATCH, PARAMS, argnums="params", batch_argnums="batch", has_aux=True)
    assert float(found.weight(BATCH)) == TOKENS
    assert found.kept_bytes == 0  # it is returned, no loop waits for it


def test_a_line_inside_a_function_of_a_library_is_the_users():
    """Library functions are traced once; a second call has lines of its own."""

    def loss(params, batch):
        h = jax.nn.log_softmax(batch["x"] @ params["w"], axis=0)
        h = jax.nn.log_softmax(h, axis=0)
        return h.mean()

    _lines, first = inspect.getsourcelines(loss)
    numbers = {coupling.place.line for coupling in explain(loss, PARAMS, BATCH).couplings}
    assert numbers == {first + 1, first + 2, first + 3}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"num_microbatches": 4}, TypeError, "explain has no num_microbatches=: .*Leave it out"),
        ({"microbatch_size": 4}, TypeError, "explain has no microbatch_size=: .*Leave it out"),
        ({"has_aux": 1}, TypeError, "has_aux must be True or False"),
        ({"has_aux": True}, TypeError, "fun must return a pair"),
        ({"argnums": 1, "batch_argnums": 0}, TypeError, "Only floating-point arguments"),
        ({"batch_argnums": 2}, ValueError, "batch_argnums must name"),
    ],
)
def test_bad_input(options, error, says):
    with pytest.raises(error, match=says):
        explain(losses.mean, PARAMS, BATCH, **options)


def test_a_loss_for_one_number_of_rows_is_refused():
    with pytest.raises(TypeError, match="cannot reshape") as raised:
        explain(lambda p, b: (b["x"].reshape(16, 6) @ p["w"]).mean(), PARAMS, BATCH)
    assert "It raises for 2n rows" in "".join(raised.value.__notes__)


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(TypeError, match="scalar"):
        explain(losses.nll, PARAMS, BATCH)
