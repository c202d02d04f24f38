"""Steps that `verify_step` judges, drawn from a seed: sound ones, and those with a planted fault.

A way to write the loop (compiled, on the host, a scan within the call, Flax Linen, NNX), an optimizer, sizes, a length
of the window; beside them stand the steps of Optax and of this library. `few` makes models of four parameters, `rare`
takes rarer optimizers and losses.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import optax_accum
from benchmarks._measure import Tree
from optax_accum.verify import _faults as step_faults

Random = np.random.Generator
KINDS = tuple(fault.name for fault in step_faults.PLANTED)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A step and what `verify_step` is called with."""

    name: str
    make_step: Callable[[int], Any]
    batch: Tree
    options: dict[str, Any]

    def report(self) -> Any:
        """Returns what `verify_step` says."""
        return optax_accum.verify_step(self.make_step, self.batch, **self.options)


# The model of all loops: two layers, a loss that is a mean over rows or tokens, dropout where there is a key.


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that a loop is made of, but how it is written."""

    params: Tree
    batch: dict[str, jax.Array]
    optimizer: optax.GradientTransformation
    every: int
    name: str
    masked: bool = False
    norm: bool = False
    rate: float | None = None  # of dropout
    dtype: Any = jnp.float32
    kind: str = ""  # of a rarer loss

    def loss(self, params: Tree, batch: Tree, key: Any) -> jax.Array:
        """Returns the mean over the rows, or over those that count."""
        first, second = (params[layer] for layer in ("first", "second"))
        cast = lambda x: x.astype(self.dtype)
        h = jnp.tanh(cast(batch["x"]) @ cast(first["kernel"]) + cast(first["bias"])[None])
        if self.kind == "straight-through":
            h = h + jax.lax.stop_gradient(jnp.round(8 * h) / 8 - h)
        if self.norm:
            h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)
        if self.rate is not None:
            h = jnp.where(jax.random.bernoulli(key, self.rate, h.shape), h / self.rate, 0)
        out = (h @ cast(second["kernel"]) + cast(second["bias"])[None]).astype(jnp.float32)
        each = RARE_TERMS[self.kind](params, batch, out) if self.kind in RARE_TERMS else _squares(batch, out)
        return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"]) if self.masked else jnp.mean(each)

    def weight(self, batch: Tree) -> jax.Array:
        """Returns how much a micro-batch counts."""
        return jnp.sum(batch["mask"]) if self.masked else jnp.float32(len(batch["x"]))


def _squares(batch: Tree, out: jax.Array) -> jax.Array:
    return jnp.mean((out - batch["y"]) ** 2, 1)


def _slopes(params: Tree, batch: Tree, out: jax.Array) -> jax.Array:
    """Returns terms with a derivative in them: that of the first output by the inputs is to be of length 1."""
    first, second = (params[layer] for layer in ("first", "second"))
    value = lambda x: (jnp.tanh(x @ first["kernel"] + first["bias"]) @ second["kernel"])[0]
    return _squares(batch, out) + (jnp.sum(jax.vmap(jax.grad(value))(batch["x"]) ** 2, 1) - 1) ** 2


def _advantages(params: Tree, batch: Tree, out: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(jnp.concatenate([out, jnp.zeros_like(out)], 1))[:, 0] * batch["gain"]


def _normalised(params: Tree, batch: Tree, out: jax.Array) -> jax.Array:
    gain = (batch["gain"] - batch["gain"].mean()) / (batch["gain"].std() + 1e-6)
    return _advantages(params, batch | {"gain": gain}, out)


def _messages(params: Tree, batch: Tree, out: jax.Array) -> jax.Array:
    """Returns terms of graphs whose nodes are a row's numbers: each hears of its neighbours."""
    x = batch["x"] + jnp.roll(batch["x"], 1, 1) * (batch["x"] > 0)
    return _squares(batch, out + jnp.tanh(x @ params["first"]["kernel"]) @ params["second"]["kernel"])


def _packed(params: Tree, batch: Tree, out: jax.Array) -> jax.Array:
    """Returns terms of rows in which the numbers of two sequences stand: each is summed up to where it ends."""
    ends = 1 + (batch["gain"] > 0)[:, None] < jnp.arange(batch["x"].shape[1])[None]
    sums = jnp.where(ends, 0, jnp.cumsum(batch["x"], 1)) @ params["first"]["kernel"]
    return _squares(batch, out + jnp.tanh(sums) @ params["second"]["kernel"])


RARE_TERMS = {
    "derivatives": _slopes,
    "advantages": _advantages,
    "normalised advantages": _normalised,
    "graphs": _messages,
    "packed": _packed,
}
RARE_LOSSES = ("derivatives", "advantages", "graphs", "packed", "straight-through", "")
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-2),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3),
    "warm-up": lambda: optax.adam(optax.linear_schedule(1e-3, 1e-1, 20)),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "decayed sgd": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
}


def _parts(params: Tree) -> Tree:
    return {layer: jax.tree.map(lambda _, layer=layer: layer, leaves) for layer, leaves in params.items()}


RARE_OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "partition": lambda: optax.partition({"first": optax.adam(1e-2), "second": optax.sgd(1e-2)}, _parts),
    "multi_transform": lambda: optax.multi_transform({"first": optax.lion(1e-3), "second": optax.adam(1e-2)}, _parts),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"first": True, "second": False}),
    "muon": lambda: optax.contrib.muon(1e-2),
    "warm-up from 0": lambda: optax.adam(optax.linear_schedule(0.0, 1e-2, 4)),
    "sgd, warm-up from 0": lambda: optax.sgd(optax.linear_schedule(0.0, 1e-2, 4)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=3),
    "novograd": lambda: optax.novograd(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
}


def setting(
    random: Random,
    number: int,
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS),
    *,
    few: bool = False,
    least: int = 2,
    **options: Any,
) -> Setting:
    """Returns a setting of random sizes, or of four parameters."""
    width, hidden, out = random.choice((4, 5, 6)), random.choice((5, 7)), random.choice((3, 4))
    width, hidden, out = (1, 1, 1) if few else (width, hidden, out)
    every = max(least, int(random.choice((2, 3, 4, 5))))
    rows = every * int(random.choice((2, 3, 4)))
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, jnp.float32)
    params = {
        "first": {"kernel": normal(width, hidden), "bias": 0.1 * normal(hidden)},
        "second": {"kernel": normal(hidden, out), "bias": 0.1 * normal(out)},
    }
    batch = {"x": jnp.asarray(random.normal(size=(rows, width)), jnp.float32), "y": 2 * normal(rows, out)}
    batch["mask"] = jnp.asarray(random.uniform(0.2, 3, size=rows), jnp.float32)
    name = optimizers[number // len(STYLES) % len(optimizers)]
    if options.get("kind"):
        batch["gain"] = jnp.asarray(random.normal(1, 2, size=rows), jnp.float32)
    return Setting(params, batch, (OPTIMIZERS | RARE_OPTIMIZERS)[name](), every, name, **options)


# The loop, as anyone writes it, and the places where it can go wrong.


@dataclasses.dataclass(frozen=True)
class Loop:
    """One micro-step in plain JAX. Each field is a place where a fault is planted."""

    s: Setting
    every: int
    key: Callable[[Any, Any], Any] = jax.random.fold_in
    gradient: Callable[[Tree], Tree] = lambda grads: grads
    weight: Callable[[Setting, Tree], Any] = lambda s, batch: s.weight(batch)
    join: Callable[[Tree, Tree, Any], Tree] = lambda acc, grads, n: jax.tree.map(jnp.add, acc, grads)
    factor: Callable[[Any, int], Any] = lambda n, k: 1.0  # of the mean of n micro-batches
    rate: Callable[[Any, int], Any] = lambda calls, k: 1.0  # of learning, by calls of the step
    empty: Callable[[Tree, Any], Tree] = lambda acc, closes: jax.tree.map(lambda a: jnp.where(closes, 0, a), acc)
    closes: Callable[[Any, int], Any] = lambda n, k: n + 1 >= k
    held: Callable[[Tree], Tree] = lambda params: params
    each: bool = False  # whether the optimizer is called at each micro-step
    loses: bool = False  # whether the step returns the old carry
    dtype: Any = jnp.float32
    finite: bool = False  # whether an update that is not finite is left out
    average: bool = False  # whether the window's state holds an average of the parameters
    early: bool = False  # whether that moves at each micro-step
    summed: Callable[[Tree, int], Tree] = lambda acc, k: acc  # of the sum so far
    stays: tuple[str, ...] = ()  # what an update does not set back to 0
    stale: bool = False  # whether gradients are those of the parameters before the last update
    flushes: bool = True  # whether the last micro-batch of the data makes an update
    cut: Callable[[Any, int], Any] = lambda x, k: x  # the rows of an array of the batch that a scan takes

    def start(self) -> Tree:
        """Returns the accumulator, its weight, the numbers of the micro-step and of calls, an average, old ones."""
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, self.dtype), self.s.params)
        average, old = (self.s.params if kept else None for kept in (self.average, self.stale))
        return zeros, jnp.float32(0), jnp.int32(0), jnp.int32(0), average, old

    def micro_step(self, params: Tree, state: Tree, window: Tree, batch: Tree, key: Any, last: Any = False) -> Any:
        """Adds a gradient, and updates where the window closes."""
        acc, total, n, calls, average, old = window
        update, before = self.s.optimizer.update, (params, state, window)
        grads = self.gradient(jax.grad(self.s.loss)(old if self.stale else params, batch, self.key(key, n)))
        w = self.weight(self.s, batch)
        if self.each:
            grads, state = update(grads, state, params)
        acc = self.join(acc, jax.tree.map(lambda g: (w * g).astype(self.dtype), grads), n)
        acc = self.summed(acc, self.every)
        total, closes = total + w, self.closes(n, self.every) | (last & self.flushes)
        mean = jax.tree.map(lambda a: a.astype(jnp.float32) / total * self.factor(n + 1, self.every), acc)
        updates, new = (mean, state) if self.each else update(mean, state, params)
        updates = jax.tree.map(lambda u: self.rate(calls, self.every) * u, updates)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates)]))
        emits = closes & finite if self.finite else closes
        pick = lambda new, old: jax.tree.map(lambda a, b: jnp.where(emits, a, b), new, old)
        old = pick(params, old) if self.stale else None
        params = pick(optax.apply_updates(params, updates), self.held(params))
        state = state if self.each else pick(new, state)
        moved = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, average, params if self.average else None)
        average = jax.tree.map(lambda new, old: jnp.where(closes | self.early, new, old), moved, average)
        total, n = (
            jnp.where(closes & (name not in self.stays), 0, of) for name, of in (("total", total), ("n", n + 1))
        )
        window = self.empty(acc, closes), total, n, calls + 1, average, old
        return before if self.loses else (params, state, window)


Maker = Callable[[Callable[[int], Loop]], Callable[[int], Any]]


def _compiled(make: Callable[[int], Loop]) -> Callable[[int], Any]:
    """A compiled function of a tuple, whose arguments are donated."""

    def make_step(every: int) -> Any:
        loop = make(every)

        def micro_step(carry: Tree, batch: Tree, last: bool) -> Tree:
            params, state, window, key = carry
            return *loop.micro_step(params, state, window, batch, key, last), key

        step = jax.jit(functools.partial(micro_step, last=False), donate_argnums=0)
        last = jax.jit(functools.partial(micro_step, last=True))
        return step, (loop.s.params, loop.s.optimizer.init(loop.s.params), loop.start(), jax.random.key(3)), last

    return make_step


def _on_host(make: Callable[[int], Loop]) -> Callable[[int], Any]:
    """A loop on the host, its carry a dict."""

    def make_step(every: int) -> Any:
        loop = make(every)
        compiled = jax.jit(loop.micro_step)

        def step(carry: Tree, batch: Tree, last: bool = False) -> Tree:
            seed = jnp.asarray(carry["rng"])
            done = compiled(carry["model"], carry["optimizer"], carry["window"], batch, seed, last)
            return dict(zip(("model", "optimizer", "window"), done, strict=True)) | {"rng": carry["rng"]}

        params = loop.s.params
        carry = {"model": params, "optimizer": loop.s.optimizer.init(params), "window": loop.start()}
        return step, carry | {"rng": jax.random.PRNGKey(3)}, functools.partial(step, last=True)

    return make_step


def _scanned(make: Callable[[int], Loop]) -> Callable[[int], Any]:
    """A scan within the call, over consecutive micro-batches, as in MaxText."""

    def make_step(every: int) -> Any:
        loop = make(every)

        @jax.jit
        def step(carry: Tree, batch: Tree) -> Tree:
            cut = jax.tree.map(lambda x: loop.cut(x, every).reshape(every, -1, *x.shape[1:]), batch)
            body = lambda c, micro: (loop.micro_step(*c, micro, carry["key"]), None)
            (params, state, _), _ = jax.lax.scan(body, (carry["params"], carry["state"], loop.start()), cut)
            return {"params": params, "state": state, "key": carry["key"]}

        params = loop.s.params
        return step, {"params": params, "state": loop.s.optimizer.init(params), "key": jax.random.key(3)}

    return make_step


class _Net(linen.Module):
    """Carries the parameters under Linen's names; the loss is the setting's."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(3, name="second")(linen.Dense(4, name="first")(x))


class _State(TrainState):
    """Flax's state with a window and a key."""

    window: Any
    key: Any


def _linen(make: Callable[[int], Loop]) -> Callable[[int], Any]:
    """Flax's TrainState."""

    def make_step(every: int) -> Any:
        loop = make(every)

        def micro_step(state: _State, batch: Tree, last: bool) -> _State:
            params, opt_state, window = loop.micro_step(
                state.params, state.opt_state, state.window, batch, state.key, last
            )
            return state.replace(step=state.step + 1, params=params, opt_state=opt_state, window=window)

        state = _State.create(
            apply_fn=_Net().apply,
            params=loop.s.params,
            tx=loop.s.optimizer,
            window=loop.start(),
            key=jax.random.key(3),
        )
        step, last = (jax.jit(functools.partial(micro_step, last=last)) for last in (False, True))
        return step, state, last

    return make_step


class _Module(nnx.Module):
    """The setting's parameters as an NNX module."""

    def __init__(self, params: Tree) -> None:
        for layer, leaves in params.items():
            dense = nnx.Linear(*leaves["kernel"].shape, rngs=nnx.Rngs(0))
            dense.kernel.set_value(leaves["kernel"])
            dense.bias.set_value(leaves["bias"])
            setattr(self, layer, dense)
        self.rngs = nnx.Rngs(3)


def _nnx(make: Callable[[int], Loop]) -> Callable[[int], Any]:
    """A module of NNX that the step changes in place."""

    def make_step(every: int) -> Any:
        loop = make(every)
        compiled = jax.jit(loop.micro_step)

        def step(carry: Tree, batch: Tree, last: bool = False) -> Tree:
            model, state, window = carry
            variables = nnx.state(model, nnx.Param)
            params, state, window = compiled(
                nnx.to_pure_dict(variables), state, window, batch, model.rngs.default.key.get_value(), last
            )
            nnx.replace_by_pure_dict(variables, params)
            nnx.update(model, variables)
            return model, state, window

        carry = (_Module(loop.s.params), loop.s.optimizer.init(loop.s.params), loop.start())
        return step, carry, functools.partial(step, last=True)

    return make_step


STYLES: dict[str, Maker] = {
    "compiled": _compiled,
    "scan": _scanned,
    "host": _on_host,
    "Linen": _linen,
    "NNX": _nnx,
}


def planted(
    random: Random,
    number: int,
    what: str = "",
    *,
    styles: tuple[str, ...] = tuple(STYLES),
    one: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    of: dict[str, Any] | None = None,
    few: bool = False,
    rare: bool = False,
    **fields: Any,
) -> Problem:
    """Returns a loop in one of the styles with these fields, of a setting with the options `of`.

    With windows of 1 the loop has the fields `one`, if it is given: a fault that shows in the reference, too, is none.
    """
    of = rarely(random, of or {}) if rare else of or {}
    s, style = setting(random, number, few=few, **of), styles[number % len(styles)]
    what = ", ".join(part for part in (s.kind, what) if part)
    make = lambda every: Loop(s, every, **(fields if every > 1 or one is None else one))
    keywords = {"every": s.every, "within_call": style == "scan"} | (options or {})
    return Problem(f"{style}, {s.name}, k={s.every}, {what}", STYLES[style](make), s.batch, keywords)


def rarely(random: Random, of: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a setting with a rarer optimizer and a rarer loss."""
    linear = "rate" in of or of.get("optimizers") == MOMENTS  # a random step is judged by what is linear
    names = WITH_MOMENTS if linear else tuple(RARE_OPTIMIZERS)
    return {"kind": str(random.choice(RARE_LOSSES)), **of, "optimizers": (str(random.choice(names)),)}


WITH_MOMENTS = ("partition", "multi_transform", "masked", "muon", "warm-up from 0")
ACROSS = ("compiled", "host", "Linen", "NNX")
WITH_STATE = ("adam", "adamw", "lion", "warm-up", "clipped adam")
MOMENTS = ("adam", "momentum", "adamw", "lion", "warm-up")  # that tell a divisor from a rate
CLIPS = {
    "by norm": lambda g: optax.clip_by_global_norm(0.05).update(g, optax.EmptyState())[0],
    "by value": lambda g: jax.tree.map(lambda leaf: jnp.clip(leaf, -0.005, 0.005), g),
    "leaf by leaf": lambda g: jax.tree.map(lambda leaf: leaf / (10 * jnp.linalg.norm(leaf) + 1e-6), g),
    "normalised": lambda g: jax.tree.map(lambda leaf: leaf / optax.global_norm(g), g),
}
UNCLIPPED = tuple(name for name in OPTIMIZERS if name != "clipped adam")


def fault(kind: str, number: int, *, few: bool = False, rare: bool = False) -> Problem:
    """Returns the step of that number with that fault."""
    random = np.random.default_rng([1 + KINDS.index(kind), number])
    plant = functools.partial(planted, random, number, few=few, rare=rare)
    turn = lambda *choices: choices[number // 2 % len(choices)]
    join = lambda function: lambda acc, g, n: jax.tree.map(lambda a, b: function(a, b, n), acc, g)
    match kind:
        case "never closes":
            late = lambda n, k: jnp.bool_(k == 1)
            fields = turn({"closes": late}, {"loses": True})
            return plant(str(list(fields)), one={}, **fields)
        case "closes at another micro-step":
            return plant(styles=ACROSS, one={}, closes=lambda n, k: n + 1 >= k + (k > 1))
        case "only the first gradient":
            divided = turn(True, False)
            keep = lambda a, b, n: jnp.where(n == 0, b, a)
            return plant(f"divided: {divided}", join=join(keep), **({} if divided else {"factor": lambda n, k: n}))
        case "only the last gradient":
            divided = turn(True, False)
            return plant(
                f"divided: {divided}",
                join=join(lambda a, b, n: b),
                **({} if divided else {"factor": lambda n, k: n}),
            )
        case "divided twice":
            return plant(
                factor=lambda n, k: 1 / n, of={"masked": turn(True, False)}, options={"uneven": turn(False, True)}
            )
        case "short window dropped":
            return plant(styles=ACROSS, flushes=False)
        case "emptied in mid-window":
            anew = lambda a, b, n: jnp.where(n == 1, b, a + b)
            return plant(join=join(anew), of={"least": 3, "optimizers": UNCLIPPED})
        case "wrong weights":
            return plant(weight=lambda s, b: jnp.exp(b["x"][0, 0]), of={"optimizers": UNCLIPPED})
        case "weighed by place":
            add = turn(lambda a, b, n: 0.7 * a + b, lambda a, b, n: a + b / (n + 1))
            return plant(join=join(add), of={"optimizers": UNCLIPPED})
        case "clipping the running sum":
            clip = lambda acc, k: optax.clip_by_global_norm(0.05 * k).update(acc, optax.EmptyState())[0]
            return plant(weight=lambda s, b: 1.0, summed=clip, of={"optimizers": UNCLIPPED})
        case "counter not emptied":
            return plant(styles=ACROSS, one={}, stays=turn(("total",), ("n",)), of={"optimizers": MOMENTS})
        case "stale parameters":
            return plant(styles=ACROSS, one={}, stale=True, of={"optimizers": MOMENTS})
        case "divided by the full k":
            return plant(styles=ACROSS, factor=lambda n, k: n / k, of={"optimizers": UNCLIPPED})
        case "sum for a mean":
            return plant(factor=lambda n, k: n, of={"masked": turn(True, False), "optimizers": UNCLIPPED})
        case "wrong divisor":
            return plant(one={}, factor=lambda n, k: turn(0.6, 1.4), of={"optimizers": MOMENTS})
        case "mean of means":
            masked = turn(True, False)
            styles = tuple(STYLES) if masked else ACROSS
            return plant(f"masked: {masked}", styles=styles, weight=lambda s, b: 1.0, of={"masked": masked})
        case "clipping at each micro-step":
            how = turn(*CLIPS)
            return plant(how, gradient=CLIPS[how], of={"optimizers": UNCLIPPED})
        case "optimizer at each micro-step":
            how = turn("each", "rate", "applied")
            if how == "each":
                return plant(how, each=True, of={"optimizers": WITH_STATE})
            if how == "rate":
                return plant(how, rate=lambda calls, k: 1 + 0.3 * calls, styles=ACROSS)
            return plant(how, closes=lambda n, k: jnp.bool_(True))
        case "moves while held" if rare and number % 2:
            return plant("an average", average=True, early=True, styles=ACROSS, one={"average": True})
        case "moves while held":
            scale = turn(lambda p: 0.99 * p, lambda p: p + 1e-3, lambda p: p.astype(jnp.bfloat16).astype(jnp.float32))
            return plant(held=lambda params: jax.tree.map(scale, params), styles=ACROSS)
        case "shared key":
            return plant(key=lambda key, n: key, of={"rate": turn(0.5, 0.8)})
        case "low-precision sum":
            dtype, too = turn(jnp.bfloat16, jnp.float16), turn(True, True, False, False)
            return plant(f"{jnp.dtype(dtype)}, reference: {too}", dtype=dtype, one=None if too else {})
        case "NaN poison":
            empty = lambda acc, closes: jax.tree.map(lambda a: a * (1 - closes), acc)
            return plant(styles=ACROSS, one={"finite": True}, finite=True, empty=empty)
        case "coupled examples" if number % 3 == 2 or (rare and number % 2):
            return plant(of={"kind": "normalised advantages"}, options={"uneven": turn(False, True)})
        case "coupled examples":
            return plant(of={"norm": True}, options={"uneven": turn(False, True)})
        case "not emptied":
            return plant(styles=ACROSS, one={}, empty=lambda acc, closes: acc)
        case "rows left out":
            trimmed = lambda x, k: x[: len(x) // k * k]
            return plant(styles=("scan",), cut=trimmed, of={"masked": turn(False, True)})
        case _:
            raise ValueError(f"Each row of the table must be planted: {kind!r} is not. Plant it here.")


# Sound steps: the same loops without a fault, and the steps of Optax and of this library.


def sound_step(number: int, *, few: bool = False, rare: bool = False) -> Problem:
    """Returns the sound step of that number."""
    random = np.random.default_rng([0, number])
    if rare:
        of = ({}, {"masked": True}, {"rate": 0.7}, {})[number // 5 % 4]
        average = number % 2 == 0
        return planted(random, number, f"{list(of)}, average: {average}", of=of, average=average, rare=True)
    if number % 5 in (3, 4) and not few:
        libraries = list(LIBRARIES)
        return LIBRARIES[libraries[number // 5 * 2 % len(libraries) + number % 5 - 3]](random, number)
    turn = number // 5 % 5
    of = ({}, {"masked": True}, {"rate": 0.7}, {"dtype": jnp.bfloat16}, {})[turn]
    return planted(random, number * 7 + turn, f"{list(of)}", of=of, finite=turn == 4, few=few)


def _multi_steps(random: Random, number: int) -> Problem:
    s = setting(random, number)

    def make_step(every: int) -> Any:
        tx = optax.MultiSteps(s.optimizer, every)

        @jax.jit
        def step(state: TrainState, batch: Tree) -> TrainState:
            return state.apply_gradients(grads=jax.grad(s.loss)(state.params, batch, None))

        return step, TrainState.create(apply_fn=None, params=s.params, tx=tx)

    return Problem(f"MultiSteps, {s.name}", make_step, s.batch, {"every": s.every, "uneven": False})


def _microbatch(random: Random, number: int) -> Problem:
    s = setting(random, number)

    def make_step(every: int) -> Any:
        def value_and_grad(params: Tree, batch: Tree) -> Any:
            return jax.value_and_grad(s.loss)(params, batch, None)

        @jax.jit
        def step(carry: Tree, batch: Tree) -> Tree:
            params, state = carry
            size = len(batch["x"]) // every
            cut = optax.microbatching.microbatch(value_and_grad, 1, size, optax.microbatching.AccumulationType.MEAN)
            updates, state = s.optimizer.update(cut(params, batch)[1], state, params)
            return optax.apply_updates(params, updates), state

        return step, (s.params, s.optimizer.init(s.params))

    return Problem(
        f"microbatch, {s.name}", make_step, s.batch, {"every": s.every, "within_call": True, "uneven": False}
    )


def _ours_across(random: Random, number: int) -> Problem:
    s = setting(random, number, masked=number % 2 == 0)

    def make_step(every: int) -> Any:
        tx = optax_accum.accumulate_gradients(s.optimizer, every, nonfinite=("skip", "propagate", "omit")[number % 3])

        def micro_step(carry: Tree, batch: Tree, flush: bool) -> Tree:
            params, state = carry
            grads = jax.grad(s.loss)(params, batch, None)
            weight = s.weight(batch)
            return optax_accum.apply_gradients(tx, grads, state, params, weight=weight, flush=flush)

        step, last = (jax.jit(functools.partial(micro_step, flush=flush)) for flush in (False, True))
        return step, (s.params, tx.init(s.params)), last

    return Problem(f"accumulate_gradients, {s.name}", make_step, s.batch, {"every": s.every})


def _ours_within(random: Random, number: int) -> Problem:
    s = setting(random, number, masked=number % 2 == 0, rate=0.7 if number % 3 else None)

    def make_step(every: int) -> Any:
        cut = optax_accum.value_and_grad(s.loss, num_microbatches=every)

        @jax.jit
        def step(carry: Tree, batch: Tree) -> Tree:
            params, state, key = carry
            updates, state = s.optimizer.update(cut(params, batch, key)[1], state, params)
            return optax.apply_updates(params, updates), state, key

        return step, (s.params, s.optimizer.init(s.params), jax.random.key(1))

    return Problem(f"value_and_grad, {s.name}", make_step, s.batch, {"every": s.every, "within_call": True})


def _nnx_optimizer(random: Random, number: int) -> Problem:
    """NNX as its users write it: `nnx.jit`, an optimizer that holds MultiSteps."""
    s = setting(random, number)

    def make_step(every: int) -> Any:
        model = _Module(s.params)
        tx = optax.MultiSteps(s.optimizer, every) if every > 1 else s.optimizer
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def loss(model: _Module, batch: Tree) -> jax.Array:
            return jnp.mean((model.second(jnp.tanh(model.first(batch["x"]))) - batch["y"]) ** 2)

        @nnx.jit
        def update(model: _Module, optimizer: Any, batch: Tree) -> None:
            optimizer.update(model, nnx.grad(loss)(model, batch))

        def step(carry: Tree, batch: Tree) -> Tree:
            update(*carry, batch)
            return carry

        return step, (model, optimizer)

    return Problem(f"nnx.Optimizer, {s.name}", make_step, s.batch, {"every": s.every, "uneven": False})


LIBRARIES = {
    "MultiSteps": _multi_steps,
    "microbatch": _microbatch,
    "ours across": _ours_across,
    "ours within": _ours_within,
    "nnx": _nnx_optimizer,
    "ours across again": _ours_across,
}
