"""Loops in NumPy that `verify_step` judges: 42 ways to a fault behind 33 optimizers, and sound ones.

A fault that leaves the update unchanged is none, and another optimizer is drawn.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optax_accum
from benchmarks._measure import Tree

Params = dict[str, np.ndarray]
Random = np.random.Generator
REFUSED = "Of a random step what is linear"
UNNAMED = ("another difference", "not known")


# A model of two layers, and losses that count rows, tokens, or nothing.


def gradient(kind: str, params: Params, batch: Tree, key: Any) -> Params:
    """Returns the gradient of a loss of this kind."""
    x, y, mask, gain = (np.asarray(batch[name], np.float64) for name in ("x", "y", "mask", "gain"))
    if kind == "normalised inputs":
        x = (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 1e-3)
    h = np.tanh(x @ params["w"] + params["b"])
    kept = np.asarray(jax.random.bernoulli(key, 0.7, h.shape)) / 0.7 if kind == "dropout" else np.ones_like(h)
    out = (h * kept) @ params["v"]
    error = 2 * (out - y) / y.shape[1]
    if kind == "centred outputs":
        error = error - error.mean(0, keepdims=True)
    if kind == "normalised advantages":
        error = ((gain - gain.mean()) / (gain.std() + 1e-3))[:, None] * np.cos(out)
    count = {"tokens": mask.sum(), "sum": 1.0}.get(kind, len(x))
    error = error * (mask[:, None] if kind == "tokens" else 1.0) / count
    back = (error @ params["v"].T) * kept * (1 - h**2)
    return {"w": x.T @ back, "b": back.sum(0), "v": (h * kept).T @ error}


def weight(kind: str, batch: Tree) -> float:
    """Returns how much a micro-batch counts."""
    return {"tokens": float(np.sum(batch["mask"])), "sum": 1.0}.get(kind, float(len(batch["x"])))


# Optimizers: a clip, and a rule of what the state keeps.


def norm(grads: Params) -> float:
    """Returns the norm of all leaves."""
    return float(np.sqrt(sum(np.sum(g * g) for g in grads.values())))


def by_norm(most: float, grads: Params) -> Params:
    """Clips by the norm of all leaves."""
    return {name: g * min(1.0, most / (norm(grads) + 1e-12)) for name, g in grads.items()}


def by_value(most: float, grads: Params) -> Params:
    """Clips each entry."""
    return {name: np.clip(g, -most, most) for name, g in grads.items()}


def by_leaf(most: float, grads: Params) -> Params:
    """Clips by the norm of each leaf."""
    return {name: g * min(1.0, most / (np.linalg.norm(g) + 1e-12)) for name, g in grads.items()}


class Rule(NamedTuple):
    """(what each moment becomes, the update of them) of a gradient; moments begin as zeros."""

    slots: tuple[str, ...]
    update: Callable[[np.ndarray, dict[str, np.ndarray], np.ndarray, int], tuple[np.ndarray, dict[str, np.ndarray]]]


def sgd(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Plain gradient descent."""
    return 0.1 * g, {}


def decayed(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Gradient descent with weight decay."""
    return 0.1 * (g + 0.1 * p), {}


def momentum(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Heavy ball."""
    m = 0.9 * m["m"] + g
    return 0.1 * m, {"m": m}


def nesterov(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Nesterov's momentum."""
    m = 0.9 * m["m"] + g
    return 0.1 * (0.9 * m + g), {"m": m}


def adam(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Adam."""
    m, v = 0.9 * m["m"] + 0.1 * g, 0.99 * m["v"] + 0.01 * g * g
    return 0.01 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8), {"m": m, "v": v}


def adamw(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Adam with decay."""
    update, moments = adam(g, m, p, t)
    return update + 1e-3 * p, moments


def warm(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Adam at a rate that grows."""
    update, moments = adam(g, m, p, t)
    return update * (1 + 0.5 * t), moments


def rmsprop(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """RMSProp, which keeps second moments only."""
    v = 0.9 * m["v"] + 0.1 * g * g
    return 0.01 * g / (np.sqrt(v) + 1e-3), {"v": v}


def adagrad(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """AdaGrad."""
    v = m["v"] + g * g
    return 0.01 * g / (np.sqrt(v) + 1e-7), {"v": v}


def lion(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Lion, whose update is a sign."""
    return 1e-3 * np.sign(0.9 * m["m"] + 0.1 * g), {"m": 0.99 * m["m"] + 0.01 * g}


def normalised(g: np.ndarray, m: Tree, p: np.ndarray, t: int) -> Any:
    """Gradients of length 1 in each leaf, with momentum."""
    m = 0.9 * m["m"] + g / (np.linalg.norm(g) + 1e-12)
    return 0.01 * m, {"m": m}


RULES = {
    "sgd": Rule((), sgd),
    "decayed sgd": Rule((), decayed),
    "momentum": Rule(("m",), momentum),
    "nesterov": Rule(("m",), nesterov),
    "adam": Rule(("m", "v"), adam),
    "adamw": Rule(("m", "v"), adamw),
    "warm-up": Rule(("m", "v"), warm),
    "rmsprop": Rule(("v",), rmsprop),
    "adagrad": Rule(("v",), adagrad),
    "lion": Rule(("m",), lion),
    "normalised": Rule(("m",), normalised),
}
CLIPS: dict[str, Callable[[Params], Params]] = {
    "no clip": lambda grads: grads,
    "norm": lambda grads: by_norm(0.3, grads),
    "value": lambda grads: by_value(0.2, grads),
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop in NumPy. Each field is a place where a fault is planted; those in `both` are in make_step(1), too."""

    params: Params
    rule: Rule
    clip: Callable[[Params], Params]
    loss: str = "rows"
    each: Callable[[Params], Params] = lambda grads: grads
    weight: Callable[[str, Tree], float] = weight
    key: Callable[[Any, int], Any] = jax.random.fold_in
    join: Callable[[np.ndarray, np.ndarray, int], np.ndarray] = lambda acc, g, n: acc + g
    factor: Callable[[int, int], float] = lambda n, k: 1.0
    rate: Callable[[int, int], float] = lambda calls, k: 1.0
    closes: Callable[[int, int], bool] = lambda n, k: n >= k
    held: Callable[[np.ndarray], np.ndarray] = lambda p: p
    empty: Callable[[np.ndarray], np.ndarray] = np.zeros_like
    dtype: Any = np.float32
    divides: bool = True
    optimizer_each: bool = False
    summed: Callable[[Params, int], Params] = lambda acc, k: acc  # of the sum so far, at each micro-step
    guarded: bool = False
    loses: bool = False
    stays: tuple[str, ...] = ()  # what is not set back to 0 after an update
    stale: bool = False  # whether gradients are those of the parameters before the last update
    flushes: bool = True  # whether the last micro-batch of the data makes an update

    def __call__(self, every: int) -> Any:
        """Returns the step, what it carries, and the step of a window that ends early."""
        zeros = lambda dtype=np.float32: {name: np.zeros(p.shape, dtype) for name, p in self.params.items()}
        carry: Tree = {"params": self.params, "acc": zeros(self.dtype), "n": 0, "total": 0.0, "calls": 0, "t": 0}
        carry |= {"old": self.params} if self.stale else {}
        carry |= {slot: zeros() for slot in self.rule.slots} | (
            {"key": jax.random.key(0)} if self.loss == "dropout" else {}
        )
        return lambda c, b: self.step(every, c, b, False), carry, lambda c, b: self.step(every, c, b, True)

    def step(self, every: int, carry: Tree, batch: Tree, last: bool) -> Tree:
        """Adds a gradient, and updates where the window closes."""
        n, params, calls = carry["n"] + 1, carry["params"], carry["calls"] + 1
        key = self.key(carry["key"], n) if self.loss == "dropout" else None
        grads = self.each(gradient(self.loss, carry["old"] if self.stale else params, batch, key))
        share = self.weight(self.loss, batch)
        state = {slot: carry[slot] for slot in self.rule.slots}
        t = carry["t"] + 1
        if self.optimizer_each:
            grads, state = self.updated(grads, state, params, t)
        acc = {name: self.join(carry["acc"][name], share * g, n).astype(self.dtype) for name, g in grads.items()}
        acc = {name: a.astype(self.dtype) for name, a in self.summed(acc, every).items()}
        total = carry["total"] + share
        kept = (
            carry
            | state
            | {"acc": acc, "n": n, "total": total, "calls": calls, "t": t if self.optimizer_each else t - 1}
        )
        if not (self.closes(n, every) or (last and self.flushes)):
            return kept | {"params": {name: self.held(p) for name, p in params.items()}}
        divisor = total if self.divides else 1.0
        mean = {name: a.astype(np.float64) / divisor * self.factor(n, every) for name, a in acc.items()}
        updates, new = (mean, state) if self.optimizer_each else self.updated(mean, state, params, t)
        updates = {name: u * self.rate(calls, every) for name, u in updates.items()}
        if self.guarded and not all(np.all(np.isfinite(u)) for u in updates.values()):
            updates, new = {name: 0 * p for name, p in params.items()}, state
        moved = {name: (p - updates[name]).astype(np.float32) for name, p in params.items()}
        after = kept | new | {"params": moved, "acc": {name: self.empty(a) for name, a in acc.items()}}
        after |= {"old": params} if self.stale else {}
        after |= {name: start for name, start in (("n", 0), ("total", 0.0)) if name not in self.stays}
        return carry if self.loses else after | {"t": t}

    def updated(self, grads: Params, state: Tree, params: Params, t: int) -> tuple[Params, Tree]:
        """Returns the updates of a gradient, and the new moments."""
        grads = self.clip(grads)
        done = {n: self.rule.update(g, {s: state[s][n] for s in state}, params[n], t) for n, g in grads.items()}
        moments = {slot: {n: done[n][1][slot].astype(np.float32) for n in grads} for slot in state}
        return {name: update for name, (update, _) in done.items()}, moments


class Plant(NamedTuple):
    """A fault: its name, the fields of a loop that has it, those that its reference has, and how it is run."""

    kind: str
    fields: dict[str, Any]
    one: dict[str, Any] | None = None  # those of a sound loop by default
    within_call: bool = False
    uneven: bool = False
    trims: bool = False
    least: int = 2  # micro-batches in a window
    moments: bool = False  # whether it takes an optimizer with first moments: without these it is as another rate


EQUAL = {"weight": lambda loss, batch: 1.0}
FIRST = {"join": lambda acc, g, n: acc if n > 1 else g}
LAST = {"join": lambda acc, g, n: g}
SUMMED = {"loss": "sum", "divides": False}
SUMMED_CLIP = EQUAL | {"divides": False, "summed": lambda acc, k: by_norm(0.1, acc)}  # a sum, which the clip holds
PLANTS = {
    "it never closes": Plant("never closes", {"closes": lambda n, k: False}),
    "it closes late": Plant("closes at another micro-step", {"closes": lambda n, k: n > k}),
    "the carry is lost": Plant("never closes", {"loses": True}),
    "the first, divided": Plant("only the first gradient", FIRST),
    "the first": Plant("only the first gradient", FIRST | {"factor": lambda n, k: n}),
    "the last, divided": Plant("only the last gradient", LAST),
    "the last": Plant("only the last gradient", LAST | {"factor": lambda n, k: n}),
    "divided twice": Plant("divided twice", {"factor": lambda n, k: 1 / n}),
    "a summed loss, averaged": Plant("divided twice", {"loss": "sum"}, SUMMED),
    "the full k": Plant("divided by the full k", {"factor": lambda n, k: n / k}),
    "a sum": Plant("sum for a mean", {"factor": lambda n, k: n}),
    "six tenths": Plant("wrong divisor", {"factor": lambda n, k: 0.6}, moments=True),
    "tokens": Plant("mean of means", EQUAL | {"loss": "tokens"}, {"loss": "tokens"}),
    "rows": Plant("mean of means", EQUAL, uneven=True),
    "other weights": Plant("wrong weights", {"weight": lambda loss, batch: float(np.exp(batch["gain"][0]))}),
    "later ones count more": Plant("weighed by place", {"join": lambda acc, g, n: acc * 0.7 + g}),
    "earlier ones count more": Plant("weighed by place", {"join": lambda acc, g, n: acc + g / n}),
    "one counts for nothing": Plant("rows left out", {"join": lambda acc, g, n: acc if n == 2 else acc + g}, least=3),
    "emptied too early": Plant("emptied in mid-window", {"join": lambda acc, g, n: g if n == 2 else acc + g}, least=3),
    "the first of all tokens": Plant("only the first gradient", FIRST | {"loss": "tokens"}, {"loss": "tokens"}),
    "the sum by norm": Plant("clipping the running sum", EQUAL | {"summed": lambda acc, k: by_norm(0.1 * k, acc)}),
    "the undivided sum by norm": Plant("clipping the running sum", SUMMED_CLIP),
    "each by norm": Plant("clipping at each micro-step", {"each": lambda g: by_norm(0.1, g)}),
    "each by value": Plant("clipping at each micro-step", {"each": lambda g: by_value(0.01, g)}),
    "each by leaf": Plant("clipping at each micro-step", {"each": lambda g: by_leaf(0.03, g)}),
    "each normalised": Plant("clipping at each micro-step", {"each": lambda g: by_norm(1e-3, g)}),
    "updates are averaged": Plant("optimizer at each micro-step", {"optimizer_each": True}),
    "the schedule": Plant("optimizer at each micro-step", {"rate": lambda calls, k: 1 + 0.3 * calls}),
    "an update each": Plant("optimizer at each micro-step", {"closes": lambda n, k: True}),
    "decay while held": Plant("moves while held", {"held": lambda p: np.float32(0.99) * p}),
    "one key": Plant("shared key", {"loss": "dropout", "key": lambda key, n: key}, {"loss": "dropout"}),
    "bfloat16": Plant("low-precision sum", {"dtype": jnp.bfloat16}),
    "0 * acc": Plant("NaN poison", {"guarded": True, "empty": lambda acc: 0 * acc}, {"guarded": True}),
    "BatchNorm": Plant("coupled examples", {"loss": "normalised inputs"}, {"loss": "normalised inputs"}),
    "centred": Plant("coupled examples", {"loss": "centred outputs"}, {"loss": "centred outputs"}),
    "advantages": Plant("coupled examples", {"loss": "normalised advantages"}, {"loss": "normalised advantages"}),
    "sums stay": Plant("not emptied", {"empty": lambda acc: acc}),
    "the divisor stays": Plant("counter not emptied", {"stays": ("total",)}),
    "the counter stays": Plant("counter not emptied", {"stays": ("n",)}),
    "old parameters": Plant("stale parameters", {"stale": True}),
    "the end is dropped": Plant("short window dropped", {"flushes": False}, uneven=True),
    "rows are dropped": Plant("rows left out", {}, within_call=True, uneven=True, trims=True),
}
# A gradient that a micro-step changes, or a loss that couples rows, is in the reference, too: there it does no harm.
BOTH = {"each", "summed", "weight"}
SOUND: tuple[dict[str, Any], ...] = (
    {"loss": "rows"},
    {"loss": "tokens"},
    SUMMED,
    {"loss": "rows", "guarded": True},
    {"loss": "dropout"},
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loop and what `verify_step` is called with."""

    name: str
    kind: str | None
    make_step: Callable[[int], Any]
    batch: Tree
    options: dict[str, Any]


def problem(number: int, what: str | None, clip: str = "", attempt: int = 0, hidden: int = 5) -> Problem:
    """Returns the loop of that number, with a fault or sound."""
    random = np.random.default_rng([number, attempt])
    plant = PLANTS[what] if what else None
    k, d, out = int(random.choice((2, 3, 4, 5))), int(random.choice((4, 6))), int(random.choice((3, 4)))
    k = max(k, plant.least) if plant else k
    rows = k * int(random.choice((2, 3, 4)))
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    params = {"w": draw(d, hidden) / 2, "b": 0.1 * draw(hidden), "v": draw(hidden, out) / 2}
    batch = {"x": draw(rows, d), "y": 2 * draw(rows, out), "mask": np.exp(draw(rows)), "gain": 1 + draw(rows)}
    rules = [name for name, rule in RULES.items() if "m" in rule.slots or not (plant and plant.moments)]
    rule = rules[(number // len(rules) * 3 + number + attempt) % len(rules)]
    clip = clip or str(random.choice(list(CLIPS)))
    name = f"{what or 'sound'}, {rule}, {clip}, k={k}"
    fields = plant.fields if plant else SOUND[number % len(SOUND)]
    one = plant.one if plant and plant.one is not None else {n: f for n, f in fields.items() if n in BOTH}
    within = plant.within_call if plant else number % 3 == 0
    uneven = plant.uneven if plant else True

    def make_step(every: int) -> Any:
        given: dict[str, Any] = fields if every > 1 or not plant else one
        loop = Loop(params, RULES[rule], CLIPS[clip], **given)
        return _within(loop(every), every, bool(plant and plant.trims)) if within else loop(every)

    options = {"every": k, "within_call": within, "uneven": uneven or what == "the full k"}
    # Without moments an update is that of a clipped gradient, and nothing else: both loops are the same.
    kind = "clipping at each micro-step" if what == "updates are averaged" and not RULES[rule].slots else None
    return Problem(name, kind or (plant.kind if plant else None), make_step, batch, options)


def _within(made: Any, every: int, trims: bool) -> Any:
    micro_step, carry, _ = made

    def step(carry: Tree, batch: Tree) -> Tree:
        rows = len(batch["x"])
        for part in np.array_split(np.arange(rows // every * every if trims else rows), every):
            carry = micro_step(carry, {name: np.asarray(leaf)[part] for name, leaf in batch.items()})
        return carry

    return step, carry


def verdict(one: Problem) -> str | None:
    """Returns the first cause, None where it holds, or what was raised."""
    try:
        report = optax_accum.verify_step(one.make_step, one.batch, **one.options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return report.causes[0].kind if report.causes else None


def harmless(one: Problem) -> bool:
    """Returns whether even windows, unequal ones, and a short one, change what whole batches do, to four digits."""
    k, rows = one.options["every"], np.arange(len(one.batch["x"]))
    even, unequal = np.split(rows, k), np.array_split(rows[:-1], k)
    if one.kind == "NaN poison" or not all(_same(one, windows, False) for windows in ([even, even], [unequal])):
        return False
    return one.options["within_call"] or not one.options["uneven"] or _same(one, [even[: -(-k // 2)]], True)


def _same(one: Problem, windows: list[list[np.ndarray]], early: bool) -> bool:
    of = lambda rows: {name: leaf[rows] for name, leaf in one.batch.items()}
    ends = []
    for every in (1, one.options["every"]):
        step, carry, *last = one.make_step(every)
        before = carry
        for parts in windows:
            calls = [np.concatenate(parts)] if every == 1 or one.options["within_call"] else parts
            for number, rows in enumerate(calls, start=1):
                take = last[0] if last and early and number == len(calls) else step
                carry = take(carry, of(rows))
        slots = [name for name in ("params", "m", "v") if name in carry]
        ends.append([carry[slot][leaf] - before[slot][leaf] for slot in slots for leaf in ("w", "b", "v")])
    return all(np.max(np.abs(a - b)) <= 1e-4 * np.max(np.abs(a)) for a, b in zip(*ends, strict=True))


def judged(number: int, what: str | None, clip: str = "", hidden: int = 5) -> tuple[Problem, str]:
    """Returns a loop and what became of it; of a fault that changes nothing behind one optimizer, behind another."""
    for attempt in range(len(RULES)):
        one = problem(number, what, clip, attempt, hidden)
        said = verdict(one)
        if said is not None or what is None or not harmless(one):
            return one, outcome_of(one.kind, said)
    return problem(number, what, clip), "harmless"


def outcome_of(planted: str | None, said: str | None) -> str:
    """Returns what a verdict is: a random step of which nothing is linear is refused."""
    if said == planted:
        return "right"
    if said is None:
        return "missed"
    return "unnamed" if said in UNNAMED else "refused" if REFUSED in said else "misnamed"
