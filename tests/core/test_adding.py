"""Programs whose results are added to sums: sums + results, and no second array of a result's size beside them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests import programs
from tests.engine import adding
from tests.tiers import sweep
from tests.versions import branches_add_in_place, since

X = jnp.linspace(-1, 1, 12).reshape(3, 4)
W = jnp.linspace(-0.5, 1.5, 32).reshape(2, 4, 4)
ROWS = jnp.array([2, 0, 2])


def layers(step, w=W, **options):
    """A loop over layers that carries [3, 4] and stacks [2, 4, 4]."""
    return lax.scan(lambda h, one: (jnp.tanh(h @ one), step(h, one)), X, w, **options)


def with_a_running_sum(body, w=W, **options):
    """What `body` makes of each layer is added to what a loop carries."""
    total = lambda carry, one: ((jnp.tanh(carry[0] @ one), carry[1] + body(carry[0], one)), None)
    return lax.scan(total, (X, jnp.zeros((4, 4))), w, **options)[0][1]


def nested(x):
    """A loop over pairs of layers, in which a loop over the two stacks, and adds to what both carry."""

    def pair(carry, two):
        h, total = carry
        step = lambda carry, one: ((jnp.tanh(carry[0] @ one), carry[1] + one * carry[0].sum()), one * carry[0].mean())
        (h, more), each = lax.scan(step, (h, jnp.zeros((4, 4))), two)
        return (h, total + more), each

    (_, total), each = lax.scan(pair, (x, jnp.zeros((4, 4))), jnp.stack([W, 2 * W]))
    return total, each


def chosen(h, one):
    """The first of three rows, the last one beside another term, or none; and in another branch what is no sum."""
    beside = lambda h, one: (lax.pad(h[:1] * one[:1], 0.0, [(3, 0, 0), (0, 0, 0)]) + one * h.sum(), h.sum())
    first = lambda h, one: (lax.pad(h[:1] * one[:1], 0.0, [(0, 3, 0), (0, 0, 0)]), h[0, 0])
    rest = lambda h, one: lax.cond(one[1, 0] < 0.5, first, lambda h, one: (jnp.zeros((4, 4)), h[0, 1]), h, one)
    return lax.cond(one[0, 0] < 0, rest, beside, h, one)


PROGRAMS = {  # of X, and the numbers of terms of its results that are added where they arise
    "a value": lambda x: (x * 2,),
    "an input": lambda x: (x, x + 1),
    "a constant": lambda x: (jnp.ones(3), x),
    "a chain of sums": lambda x: (lax.add_p.bind(x * 2, lax.add_p.bind(jnp.sin(x), jnp.cos(x))),),
    "a result that is used": lambda x: (y := x * 2, y.sum(0) * y[0]),
    "one value, two results": lambda x: (y := jnp.sin(x), y),
    "a sum of one value with itself": lambda x: (lax.add_p.bind(y := jnp.sin(x), y),),
    "what a loop stacks": lambda x: layers(lambda h, one: one * h.sum())[1:],
    "what a loop stacks from the end": lambda x: layers(lambda h, one: one * h.sum(), reverse=True)[1:],
    "what a loop stacks, unrolled": lambda x: layers(lambda h, one: one * h.sum(), unroll=2)[1:],
    "what a loop adds up": lambda x: (with_a_running_sum(lambda h, one: one * h.sum()),),
    "what a loop adds up from the end": lambda x: (with_a_running_sum(lambda h, one: one * h.sum(), reverse=True),),
    "what a loop adds up, from a start": lambda x: (
        lax.scan(lambda total, one: (total + jnp.sin(one * x.sum()), None), jnp.cos(W[0]), W)[0],
    ),
    "what a loop stacks, and somebody takes": lambda x: (ys := layers(lambda h, one: one * h.sum())[1], ys.sum()),
    "what a loop multiplies": lambda x: (lax.scan(lambda h, one: (h * one, None), jnp.cos(W[0]), W)[0],),
    "loops in loops": nested,
    "two terms of one loop": lambda x: (
        lax.add_p.bind(*lax.scan(lambda h, one: (h + one.sum() * W, one * x.sum()), jnp.zeros_like(W), W)),
    ),
    "rows of a table": lambda x: (jnp.zeros((5, 4)).at[ROWS].add(x),),
    "rows of a table, and more": lambda x: (jnp.zeros((5, 4)).at[ROWS].add(x) + jnp.ones((5, 4)) * x.sum(),),
    "rows beyond a table": lambda x: (jnp.zeros((2, 4)).at[ROWS].add(x, mode="drop"),),
    "rows of another array": lambda x: (jnp.ones((5, 4)).at[ROWS].add(x),),
    "a slice": lambda x: (lax.pad(x, 0.0, [(1, 1, 0), (0, 2, 0)]),),
    "a slice of zeros, cut off": lambda x: (lax.pad(x, 0.0, [(-1, 1, 0), (0, 0, 1)]),),
    "a slice of ones": lambda x: (lax.pad(x, 1.0, [(1, 1, 0), (0, 2, 0)]),),
    "a slice at a place": lambda x: (lax.dynamic_update_slice(jnp.zeros((5, 4)), x, (jnp.int32(1), 0)),),
    "a slice at a place beyond": lambda x: (lax.dynamic_update_slice(jnp.zeros((5, 4)), x, (jnp.int32(4), 0)),),
    "a slice of another array": lambda x: (lax.dynamic_update_slice(jnp.ones((5, 4)), x, (jnp.int32(1), 0)),),
    "a loop of no layers": lambda x: lax.scan(lambda h, one: (h, one), x, jnp.zeros((0, 4))),
    "a branch": lambda x: (lax.cond(x[0, 0] < 0, lambda x: x * 2, lambda x: x, x),),
    "a slice in a branch": lambda x: (
        lax.cond(x[0, 0] < 0, lambda x: lax.pad(x, 0.0, [(1, 1, 0), (0, 2, 0)]), lambda x: jnp.zeros((5, 6)), x),
    ),
    "two terms of a branch": lambda x: (
        lax.add_p.bind(*lax.cond(x[0, 0] < 0, lambda x: (x, jnp.sin(x)), lambda x: (x, jnp.zeros_like(x)), x)),
    ),
    "branches in branches": lambda x: chosen(x, W[0]),
    "branches that a loop stacks": lambda x: layers(lambda h, one: chosen(h, one)[0])[1:],
    "branches that a loop adds up": lambda x: (with_a_running_sum(lambda h, one: chosen(h, one)[0]),),
}


def wide(leaf):
    return jnp.promote_types(leaf.dtype, jnp.float32)


def added(program, x, scale=None, square=None):
    """The sums, which begin with something, after the program's results have been added, and the squares."""
    traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    begin = [jnp.cos(jnp.arange(kind.size, dtype=wide(kind))).reshape(kind.shape) for kind in traced.out_avals]
    sums = [adding.Sum(leaf, square, scale) for leaf in begin]
    assert adding.run(traced, [x], sums) == [None] * len(sums)
    return [one.total for one in sums], [one.square for one in sums]


def expected(program, x, scale=1.0):
    results = [jnp.asarray(leaf) for leaf in program(x)]
    begin = [jnp.cos(jnp.arange(leaf.size, dtype=wide(leaf))).reshape(leaf.shape) for leaf in results]
    return [a + scale * b.astype(a.dtype) for a, b in zip(begin, results, strict=True)]


def close(found, want, rtol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), found, want)


AS_ANOTHER = {  # as from the end, with a start, as two terms of one loop, as branches in branches
    *("what a loop stacks", "what a loop stacks, and somebody takes", "what a loop adds up", "loops in loops"),
    *("branches that a loop stacks", "branches that a loop adds up"),
}


def of_all(run):
    """What a function makes of each program, by name: all are one program, which is compiled once."""
    return jax.jit(lambda *args: {name: run(program, *args) for name, program in PROGRAMS.items()})


def test_results_are_added_to_sums():
    found = of_all(lambda program, x: added(program, x)[0])(X)
    close(found, of_all(expected)(X))
    nothing = of_all(lambda program, x: expected(program, x, scale=0.0))(X)
    assert not [name for name in PROGRAMS if all(map(np.array_equal, found[name], nothing[name]))]


@pytest.mark.sweep
def test_they_are_under_vmap():
    xs = jnp.stack([X, -2 * X])
    found = of_all(lambda program, xs: jax.vmap(lambda x: added(program, x)[0])(xs))(xs)
    close(found, jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(of_all(expected), xs)))


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_outside_jit(name):
    close(added(PROGRAMS[name], X)[0], expected(PROGRAMS[name], X))


@pytest.mark.sweep
def test_they_are_differentiated():
    total = lambda leaves: sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves)
    of = lambda sums: of_all(lambda program, x: jax.grad(lambda x: total(sums(program, x)))(x))(X)
    close(of(lambda program, x: added(program, x)[0]), of(expected), rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sweep(PROGRAMS, but=["a slice in a branch"]))
def test_in_a_shard_map_a_sum_varies_with_what_is_added_to_it(name):
    """The program was traced outside; the sum begins with the same number on all devices, whose branches differ."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec, xs = jax.sharding.PartitionSpec("data"), jnp.stack([X, -2 * X])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def run(xs):
        sums, squares = added(PROGRAMS[name], xs[0], square=jnp.float32(0))
        return [leaf[None] for leaf in [*sums, *squares]]

    want = [[*expected(PROGRAMS[name], x), *(jnp.sum(y**2) for y in PROGRAMS[name](x))] for x in xs]
    close(run(xs), jax.tree.map(lambda *leaves: jnp.stack(leaves), *want), rtol=1e-5)


@pytest.mark.parametrize("name", sweep(PROGRAMS, but=["what a loop stacks", "rows of a table", "a slice at a place"]))
@pytest.mark.parametrize("scale", [2.0, 0.0])
def test_they_are_scaled(name, scale):
    found = jax.jit(lambda x, scale: added(PROGRAMS[name], x, scale=scale)[0])(X, jnp.float32(scale))
    close(found, expected(PROGRAMS[name], X, scale))


@pytest.mark.parametrize(
    "name",
    [
        *sweep(["what a loop stacks", "what a loop adds up"]),
        *("rows of a table", "a slice", "a slice in a branch", "a value"),
    ],
)
def test_a_scale_of_zero_leaves_out_what_is_no_number(name):
    program = lambda x: PROGRAMS[name](x / 0)
    found = jax.jit(lambda x, scale: added(program, x, scale=scale)[0])(0 * X, jnp.float32(0))
    begun = [leaf - result for leaf, result in zip(expected(PROGRAMS[name], X), PROGRAMS[name](X), strict=True)]
    close(found, begun)


@pytest.mark.parametrize("name", sweep(PROGRAMS, but=["two terms of one loop", "a chain of sums"]))
def test_squares_are_those_of_the_results(name):
    """Of a sum of several terms, the square of the sum."""
    _, squares = jax.jit(lambda x: added(PROGRAMS[name], x, square=jnp.float32(1)))(X)
    want = [1 + jnp.sum(jnp.asarray(leaf, jnp.float32) ** 2) for leaf in PROGRAMS[name](X)]
    close(squares, want, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["what a loop stacks", "a slice", "a slice in a branch", "a slice at a place beyond", "a branch"]
)
def test_squares_of_layers_are_measured_apart(name):
    (result,) = PROGRAMS[name](X)
    _, (found,) = jax.jit(lambda x: added(PROGRAMS[name], x, square=jnp.ones(len(result))))(X)
    close(found, 1 + jnp.sum(result**2, range(1, result.ndim)))


@pytest.mark.parametrize("name", ["what a loop stacks", "what a loop adds up", "rows of a table", "a value"])
def test_narrow_results_are_added_wide(name):
    """256 times 1.0 to a sum of 2**16: in bfloat16, not one of them counts."""
    program = lambda x: [leaf.astype(jnp.bfloat16) * 0 + 1 for leaf in PROGRAMS[name](x)]
    traced = jax.make_jaxpr(program)(X)

    def run(x):
        totals = [jnp.full(kind.shape, 2.0**16) for kind in traced.out_avals]
        for _ in range(4):
            sums = [adding.Sum(leaf) for leaf in totals]
            adding.run(traced, [x], sums)
            totals = [one.total for one in sums]
        return totals

    for total in jax.jit(run)(X):
        assert total.dtype == jnp.float32
        np.testing.assert_array_equal(total, 2.0**16 + 4)


def test_a_narrow_sum_is_rounded_once():
    one, part = adding.Sum(jnp.bfloat16(1)), jnp.float32(2**-8 + 2**-17)  # alone it is rounded to 2**-8
    adding.run(jax.make_jaxpr(lambda x: x)(part), [part], [one])
    assert (one.total.dtype, one.total) == (jnp.bfloat16, 1 + 2**-7)


def test_what_a_program_rounds_is_rounded():
    one, x = adding.Sum(jnp.float32(0)), jnp.float32(1 + 2**-9)
    adding.run(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32))(x), [x], [one])
    assert one.total == 1


# What becomes of a finished sum

FINISHED = {  # the shapes of what is finished, a sum or a slice of it
    "a value": {(3, 4)},
    "a chain of sums": {(3, 4)},
    "what a loop stacks": {(4, 4)},
    "what a loop stacks from the end": {(4, 4)},
    "what a loop adds up": {(4, 4)},
    "two terms of one loop": {(2, 4, 4)},
    "rows of a table": {(5, 4)},
    "loops in loops": {(4, 4)},
    "a branch": {(3, 4)},  # not in it, where another device may be in another one
    "branches that a loop stacks": {(4, 4)},
}


@pytest.mark.parametrize("name", sweep(FINISHED, but=FINISHED.keys() - AS_ANOTHER))
def test_a_sum_is_finished_once_where_nothing_more_is_added(name):
    """A stacked one slice by slice, also in a loop in a loop."""
    shapes, program = [], PROGRAMS[name]

    def finish(leaf):
        shapes.append(leaf.shape)
        return 2 * leaf + 1

    def run(x):
        traced = jax.make_jaxpr(program)(x)
        sums = [adding.Sum(jnp.ones(kind.shape), finish=finish) for kind in traced.out_avals]
        adding.run(traced, [x], sums)
        return [one.total for one in sums]

    close(jax.jit(run)(X), [2 * (1 + leaf) + 1 for leaf in program(X)])
    assert set(shapes) == FINISHED[name]


def test_a_slice_that_waits_is_finished_with_the_others():
    """`finish` refuses slices: it gets the whole sum."""
    program, shapes = PROGRAMS["what a loop stacks"], []

    def finish(leaf):
        shapes.append(leaf.ndim)
        return None if leaf.ndim == 2 else 2 * leaf

    def run(x):
        one = adding.Sum(jnp.ones_like(W), finish=finish)
        adding.run(jax.make_jaxpr(program)(x), [x], [one])
        return one.total

    close(jax.jit(run)(X), 2 * (1 + program(X)[0]))
    assert shapes[-1] == 3


# Memory

BIG = jnp.zeros((16, 128, 128))


def of_big_layers(w, x):
    step = lambda h, one: (jnp.tanh(h @ one), (h.T @ h) * one)
    return lax.scan(step, x, w)[1]


def in_big_loops(w, x):
    """Its results are added up, in what a loop of no stack carries."""
    return lax.scan(lambda total, one: (total + jnp.outer(one[0], one[1])[None] * w, None), jnp.zeros_like(w), x)[0]


def to_a_big_table(w, x):
    return jnp.zeros_like(w).at[jnp.arange(len(x)), 7].add(jnp.tanh(x @ w[0]))


def slice_by_slice(w, x):
    """The gradient of layers that are taken one by one."""
    layers_of = lambda w, x: functools.reduce(lambda h, n: jnp.tanh(h @ w[n]), range(4), x).sum()
    return jax.grad(layers_of)(w, x)


def slice_at_a_place(w, x):
    layers_of = lambda w, x: lax.fori_loop(0, 4, lambda n, h: jnp.tanh(h @ w[n]), x).sum()
    return jax.grad(layers_of)(w, x)


def in_branches(w, x):
    """The gradient of the layer that a branch takes."""
    layers_of = lambda w, x: lax.switch(x[0, 0].astype(int), [lambda x, n=n: jnp.tanh(x @ w[n]) for n in range(4)], x)
    return jax.grad(lambda *args: layers_of(*args).sum())(w, x)


LARGE = {
    "stacked": (of_big_layers, 0.2),
    "carried": (in_big_loops, 0.2),
    "a table": (to_a_big_table, 0.2),
    "slices": (slice_by_slice, 0.4),
    "slices at places": (slice_at_a_place, 0.4),
    "branches": (in_branches, 0.2),
}


IN_PLACE_ANYHOW = since(0, 12, 0, why="an older XLA adds slices that are stacked in place, even afterwards")


NEWER = {"slices": IN_PLACE_ANYHOW, "branches": branches_add_in_place}


@pytest.mark.parametrize(
    "name", sweep([pytest.param(name, marks=NEWER.get(name, ())) for name in LARGE], but=["carried", "a table"])
)
def test_no_second_array_of_the_size_of_a_sum(name):
    """With `sums + program(values)` there is one, at least."""
    program, most = LARGE[name]
    types = jax.typeof(BIG), jax.ShapeDtypeStruct((8, 128), jnp.float32)
    traced = jax.make_jaxpr(program)(*types)

    def where_they_arise(total, *values):
        one = adding.Sum(total)
        adding.run(traced, values, [one])
        return one.total

    def afterwards(total, *values):
        return total + jax.lax.optimization_barrier(program(*values))

    def temporary(run):
        step = jax.jit(run, donate_argnums=0)
        return programs.compiled(step.lower(jax.typeof(BIG), *types)).memory_analysis().temp_size_in_bytes / BIG.nbytes

    assert temporary(where_they_arise) < most
    assert temporary(afterwards) > 0.9


@pytest.mark.parametrize("put", [jnp.stack, jnp.concatenate], ids=["stack", "concatenate"])
@pytest.mark.parametrize("axis", [0, 1])
def test_arrays_that_are_put_side_by_side_are_added_each_to_its_slice(put, axis):
    """The gradient of layers that a Python loop takes out of a stack: no second stack is made."""
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    fun = lambda a, b: put([2 * a, a * b], axis)
    program, total = jax.make_jaxpr(fun)(a, b), jnp.full_like(fun(a, b), 10.0)

    def added(total):
        one = adding.Sum(total)
        assert adding.run(program, [a, b], [one]) == [None]
        return one.total

    np.testing.assert_array_equal(added(total), 10 + fun(a, b))
    assert not {"stack", "concatenate"} & {equation.primitive.name for equation in jax.make_jaxpr(added)(total).eqns}
