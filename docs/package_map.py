"""The map of packages in CONTRIBUTING.md, made of docstrings and imports.

`python docs/package_map.py` writes it.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PAGE, PACKAGE = ROOT / "CONTRIBUTING.md", ROOT / "optax_accum"
TABLE = re.compile(r"(?<=<!-- docs/package_map.py -->\n).*?(?=\n\n)", re.DOTALL)
HEAD = "| package | contains | imports (and what these import) |\n|---|---|---|"
PUBLIC = "public names"  # what a package imports as a user does


def sources(package: pathlib.Path) -> dict[str, list[ast.Module]]:
    """The files of each package inside, its docstring's first."""
    folders = {path.parent.name: path for path in package.glob("*/__init__.py")}
    modules = {path.stem: path for path in package.glob("[!_]*.py")}
    return {
        name: [
            ast.parse(file.read_text())
            for file in (
                path,
                *(path.parent.glob("*.py") if name in folders else ()),
            )
        ]
        for name, path in (folders | modules).items()
    }


def imported(files: list[ast.Module], package: str) -> set[str]:
    """The packages that some files import from."""
    found = set()
    for node in (node for file in files for node in ast.walk(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= (
                {node.module.split(".")[1]}
                if node.module.startswith(f"{package}.")
                else set()
            )
        elif isinstance(node, ast.Import):
            found |= {
                PUBLIC
                for name in node.names
                if name.name.split(".")[0] == package
            }
    return found


def table(package: pathlib.Path) -> str:
    """The map: a package stands below those that it imports from."""
    files = sources(package)
    direct = {
        name: imported(of, package.name) - {name} for name, of in files.items()
    }

    def reached(name: str) -> set[str]:
        inner = direct.get(name, set())
        return inner.union(*map(reached, inner))

    lines = [HEAD]
    for name in sorted(files, key=lambda name: (len(reached(name)), name)):
        first = ast.get_docstring(files[name][0]).splitlines()[0]
        nearest = direct[name].difference(*map(reached, direct[name]))
        on = [f"`{other}`" for other in sorted(nearest - {PUBLIC})] or ["JAX"]
        on += [PUBLIC] if PUBLIC in direct[name] else []
        lines.append(f"| `{name}` | {first} | {', '.join(on)} |")
    return "\n".join(lines)


def written(page: str, package: pathlib.Path = PACKAGE) -> str:
    """The page with its map."""
    return TABLE.sub(lambda _: table(package), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
