"""Public models restated small, whole and in micro-batches of one call: error of the gradient, and memory.

Run `python -m benchmarks.models`. Nothing is declared of a model. `tests/rows/test_models.py` has them smaller.
"""

import jax
from tqdm import tqdm

import optax_accum
from benchmarks import _measure
from tests import programs
from tests.public_models import MODELS, made

ROWS, K, WIDTH = 256, 16, 64
TOLERANCE = 1e-4  # of the largest entry of all gradients
NOTES = f"""\
{ROWS} rows, k = {K}, width {WIDTH}, float32. Error: the largest difference from `jax.value_and_grad` of the whole
batch, of the largest entry of its gradient, and from what else the loss returns. Memory: temporary memory of the
compiled program."""


def measured(name: str) -> tuple[str, ...]:
    """Returns a row of the table, after both ways gave the same value, gradient and `aux`."""
    loss, params, batch, args, has_aux = made(name, ROWS, WIDTH)
    ways = jax.value_and_grad(loss, has_aux=has_aux), optax_accum.value_and_grad(loss, K, has_aux=has_aux)
    with programs.as_shipped():
        compiled = [jax.jit(way).lower(params, batch, *args).compile() for way in ways]
    whole, ours = (program(params, batch, *args) for program in compiled)
    error = _measure.gradient_difference(ours, whole)
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: another gradient, {error:.1e}.")
    memory = [f"{program.memory_analysis().temp_size_in_bytes / 1e6:.2f} MB" for program in compiled]
    return name, f"{error:.0e}", *memory


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.parse_args()
    tqdm.write(_measure.header("Public models", NOTES))
    table = [("model", "error", "memory, whole batch", f"memory, k = {K}")]
    tqdm.write(_measure.markdown([*table, *(measured(name) for name in tqdm(MODELS, leave=False, disable=None))]))


if __name__ == "__main__":
    _measure.command(main)
