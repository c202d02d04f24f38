"""How large the library is: files, lines, tokens, docstrings of the core and of the products, and their options.

Run `python -m benchmarks.code_size`. The products stand beside the core: one could do without them.
`tests/test_architecture.py` holds both to a budget.
"""

import ast
import importlib
import inspect
import io
import pathlib
import re
import tokenize

import optax_accum
from benchmarks import _measure

CODE = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING} | {
    getattr(tokenize, name) for name in ("FSTRING_START", "FSTRING_MIDDLE") if hasattr(tokenize, name)
}
PRODUCTS = re.compile(r"\b(verify|plan|accelerators)/|\bbatching/_pack(ed|ing)\.py$")  # all else is the core
FACES = (
    *("", ".accelerators", ".batching", ".checkpoint", ".flax", ".flax.linen", ".flax.nnx"),
    *(".plan", ".sharding", ".statistics", ".verify"),
)

NOTES = """\
Tokens are names, numbers, operators and strings; docstrings and comments do not count. Products are `verify`, `plan`,
`accelerators` and the packing of `batching`. Options are keywords with a default, of public functions."""


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.parse_args()
    columns = counted(of_tree())
    print(_measure.header("Size of the code", NOTES))
    rows = [(name, *(str(of[name]) for of in columns.values())) for name in next(iter(columns.values()))]
    print(f"{_measure.markdown([('', *columns), *rows])}\n")
    by_function = dict(sorted(public_options().items(), key=lambda pair: -pair[1]))
    print(
        f"Options: {sum(by_function.values())} in all; {', '.join(f'{n} {name}' for name, n in by_function.items())}."
    )


def of_tree() -> dict[str, str]:
    """Returns the library's files that are here."""
    return {path.as_posix(): path.read_text() for path in pathlib.Path(optax_accum.__file__).parent.rglob("*.py")}


def counted(files: dict[str, str]) -> dict[str, dict[str, int]]:
    """Returns the counts of the core, and those of the products."""
    products = {path: source for path, source in files.items() if PRODUCTS.search(path)}
    core = {path: source for path, source in files.items() if path not in products}
    return {"core": _counted(core), "products": _counted(products)}


def _counted(files: dict[str, str]) -> dict[str, int]:
    trees = {path: ast.parse(source) for path, source in files.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    code = {path: list(code_tokens(source, trees[path])) for path, source in files.items()}
    return {
        "files": len(files),
        "lines": sum(len(source.splitlines()) for source in files.values()),
        "lines of code": sum(len({token.start[0] for token in of}) for of in code.values()),
        "tokens": sum(map(len, code.values())),
        "docstrings": sum(docstring(node) is not None for node in nodes),
        "raises": sum(isinstance(node, ast.Raise) for node in nodes),
        "lambdas": sum(isinstance(node, ast.Lambda) for node in nodes),
    }


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
