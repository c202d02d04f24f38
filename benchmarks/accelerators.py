"""What the compilers of accelerators make of the library: bytes, copies, memory, collectives.

Run `python -m benchmarks.accelerators --targets h100`; no accelerator is needed, but its compiler is. JAX comes with
that of CPUs (`--targets cpu`), which is asked about the memory of one device alone. `--facts FILE` adds them to a JSON
of targets and versions of JAX, where a change shows as a diff; with `--pages docs/accelerators.md docs/fsdp.md
docs/many_devices.md` nothing is compiled, and the tables of those pages become those of the JSON.
"""

import importlib.metadata
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import _batch_norms, _code, _decoder, _fsdp, _in_place, _many_devices, _measure, _one_device
from benchmarks._one_device import Facts
from optax_accum.accelerators import Target, target

FACTS = pathlib.Path(__file__).with_suffix(".json")
CODE = "code"  # in the file, beside the targets: of which code each kind is
NOTES = """\
P is one copy of the float32 parameters. Bytes are what instructions read and write in the device's memory; temporary
memory is what the compiler asks for beside arguments and results; both of one device, all donated that can be."""
IN_PLACE = "value_and_grad, in place"
COMPILERS = {"tpu": "libtpu"}  # those of GPUs and CPUs have the version of JAX
OF_CPUS = ("in place",)  # the kinds that are read for a CPU, too
OF_SEVERAL = ("data parallel", "overlap", "overlap, by flag", "FSDP", "HSDP")
KINDS: dict[str, Callable[[Target], Iterator[tuple[str, Facts]]]] = {
    "apply_gradients, by optimizer": _one_device.optimizers,
    "apply_gradients, by policy": _one_device.policies,
    "value_and_apply_gradients": _one_device.backward,
    "weights": _one_device.weighed,
    "update": _one_device.wrappers,
    "offload": _one_device.offloaded,
    "decoder": _decoder.decoders,
    "in place": _in_place.memory,
    "BatchNorm": _batch_norms.norms,
    "cut": _one_device.cuts,
    "data parallel": _many_devices.parallel,
    "overlap": _many_devices.overlap,
    "overlap, by flag": _many_devices.flags,
    "FSDP": _many_devices.sharded,
    "HSDP": _many_devices.replicated,
}


def main() -> None:
    """Prints the tables of each target, or writes those of pages."""
    parser = _measure.parser(__doc__)
    parser.add_argument(
        "--targets", nargs="+", default=["h100"], help="h100, a100, h200, b200, v5e:4x4, v5p:2x2x1, cpu, ..."
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="of facts; all by default")
    parser.add_argument("--facts", type=_measure.writable, default=FACTS, help="the JSON to add them to, or to show")
    parser.add_argument(
        "--pages", nargs="+", type=_measure.writable, help="Markdown files whose tables are to be those of the JSON"
    )
    options = parser.parse_args()
    for path in options.pages or ():
        path.write_text(page(path.read_text(), record(options.facts)))
    if options.pages:
        return
    # Before JAX is used, as the header does: without a driver it would ask for the libraries to run programs with.
    targets = {name: _target(name) for name in options.targets}
    print(_measure.header("Compiled for accelerators, not timed", NOTES))
    for name, many in targets.items():
        here = f"{name}, JAX {jax.__version__}"
        if compiler := COMPILERS.get(many.devices[0].platform):
            here += f", {compiler} {importlib.metadata.version(compiler)}"
        left_out = OF_SEVERAL if len(many.devices) == 1 else ()
        for kind in (kind for kind in options.kinds if kind in OF_CPUS or not (name == "cpu" or kind in left_out)):
            found = {case: _rounded(row) for case, row in tqdm(KINDS[kind](many), desc=f"{name}: {kind}", leave=False)}
            _add(options.facts, here, kind, found)
            print(table(kind, {here: {kind: found}}), flush=True)


def record(path: pathlib.Path = FACTS) -> dict[str, Any]:
    """Returns the facts of a file, by target and kind."""
    return {name: facts for name, facts in _read(path).items() if name != CODE}


def code(path: pathlib.Path = FACTS) -> tuple[str, str]:
    """Returns the commits of all facts of a file, and a digest of their source: an old one, if there is one."""
    stamps = [stamp for kinds in _read(path)[CODE].values() for stamp in kinds.values()]
    commits, sources = (sorted(set(column)) for column in zip(*stamps, strict=True))
    by_date = sorted(commits, key=lambda commit: commit.split(" of ")[-1])
    return ", ".join(by_date), min(sources, key=lambda source: source == _code.digest("accelerators"))


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _add(path: pathlib.Path, target: str, kind: str, found: dict[str, Facts]) -> None:
    """Writes facts into a file, with the commit and the digest of the source that they are of."""
    read = _read(path)
    read.setdefault(target, {})[kind] = found
    read.setdefault(CODE, {}).setdefault(target, {})[kind] = [_code.commit(), _code.digest("accelerators")]
    path.write_text(json.dumps(read, indent=1) + "\n")


def table(kind: str, record: dict[str, Any]) -> str:
    """Returns the facts of a kind as Markdown, a row for all targets that have the same."""
    of = {name: facts[kind] for name, facts in record.items() if facts.get(kind)}
    columns = list(dict.fromkeys(fact for rows in of.values() for row in rows.values() for fact in row))
    lines = []
    for case in dict.fromkeys(case for rows in of.values() for case in rows):
        same: dict[tuple[str, ...], list[str]] = {}
        for name, rows in of.items():
            if case in rows:
                cells = (f"{rows[case][fact]:g}" if fact in rows[case] else "" for fact in columns)
                same.setdefault(tuple(cells), []).append(name)
        for cells, names in same.items():
            lines.append([case, "all" if len(names) == len(of) > 1 else "; ".join(names), *cells])
    return _measure.markdown([[kind, "compiled for", *columns], *lines], left=(0, 1)) + "\n"


def targets(record: dict[str, Any]) -> str:
    """Returns what these facts have to reach, the worst of all that they were compiled for."""
    read = lambda kind, case, fact: {
        name: facts[kind][case][fact] for name, facts in record.items() if kind in facts and case in facts[kind]
    }
    ratio = lambda a, b: {name: a[name] / b[name] for name in a}
    memory = lambda case: read("decoder", case, "memory, P")
    flow = [read("FSDP", f"by layer, k = {k}", fact) for k in (2, 32) for fact in ("gathered, P", "reduced, P")]
    through = [{name: flow[i][name] + flow[i + 1][name] for name in flow[i]} for i in (0, 2)]
    inside = {name: list(facts["in place"].values()) for name, facts in record.items() if "in place" in facts}
    beyond = lambda base, way: {name: max(row[way] - row[base] for row in rows) for name, rows in inside.items()}
    norms = lambda case, fact: read("BatchNorm", f"{case}, value_and_grad, recompute=0.6", f"{fact} / whole")
    four = read("in place", _in_place.FOUR, "in place, P")
    adamw = lambda fact: read("apply_gradients, by optimizer", "AdamW", fact)
    between = [read("HSDP", f"{way}, k = 8", "between replicas, P") for way in (_many_devices.ONCE, _fsdp.SCAN)]
    sent = lambda case: {name: size for name, size in read("overlap", case, "sent, P").items() if name.startswith("h")}
    hidden = lambda case: read("overlap", case, "of it hidden, P")  # on a TPU that is not known
    exposed = lambda case: {name: 1 - hidden(case)[name] / of for name, of in sent(case).items()}
    decoder = ratio(memory(IN_PLACE), memory("optax.microbatch"))
    narrow = ratio(sent("stacked, overlap=True, bfloat16 wire"), sent("stacked, overlap=True"))
    verdicts = [
        ("held apply_gradients, AdamW, moves, P", adamw("held, P"), 3),
        ("copies in it", adamw("held copies"), 0),
        ("its temporary memory, P", adamw("temporary, P"), 0),
        ("a window of 8, P", adamw("window of 8, P"), 31),
        ("a decoder's memory, value_and_grad / optax.microbatch", decoder, 0.9),
        ("in place, temporary memory beyond one micro-batch's, P", beyond("one micro-batch, P", "in place, P"), 0.05),
        ("statistics, beyond that, P", beyond("in place, P", "with statistics, P"), 0.02),
        ("bfloat16 parameters, float32 sums, tied and checkpointed, k = 4: temporary memory, P", four, 0.55),
        ("8 BatchNorms, temporary memory / the whole batch's", norms("8 layers", "temporary"), 0.4),
        ("the same, bytes moved", norms("8 layers", "moved"), 2.2),
        ("24 BatchNorms, temporary memory / the whole batch's", norms("24 layers", "temporary"), 0.3),
        ("the same, bytes moved", norms("24 layers", "moved"), 2.1),
        ("ResNet-50, temporary memory / the whole batch's", norms("ResNet-50", "temporary"), 0.35),
        ("the same, bytes moved", norms("ResNet-50", "moved"), 2.6),
        ("FSDP by layer, bytes through the network, k = 32, P", through[1], 5),
        ("the same, k = 32 / k = 2", ratio(through[1], through[0]), 1),
        ("HSDP, k = 8: bytes between replicas / those of a scan by hand", ratio(*between), 1 / 8),
        ("exposed, of what a window sends: layers stacked", exposed("stacked, overlap=True"), 0.2),
        ("the same, unrolled", exposed("unrolled, overlap=True"), 0.2),
        ("the same, stacked, to shards", exposed("stacked, to shards (ZeRO-1), overlap=True"), 0.2),
        ("the same, stacked, across calls", exposed("stacked, across calls, static flush, overlap=True"), 0.2),
        ("sent in bfloat16 / in float32", narrow, 0.5),
    ]
    worst = lambda of: max(of, key=lambda name: of[name])
    there = [(what, of, at) for what, of, at in verdicts if of]  # no target of a record may have some kinds
    return _measure.targets_text([_measure.verdict(what, of[worst(of)], at, worst(of)) for what, of, at in there])


def part(kind: str, record: dict[str, Any], target: str, cases: str) -> str:
    """Returns the facts of a kind for one target, of the cases that begin so."""
    (found,) = (facts[kind] for name, facts in record.items() if name.startswith(target))
    rows = {case.removeprefix(cases): row for case, row in found.items() if case.startswith(cases)}
    columns = list(dict.fromkeys(fact for row in rows.values() for fact in row))
    cells = [[case, *(f"{row[fact]:g}" if fact in row else "" for fact in columns)] for case, row in rows.items()]
    return _measure.markdown([[f"{cases}{target}", *columns], *cells]) + "\n"


def page(text: str, record: dict[str, Any]) -> str:
    """Returns a page with the table of the newest JAX after each mark `<!-- facts: KIND -->`.

    A mark `<!-- facts: KIND (TARGET; CASES) -->` is for one target, and for cases that begin so. Pages say in words
    that numbers are multiples of the parameters' size: in their code, P is JAX's PartitionSpec.
    """
    new = _without_unit(_newest(record))

    def made(mark: re.Match[str]) -> str:
        _, kind, target, cases = mark.groups()
        return part(kind, new, target, cases) if target else table(kind, new)

    return _measure.filled(text, r"facts: (.*?)(?: \((.*); (.*)\))?", made)


def _newest(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of the newest JAX, by target alone."""
    version = lambda name: re.findall(r"JAX ([\d.]+)", name)[0]
    newest = max(map(version, record), key=lambda text: list(map(int, text.split("."))))
    return {name.split(",")[0]: facts for name, facts in record.items() if version(name) == newest}


def _without_unit(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the same facts, without `, P` in their names."""
    named = lambda row: {fact.removesuffix(", P"): value for fact, value in row.items()}
    return {
        name: {kind: {case: named(row) for case, row in rows.items()} for kind, rows in facts.items()}
        for name, facts in record.items()
    }


def _target(name: str) -> Target:
    """Returns a target of eight devices where its name does not say how many; "cpu" is the one that is here."""
    if name == "cpu":
        return target()
    return target(name) if ":" in name else target(name, num_devices=8)


def _rounded(row: Facts) -> Facts:
    return {name: round(value, 2) for name, value in row.items()}


if __name__ == "__main__":
    _measure.command(main)
