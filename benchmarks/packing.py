"""What cutting by tokens gains: how full the budget is, against the fewest possible; padding, time and memory.

Run `python -m benchmarks.packing`, with `--quick` for the packings alone. The texts are the topics of `help()`, which
come with Python, in paragraphs.
"""

import pydoc_data.topics
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum
from benchmarks import _measure, _problems
from benchmarks._measure import Tree
from optax_accum.batching import TokenPacking, token_microbatches

CONTEXT, VOCABULARY, WIDTH, LAYERS = 512, 1024, 64, 2  # tokens of a row at most; the decoder
ROWS, BUDGET, BUCKETS = 128, 1024, 8  # of the measured update

NOTES = """\
Filled is the share of the budget, tokens of all micro-batches and devices, that is no padding; most, that of the
fewest micro-batches. These are those of a bucket for each length, on as many devices, and no packing has fewer. For a
micro-batch is a rectangle of devices, rows and the longest of these rows: the one with the longest of all holds
devices * floor(budget / longest) rows at most, and leaves the least to the others if it holds that many, the longest;
and so on. (A test compares with all partitions.) Seconds are those of the fastest of three calls."""


class Packed(NamedTuple):
    """One row of the first table."""

    data: str
    budget: int
    devices: int
    buckets: str
    packing: TokenPacking
    fewest: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.data}, {self.budget} tokens, devices: {self.devices}"


def main() -> None:
    """Prints the tables, and whether the targets are met."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="packings alone: nothing is compiled")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each contender")
    options = parser.parse_args()
    rows = paragraphs()
    print(_measure.header("Micro-batches by tokens", NOTES))
    found = [*_packed("paragraphs", [len(row) for row in rows], (1024, 2048), (1, 2))]
    found += _packed("log-normal", log_normal(100_000), (4096, 8192, 16384), (1, 8))
    print(_rendered(found))
    print(_measure.targets_text(_verdicts(found)))
    if not options.quick:
        print(_measured(rows, options.rounds))


def paragraphs() -> list[Any]:
    """Returns the paragraphs of the texts of `help()`, as numbers of words, cut to `CONTEXT`."""
    texts = (text for topic in pydoc_data.topics.topics.values() for text in re.split(r"\n\s*\n", topic))
    words = [found for text in texts if (found := re.findall(r"\w+|[^\w\s]", text))]
    number: dict[str, int] = {}
    rows = [np.array([number.setdefault(word, len(number)) % VOCABULARY for word in text]) for text in words]
    return [row[start : start + CONTEXT] for row in rows for start in range(0, len(row), CONTEXT)]


def log_normal(rows: int) -> Any:
    """Returns lengths around e^5, spread by a factor of e, of at most 4096."""
    return np.clip(np.random.default_rng(0).lognormal(5, 1, rows).astype(int), 1, 4096)


def _packed(data: str, lengths: Any, budgets: tuple[int, ...], devices: tuple[int, ...]) -> list[Packed]:
    found = []
    for budget in budgets:
        for number in devices:
            fewest = token_microbatches(lengths, budget, num_devices=number, buckets=np.unique(lengths))
            for name, buckets in {"default": None, "24": 24, "16": 16, "8": 8}.items():
                times = []
                for _ in range(3):
                    start = time.perf_counter()
                    packing = token_microbatches(lengths, budget, num_devices=number, buckets=buckets)
                    times.append(time.perf_counter() - start)
                count = fewest.num_microbatches
                found.append(Packed(data, budget, number, name, packing, count, min(times)))
    return found


def _rendered(found: list[Packed]) -> str:
    head = ("lengths", "budget", "devices", "buckets", "shapes", "micro-batches", "fewest", "filled", "most", "seconds")
    rows = []
    for each in found:
        case = f"{each.data}, {len(each.packing.lengths)} rows", str(each.budget), str(each.devices), each.buckets
        count, filled = each.packing.num_microbatches, each.packing.filled
        counts = map(str, (len(set(each.packing.padded_lengths)), count, each.fewest))
        rows.append((*case, *counts, f"{filled:.1%}", f"{filled * count / each.fewest:.1%}", f"{each.seconds:.2f}"))
    return f"{_measure.markdown([head, *rows])}\n"


def _verdicts(found: list[Packed]) -> list[dict[str, Any]]:
    """The numbers to reach, with default buckets."""
    default = [each for each in found if each.buckets == "default"]
    beyond = lambda each: each.packing.num_microbatches / each.fewest
    return [
        _measure.worst("budget filled", default, lambda each: each.packing.filled, 0.9, at_least=True),
        _measure.worst("micro-batches / fewest", default, beyond, 1.05),
        _measure.worst("seconds", default, lambda each: each.seconds, 1.0),
    ]


# An update, measured.


def _measured(rows: list[Any], rounds: int) -> str:
    every = token_microbatches([len(row) for row in rows], BUDGET, buckets=BUCKETS)
    batch, start = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:ROWS]], _decoder()
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1, momentum=0.9), None)
    step = jax.jit(optax_accum.value_and_apply_gradients(_loss, tx, weight_fn=_count), donate_argnums=(0, 1))
    ways = {name: _Way(step, start, tx.init(start), cut) for name, cut in _contenders(batch, every.buckets).items()}
    updated = {name: way.run() for name, way in ways.items()}
    numbered = lambda tree: {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(tree))}
    of = {name: numbered(params) for name, params in updated.items()}
    differences = {name: _problems.difference(params, of["by rows"], numbered(start)) for name, params in of.items()}
    _problems.judge("by tokens", differences)
    for _ in range(rounds - 1):  # in turn, so that what others do on the machine hits all
        for way in ways.values():
            way.run()
    head = ("cut", "micro-batches", "programs", "padding", "ms / update", "temporary MB", "difference")
    table = [
        (
            name,
            str(len(way.micro_batches)),
            str(len(way.programs)),
            f"{way.padding:.0%}",
            f"{1e3 * min(way.times):.0f}",
            f"{way.memory / 1e6:.0f}",
            f"{differences[name]:.0e}",
        )
        for name, way in ways.items()
    ]
    millions = sum(leaf.size for leaf in jax.tree.leaves(start)) / 1e6
    notes = f"""\
The update of {ROWS} of these paragraphs ({sum(map(len, batch))} tokens), at most {BUDGET} tokens in a micro-batch, by
a decoder of {millions:.1f} million parameters, through `value_and_apply_gradients`. By rows: {BUDGET // CONTEXT} of
them in the order in which they come, padded to {CONTEXT} tokens, or to the bucket of their longest. The
{len(every.buckets)} buckets were chosen for all paragraphs. Time is that of the fastest of {rounds} updates,
compilation left out; memory is the compiler's temporary memory of the largest program. Difference: the updates and
those of the first way, in units of the largest change in a leaf."""
    return f"\n### An update, by rows and by tokens\n\n{notes}\n\n{_measure.markdown([head, *table])}"


class _Way:
    """A way to cut a batch: its micro-batches, a compiled program for each shape, and the times of updates."""

    def __init__(self, step: Any, params: Tree, state: Any, micro_batches: list[Tree]) -> None:
        self.start, self.micro_batches, self.times = (params, state), micro_batches, list[float]()
        shapes = {micro_batch["tokens"].shape: micro_batch for micro_batch in micro_batches}
        flush = jnp.bool_(False)
        self.programs = {shape: step.lower(params, state, b, flush=flush).compile() for shape, b in shapes.items()}

    def run(self) -> Tree:
        """Times one update, and returns the parameters."""
        params, state = jax.block_until_ready(jax.tree.map(jnp.copy, self.start))
        began = time.perf_counter()
        for index, micro_batch in enumerate(self.micro_batches, 1):
            program = self.programs[micro_batch["tokens"].shape]
            flush = jnp.bool_(index == len(self.micro_batches))
            _, params, state = program(params, state, micro_batch, flush=flush)
        jax.block_until_ready(params)
        self.times.append(time.perf_counter() - began)
        return params

    @property
    def padding(self) -> float:
        """The share of what is computed that is padding."""
        masks = [np.asarray(micro_batch["mask"]) for micro_batch in self.micro_batches]
        return 1 - sum(mask.sum() for mask in masks) / sum(mask.size for mask in masks)

    @property
    def memory(self) -> int:
        """Temporary bytes of the largest program."""
        return max(program.memory_analysis().temp_size_in_bytes for program in self.programs.values())


def _contenders(rows: list[Any], buckets: tuple[int, ...]) -> dict[str, list[Tree]]:
    """The same rows in micro-batches of at most `BUDGET` tokens."""
    lengths = [len(row) for row in rows]
    packing = token_microbatches(lengths, BUDGET, buckets=buckets)
    few = BUDGET // CONTEXT
    parts = [rows[at : at + few] for at in range(0, len(rows), few)]
    bucket = lambda part: next(length for length in buckets if length >= max(map(len, part)))
    packed = lambda part, length: token_microbatches([len(row) for row in part], few * length, buckets=[length])
    return {
        "by rows": [_micro_batch(packed(part, CONTEXT), 0, part) for part in parts],
        "by rows, in buckets": [_micro_batch(packed(part, bucket(part)), 0, part) for part in parts],
        "by tokens": [_micro_batch(packing, index, rows) for index in range(packing.num_microbatches)],
    }


def _micro_batch(packing: TokenPacking, index: int, rows: list[Any]) -> Tree:
    return {"tokens": jnp.asarray(packing.take(index, rows)), "mask": jnp.asarray(packing.mask(index))}


def _decoder() -> Tree:
    """Parameters of a decoder of `LAYERS` layers, which is tied to its table of words."""
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {
        "words": normal(VOCABULARY, WIDTH),
        "places": normal(CONTEXT, WIDTH),
        "layers": {name: normal(LAYERS, *shape) for name, shape in shapes.items()},
    }


def _loss(params: Tree, batch: Tree) -> jax.Array:
    """The mean over the words that have a next one."""
    length = batch["tokens"].shape[1]
    h = params["words"][batch["tokens"]] + params["places"][:length]
    h, _ = jax.lax.scan(jax.checkpoint(lambda h, layer: (_layer(h, layer), None)), h, params["layers"])
    logits = h[:, :-1] @ params["words"].T
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return jnp.sum(batch["mask"][:, 1:] * each) / jnp.maximum(_count(batch), 1)


def _count(batch: Tree) -> jax.Array:
    return batch["mask"][:, 1:].sum()


def _layer(h: jax.Array, layer: Tree) -> jax.Array:
    norm = lambda h: h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-3)
    q, k, v = jnp.split(norm(h) @ layer["qkv"], 3, axis=-1)
    scores = jnp.where(np.tri(h.shape[1], dtype=bool), q @ k.mT / WIDTH**0.5, -1e9)
    h = h + jax.nn.softmax(scores) @ v
    return h + jax.nn.gelu(norm(h) @ layer["up"]) @ layer["down"]


if __name__ == "__main__":
    _measure.command(main)
