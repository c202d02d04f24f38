"""Owns the command line of `verify_step`. Compares nothing."""

import argparse
import sys
from collections.abc import Sequence

from optax_accum._command.named import load
from optax_accum._verify.verify_step import verify_step


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report of a step, and returns 0 if the law holds for it, else 1."""
    about = "Tells whether a train step accumulates as it should, and if not, why, and what to do."
    parser = argparse.ArgumentParser(prog="python -m optax_accum.verify", description=about)
    parser.add_argument("make_step", help="module:make_step, or file.py:make_step; make_step(every) -> (step, carry)")
    parser.add_argument("--batch", help="module:batch, arrays or a function; by default `batch` beside make_step")
    parser.add_argument("--every", type=int, default=4, help="the length of the window")
    parser.add_argument("--within-call", action="store_true", help="one call gets the whole batch and cuts it itself")
    parser.add_argument("--no-uneven", dest="uneven", action="store_false", help="micro-batches are always equal")
    parser.add_argument("--group-size", type=int, default=1, help="how many consecutive rows belong together")
    parser.add_argument("--rtol", type=float, help="the largest relative error that counts as rounding")
    options = vars(parser.parse_args(arguments))
    name, where = options.pop("make_step"), options.pop("batch")
    try:
        make_step = load(name)
        if not callable(make_step):
            raise TypeError(
                f"What is checked must be a function: {name} is a {type(make_step).__name__}. Name make_step."
            )
        batch = load(where or f"{name.rpartition(':')[0]}:batch")
        report = verify_step(make_step, batch() if callable(batch) else batch, **options)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\nInterrupted: nothing was found out.", file=sys.stderr)
        return 130
    print(report)
    return 0 if report.holds else 1
