"""What it takes to add inside the backward pass: the memory of four losses, each in three mixtures of dtypes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_accum
from benchmarks._measure import Tree
from benchmarks._one_device import Facts, by_cublas, is_gpu, sums_in_products
from optax_accum.accelerators import Target

DEPTH, WIDTH, WORDS = 16, 1024, 4096  # no stack fits in the 128 MiB of a TPU's vector memory
ROWS, LENGTH = 8, 4  # of a micro-batch: few, so that P is more than what is kept of them
CHOSEN = "one of 16 layers, by a switch, bfloat16"
FOUR, KEPT = "tied embedding, bfloat16, k = 4", "tied embedding without checkpoint, bfloat16, k = 4"


class Mixture(NamedTuple):
    """The dtype of the parameters, whose sums are float32, and what the loss casts them to before its layers."""

    of_params: Any
    inside: Any


class Case(NamedTuple):
    """A loss `(params, batch)`, and the shapes of its parameters."""

    loss: Callable[[Tree, jax.Array], jax.Array]
    params: Tree
    words: bool = False


MIXTURES = {
    "float32": Mixture(jnp.float32, jnp.float32),
    "bfloat16": Mixture(jnp.bfloat16, jnp.bfloat16),
    "cast before": Mixture(jnp.float32, jnp.bfloat16),
}


def block(x: jax.Array, w: Tree) -> jax.Array:
    """Returns what a layer makes of rows."""
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def through(layer: Callable[[jax.Array, Any], jax.Array], x: jax.Array, layers: Tree) -> jax.Array:
    """Returns what stacked layers make of rows."""
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, layers)[0]


def stacked(params: Tree, x: jax.Array, layer: Callable[..., Any] = block) -> jax.Array:
    return _mean(through(layer, x.astype(params["up"].dtype), params))


def unrolled(params: Tree, x: jax.Array) -> jax.Array:
    return _mean(functools.reduce(block, params, x.astype(params[0]["up"].dtype)))


def tied(params: Tree, words: jax.Array, layer: Callable[..., Any] = block) -> jax.Array:
    x = through(layer, params["table"][words[..., :-1]], params["layers"])
    logits = (x @ params["table"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, words[..., 1:]).mean()


def chosen(params: Tree, x: jax.Array) -> jax.Array:
    each = [lambda x, n=n: block(x, jax.tree.map(lambda w: w[n], params)) for n in range(DEPTH)]
    x = x.astype(params["up"].dtype)
    return _mean(jax.lax.switch(jnp.int32(jnp.abs(jnp.sum(x))) % DEPTH, each, x))


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


UP, DOWN = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
STACK = {"up": (DEPTH, *UP), "down": (DEPTH, *DOWN)}
CASES = {
    "scan": Case(stacked, STACK),
    "tied embedding": Case(
        functools.partial(tied, layer=jax.checkpoint(block)), {"table": (WORDS, WIDTH), "layers": STACK}, words=True
    ),
    "checkpointed scan": Case(functools.partial(stacked, layer=jax.checkpoint(block)), STACK),
    "one by one": Case(unrolled, [{"up": UP, "down": DOWN}] * DEPTH),
}


def memory(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the temporary memory of each loss in each mixture; its gradient, which comes out, is not in it."""
    for name, case in CASES.items():
        for mixture in MIXTURES:
            yield f"{name}, {mixture}", Ways(on, case, MIXTURES[mixture]).facts()
    bfloat16, case = MIXTURES["bfloat16"], CASES["tied embedding"]
    yield FOUR, Ways(on, case, bfloat16, count=4).facts()
    yield KEPT, Ways(on, case._replace(loss=tied), bfloat16, count=4).facts()
    yield CHOSEN, Ways(on, Case(chosen, STACK), bfloat16).facts()


class Ways(NamedTuple):
    """A loss in a mixture of dtypes, and the ways to its gradient over a batch of so many micro-batches."""

    on: Target
    case: Case
    mixture: Mixture
    count: int = 8

    def facts(self) -> Facts:
        """Returns what each way needs, and how many of its products add to what they write."""
        ways = {
            "in place": self.compiled(self.ours()),
            "with statistics": self.compiled(self.ours(statistics=True)),
            "by hand": self.compiled(self.by_hand),
        }
        found = {"one micro-batch, P": self.alone()}
        found |= {f"{way}, P": self.temporary(program) for way, program in ways.items()}
        if is_gpu(self.on):
            found |= {f"beta = 1, {way}": sums_in_products(ways[way]) for way in ("in place", "by hand")}
        return found

    def ours(self, **options: Any) -> Callable[..., Any]:
        """Returns the gradient by the library."""
        size = {"microbatch_size": ROWS, "accumulator_dtype": jnp.float32}
        return optax_accum.value_and_grad(self.loss, **size, **options)

    def alone(self) -> float:
        """Returns what one micro-batch needs, and one layer's gradient, which is added to the sum when it is whole."""
        found = self.temporary(self.compiled(jax.value_and_grad(self.loss), 1))
        return found + 1 / DEPTH

    def by_hand(self, params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
        """Returns the gradient as one writes it."""

        def add(total: Tree, rows: jax.Array) -> tuple[Tree, None]:
            found = jax.value_and_grad(self.loss)(params, rows)
            return jax.tree.map(lambda total, one: total + one.astype(jnp.float32), total, found), None

        start = (jnp.zeros([]), optax.tree.zeros_like(params, dtype=jnp.float32))
        return jax.lax.scan(add, start, batch.reshape(-1, ROWS, *batch.shape[1:]))[0]

    def loss(self, params: Tree, batch: jax.Array) -> jax.Array:
        """Returns the loss of parameters that are cast before it, where they are."""
        return self.case.loss(optax.tree.cast(params, self.mixture.inside), batch)

    def compiled(self, step: Callable[..., Any], count: int | None = None) -> Any:
        """Returns the program of a step over a batch of so many micro-batches."""
        rows = ROWS * (self.count if count is None else count)
        words = jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)
        batch = words if self.case.words else jax.ShapeDtypeStruct((rows, LENGTH, WIDTH), jnp.float32)
        args = (self.shapes(self.mixture.of_params), batch)
        return by_cublas(self.on, jax.jit(step).lower(*map(self.on.one().shapes, args)))

    def temporary(self, program: Any) -> float:
        """Returns its temporary memory, in float32 copies of the parameters."""
        copy = sum(4 * leaf.size for leaf in jax.tree.leaves(self.shapes(jnp.float32)))
        return program.memory_analysis().temp_size_in_bytes / copy

    def shapes(self, dtype: Any) -> Tree:
        """Returns the parameters' shapes."""
        is_shape = lambda node: isinstance(node, tuple) and all(isinstance(n, int) for n in node)
        return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), self.case.params, is_leaf=is_shape)
