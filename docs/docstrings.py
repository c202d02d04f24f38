"""Turns what this project writes in docstrings into what Sphinx reads: Markdown's code and indented formulas.

Google's sections are left to napoleon, which comes after. Public names in backticks become links.
"""

import re
import types
from collections.abc import Iterable
from typing import Any


def public_names(modules: Iterable[types.ModuleType]) -> dict[str, str]:
    """Returns where each public name has its page: of what is written in docstrings, and of private paths in types."""
    names: dict[str, str] = {}
    for module in modules:
        names[module.__name__] = module.__name__
        for name in module.__all__:
            value, path = getattr(module, name), f"{module.__name__}.{name}"
            names[path] = path
            names.setdefault(
                name
                if module.__name__ == "optax_accum"
                else path.removeprefix("optax_accum."),
                path,
            )
            if not isinstance(value, types.ModuleType):
                names[f"{value.__module__}.{value.__qualname__}"] = path
    return names


def setup(app: Any, public: dict[str, str]) -> None:
    """Before napoleon (500): docstrings; when a reference is missing: types by the path where they are defined."""
    qualified = {name: path for name, path in public.items() if "." in name}

    def process(
        app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
    ) -> None:
        edge = name.startswith(
            ("optax_accum.flax.linen", "optax_accum.flax.nnx")
        )  # which has such names of its own
        lines[:] = restructured(lines, qualified if edge else public, name)

    def skip(
        app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
    ) -> bool | None:
        return (
            True if type(obj).__name__ == "_tuplegetter" else None
        )  # the class describes its fields

    def signature(
        app: Any,
        what: str,
        name: str,
        obj: Any,
        options: Any,
        args: str | None,
        returns: str | None,
    ) -> Any:
        args = args or ""
        if "<factory>" in args:
            return "(...)", returns
        # Sphinx cannot parse a function's repr, and would show all types whole
        read = re.sub(r"<function [\w.]+>", "...", args)
        return (read, returns) if read != args else None

    def missing(app: Any, env: Any, node: Any, content: Any) -> Any:
        path = public.get(node.get("reftarget", ""))
        if path is None or path == node["reftarget"]:
            return None
        return env.get_domain("py").resolve_xref(
            env, node.get("refdoc"), app.builder, "obj", path, node, content
        )

    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", missing)


def restructured(
    lines: list[str], public: dict[str, str], own: str = ""
) -> list[str]:
    """Returns the lines of a docstring as reStructuredText."""
    return _code(_formulas(lines), public, own)


def _code(lines: list[str], public: dict[str, str], own: str) -> list[str]:
    """`name` is code, or a link to a page of its own, as docs/name.md is; doctests are left as they are."""

    def marked(match: re.Match[str]) -> str:
        path = public.get(match[1])
        return (
            f"``{match[1]}``"
            if path in (None, own)
            else f":py:obj:`{match[1]} <{path}>`"
        )

    def apart(match: re.Match[str]) -> str:  # `code`s
        return f"{marked(match)}\\ " if match[2] else marked(match)

    prose = re.sub(
        r"(?m)^ *(>>>|\.\.\.).*$",
        lambda match: match[0].replace("`", "\0"),
        "\n".join(lines),
    )
    prose = re.sub(r"(?<!`)`([^`]+)`(?!`)(?=(\w)?)", apart, prose)
    return (
        re.sub(r"(?<!`)\bdocs/(\w+)\.md\b", r":doc:`/\1`", prose)
        .replace("\0", "`")
        .split("\n")
    )


def _formulas(lines: list[str]) -> list[str]:
    """A paragraph that is indented by four more is a formula."""
    out: list[str] = []
    last = ""  # the last line of text, of a formula's surroundings
    inside = False
    for before, line in zip(["", *lines], lines, strict=False):
        depth = len(line) - len(line.lstrip())
        if (
            line
            and not before
            and not inside
            and last
            and not re.fullmatch(r" *[A-Z]\w+:", last)
        ):  # a section
            inside = depth >= len(last) - len(last.lstrip()) + 4
            out += [" " * (depth - 4) + "::", ""] if inside else []
        elif line and inside and depth <= len(last) - len(last.lstrip()):
            inside = False
        if line and not inside:
            last = line
        out.append(line)
    return out
