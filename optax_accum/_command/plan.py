"""Owns `python -m optax_accum plan`: a step by name in, a table or JSON out. Plans nothing."""

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import Any

from optax_accum._command.named import load
from optax_accum._compiled.targets import GPUS, TPUS
from optax_accum._plan.plan import NothingFitsError, Plan
from optax_accum._plan.planning import plan_microbatches

EXAMPLE = "python -m optax_accum plan examples.will_it_fit:make_step --global-batch 64 --budget 2GB"
_TARGETS = f"a GPU ({', '.join(GPUS)}) or a TPU with its topology ({', '.join(TPUS)}, such as v5e:4x4)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes a step, its rows, and where it is to fit."""
    add = parser.add_argument
    add("make_step", help="module:make_step, or file.py:make_step; make_step(num_microbatches) -> the lowered step")
    add("--global-batch", type=int, required=True, metavar="ROWS", help="the rows of one update, over all devices")
    add("--target", help=f"{_TARGETS}; needs its compiler, not the device; by default the devices here")
    add(
        "--devices",
        type=int,
        metavar="N",
        help="the devices that share a micro-batch; by default 1, or a TPU topology's",
    )
    add(
        "--budget",
        metavar="SIZE",
        help='memory of one device, such as 70GB or "7.5 GiB" (default: what the target has)',
    )
    add("--safety", type=float, default=0.9, help="the fraction of the budget that the plan may use (default: 0.9)")
    add("--options", nargs="+", metavar="OPTION", help="second arguments of make_step, tried in this order")
    add(
        "--candidates",
        nargs="+",
        type=int,
        metavar="K",
        help="numbers of micro-batches to try; by default the divisors of ROWS",
    )
    add("--json", action="store_true", help="print JSON in place of the table")


def run(options: argparse.Namespace) -> int:
    """Finds the fewest micro-batches with which a step fits, according to its compiler.

    Exits with 1 if nothing fits, with 2 after an error.
    """
    status = 0
    try:
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
    except NothingFitsError as error:
        plan, status = error.plan, 1
        print(error, file=sys.stderr)
    print(json.dumps(_record(plan), indent=2, default=str) if options.json else plan)
    return status


def _record(plan: Plan) -> dict[str, Any]:
    """Returns what a plan says, as JSON has it: null for what is not known, or not chosen."""
    known = lambda value: None if value == float("inf") else value
    said = {one.name: getattr(plan, one.name) for one in dataclasses.fields(plan) if one.name != "compiled"}
    chosen = {name: getattr(plan, name) if plan.num_microbatches else None for name in ("sizes", "peak")}
    return said | chosen | {"rows": [{key: known(value) for key, value in row.items()} for row in plan.rows]}
