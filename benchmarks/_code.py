"""Of which code a table is: the commit, and a digest of the benchmark's own source.

The digest needs no git. It covers the statements of the benchmark's module and of all modules of `benchmarks` and
`tests` that it imports, directly or not. White space, imports, docstrings of modules, and in which of these modules a
statement stands do not count. `_measure` is left out: a change to how tables look is no other benchmark.
"""

import ast
import functools
import hashlib
import pathlib
import subprocess
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS, LEFT_OUT = ("benchmarks", "tests"), ("benchmarks", "benchmarks._measure", "tests")


def commit() -> str:
    """Returns the commit that is checked out and its date, as in "1ff67c9 of 2026-11-28"."""
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout
    try:
        shown = git("show", "-s", "--format=%h of %cs", "HEAD").strip()
        code = [f"{folder}/*.py" for folder in ("optax_accum", *FOLDERS)]  # results that were just written are none
        changes = git("status", "--porcelain", "--untracked-files=no", *code)
    except (OSError, subprocess.CalledProcessError):
        return "that is not known: there is no git here"
    return f"{shown}, with changes" if changes else shown


@functools.cache
def read(module: str) -> str | None:
    """Returns the source of a module; None where the name is no module's."""
    path = ROOT / module.replace(".", "/")
    return next((each.read_text() for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def digest(name: str, read: Callable[[str], str | None] = read) -> str:
    """Returns a digest of the source of `benchmarks.<name>`."""
    found = sorted(text for source in sources(f"benchmarks.{name}", read).values() for text in statements(source))
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]


def sources(name: str, read: Callable[[str], str | None] = read) -> dict[str, str]:
    """Returns the sources of a module and of those of `FOLDERS` that it imports, directly or not."""
    found, waiting = dict[str, str](), [name]
    while waiting:
        module = waiting.pop()
        if module not in (*found, *LEFT_OUT) and (source := read(module)) is not None:
            found[module] = source
            waiting += imported(source)
    return found


def imported(source: str) -> Iterator[str]:
    """Yields the names that a source imports from `FOLDERS`: of modules, and of what may be one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOLDERS:
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def statements(source: str) -> Iterator[str]:
    """Yields the statements of a module, without white space."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            yield "".join("".join(lines[first - 1 : node.end_lineno]).split())
