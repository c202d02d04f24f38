"""How large the library is: files, lines, tokens, docstrings, and the options of its functions.

Run `python -m benchmarks.code_size`; with `--commits REV ...` it counts other commits beside this tree.
"""

import argparse
import ast
import importlib
import inspect
import io
import pathlib
import subprocess
import tokenize

import optax_accum
from benchmarks import _measure

ROOT = pathlib.Path(__file__).parent.parent
CODE = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING} | {
    getattr(tokenize, name) for name in ("FSTRING_START", "FSTRING_MIDDLE") if hasattr(tokenize, name)
}
WALKED = ("grads", "call", "make_step", "program")  # arguments that functions hand on
FACES = (
    *("", ".accelerators", ".batching", ".checkpoint", ".flax", ".flax.linen", ".flax.nnx"),
    *(".plan", ".sharding", ".statistics", ".verify"),
)

NOTES = """\
Tokens are names, numbers, operators and strings; docstrings and comments do not count. An argument is walked through
each function or lambda that takes one of its name. Options are keywords with a default, of public functions."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", nargs="*", default=[], help="other commits to count")
    options = parser.parse_args()
    of_tree = {str(path): path.read_text() for path in pathlib.Path(optax_accum.__file__).parent.rglob("*.py")}
    columns = {commit: counted(sources(commit)) for commit in options.commits} | {"this tree": counted(of_tree)}
    print(_measure.header("Size of the code", NOTES))
    names = list(columns["this tree"])
    rows = [("", *columns), *((name, *(str(of[name]) for of in columns.values())) for name in names)]
    print(f"{_measure.markdown(rows)}\n")
    by_function = dict(sorted(public_options().items(), key=lambda pair: -pair[1]))
    print(
        f"Options: {sum(by_function.values())} in all; {', '.join(f'{n} {name}' for name, n in by_function.items())}."
    )


def sources(commit: str) -> dict[str, str]:
    """Returns the library's files at a commit."""
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout
    paths = git("ls-tree", "-r", "--name-only", commit, "optax_accum").split()
    return {path: git("show", f"{commit}:{path}") for path in paths if path.endswith(".py")}


def counted(files: dict[str, str]) -> dict[str, int | str]:
    """Returns the counts of some files."""
    trees = {path: ast.parse(source) for path, source in files.items()}
    docstrings = [text for tree in trees.values() for text in map(docstring, ast.walk(tree)) if text is not None]
    code = {path: list(code_tokens(source, trees[path])) for path, source in files.items()}
    counts: dict[str, int | str] = {
        "files": len(files),
        "lines": sum(len(source.splitlines()) for source in files.values()),
        "lines of code": sum(len({token.start[0] for token in of}) for of in code.values()),
        "tokens": sum(map(len, code.values())),
        "docstrings": len(docstrings),
        'that begin with "Returns"': sum(text.value.strip().startswith("Returns") for text in docstrings),
        "raises": sum(isinstance(node, ast.Raise) for tree in trees.values() for node in ast.walk(tree)),
        "lambdas": sum(isinstance(node, ast.Lambda) for tree in trees.values() for node in ast.walk(tree)),
    }
    for name in WALKED:
        takes = [sum(name in arguments(node) for node in ast.walk(tree)) for tree in trees.values()]
        counts[f"functions with an argument {name} (in files)"] = f"{sum(takes)} ({sum(map(bool, takes))})"
    return counts


def docstring(node: ast.AST) -> ast.Constant | None:
    """Returns the docstring of a module, class or function, as a node."""
    body = getattr(node, "body", None) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return first if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def code_tokens(source: str, tree: ast.Module):
    """Yields the tokens of a file that are code."""
    docstrings = {text.lineno for text in map(docstring, ast.walk(tree)) if text is not None}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in CODE and not (token.type == tokenize.STRING and token.start[0] in docstrings):
            yield token


def arguments(node: ast.AST) -> set[str]:
    """Returns the names of a function's arguments."""
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return set()
    return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def public_options() -> dict[str, int]:
    """Returns how many options each public function or class has."""
    found: dict[object, tuple[str, int]] = {}
    for face in FACES:
        module = importlib.import_module(f"optax_accum{face}")
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and value not in found:
                kinds = inspect.signature(value).parameters.values()
                number = sum(kind.kind is kind.KEYWORD_ONLY and kind.default is not kind.empty for kind in kinds)
                found[value] = f"{face}.{name}".lstrip("."), number
    return {name: number for name, number in found.values() if number}


if __name__ == "__main__":
    _measure.command(main)
