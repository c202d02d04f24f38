"""The map of packages in CONTRIBUTING.md: their docstrings' first lines, and what they import.

`python docs/package_map.py` writes it.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PAGE, PACKAGE = ROOT / "CONTRIBUTING.md", ROOT / "optax_accum"
TABLE = re.compile(r"(?<=<!-- docs/package_map.py -->\n).*?(?=\n\n)", re.DOTALL)


def rooms(package: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """The packages inside a package, and its public modules, each with its files; the first has the docstring."""
    folders = {
        path.parent.name: [
            path,
            *path.parent.glob("[!_]*.py"),
            *path.parent.glob("_[!_]*.py"),
        ]
        for path in package.glob("*/__init__.py")
    }
    return folders | {path.stem: [path] for path in package.glob("[!_]*.py")}


def imported(files: list[pathlib.Path], package: str) -> set[str]:
    """The packages that some files import from."""
    found = (
        node.module or ""
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    )
    return {
        module.split(".")[1]
        for module in found
        if module.startswith(f"{package}.")
    }


def table(package: pathlib.Path) -> str:
    """The map as a table; a package comes after those that it imports, and leaves out what these import."""
    files = rooms(package)
    direct = {
        name: imported(paths, package.name) & files.keys() - {name}
        for name, paths in files.items()
    }

    def reached(name: str) -> set[str]:
        return direct[name].union(*map(reached, direct[name]))

    lines = [
        "| package | contains | imports (and what these import) |",
        "|---|---|---|",
    ]
    for name in sorted(files, key=lambda name: (len(reached(name)), name)):
        first = ast.get_docstring(
            ast.parse(files[name][0].read_text())
        ).splitlines()[0]
        on = sorted(direct[name].difference(*map(reached, direct[name])))
        lines.append(
            f"| `{name}` | {first} | {', '.join(f'`{other}`' for other in on) or 'JAX'} |"
        )
    return "\n".join(lines)


def written(page: str, package: pathlib.Path = PACKAGE) -> str:
    """The page with its map."""
    return TABLE.sub(lambda _: table(package), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
