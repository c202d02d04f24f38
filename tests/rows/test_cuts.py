"""Which rows loops keep for later ones: as few bytes as can be, fewer with `recompute`, and the gradient is exact."""

import collections
import functools
import itertools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from tests import programs
from tests.engine import cuts
from tests.tiers import sweep


class Node(NamedTuple):
    """A value of a random program: what it is made of, its bytes, the price of making it again."""

    ins: tuple
    size: int
    price: int


def random_program(seed):
    """Values in order; the first are there anyway, or must be kept."""
    draw = random.Random(seed)
    nodes = []
    for number in range(draw.randint(3, 9)):
        ins = tuple(draw.sample(range(number), min(number, draw.choice([0, 1, 1, 2, 3])))) if number else ()
        price = cuts.ALWAYS if not ins else draw.choice([0, 0, 1, 2, 5, cuts.ALWAYS])
        nodes.append(Node(ins, draw.choice([0, 1, 2, 3, 5, 8]) if ins else draw.choice([0, 3, 4]), price))
    wanted = draw.sample(range(len(nodes)), draw.randint(1, min(3, len(nodes))))
    return nodes, wanted


def cost_of(nodes, wanted, kept):
    """The bytes of what is kept and the prices of what is made again; None where something cannot be made."""
    total, todo, seen = sum(nodes[value].size for value in kept), list(wanted), set()
    while todo:
        value = todo.pop()
        if value in kept or value in seen or not nodes[value].size:
            continue
        seen.add(value)
        if nodes[value].price == cuts.ALWAYS:
            return None
        total += nodes[value].price
        todo += nodes[value].ins
    return total


def smallest(nodes, wanted):
    made = {value: node for value, node in enumerate(nodes) if node.ins}
    prices = {id(node): node.price for node in nodes}
    return cuts.smallest(wanted, made, lambda value: nodes[value].size, lambda node: prices[id(node)])


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_no_other_set_costs_less(first):
    sizes = collections.Counter()
    for seed in range(first, first + 200):
        nodes, wanted = random_program(seed)
        kept = smallest(nodes, wanted)
        every = itertools.chain.from_iterable(
            itertools.combinations(range(len(nodes)), number) for number in range(len(nodes) + 1)
        )
        costs = [cost for some in every if (cost := cost_of(nodes, wanted, set(some))) is not None]
        assert cost_of(nodes, wanted, set(kept)) == min(costs), seed
        assert all(nodes[value].size for value in kept)
        sizes[len(kept)] += 1
    assert len(sizes) > 2  # none, one, several


def test_of_equal_sets_the_earliest_is_kept():
    """More is made of it: a chain of equal sizes is kept at its start."""
    nodes = [Node((), 4, cuts.ALWAYS), Node((0,), 4, 0), Node((1,), 4, 0), Node((2,), 9, 0)]
    assert smallest(nodes, [3]) == [0]
    assert smallest([*nodes[:2], Node((1,), 3, 0), nodes[3]], [3]) == [2]  # a smaller one later


def test_what_costs_less_than_it_saves_runs_again():
    of_price = lambda price: [Node((), 3, cuts.ALWAYS), Node((0,), 5, price)]
    assert smallest(of_price(1), [1]) == [0]
    assert smallest(of_price(3), [1]) == [1]


# Chains of layers with BatchNorm

DEPTH, ROWS, WIDTH = 8, 64, 6


def chain(params, x):
    h = x
    for w in params:
        h = h @ w
        h = jnp.tanh((h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3))
    return (h**2).mean()


def of_largest(params, x):
    """Rows that are compared with the largest of all, which has a gradient."""
    h = x
    for w in params:
        h = jnp.tanh(h @ w)
        h = h / (1 + jnp.max(jnp.abs(h), 0, keepdims=True)) + jnp.max(h, 0, keepdims=True)
    return jnp.mean(h**3)


def with_shortcuts(params, x):
    """Later layers take rows of earlier ones, and outputs are rows."""
    h = before = x
    for w in params:
        h, before = jnp.tanh(h @ w - (h @ w).mean(0, keepdims=True)) + before, h
    return (h**2).mean() + jnp.mean(before * x)


def values(depth=DEPTH, dtype=jnp.float32, rows=ROWS):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return [normal(WIDTH, WIDTH) / 2 for _ in range(depth)], normal(rows, WIDTH)


SHARES = [0, 0.3, 0.6, 1, 2, 4, 10]


@pytest.mark.sweep
def test_less_is_kept_where_more_may_run_again():
    params, x = values()
    kept = [optax_accum.explain(chain, params, x, recompute=share).kept_bytes / x.nbytes for share in SHARES]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == DEPTH
    assert kept[-1] <= 2
    assert optax_accum.explain(chain, params, x).kept_bytes / x.nbytes == kept[0]  # on a CPU


def products(share):
    """How often the program multiplies matrices: a loop's body counts once, as each layer here has its own."""
    program = jax.make_jaxpr(optax_accum.value_and_grad(chain, 4, recompute=share))(*values())
    return sum(equation.primitive.name == "dot_general" for equation in programs.equations(program.jaxpr))


def test_without_it_each_product_runs_once():
    """Bases are what a product makes: a backward loop begins with them. Of the first layer there is no gradient of rows."""
    assert products(0) == 3 * DEPTH - 1


@pytest.mark.sweep
@pytest.mark.parametrize("share", sweep(SHARES[1:5], but=SHARES[2:3]))
def test_no_more_runs_again_than_is_allowed(share):
    """By bytes that products move; what is cheap may run anywhere."""
    again = products(share) - products(0)
    forward = DEPTH * (1 + 2)  # of each layer a product, and some passes over its rows that are cheap
    assert again <= share * forward
    assert again > 0 or share < 0.5


@pytest.mark.sweep
@pytest.mark.parametrize("loss", [chain, with_shortcuts])
def test_the_compiled_program_needs_less_memory(loss):
    """But for rows that are compared with an extreme: these are kept."""

    def temporary(share):
        step = jax.jit(optax_accum.value_and_grad(loss, 16, recompute=share))
        types = jax.tree.map(jax.typeof, values(rows=4096))
        return programs.compiled(step.lower(*types)).memory_analysis().temp_size_in_bytes / (4096 * WIDTH * 4)

    saved, again = temporary(0), temporary(4.0)
    assert again < 0.7 * saved


EXACT = [
    (loss, share, parts) for loss in (chain, of_largest, with_shortcuts) for share in (0, 0.6, 4) for parts in (4, 7)
]


@pytest.mark.sweep
@pytest.mark.parametrize(("loss", "share", "parts"), sweep(EXACT, but=EXACT[2:3]))
def test_the_gradient_is_exact(loss, share, parts, x64):
    """Also of extremes, with which rows that are made again are compared; of seven micro-batches the last are filled up."""
    args = values(depth=5, dtype=jnp.float64)
    ours = optax_accum.value_and_grad(loss, parts, recompute=share)
    found, want = jax.jit(lambda *args: [fun(*args) for fun in (ours, jax.value_and_grad(loss))])(*args)
    largest = functools.reduce(max, (float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(want[1])))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, largest)), found, want)


@pytest.mark.sweep
@pytest.mark.parametrize("share", sweep([0, 0.6, 4], but=[0.6]))
def test_rows_that_attain_an_extreme_share_its_gradient(share):
    """In float32, where a row that is made again otherwise would not be equal to it."""
    params, x = values(depth=4)
    found = jax.jit(optax_accum.value_and_grad(of_largest, 5, recompute=share))(params, x)
    want = jax.jit(jax.value_and_grad(of_largest))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, want)
