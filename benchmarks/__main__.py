"""The one entry: `python -m benchmarks` runs every benchmark that is here and writes benchmarks/RESULTS.md.

`--list` tells which, names run those alone, `--outdated` those that have changed since. `--quick` runs a sample of some
in under 3 minutes, and writes nothing unless told where. A run replaces the parts that it measured; a machine or
versions that differ from those of a section (times on a CPU, times on a GPU, counts, what compilers tell) begin it
anew.
"""

import argparse
import ast
import os
import pathlib
import pkgutil
import subprocess
import sys
from importlib.util import find_spec

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is for those that are measured

import jax

import benchmarks
from benchmarks import _measure, _results, accelerators

HERE = pathlib.Path(__file__).parent
QUICK = {  # options; the others are left out
    "peers": ["--quick"],
    "micro_step": ["--quick"],
    "host_time": ["--turns", "5"],
}
COMPILERS = {"h100": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "v5e:4x4": ("libtpu",), "cpu": ("jax",)}
FULL = {
    "accelerators": ["--targets", *(name for name, packages in COMPILERS.items() if any(map(find_spec, packages)))],
    "code_size": None,  # another after each commit: a test holds its budget
    "notebooks": None,  # for two accelerators beside each other
    "support": None,  # of each JAX in an environment of its own
    "features": ["--write"],
    "loops": ["--page", "docs/compared.md"],
}
if jax.devices()[0].platform == "cpu":
    FULL["on_device"] = None
KINDS = {
    "accelerators": "compiled",
    "plan_search": "counts",
    "features": "counts",
    "loops": "counts",
    "models": "counts",
    "verify_step": "counts",
    "verify_numpy": "counts",
}  # all else is timed


def main() -> None:
    options = _options()
    if options.list:
        print(_measure.markdown([("benchmark", "what it measures"), *found().items()], left=(0, 1)))
        return
    failed = []
    for name in options.names:
        arguments = QUICK.get(name) if options.quick else FULL.get(name, [])
        if arguments is None:
            continue
        print(f"benchmarks.{name} {' '.join(arguments)}", file=sys.stderr, flush=True)
        said = _said(name, arguments)
        print(said or "", flush=True)
        if said is None:
            failed.append(name)
        elif options.output:
            part = _of_compilers() if name == "accelerators" else _results.part(name, arguments, said)
            kind = KINDS.get(name, jax.devices()[0].platform)
            old = options.output.read_text() if options.output.exists() else ""
            new = {kind: _results.section(kind, [part], options.quick)}
            _measure.write(options.output, _results.merged(old, new))
    if failed:
        raise SystemExit(f"Failed, and not written: {', '.join(failed)}.")


def found() -> dict[str, str]:
    """Returns the benchmarks that are here, the peers first, and the first sentence of each."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name[0] != "_"]
    document = lambda name: ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    ordered = sorted(names, key=lambda name: (name != "peers", name))
    return {name: document(name).split("\n")[0] for name in ordered}


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
    parser.add_argument(
        "--outdated", action="store_true", help="run those that have changed since their part was written"
    )
    parser.add_argument("--quick", action="store_true", help="run a sample, in under 3 minutes on two quiet cores")
    where = "the file to write (default: benchmarks/RESULTS.md; none with --quick)"
    parser.add_argument("--output", type=_measure.writable, help=where)
    options = parser.parse_args()
    if wrong := sorted(set(options.names) - set(found())):
        parser.error(f"unknown: {', '.join(wrong)}. There are {', '.join(found())}.")
    if options.quick and (slow := [name for name in options.names if name not in QUICK]):
        parser.error(f"not in --quick: {', '.join(slow)}. There are {', '.join(QUICK)}.")
    if not (options.quick or options.output):
        options.output = HERE / "RESULTS.md"
    outdated = _results.outdated((HERE / "RESULTS.md").read_text()) if options.outdated else found()
    options.names = options.names or list(outdated)
    return options


def _said(name: str, arguments: list[str]) -> str | None:
    """Returns the output of a benchmark, or None if it fails."""
    # Where the library is not installed, it is where this was found.
    paths = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=False
    )
    return None if done.returncode else done.stdout.strip()


def _of_compilers() -> _results.Part:
    """Returns what compilers told, of all targets and versions of JAX in the file, whenever they were asked."""
    record = accelerators.record()
    kinds = dict.fromkeys(kind for facts in record.values() for kind in facts)
    tables = [accelerators.table(kind, record) for kind in kinds]
    text = "\n".join([f"## {', '.join(record)}\n", accelerators.NOTES, "", *tables, accelerators.targets(record)])
    commit, source = accelerators.code()
    return _results.part("accelerators", [], text)._replace(commit=commit, source=source)


if __name__ == "__main__":
    _measure.command(main)
