"""Owns the one entry: `python -m benchmarks` runs every benchmark that is here and writes benchmarks/RESULTS.md.

`--list` tells which, names run those alone. `--quick` runs a sample of some in under 3 minutes, and writes nothing
unless told where. A run replaces the sections that it measured: times on a CPU, times on a GPU, counts, and what
compilers tell.
"""

import argparse
import ast
import datetime
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is for those that are measured

import jax

import benchmarks
from benchmarks import _measure, _plots, accelerators

HERE = pathlib.Path(__file__).parent
QUICK = {  # options; the others are left out
    "peers": ["--quick"],
    "micro_step": ["--quick"],
    "sharded": ["--every", "2", "--seconds", "1", "--devices", "8"],
    "host_time": ["--turns", "5"],
}
FULL = {"accelerators": None, "notebooks": None, "features": ["--write"]}  # None: of compilers that are not here
if jax.devices()[0].platform == "cpu":
    FULL["on_device"] = None
KINDS = {
    "fsdp": "compiled",
    "plan_search": "counts",
    "features": "counts",
    "loops": "counts",
    "verify": "counts",
    "verify_step": "counts",
}  # all else is timed
WHY = {  # a target was missed, by the beginning of its name
    "window, apply_gradients / ideal": (
        "beside small arrays it shows what a call costs the host: Adafactor has many leaves, and 4.2 M parameters "
        "are added in a millisecond. On an accelerator a window moves the bytes of the floor"
    ),
    "window, apply_gradients with statistics": (
        "a held micro-step reads the gradient twice, 4 P where 3 P are moved without statistics (1.33), and waits for "
        "the sum; with k=1 a window without statistics has no accumulator to write"
    ),
    "window, MultiSteps / update": "`update` writes updates at each micro-step, which are then applied",
    'to trace and compile, "skip"': (
        "to ask whether a gradient is finite takes a reduction, and a kernel, for each leaf; runs of one machine gave "
        "medians of 1.10 to 1.39"
    ),
    "in place, temporary memory": (
        "layers one by one that are cast before: XLA casts all of them once, outside the loop over micro-batches, and "
        "keeps the casts; the same added after, or by hand. Layers in a scan meet it"
    ),
    "statistics, beyond that": (
        "float32 parameters on an H100: XLA writes a gradient to take its norm, instead of adding it by the product "
        "that makes it. In bfloat16, and on a v5e, it is 0"
    ),
    "time, ours / ": "within the noise of the machine, which is 5 to 15 %; the worst of all tables counts",
}
HEAD = "# Results\n\nWhat `python -m benchmarks` printed.\n"
TITLES = {
    "cpu": "CPU time",
    "gpu": "GPU time",
    "tpu": "TPU time",
    "counts": "Counts",
    "compiled": "Compiled facts by target",
}


def main() -> None:
    options = _options()
    if options.list:
        print(_measure.markdown([("benchmark", "what it measures"), *found().items()], left=(0, 1)))
        return
    texts, failed = {}, []
    for name in options.names:
        arguments = QUICK.get(name) if options.quick else FULL.get(name, [])
        if arguments is None:
            continue
        print(f"benchmarks.{name} {' '.join(arguments)}", file=sys.stderr, flush=True)
        said = _said(name, arguments, options.output)
        if said is None:
            failed.append(name)
        else:
            texts.setdefault(KINDS.get(name, jax.devices()[0].platform), []).append(said)
            print(said, flush=True)
    if failed:
        raise SystemExit(f"Failed, and nothing is written: {', '.join(failed)}.")
    if "accelerators" in options.names and accelerators.FACTS.exists() and not options.quick:
        texts.setdefault("compiled", []).append(_facts(json.loads(accelerators.FACTS.read_text())))
    if options.output:
        old = options.output.read_text() if options.output.exists() else ""
        _measure.write(
            options.output,
            merged(old, {kind: section(kind, said, options.quick) for kind, said in texts.items()}),
            None,
        )


def found() -> dict[str, str]:
    """Returns the benchmarks that are here, the peers first, and the first sentence of each."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name[0] != "_"]
    document = lambda name: ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    ordered = sorted(names, key=lambda name: (name != "peers", name))
    return {name: document(name).split("\n")[0].removeprefix("Owns ") for name in ordered}


def _options() -> argparse.Namespace:
    description = "Runs the benchmarks, all by default, and writes benchmarks/RESULTS.md."
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=description,
        epilog="benchmarks:\n" + "\n".join(f"  {name:<14}{what}" for name, what in found().items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the benchmarks to run, of those below")
    parser.add_argument("--list", action="store_true", help="print the benchmarks as a table")
    parser.add_argument("--quick", action="store_true", help="run a sample, in under 3 minutes on two quiet cores")
    where = "the file to write (default: benchmarks/RESULTS.md; none with --quick)"
    parser.add_argument("--output", type=_measure.writable, help=where)
    options = parser.parse_args()
    if wrong := sorted(set(options.names) - set(found())):
        parser.error(f"unknown: {', '.join(wrong)}. There are {', '.join(found())}.")
    if options.quick and (slow := [name for name in options.names if name not in QUICK]):
        parser.error(f"not in --quick: {', '.join(slow)}. There are {', '.join(QUICK)}.")
    options.names = options.names or list(found())
    if not (options.quick or options.output):
        options.output = HERE / "RESULTS.md"
    return options


def _said(name: str, arguments: list[str], output: pathlib.Path | None) -> str | None:
    """Returns what a benchmark prints, or None if it fails; draws the peers beside the output."""
    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder) / "peers.json"
        more = [f"--output={record}"] if name == "peers" else []
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, *more]
        # Where the library is not installed, it is where this was found.
        paths = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            return None
        pictures = _plots.draw(json.loads(record.read_text()), output) if more and output else []
    return "\n\n".join([done.stdout.strip(), *(f"![{title}]({path.name})" for title, path in pictures)])


def _facts(record: dict[str, Any]) -> str:
    """Returns the facts that compilers told, of all targets and versions of JAX in the file."""
    kinds = dict.fromkeys(kind for facts in record.values() for kind in facts)
    return "\n".join(
        [
            f"## {', '.join(record)}\n",
            accelerators.NOTES,
            "",
            *(accelerators.table(k, record) for k in kinds),
            accelerators.targets(record),
        ]
    )


def section(kind: str, texts: list[str], quick: bool = False) -> str:
    """Returns a section: the machine, versions and the date stand in its heading, and no more in its parts."""
    facts = "\n".join(f"* {name}: {value}" for name, value in _measure.machine().items())
    facts += "\n* run: `--quick`, a sample" if quick else ""
    body = "\n\n".join(re.sub(r"^\* (device|host|versions): .*\n", "", text, flags=re.MULTILINE) for text in texts)
    body = explained(re.sub(r"\n{3,}", "\n\n", body))
    body = re.sub(r"^(#+) ", r"#\1 ", body, flags=re.MULTILINE)
    return f"## {TITLES.get(kind, kind)}, {datetime.date.today()}\n\n{facts}\n\n{body.strip()}\n"


def explained(text: str) -> str:
    """Returns the tables with a sentence behind each in which a target is missed, for each of these."""

    def why(found: re.Match[str]) -> str:
        names = dict.fromkeys(re.findall(r"^\| (.*?) +\|.*\| MISSED ", found[0], flags=re.MULTILINE))
        reason = lambda name: next((why for begins, why in WHY.items() if name.startswith(begins)), "not explained")
        return "\n".join([found[0].rstrip(), *(f"\nMissed: {name}: {reason(name)}." for name in names)])

    return re.sub(r"(?:^\|.*\n?)+", lambda found: why(found).rstrip() + "\n", text, flags=re.MULTILINE)


def merged(old: str, new: dict[str, str]) -> str:
    """Returns the page with these sections in the place of older ones of their kinds."""
    kept = {part.split(",")[0].removeprefix("## "): part for part in re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]}
    sections = kept | {TITLES.get(kind, kind): text for kind, text in new.items()}
    order = [title for title in TITLES.values() if title in sections]
    return "\n".join([HEAD, *(sections[title] for title in [*order, *(sections.keys() - order)])]).rstrip()


if __name__ == "__main__":
    _measure.command(main)
