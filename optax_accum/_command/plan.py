"""Owns `python -m optax_accum.plan`: arguments in, a table, JSON or a picture out. Plans nothing itself."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optax_accum._command.named import load
from optax_accum._compiled.targets import GPUS, TPUS
from optax_accum._plan import picture
from optax_accum._plan.plan import NothingFitsError, Plan
from optax_accum._plan.planning import plan_microbatches

_TARGETS = f"a GPU ({', '.join(GPUS)}) or a TPU with its topology ({', '.join(TPUS)}, such as v5e:4x4)"
_EXAMPLE = """\
example, from the folder of the repository (on a machine with NVIDIA's compiler, add --target h100):

  python -m optax_accum.plan examples.will_it_fit:make_step --global-batch 64 --budget 2GB

make_step(num_microbatches) returns jax.jit(step).lower(*shapes); if it has a parameter `target`, it is given the
accelerator to lower for, whose `target.shapes(tree)` are shapes there. Nothing is run, and nothing is allocated.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Plans what the arguments name, and prints it."""
    parser = _parser()
    options = parser.parse_args(_joined(sys.argv[1:] if argv is None else argv))
    if options.target == "":
        print(f"--target is one of: {_TARGETS}; without it, the devices that are here.")
        return
    if options.make_step is None or options.global_batch is None:
        parser.error("module:make_step and --global-batch are needed")
    try:
        _run(options)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(130) from None
    except NothingFitsError as error:
        if options.json:
            print(json.dumps(_record(error.plan), indent=2, default=str))
        raise SystemExit("\n".join([str(error), *error.__notes__])) from error
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit("\n".join([str(error), *getattr(error, "__notes__", ())])) from error


def _run(options: argparse.Namespace) -> None:
    if options.plot:
        _check_picture(options.plot)
    with contextlib.redirect_stdout(sys.stderr):  # what a user's module prints is not ours
        plan = plan_microbatches(
            load(options.make_step),
            options.global_batch,
            target=options.target,
            budget=options.budget,
            num_devices=options.devices,
            options=options.options,
            candidates=options.candidates,
            safety=options.safety,
            progress=sys.stderr.isatty(),
        )
    print(json.dumps(_record(plan), indent=2, default=str) if options.json else plan)
    if options.plot:
        _draw(plan, options.plot)


def _check_picture(path: Path) -> None:
    """Raises unless a picture can be drawn there, before anything is compiled."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--plot must be a file that can be written: {path}. Name one in a folder that exists.")
    if path.suffix.lower() not in (kinds := picture.kinds()):
        raise ValueError(f"--plot must end in one of {', '.join(kinds)}: {path}. Name it plan.png, say.")


def _draw(plan: Plan, path: Path) -> None:
    try:
        plan.plot().savefig(path, dpi=150)
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}.") from None


def _joined(words: Sequence[str]) -> list[str]:
    """Returns the words with `--budget -3GB` as one, whose minus would begin an option."""
    return re.sub(r"(^|\0)--budget\0(-[\d.])", r"\1--budget=\2", "\0".join(words)).split("\0") if words else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optax_accum.plan",
        description="Tells the fewest micro-batches with which a step fits, asked of the compiler.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("make_step", nargs="?", metavar="module:make_step", help="what returns the lowered step")
    add("--global-batch", type=int, metavar="ROWS", help="the rows of one update, over all devices")
    add("--target", nargs="?", const="", help=f"{_TARGETS}; alone: lists them; by default the devices here")
    add("--devices", type=int, metavar="N", help="how many of them share a micro-batch")
    add("--budget", metavar="SIZE", help='the memory of one device, such as 70GB or "7.5 GiB"; by default its own')
    add("--safety", type=float, default=0.9, help="the part of the budget to use (default: 0.9)")
    add("--options", nargs="+", metavar="OPTION", help="what make_step takes second, each planned")
    add("--candidates", nargs="+", type=int, metavar="K", help="numbers of micro-batches to choose from")
    add("--json", action="store_true", help="print JSON in place of the table; where nothing fits, too, with status 1")
    add("--plot", type=Path, metavar="FILE", help="draw what each number of micro-batches needs")
    return parser


def _record(plan: Plan) -> dict[str, Any]:
    names = (
        "num_microbatches",
        "option",
        "global_batch",
        "num_devices",
        "target",
        "budget",
        "limit",
        "open",
        "monotone",
    )
    chosen = {name: getattr(plan, name) if plan.num_microbatches else None for name in ("sizes", "peak")}
    known = lambda value: None if value == float("inf") else value  # which JSON has not
    rows = [{key: known(value) for key, value in row.items()} for row in plan.rows]
    return {name: getattr(plan, name) for name in names} | chosen | {"rows": rows}
