"""A number that one count of the batch alone decides, as a function of the count: `maximum(count, 1)`, or its root.

No function is known beforehand: its equations are evaluated, with the count of a whole window, or, to tell a guard
from a root, with some counts.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core import compilers, evaluation
from optax_accum._rows.program import Constant, Equation, Number, Value

COUNTS = 2.0 ** np.arange(16)  # exact in 16 bits
MEANS = 2.0 ** np.arange(-9, 1)  # of masks
_CLOSE = 2e-5  # a guard may add 1e-5 to a denominator: of ten tokens, a millionth
_LINEAR = {"broadcast_in_dim", "convert_element_type", "copy", "div", "mul", "neg", "pvary", "reshape", "squeeze"}


class Function:
    """A product of powers of numbers, each of which the count decides."""

    def __init__(
        self,
        count: Value,
        powers: Sequence[tuple[Value, int]],
        samples: np.ndarray,
        made_by: Mapping[Value, Equation],
        repeats: Mapping[Value, Value],
    ):
        """`samples`: what the count may be; `repeats`: the earlier value that a value repeats, or casts."""
        self.count, self.powers, self.samples = count, tuple(powers), samples
        original, found = (lambda value: repeats.get(value, value)), dict[Equation, None]()

        def find(value: Value) -> None:
            made = made_by.get(value) or made_by.get(original(value))
            if made is not None and made not in found and original(value) is not count:
                for operand in made.ins:
                    find(operand)
                found[made] = None

        for value, _ in powers:
            find(value)
        self.equations = tuple(found)  # that make the numbers from the count, in order; the program is not kept
        taken = [*dict(powers), *(value for each in found for value in each.ins)]
        self.originals = {value: original(value) for value in taken}

    def __call__(self, counts: jax.Array) -> jax.Array:
        """The function of a count, or of each of several."""
        return jnp.vectorize(self._of_one)(counts)

    def _of_one(self, count: jax.Array) -> jax.Array:
        found: dict[Value, Any] = {}

        def read(value: Value) -> Any:
            if isinstance(value, Constant | Number):
                return value.array
            original = self.originals[value]
            if original is self.count:
                return jnp.broadcast_to(jnp.reshape(count, ()), value.aval.shape).astype(value.aval.dtype)
            return found[value] if value in found else found[original]

        for equation in self.equations:
            values = evaluation.bind_elsewhere(equation.single, list(map(read, equation.ins)))
            found.update(zip(equation.outs, values, strict=True))
        factors = (jnp.reshape(read(value), ()).astype(count.dtype) ** exponent for value, exponent in self.powers)
        return functools.reduce(jnp.multiply, factors)

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The function of the samples; NaN where only a compiler understands it."""
        try:
            with compilers.tracing_on(jax.sharding.AbstractMesh((), ())), jax.ensure_compile_time_eval():
                return np.asarray(self(jnp.asarray(self.samples, jnp.float32)), np.float64)
        except Exception:  # a constant that is traced, say
            return np.full(len(self.samples), np.nan)

    @property
    @np.errstate(all="ignore")
    def is_count(self) -> bool:
        """Whether it is the count, times a number, but for zero, which it may keep away."""
        counts = self.values * (self.samples[-1] / self.values[-1])
        return bool(np.all(np.abs(counts - self.samples) <= _CLOSE * np.maximum(self.samples, 1)))

    @property
    def may_be_count(self) -> bool:
        """Whether it is in proportion to some of the samples, as a count with a bound is, but not one plus 5e-4."""
        below, above = self.values[:11], self.values[1:12]  # a float32 beyond forgets what is added
        return bool(np.any((above == 2 * below) & (below != 0)))

    @property
    def is_constant(self) -> bool:
        """Whether all samples give the same number."""
        return bool(np.allclose(self.values, self.values[0], rtol=_CLOSE, atol=0))

    @property
    def falls(self) -> bool:
        """Whether it is smaller for large counts than for small ones."""
        return bool(abs(self.values[-1]) < abs(self.values[0]))

    @property
    def case(self) -> int | None:
        """Of an index, the case that each count but zero chooses; None if they choose several."""
        cases = set(self.values.tolist())
        return int(cases.pop()) if len(cases) == 1 and np.isfinite(self.values).all() else None

    @property
    def guard(self) -> Equation | None:
        """The last operation that does more than scale the count; None if there is none."""
        return next((each for each in reversed(self.equations) if each.name not in _LINEAR), None)
