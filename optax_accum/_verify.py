"""Owns the question whether accumulation changes a loss, and why. Knows no optimizer."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _arguments, _split
from optax_accum._accumulator import Tree
from optax_accum._microbatch import value_and_grad
from optax_accum._report import DRAWS, Cause, Report, order


def verify(
    fun: Callable[..., Any],
    params: Tree,
    batch: Tree,
    *args: Any,
    num_microbatches: int = 2,
    weight_fn: Callable[..., Any] | None = None,
    has_aux: bool = False,
    rng_argnum: int | None = None,
    carry_argnum: int | None = None,
    accumulator_dtype: Any = None,
    rtol: float | None = None,
) -> Report:
    """Tells whether a loss may be accumulated, and if not, why, and what to do.

        whole = grad fun(params, batch)        cut = sum_i w_i grad fun(params, batch_i) / sum_i w_i

    A small batch is run whole, by `jax.value_and_grad`, and cut, by `optax_accum.value_and_grad` with your options,
    once into `num_microbatches` and once into micro-batches of unequal size. Where the two differ, each possible cause
    is tested by a probe of its own. Run it once, on a batch like those of training: with masks of unequal length, say.

    Args:
      fun: the loss, called as `fun(params, batch, *args)`; what it returns is what `value_and_grad` takes.
      params: parameters at which the gradient is not zero; freshly initialised ones do.
      batch: a pytree of at least 4 rows, and of `num_microbatches` rows.
      *args: the other arguments of `fun`; random keys are found by their dtype.
      num_microbatches: into how many the batch is cut, 2 or more. Take many to see an accumulator of low precision.
      weight_fn: as `value_and_grad` takes it, and so the next four.
      has_aux: whether `fun` returns something beside the loss; it is not compared.
      rng_argnum: the number of the key's argument; the first of `*args` is number 2.
      carry_argnum: the number of the argument that is threaded through the micro-batches.
      accumulator_dtype: the dtype in which gradients are added.
      rtol: the largest relative error that counts as rounding. By default the square root of the machine epsilon of
        the narrowest float that `fun` computes with: 3e-4 for float32, 9e-2 for bfloat16.

    Returns:
      A `Report`: `holds`, `errors` for each leaf, and `causes`, each with its evidence and remedy. Print it.

    Raises:
      TypeError, ValueError: too few rows or micro-batches; a loss that is no scalar; a loss or gradient of the whole
        batch that is not finite; a gradient that is zero everywhere, for then nothing would be compared.

    Guarantees:
      | case | result | known when |
      |---|---|---|
      | a mean over unequal weights | `"weights"`: the whole lies between its halves, not at their rows | running |
      | a sum over rows | `"sum"`: the whole is its two halves added up | running |
      | example j changes example i's term | `"coupled examples"`: two rows changed do not act as each alone | running |
      | a loss that depends on a key without `rng_argnum` | `"shared key"`: equal rows get equal losses | running |
      | a narrow `accumulator_dtype` | `"low-precision accumulator"`: a wide one gives another gradient | running |
      | a loss that depends on the carry | `"mutable state"`: holding the carry fixed gives another gradient | running |
      | a loss that differs between equal calls | `"mutable state"`; nothing is compared | running |
      | a random loss with `rng_argnum` | means over 128 keys are compared | running |
      | a leaf below 1 % of the largest gradient | its error is relative to that 1 % | running |

    Example:
      A masked mean: rows with more tokens count for more.

      >>> import jax.numpy as jnp, optax_accum
      >>> def loss(w, batch):
      ...     return jnp.sum(batch["mask"] * (batch["x"] * w - 1) ** 2) / jnp.sum(batch["mask"])
      >>> x = jnp.arange(12.0).reshape(4, 3)
      >>> batch = {"x": x, "mask": jnp.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]])}
      >>> [cause.kind for cause in optax_accum.verify(loss, jnp.float32(0.5), batch).causes]
      ['weights']
      >>> optax_accum.verify(loss, jnp.float32(0.5), batch, weight_fn=lambda batch: batch["mask"].sum()).holds
      True

    References:
      Mean of means: the gradient accumulation bug found in 2024 in several trainers (unsloth.ai/blog/gradient).
    """
    loss = _Loss(fun, params, args, has_aux, carry_argnum)
    count = _check(loss, batch, num_microbatches)
    if impure := _impure(loss, batch):
        return Report(False, {}, {}, (impure,), count, num_microbatches, False)
    rtol = _rounding(loss, batch) if rtol is None else rtol
    probes = _Probes(loss, batch, count, num_microbatches, weight_fn, rng_argnum, accumulator_dtype, rtol)
    errors, limits = probes.compare()
    equal, shared = _within(errors, limits), probes.shared_key()
    causes = shared if equal else [*shared, *probes.low_precision(), *probes.state(), *probes.formula()]
    return Report(equal and not shared, errors, limits, tuple(causes), count, num_microbatches, probes.random)


@dataclasses.dataclass(frozen=True)
class _Loss:
    """A loss in one form, whatever stands beside it."""

    fun: Callable[..., Any]
    params: Tree
    args: tuple[Any, ...]
    has_aux: bool
    carry_argnum: int | None

    def terms(self, params: Tree, batch: Tree, *args: Any) -> Any:
        """Returns the loss, or the dict of its terms."""
        out = self.fun(params, batch, *args)
        return out[0] if self.has_aux or self.carry_argnum is not None else out

    def total(self, params: Tree, batch: Tree, *args: Any, term: str | None = None) -> jax.Array:
        """Returns the sum of all terms, or one of them."""
        terms = self.terms(params, batch, *args)
        return sum(jax.tree.leaves(terms)) if term is None else terms[term]  # type: ignore[return-value]

    def threaded(self, params: Tree, batch: Tree, *args: Any) -> Any:
        """Returns the loss, or the dict of its terms, with the carry beside it if there is one."""
        out = self.fun(params, batch, *args)
        if self.carry_argnum is None:
            return out[0] if self.has_aux else out
        return (out[0], out[1][1]) if self.has_aux else out

    def draw(self, number: Any) -> tuple[Any, ...]:
        """Returns the arguments with keys that are `number`'s own."""
        return jax.tree.map(lambda leaf: jax.random.fold_in(leaf, number) if _is_key(leaf) else leaf, self.args)


@dataclasses.dataclass(frozen=True)
class _Probes:
    """The runs that are compared, and one probe for each cause."""

    loss: _Loss
    batch: Tree
    count: int
    num_microbatches: int
    weight_fn: Callable[..., Any] | None
    rng_argnum: int | None
    dtype: Any
    rtol: float

    def compare(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns each leaf's error, that of the worse of the two cuts, and its limit."""
        cuts = [self.differences(self.whole, cut) for cut in self.asked]
        worst = {path: max((cut[path] for cut in cuts), key=lambda pair: order(pair[0] / pair[1])) for path in cuts[0]}
        return {path: error for path, (error, _) in worst.items()}, {path: limit for path, (_, limit) in worst.items()}

    def shared_key(self) -> list[Cause]:
        """Two micro-batches of equal rows: without a key of their own, their losses are equal to the bit."""
        if not self.random:
            return []
        twice = _take(self.batch, np.repeat(np.arange(self.count // 2), 2))
        both = lambda *args: (self.loss.terms(*args), self.loss.total(*args))
        options: dict[str, Any] = {"num_microbatches": 2, "weight_fn": self.weight_fn, "rng_argnum": self.rng_argnum}
        cut = jax.jit(value_and_grad(both, has_aux=True, aux_reduction="stack", **options))
        first, second = cut(self.loss.params, twice, *self.loss.args)[0][1]
        if first != second:
            return []
        return [
            Cause("shared key", "The loss changes with its key, and two micro-batches of equal rows drew the same.")
        ]

    def low_precision(self) -> list[Cause]:
        """The default accumulator gives another gradient than the one asked for."""
        error = self._worst(self.sound, self.cut(self.dtype, held=True)) if self.dtype else 0.0
        sums = f"Added in {jnp.dtype(self.dtype)}, the gradient is off by {error:.1e}; added in float32 it is not."
        return [Cause("low-precision accumulator", sums)] if error else []

    def state(self) -> list[Cause]:
        """The gradient is another one when each micro-batch starts from the first carry."""
        if self.loss.carry_argnum is None:
            return []
        error = self._worst(self.sound, self.cut(None, held=False))
        says = f"What earlier micro-batches leave in the carry changes the gradient of later ones, by {error:.1e}."
        return [Cause("mutable state", says)] if error else []

    def formula(self) -> list[Cause]:
        """What is wrong with a sound accumulator and a fixed carry lies in the formula of the loss."""
        if not self._worst([self.whole] * 2, self.sound):
            return []
        terms = jax.eval_shape(self.loss.terms, self.loss.params, self.batch, *self.loss.draw(0))
        names = list(terms) if isinstance(terms, dict) else [None]
        halves = [halve for name in names for halve in self._halves(name)]
        together = self._together()
        if halves and all(kind == "weights" for kind, _ in halves) and not (self.random and together):
            return [Cause("weights", max((says for _, says in halves), key=len))]
        if halves and all(kind == "sum" for kind, _ in halves):
            return [Cause("sum", halves[0][1])]
        if together:
            return [Cause("coupled examples", together)]
        says = "Examples act on the loss one by one, but no weight per micro-batch explains it: several denominators."
        return [Cause("weights", says)]

    def cut(self, dtype: Any, *, held: bool) -> list[list[np.ndarray]]:
        """Returns the loss and the gradient of the cut batch, of equal and of unequal micro-batches."""
        size = next(
            size for size in range(-(-self.count // self.num_microbatches) + 1, self.count) if self.count % size
        )
        fun, carry = (self.loss.terms, None) if held else (self.loss.threaded, self.loss.carry_argnum)
        options: dict[str, Any] = {
            "weight_fn": self.weight_fn,
            "rng_argnum": self.rng_argnum,
            "accumulator_dtype": dtype,
        }

        def total(*args: Any, **sizes: int) -> tuple[Any, Any]:
            out, grads = value_and_grad(fun, carry_argnum=carry, **sizes, **options)(*args)
            return (out if carry is None else out[0]), grads

        sizes = ({"num_microbatches": self.num_microbatches}, {"microbatch_size": size})
        return [self._measure(functools.partial(total, **size), self.batch) for size in sizes]

    @functools.cached_property
    def asked(self) -> list[list[np.ndarray]]:
        """The cut batch, with the options asked for."""
        return self.cut(self.dtype, held=False)

    @functools.cached_property
    def sound(self) -> list[list[np.ndarray]]:
        """The cut batch, with the default accumulator and the carry held fixed."""
        plain = self.dtype is None and self.loss.carry_argnum is None
        return self.asked if plain else self.cut(None, held=True)

    @functools.cached_property
    def random(self) -> bool:
        """Whether the loss changes with a key among its arguments."""
        if not any(_is_key(leaf) for leaf in jax.tree.leaves(self.loss.args)):
            return False
        losses = jax.lax.map(lambda n: self.loss.total(self.loss.params, self.batch, *self.loss.draw(n)), jnp.arange(4))
        return bool(jnp.any(losses != losses[0]))

    @functools.cached_property
    def whole(self) -> list[np.ndarray]:
        """The loss and the gradient of the whole batch."""
        found = self._measure(jax.value_and_grad(self.loss.total), self.batch)
        if not all(np.all(np.isfinite(leaf)) for leaf in found):
            raise ValueError("The whole batch must have a finite loss and gradient to compare with. Look for the NaN.")
        if not any(np.any(leaf) for leaf in found[1:]):
            raise ValueError("The whole batch must have a gradient: it is 0 everywhere. Pass freshly made parameters.")
        return found

    @functools.cached_property
    def scales(self) -> list[float]:
        """The largest entry of the loss and of each leaf, and 1 % of the gradient's largest at least."""
        loss, *leaves = [float(np.max(np.abs(np.mean(leaf, 0)), initial=0)) for leaf in self.whole]
        return [loss or 1.0, *(max(leaf, 0.01 * max(leaves)) for leaf in leaves)]

    def differences(self, whole: list[np.ndarray], cut: list[np.ndarray]) -> dict[str, tuple[float, float]]:
        """Returns for the loss and each leaf its relative error and the largest that is rounding or noise."""
        found = {}
        leaves = jax.tree.leaves_with_path(self.loss.params)
        paths = ["loss", *(f"params{jax.tree_util.keystr(path)}" for path, _ in leaves)]
        for path, a, b, scale in zip(paths, whole, cut, self.scales, strict=True):
            noise = 6 * np.max(np.std(b - a, axis=0), initial=0) / math.sqrt(len(a))
            error = np.max(np.abs(np.mean(b - a, axis=0)), initial=0)
            found[path] = (float(error / scale), float(self.rtol + np.nan_to_num(noise) / scale))
        return found

    def _worst(self, wholes: list[list[np.ndarray]], cuts: list[list[np.ndarray]]) -> float:
        """Returns the largest error that is neither rounding nor noise, or 0."""
        pairs = zip(wholes, cuts, strict=True)
        found = [pair for whole, cut in pairs for pair in self.differences(whole, cut).values()]
        return max((error for error, limit in found if not error <= limit), key=order, default=0.0)

    def _measure(self, function: Callable[..., tuple[Any, Any]], batch: Tree) -> list[np.ndarray]:
        """Returns the loss [draws] and the leaves of the gradient [draws, ...] that `function` returns."""
        return self._compiled(function)(batch)

    def _compiled(self, function: Callable[..., tuple[Any, Any]]) -> Callable[[Tree], list[np.ndarray]]:
        draws = jnp.arange(DRAWS if self.random else 1)
        run = jax.jit(lambda p, batch: jax.lax.map(lambda n: function(p, batch, *self.loss.draw(n)), draws))
        wide = lambda leaf: np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64)
        return lambda batch: [wide(leaf) for leaf in jax.tree.leaves(run(self.loss.params, batch))]

    def _halves(self, term: str | None) -> list[tuple[str, str]]:
        """Cuts the batch in two, in several ways: and tells where the whole lies."""
        run = self._compiled(jax.value_and_grad(functools.partial(self.loss.total, term=term)))
        measure = lambda rows: run(_take(self.batch, rows))
        rows, found = np.arange(self.count), []
        whole = measure(rows)
        for arranged in (rows, np.argsort(rows % 2, kind="stable"), np.roll(rows, 1)):
            parts = [measure(arranged[: self.count // 2]), measure(arranged[self.count // 2 :])]
            if all(np.all(np.isfinite(leaf)) for part in parts for leaf in part):
                found.append(self._between(whole, *parts))
        return found

    def _between(self, whole: list[np.ndarray], first: list[np.ndarray], second: list[np.ndarray]) -> tuple[str, str]:
        scaled = lambda parts: np.concatenate(
            [np.mean(x, 0).ravel() / s for x, s in zip(parts, self.scales, strict=True)]
        )
        w, u, v = scaled(whole), scaled(first), scaled(second)
        line = np.vdot(u - v, u - v).real
        share = float(np.vdot(u - v, w - v).real / line) if line else 0.5
        noise = max(limit for _, limit in self.differences(whole, first).values()) if self.random else self.rtol
        limit = noise * max(1.0, *np.abs(u), *np.abs(v))
        if np.max(np.abs(w - v - share * (u - v))) <= limit and -limit <= share <= 1 + limit:
            return "weights", f"Some {self.count // 2} of the {self.count} rows count for {share:.2f} of the whole."
        if np.max(np.abs(w - u - v)) <= limit:
            return "sum", "The whole is its two halves added up, where their mean was needed."
        return "neither", ""

    def _together(self) -> str:
        """Changes two rows, each alone and together: the effects add up, unless one is in the other's term."""
        loss = jax.jit(lambda batch: self.loss.total(self.loss.params, batch, *self.loss.draw(0)))
        value = lambda *rows: float(loss(_replace(self.batch, rows)))
        start, limit = value(), self.rtol
        for i, j in ((0, 1), (1, 2), (0, 2)):
            one, two, both = value(i) - start, value(j) - start, value(i, j) - start
            change = max(abs(one), abs(two))
            if abs(both - one - two) > limit * max(change, limit * abs(start)):
                return (
                    f"Changing row {i} changes the loss by {one:.3g}, row {j} by {two:.3g}, both by {both:.3g}: "
                    "one row's input changes the other row's term."
                )
        return ""


def _check(loss: _Loss, batch: Tree, num_microbatches: Any) -> int:
    """Returns the number of rows, and raises for a batch or a number that leaves nothing to compare."""
    if (_arguments.as_positive("num_microbatches", num_microbatches) or 0) < 2:
        raise ValueError(f"There must be a cut to compare: num_microbatches={num_microbatches}. Pass 2 or more.")
    _arguments.check_differentiable(loss.params)
    rows, needed = _split.count_rows(batch), max(4, num_microbatches)
    if rows < needed:
        raise ValueError(
            f"verify needs {needed} rows or more, to cut them evenly and unevenly into num_microbatches="
            f"{num_microbatches}: the batch has {rows}. Pass a batch of {needed}."
        )
    return rows


def _impure(loss: _Loss, batch: Tree) -> Cause | None:
    """Calls the loss three times with the same arguments, without compiling it."""
    calls = [jax.tree.map(jnp.asarray, loss.terms(loss.params, batch, *loss.args)) for _ in range(3)]
    _arguments.check_loss(calls[0], None)
    values = [float(sum(jax.tree.leaves(call))) for call in calls]
    if np.allclose(values, values[0], rtol=1e-5, atol=0, equal_nan=True):
        return None
    return Cause("mutable state", f"Called three times with the same arguments, fun returned {values}.")


def _rounding(loss: _Loss, batch: Tree) -> float:
    """Returns the square root of the machine epsilon of the narrowest float in the computation of the loss."""
    text = str(jax.make_jaxpr(loss.total)(loss.params, batch, *loss.args))
    names = {"f64": 2**-52, "c128": 2**-52, "f32": 2**-23, "c64": 2**-23, "f16": 2**-10, "bf16": 2**-7}
    return math.sqrt(max((names.get(name, 0) for name in re.findall(r"\b(\w+)\[", text)), default=2**-23))


def _replace(batch: Tree, rows: tuple[int, ...]) -> Tree:
    """Returns the batch with each of `rows` replaced by one from the end; what looks like a weight of rows stays."""
    weight = lambda leaf: jnp.ndim(leaf) < 2 or bool(jnp.all((leaf == 0) | (leaf == 1)))
    alone = all(weight(leaf) for leaf in jax.tree.leaves(batch))
    order = np.arange(_split.count_rows(batch))
    order[list(rows)] = [order[-1 - row] for row in rows]
    return jax.tree.map(lambda leaf: leaf if weight(leaf) and not alone else _take(leaf, order), batch)


def _take(batch: Tree, rows: np.ndarray) -> Tree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows] if _split.is_split(leaf) else leaf, batch)


def _within(errors: dict[str, float], limits: dict[str, float]) -> bool:
    return all(error <= limits[path] for path, error in errors.items())  # a NaN is not


def _is_key(leaf: Any) -> bool:
    """Returns whether a leaf is a random key, new or old style."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    return dtype is not None and (
        (shape == () and jnp.issubdtype(dtype, jax.dtypes.prng_key)) or (shape == (2,) and dtype == jnp.uint32)
    )
