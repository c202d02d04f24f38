"""The loops that people write by hand: what `verify_step` says of each, and how far its update is off.

Run `python -m benchmarks.loops` for the table, `--page docs/compared.md` to put it there.
"""

import functools
import importlib.metadata
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum
from benchmarks import _measure
from benchmarks._measure import Tree
from tests.pages.loops_by_hand import LOOPS, ROWS, SEEDS, Loop, batch, one_key

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "compared.md"
BEGIN, END = "<!-- what python -m benchmarks.loops --page docs/compared.md found -->", "<!-- end -->"


def said(loop: Loop) -> str:
    """Returns what `verify_step` says."""
    report = optax_accum.verify_step(loop.make_step, batch(0, even=loop.even), every=4, within_call=loop.within)
    return ", ".join(f"`{cause.kind}`" for cause in report.causes) or "holds"


def error(loop: Loop) -> str:
    """Returns how far an update is off, relative to its size: the mean over seeds."""
    if loop.make_step is one_key:
        return f"noise x {_noise(loop):.1f}"
    off = float(np.mean([_error(loop, seed) for seed in range(SEEDS)]))
    return f"{off:.0%}" if off > 1e-3 else f"{off:.0e}"


def _error(loop: Loop, seed: int) -> float:
    whole, cut = (_change(loop, every, seed) for every in (1, loop.every))
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, cut, whole)) / optax.tree.norm(whole))


def _change(loop: Loop, every: int, seed: int) -> Tree:
    """Returns what the windows have changed."""
    step, carry, *last = loop.make_step(every)
    start = loop.of(carry)
    for window in range(loop.windows):
        rows = batch(seed + 100 * window, even=loop.even)
        if loop.micro_batches:
            rows = jax.tree.map(lambda leaf: leaf[: loop.micro_batches * ROWS // loop.every], rows)
        if loop.within or every == 1:
            carry = step(carry, rows)
            continue
        split = np.split(np.arange(len(rows["x"])), loop.micro_batches or every)
        *before, final = [jax.tree.map(lambda leaf, own=own: leaf[own], rows) for own in split]
        carry = functools.reduce(step, before, carry)
        carry = (last[0] if last else step)(carry, final)
    return jax.tree.map(jnp.subtract, loop.of(carry), start)


def _noise(loop: Loop) -> float:
    """Returns how much more an update of equal rows varies with the key than one with a key for each micro-batch."""
    rows = jax.tree.map(lambda leaf: np.concatenate([leaf[:2]] * (ROWS // 2)), batch(0, even=True))
    keys = jax.random.split(jax.random.key(2), 64)

    def deviation(every: int) -> float:
        step, carry = loop.make_step(every)
        draws = [step((*carry[:2], key), rows)[0] for key in keys]
        return float(optax.tree.norm(jax.tree.map(lambda *leaves: jnp.std(jnp.stack(leaves), 0), *draws)))

    return deviation(loop.every) / deviation(1)


def table() -> str:
    """Returns the table, as Markdown."""
    head = ("the loop", "seen in", "`verify_step` says", "its update is off by")
    rows = [(loop.name, loop.seen, said(loop), error(loop)) for loop in LOOPS]
    return _measure.markdown([head, *rows], left=range(len(head)))


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--page", type=pathlib.Path, help="put the table there")
    page = parser.parse_args().page
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "optax"))
    text = f"{table()}\n\nFound with {versions}, on a CPU."
    print(f"## Loops by hand\n\n{text}")
    if page:
        before, rest = page.read_text().split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    _measure.command(main)
