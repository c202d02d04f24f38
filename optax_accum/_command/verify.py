"""Owns `python -m optax_accum verify`: a step by name in, its report out. Compares nothing."""

import argparse

from optax_accum._command.named import load
from optax_accum._verify.verify_step import verify_step

EXAMPLE = "python -m optax_accum verify examples.verified_step:make_step --every 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes a step, and what `verify_step` is to know of it."""
    add = parser.add_argument
    add("make_step", help="module:make_step, or file.py:make_step; make_step(every) -> (step, carry[, last_step])")
    add("--batch", help="module:batch, arrays or a function; by default `batch` beside make_step")
    add("--every", type=int, default=4, help="micro-batches per update (default: %(default)s)")
    add("--within-call", action="store_true", help="the step takes the whole batch and splits it itself")
    add("--no-uneven", dest="uneven", action="store_false", help="do not try unequal micro-batches")
    add("--group-size", type=int, default=1, help="consecutive rows that belong together (default: %(default)s)")
    add("--rtol", type=float, help="the largest relative error that counts as rounding (default: by dtype)")


def run(options: argparse.Namespace) -> int:
    """Tells whether a train step accumulates correctly; if not, says why and what to do, and exits with 1."""
    make_step = load(options.make_step)
    if not callable(make_step):
        raise TypeError(
            f"What is checked must be a function: {options.make_step} is a {type(make_step).__name__}. Name make_step."
        )
    batch = load(options.batch or f"{options.make_step.rpartition(':')[0]}:batch")
    report = verify_step(
        make_step,
        batch() if callable(batch) else batch,
        every=options.every,
        within_call=options.within_call,
        uneven=options.uneven,
        group_size=options.group_size,
        rtol=options.rtol,
    )
    print(report)
    return 0 if report.holds else 1
