"""The small programs that decide the cells of the feature table."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from benchmarks._contenders import OURS, TORCH, WAYS, Across, Scan, Way, Whole, held
from benchmarks._problems import Batch, Problem, difference

ROUNDING = 1e-4  # of the largest change in a leaf
K, ROWS, SIZE = 4, 4, 256  # micro-batches, rows of each, numbers in the only parameter: 1 kB


class Outcome(NamedTuple):
    """Whether a way can do it, and the number that decided."""

    holds: bool
    number: str

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'no'} ({self.number})"


class Feature(NamedTuple):
    """A row: `program(way)` runs it, or returns None where it leaves the matter to its user."""

    name: str
    said: str  # what the program does, and when the cell says yes
    program: Callable[[str], Outcome | None]


# What the programs share: a line fitted to rows that a mask counts, and how far a way ends from the whole batch.


def _loss(params: Any, x: Any, y: Any, mask: Any) -> Any:
    """The mean over the rows that count, in JAX and in PyTorch alike."""
    return (mask * (x @ params["w"] - y) ** 2).sum() / mask.sum()


def _problem(loss: Callable[..., Any] = _loss, k: int = K, **options: Any) -> Problem:
    random = np.random.default_rng(0)
    normal = lambda *shape: np.float32(random.normal(size=shape))
    rows = k * ROWS
    batches = [(normal(rows, SIZE), normal(rows), np.ones(rows, np.float32)) for _ in range(2)]
    given = {"torch_loss": loss, "params": {"w": normal(SIZE)}, "optimizer": "SGD", "batches": batches}
    return Problem(**{"name": "a line", "loss": loss, "k": k} | given | options)


def _against_whole(way: Way, runs: Callable[[Way], None], batches: Sequence[Batch], problem: Problem) -> Outcome:
    """Compares a way after `runs(way)` with an update of each of these batches in one piece."""
    whole = Whole(problem)
    for batch in batches:
        whole.update(whole.place(batch))
    runs(way)
    value = difference(way.params(), whole.params(), problem.params)
    return Outcome(value < ROUNDING, f"{value:.0e}")


def _updates(way: Way, problem: Problem) -> Outcome:
    def runs(way: Way) -> None:
        for batch in problem.batches:
            way.update(way.place(batch))

    return _against_whole(way, runs, problem.batches, problem)


# The programs


def _even(name: str) -> Outcome:
    problem = _problem()
    return _updates(WAYS[name](problem), problem)


def _uneven(name: str) -> Outcome:
    problem = _problem(weight=lambda x, y, mask: mask.sum())
    for _, _, mask in problem.batches:
        mask[1:ROWS] = 0  # one row of the first micro-batch counts, and all of the others
    return _updates(WAYS[name](problem), problem)


def _short(name: str) -> Outcome:
    problem = _problem()
    short = tuple(x[: 2 * ROWS] for x in problem.batches[1])

    def runs(way: Way) -> None:
        way.update(way.place(problem.batches[0]))
        way.finish(way.place(short))

    return _against_whole(WAYS[name](problem), runs, [problem.batches[0], short], problem)


def _indivisible(name: str) -> Outcome:
    problem = _problem(weight=lambda x, y, mask: mask.sum())
    ragged = tuple(x[: 2 * ROWS + 2] for x in problem.batches[0])
    try:
        return _against_whole(WAYS[name](problem), lambda way: way.finish(way.place(ragged)), [ragged], problem)
    except ValueError:
        return Outcome(False, "an error")


def _nan(name: str) -> Outcome:
    problem = _problem(skip=True)
    first, second = problem.batches
    spoiled = tuple(np.copy(x) for x in first)
    spoiled[1][ROWS] = np.nan  # in the second micro-batch
    finite = [np.concatenate([a[:ROWS], a[2 * ROWS :], b[:ROWS]]) for a, b in zip(first, second, strict=True)]

    def runs(way: Way) -> None:
        way.update(way.place(spoiled))
        way.update(way.place(second))

    return _against_whole(WAYS[name](problem), runs, [tuple(finite)], problem)


def _calls(name: str) -> Outcome:
    calls: list[None] = []
    problem = _problem(called=lambda: calls.append(None))
    way = WAYS[name](problem)
    way.update(way.place(problem.batches[0]))
    way.wait()
    jax.effects_barrier()
    return Outcome(len(calls) == 1, f"{len(calls)} of {K}")


def _resumed(name: str) -> Outcome | None:
    """Three micro-steps of a window of four are done when it becomes one of two."""
    if not issubclass(WAYS[name], Across) or not hasattr(way := WAYS[name](_problem()), "carry"):
        return None  # there is no state between micro-steps, or the loop is the user's
    if type(way).update is not Across.update:
        return None
    problem = way.problem
    resumed = WAYS[name](problem._replace(k=2))

    def runs(resumed: Way) -> None:
        data = way.place(problem.batches[0])
        way.update(data[:3])
        resumed.carry = way.carry
        resumed.update(data[3:])

    return _against_whole(resumed, runs, problem.batches[:1], problem)


def _bfloat16(name: str) -> Outcome:
    """512 gradients of 0.01, from parameters of 0."""
    k, number = 512, ml_dtypes.bfloat16(0.01)
    batch = (np.full((k, SIZE), number),)
    zeros = {"w": np.zeros(SIZE, ml_dtypes.bfloat16)}
    loss = lambda params, x: (x @ params["w"]).mean()
    problem = _problem(loss, k, params=zeros, batches=[batch])
    way = WAYS[name](problem)
    way.update(way.place(batch))
    error = abs(np.float32(way.params()["w"]) / (-1e-2 * np.float32(number)) - 1).max()
    return Outcome(error < 0.01, f"off by {error:.1%}")


def _key(name: str) -> Outcome | None:
    """Counts different random numbers among the gradients of micro-batches, each of which is one number."""
    rows = np.eye(K, dtype=np.float32)

    def loss(w: jax.Array, x: jax.Array, key: Any) -> jax.Array:
        return jnp.sum((x @ w) * jax.random.uniform(key, x.shape[:1]))

    ours = optax_accum.value_and_grad(loss, num_microbatches=K)
    cut = {
        OURS: lambda *args: ours(*args)[1],
        "optax.microbatch": optax.microbatch(jax.grad(loss), 1, microbatch_size=1),
    }
    if name == TORCH:
        import torch

        w = torch.ones(K, requires_grad=True)
        for row in torch.from_numpy(rows):
            ((row @ w) * torch.rand(())).backward()
        found = w.grad.numpy()
    elif name in cut:
        found = np.asarray(cut[name](jnp.ones(K), jnp.asarray(rows), jax.random.key(0)))
    else:
        return None
    return Outcome(len(np.unique(found)) == K, f"{len(np.unique(found))} of {K}")


def _told(name: str, values: Sequence[float], around: Callable[[Any], Any] = lambda tx: tx) -> str | None:
    """Returns what an optimizer is told as `value` in a window of as many micro-steps."""
    heard: list[float] = []

    def update(grads: Any, state: Any, params: Any = None, *, value: Any = None, **_: Any) -> tuple[Any, Any]:
        jax.debug.callback(lambda v: heard.append(float(v)), jnp.float32(np.nan) if value is None else value)
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    wrapped = {
        OURS: lambda: optax_accum.accumulate_gradients(inner, len(values)),
        "optax.MultiSteps": lambda: optax.MultiSteps(inner, len(values)).gradient_transformation(),
        "optax.apply_every": lambda: optax.chain(inner, optax.apply_every(len(values))),
    }
    if name not in wrapped:
        return None
    tx, params = around(wrapped[name]()), jnp.ones(2)
    state = tx.init(params)
    for value in values:
        _, state = tx.update(params, state, params, value=jnp.float32(value))
    jax.effects_barrier()
    return f"{heard[-1]:g}"


def _extra(name: str) -> Outcome | None:
    told = _told(name, [3.0], optax.chain)
    return told and Outcome(told == "3", f"got {told}, expected 3")


def _mean_value(name: str) -> Outcome | None:
    told = _told(name, [1.0, 3.0])
    return told and Outcome(told == "2", f"got {told}, expected 2")


def _coupled(name: str) -> Outcome:
    """Each row is compared with all others of the batch."""

    def loss(params: Any, x: Any, y: Any, mask: Any, encode: Any = lambda w, x: x @ w) -> Any:
        z = encode(params["w"].reshape(-1, 8), x[:, : SIZE // 8])
        return ((z @ z.T) ** 2).mean() / SIZE

    problem = _problem(loss)
    if name == OURS:
        cut = optax_accum.microbatched(lambda w, x: x @ w, K)
        way: Way = Whole(problem._replace(loss=functools.partial(loss, encode=cut)))
    else:
        way = WAYS[name](problem)
    return _updates(way, problem)


def _reductions(name: str) -> Outcome | None:
    """Counts the reductions of a gradient over two devices in a window."""
    if name == TORCH:
        return _torch_reductions()
    problem = _problem()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        way: Any = Whole(problem) if name == OURS else WAYS[name](problem)
        if not hasattr(way, "carry"):
            return None
        if name == OURS:
            ours = optax_accum.value_and_grad(_loss, num_microbatches=K, batch_argnums=(1, 2, 3), devices="data")
            way.gradient = lambda *args: ours(*args)[1]
        rows = P(None, "data") if isinstance(way, Scan) else P("data")
        data = jax.device_put(way.place(problem.batches[0]), NamedSharding(mesh, rows))
        way.carry = jax.device_put(way.carry, NamedSharding(mesh, P()))
    count = 0
    for program, calls in way.programs(data):
        found = optax_accum.sharding.count_collectives(program).select(("all-reduce", "reduce-scatter"), min_bytes=SIZE)
        count += calls * found.select(place=("outside", "loop")).count + found.select(place="branch").count
    return Outcome(count == 1, f"{count} for {K}")


def _planned(name: str) -> Outcome | None:
    """Asks, from shapes alone, how many micro-batches fit beside a batch; the whole batch does not."""
    if name != OURS:
        return None
    w, batch = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    def step_of_k(k: int) -> Any:
        return jax.jit(optax_accum.value_and_grad(loss, num_microbatches=k))

    budget = batch.size * 4 + 500_000
    found = optax_accum.plan.fit(step_of_k, w, batch, run=False, budget=budget, safety=1, progress=False)
    k = found.num_microbatches
    fits = lambda k: held(step_of_k(k).lower(w, batch).compile()) <= budget
    return Outcome(fits(k) and not fits(1), f"{k} fit")


def _torch_reductions() -> Outcome:
    import torch
    from torch import distributed

    problem, count = _problem(), 0
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    way: Any = WAYS[TORCH](problem)
    model = torch.nn.parallel.DistributedDataParallel(way.model)

    def hook(_, bucket):  # without annotations, which PyTorch would read
        nonlocal count
        count += 1
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    *held, last = way.place(problem.batches[0])
    with model.no_sync():
        for micro_batch in held:
            model(*micro_batch).backward()
    model(*last).backward()
    distributed.destroy_process_group()
    return Outcome(count == 1, f"{count} for {K}")


FEATURES = [
    Feature("the update of the whole batch", "Two updates of equal micro-batches.", _even),
    Feature(
        "uneven weights",
        "In one micro-batch only one row of four counts.",
        _uneven,
    ),
    Feature("short last window", "Two micro-batches are left for a window of four.", _short),
    Feature("rows that k does not divide", "Ten rows in micro-batches of four: four, four, two.", _indivisible),
    Feature(
        "NaN recovers",
        "One micro-batch is NaN: is the update that of the others?",
        _nan,
    ),
    Feature("one optimizer call per window", "The optimizer's calls, on a CPU.", _calls),
    Feature(
        "one reduction per window",
        "Reductions of a gradient over two devices, compiled for CPUs; of PyTorch those of DDP, with `no_sync`.",
        _reductions,
    ),
    Feature(
        "own dropout key",
        "How many random numbers of four micro-batches differ.",
        _key,
    ),
    Feature("bfloat16 sums", "512 gradients of 0.01 for bfloat16 parameters: is the update within 1 %?", _bfloat16),
    Feature(
        "extra arguments through a chain",
        "What a wrapped optimizer in an `optax.chain` gets as `value`.",
        _extra,
    ),
    Feature("the window's mean loss", "In a window with the losses 1 and 3.", _mean_value),
    Feature("resumed with another k", "A window of four resumes, after three micro-batches, with k = 2.", _resumed),
    Feature(
        "planned ahead",
        "How many micro-batches fit, before anything is allocated.",
        _planned,
    ),
    Feature("losses that couple rows", "Each row is compared with all of the batch.", _coupled),
]
