"""The table of primitives is true of random equations, with their derivatives; and what would be false is found."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine import claims_of, known, set_rules
from tests.rows import equations, variants
from tests.rows.test_primitives import COLLECTIVES, EQUINOX, OF_OTHER_VERSIONS, TABLE
from tests.tiers import sweep

MOST = 120  # variants that are traced until enough of each claim were seen
FAMILIES = collections.defaultdict(list)
for _name, _writer in variants.WRITERS.items():
    FAMILIES[_writer.__name__].append(_name)


def test_every_primitive_of_the_table_has_variants():
    assert TABLE - COLLECTIVES - EQUINOX - {"closed_call"} == set(variants.WRITERS)


def enough(name, number):
    """The first variants of a primitive about which the table makes each claim so often; none in another JAX."""
    seen, is_there = {claim: [] for claim in claims_of(name)}, False
    for variant in range(MOST):
        found = variants.traced(name, variant)
        is_there |= found is not None
        if found is not None and len(seen.get(found.says, range(number))) < number:
            seen[found.says].append(found)
        if all(len(each) == number for each in seen.values()):
            break
    counts = {claim: len(founds) for claim, founds in seen.items()}
    assert set(counts.values()) == {number} or (not is_there and name in OF_OTHER_VERSIONS), (name, counts)
    return list(itertools.chain(*seen.values()))


@pytest.mark.parametrize(
    "family", sweep(FAMILIES, but=["reductions", "windows", "scatters", "gathers", "dynamic_slices", "drawn"])
)
def test_what_the_table_says_of_a_variant_is_true(family):
    """Entry by entry, primitives share a rule."""
    names = FAMILIES[family][:: 2 if family == "entries" else 1]
    equations.assert_true([found for name in names for found in enough(name, 1)])


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_table_says_of_many_variants_is_true(family):
    for name in FAMILIES[family]:
        equations.assert_true(enough(name, 2 if family in ("entries", "special") else 6))


# False rules are found


def always(view):
    return True


def rows_of_features(view):
    numbers = view.params["dimension_numbers"]
    return numbers.lhs_spec[1], numbers.rhs_spec[1]


DRAWN = known("random_bits").positional


def from_zero_on(equation, values, axis, places):
    return DRAWN.at(equation, values, axis, jnp.arange(len(places)))


SAME = {"reduce_max", "reduce_min", "random_bits"}  # the same claims, of other parts
FALSE = {
    "rev": {"local": always},
    "sort": {"local": always},
    "cumsum": {"local": always},
    "reshape": {"local": always},
    "conv_general_dilated": {"local": always},
    "conv_general_dilated, in groups": {
        "partial": dataclasses.replace(
            known("conv_general_dilated").partial, rule=lambda view: tuple(view.ins) == rows_of_features(view)
        )
    },
    "gather": {"local": always},
    "scatter": {"local": always},
    "pad": {"local": always},
    "concatenate": {"local": always},
    "reduce_max": {"partial": known("reduce_min").partial},
    "reduce_min": {"partial": known("reduce_max").partial},
    "reduce_prod": {"partial": known("reduce_sum").partial},
    "iota": {"alike": always},
    "random_bits": {"positional": dataclasses.replace(DRAWN, at=from_zero_on)},
}


@pytest.mark.parametrize("name", sweep(FALSE, but=["iota"]))
def test_a_false_rule_is_found(name, monkeypatch):
    """Among a few variants about which it says something else than the table."""
    rules, name = FALSE[name], name.split(",")[0]
    before = [variants.traced(name, number) for number in range(MOST)]
    said = [found and found.says for found in before]
    set_rules(monkeypatch, name, **rules)
    claimed = [
        (found, was) for found, was in zip(before, said, strict=True) if found and found.says in equations.IN_LOOPS
    ]
    others = [found for found, was in claimed if name in SAME or found.says != was]
    assert others
    with pytest.raises((AssertionError, TypeError, ValueError)):  # or a shape that the rule would not have let through
        equations.assert_true(others[:4])


def test_a_false_derivative_is_found(monkeypatch):
    """The values of the function are right: its tangents take rows together."""

    @jax.custom_jvp
    def twice(x):
        return 2 * x

    twice.defjvp(lambda xs, ts: (twice(*xs), 2 * ts[0] - ts[0].mean(0, keepdims=True)))
    trace = lambda: equations.traced("custom_jvp_call", twice, "n3")
    assert trace().says == "together"
    set_rules(monkeypatch, "custom_jvp_call", local=always)
    assert trace().says == "local"
    with pytest.raises(ValueError, match="does not treat rows one by one"):
        equations.assert_true([trace()])


# Groups of operands in which it is linear

LINEAR = sorted(name for name in variants.WRITERS if known(name).linear)


def sides(found):
    """f(a + b) and f(a) + f(b), f(2 a) and 2 f(a), for each group of operands."""
    random, pairs = np.random.default_rng(0), []
    for group in known(found.single.primitive.name).linear_groups(found.single):
        if not all(jnp.issubdtype(found.values[place].dtype, jnp.inexact) for place in group):
            continue
        others = {place: jnp.asarray(random.normal(size=v.shape), v.dtype) for place, v in enumerate(found.values)}

        def at(change, group=group):
            values = [change(v, place) if place in group else v for place, v in enumerate(found.values)]
            return [out for out in equations.bind(found.single, values) if jnp.issubdtype(out.dtype, jnp.inexact)]

        first, second = at(lambda value, place: value), at(lambda value, place, others=others: others[place])
        both = at(lambda value, place, others=others: value + others[place])
        pairs += zip(both, map(jnp.add, first, second), strict=True)
        pairs += zip(at(lambda value, place: 2 * value), [2 * out for out in first], strict=True)
    return pairs


def assert_linear(names, number):
    """Entry by entry, shapes change nothing: six variants have all ways to be given literals and parameters."""
    numbers = {name: min(number, 6) if name in FAMILIES["entries"] else number for name in names}
    founds = {name: [variants.traced(name, each) for each in range(numbers[name])] for name in names}
    founds = {name: [found for found in each if found is not None] for name, each in founds.items()}
    pairs = jax.jit(lambda: {name: [sides(found) for found in each] for name, each in founds.items()})()
    assert [name for name in names if not any(pairs[name])] == [
        name for name in names if not founds[name] and name in OF_OTHER_VERSIONS
    ]
    for name in names:
        for found, sums in zip(founds[name], pairs[name], strict=True):
            for got, want in sums:
                digits = max(
                    float(jnp.finfo(got.dtype).eps),
                    float(jnp.finfo(jnp.float32).eps) * 2 ** (3 * (name == "reduce_precision")),
                )
                np.testing.assert_allclose(got, want, rtol=64 * digits, atol=64 * digits, err_msg=str(found.single))


@pytest.mark.parametrize("number", [2, pytest.param(20, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("share", sweep(range(3), but=[0]))
def test_it_is_linear_in_each_group_of_operands(share, number):
    assert_linear(LINEAR[share::3], number)


def test_a_gather_that_fills_is_linear_in_nothing():
    """It adds the number that it fills with."""
    take = lambda x: x.at[jnp.asarray([0, 7])].get(mode="fill", fill_value=1.0)
    assert known("gather").linear_groups(equations.traced("gather", take, "3n").single) == []


def test_a_false_group_is_found(monkeypatch):
    """A division is linear in what is divided, not in the divisor."""
    set_rules(monkeypatch, "div", linear=((0, 1),))
    with pytest.raises(AssertionError):
        assert_linear(["div"], 2)
