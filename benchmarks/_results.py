"""What stands in benchmarks/RESULTS.md: parts in sections.

A part is signed: the command that printed it, the commit, a digest of the part, which shows a change by hand, and a
digest of the benchmark's source, which shows that the benchmark has changed since.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import _code, _measure

WHY = {  # a target was missed, by the beginning of its name
    'to trace and compile, "skip"': (
        "to ask whether a gradient is finite takes a reduction, and a kernel, for each leaf; runs of one machine gave "
        "medians of 1.10 to 1.39"
    ),
    "`jit_step` / two functions by hand": (
        "by hand a micro-step that adds takes the parameters and the sum and returns the sum, as here; beside that "
        "stands the Python that finds which program to run. Against the mean micro-step of a window by hand it is 0.8"
    ),
    "ours: value_and_grad / hand-written scan, to compile": (
        "the loss is also traced for other numbers of rows, and each gradient is followed to the place where it is "
        "added. Small programs notice this, and layers that a Python loop takes out of stacked parameters: their "
        "slices are added one by one. Turns differ by 5 to 20 %"
    ),
    "error of a plan": (
        "on a CPU, convolutions work in memory of their own, which XLA does not count: a process holds 23 % more than "
        "foretold of the U-Net in one piece, too"
    ),
    "held by a plan": "the same; keep `safety` at 0.75 for convolutions on a CPU",
    "in place, temporary memory": (
        "a `switch` over layers before JAX 0.12; layers one by one that are cast before, 0.5: XLA casts all of them "
        "once, outside the loop over micro-batches, and keeps the casts; the same by hand. Layers in a scan meet it"
    ),
    "statistics, beyond that": (
        "on an H100 XLA writes a gradient to take its norm, instead of adding it by the product that makes it: at most "
        "2 of 16 layers. On a v5e it is 0"
    ),
}
HEAD = """\
# Results

What `python -m benchmarks` printed.
"""
TITLES = {
    "cpu": "CPU time",
    "gpu": "GPU time",
    "tpu": "TPU time",
    "counts": "Counts",
    "compiled": "Compiled facts by target",
}
SIGNED = re.compile(r"\n\nPrinted by `(python -m .*?)` at commit (.*?)\. <!-- (\w+) (\w+) -->(?=\n|\Z)")


class Part(NamedTuple):
    """What a command printed, and of which code: the commit, and a digest of the benchmark's source."""

    command: str
    text: str
    commit: str
    source: str

    @property
    def name(self) -> str:
        """The benchmark's."""
        return re.search(r"python -m benchmarks\.(\w+)", self.command)[1]

    def __str__(self) -> str:
        digests = f"<!-- {digest(self.text)} {self.source} -->"
        return f"{self.text}\n\nPrinted by `{self.command}` at commit {self.commit}. {digests}"


def part(name: str, arguments: Sequence[str], text: str) -> Part:
    """Returns what a benchmark has just printed, as it stands on the page."""
    command = " ".join(["python -m", f"benchmarks.{name}", *arguments])
    return Part(command, body(text), _code.commit(), _code.digest(name))


def section(kind: str, parts: list[Part], quick: bool = False) -> str:
    """Returns a section: the machine and versions stand in its heading, and no more in its parts."""
    facts = "\n".join(f"* {name}: {value}" for name, value in _measure.machine().items())
    facts += "\n* run: `--quick`, a sample" if quick else ""
    return written(f"## {TITLES.get(kind, kind)}\n\n{facts}", parts)


def written(head: str, parts: list[Part]) -> str:
    """Returns a section, each part with its signature below it."""
    return "\n\n".join([head, *map(str, parts)]) + "\n"


def body(text: str) -> str:
    """Returns what a benchmark printed as it stands on the page: in a section, without the machine."""
    text = re.sub(r"^\* (device|host|versions): .*\n", "", text, flags=re.MULTILINE)
    text = explained(re.sub(r"\n{3,}", "\n\n", text))
    return re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE).strip()


def digest(text: str) -> str:
    """Returns the same for the same words, however they are broken into lines."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:12]


def explained(text: str) -> str:
    """Returns the tables with a sentence behind each in which a target is missed, for each of these."""

    def why(found: re.Match[str]) -> str:
        names = dict.fromkeys(re.findall(r"^\| (.*?) +\|.*\| MISSED ", found[0], flags=re.MULTILINE))
        reason = lambda name: next((why for begins, why in WHY.items() if name.startswith(begins)), "not explained")
        return "\n".join([found[0].rstrip(), *(f"\nMissed: {name}: {reason(name)}." for name in names)])

    return re.sub(r"(?:^\|.*\n?)+", lambda found: why(found).rstrip() + "\n", text, flags=re.MULTILINE)


def changed(page: str) -> list[str]:
    """Returns the headings of the parts that are not as their command printed them, or have none."""
    found = []
    for text in sections(page):
        _, parts, rest = split(text)
        found += [part.text for part, written in parts if digest(part.text) != written] + ([rest] if rest else [])
    return [re.search(r"^#* *(.*)$", body, re.MULTILINE)[1] for body in found]


def outdated(page: str) -> list[str]:
    """Returns the benchmarks that have changed since they printed their part."""
    parts = [part for text in sections(page) for part, _ in split(text)[1]]
    return [part.name for part in parts if _code.digest(part.name) != part.source]


def sections(page: str) -> list[str]:
    """Returns the sections of a page, without what stands before them."""
    return re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]


def split(text: str) -> tuple[str, list[tuple[Part, str]], str]:
    """Splits a section into its heading with the machine, each part with its written digest, and what is left."""
    text = text.rstrip() + "\n"
    head = re.match(r"## .*\n\n(?:\* .*\n)*", text)[0]
    parts, start = [], len(head)
    for mark in SIGNED.finditer(text):
        command, commit, written, source = mark.groups()
        parts.append((Part(command, text[start : mark.start()].strip(), commit, source), written))
        start = mark.end()
    return head.strip(), parts, text[start:].strip()


def merged(old: str, new: dict[str, str]) -> str:
    """Returns the page with these sections; on the same machine, old parts that were not printed anew stay."""
    kept = {text.splitlines()[0]: text for text in sections(old)}
    for text in new.values():
        title = text.splitlines()[0]
        kept[title] = joined(kept[title], text) if title in kept else text
    order = [f"## {title}" for title in TITLES.values() if f"## {title}" in kept]
    return "\n".join([HEAD, *(kept[title].rstrip() + "\n" for title in [*order, *(kept.keys() - order)])]).rstrip()


def joined(old: str, new: str) -> str:
    """Returns a section with its new parts in the place of those of the same program."""
    (before, kept, _), (head, parts, _) = split(old), split(new)
    if before != head:
        return new
    of_programs = {part.name: part for part, _ in [*kept, *parts]}
    return written(head, list(of_programs.values()))
