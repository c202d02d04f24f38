"""How Sphinx builds these pages: `python -m sphinx -W -n docs build/docs`."""

import importlib
import os
import pathlib
import re
import shutil
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import docstrings
import gallery

import optax_accum

project = "optax_accum"
author = "the optax_accum authors"
copyright = "the optax_accum authors, Apache-2.0"
version = release = optax_accum.__version__
REPOSITORY = re.search(
    r'Repository = "(.*)"', (ROOT / "pyproject.toml").read_text()
)[1]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {
    ".rst": "restructuredtext",  # the first: what autosummary writes
    ".md": "myst-nb",
    ".ipynb": "myst-nb",
}
exclude_patterns = ["_templates"]
templates_path = ["_templates"]

html_theme = "sphinx_book_theme"
# The site has the docs of the newest release, and `latest`, those of main: `.ci/site` builds both.
html_title = f"optax_accum {os.environ.get('OPTAX_ACCUM_DOCS', release)}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": REPOSITORY,
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_issues_button": True,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the search field stands in the sidebar
}

# Notebooks are committed with their outputs, and CI executes them; here they are only shown.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

# One page for each name in an `__all__`: nothing is listed by hand.
autosummary_generate = True
autosummary_ignore_module_all = False
autosummary_imported_members = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # `nnx.Param`, not a class's repr
python_maximum_signature_line_length = 80
napoleon_custom_sections = ["Guarantees"]
napoleon_use_ivar = True
napoleon_attr_annotations = False

# A build needs no network, and does not fail when another project moves a page: links to other projects are made where
# OPTAX_ACCUM_INTERSPHINX is set, as the docs workflow does, and are never missed.
if os.environ.get("OPTAX_ACCUM_INTERSPHINX"):
    intersphinx_mapping = {
        "flax": ("https://flax.readthedocs.io/en/latest/", None),
        "jax": ("https://docs.jax.dev/en/latest/", None),
        "optax": ("https://optax.readthedocs.io/en/latest/", None),
        "python": ("https://docs.python.org/3/", None),
    }
nitpick_ignore_regex = [
    ("py:.*", r"(?!optax_accum).*"),
    ("py:class", r"optax_accum\.(\w+\.)*_.*"),
]


def setup(app: Any) -> None:
    """Copies the notebooks to where Sphinx reads, and reads docstrings and links as they are written."""
    for made in ("api", "notebooks"):  # by the last build
        shutil.rmtree(HERE / made, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", HERE / "notebooks")
    gallery.write(HERE / "notebooks")
    modules = re.findall(
        r"^   (optax_accum[\w.]*)$", (HERE / "api.md").read_text(), re.MULTILINE
    )
    public = docstrings.public_names(map(importlib.import_module, modules))
    docstrings.setup(app, public)
    app.connect("source-read", _links_inside)
    app.connect("html-page-context", _names_that_break)


def _names_that_break(
    app: Any, page: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """Where code may break in a narrow column: behind `_`, `.` and the like, not in a word."""

    def behind(code: re.Match[str]) -> str:
        mark = r'\1<wbr class="long">' if len(code[0]) > 25 else r"\1<wbr>"
        return re.sub(r"(?<=[\w)\]])([_.=(,/]+)(?=\w|&quot;)", mark, code[0])

    context["body"] = re.sub(
        r'(?<=<span class="pre">)[^<]{15,}', behind, context.get("body") or ""
    )


def _links_inside(app: Any, page: str, source: list[str]) -> None:
    """Links that lead to files in the repository lead to pages, where these are pages, or to the code host."""
    text = source[0]
    if (
        page == "api"
    ):  # where a code host shows the page, its names lead nowhere
        named = lambda row: re.sub(
            r"`([\w.]+)`", r"{py:obj}`\1 <optax_accum.\1>`", row[0]
        )
        text = re.sub(r"^\| `[^|]*\|", named, text, flags=re.MULTILINE)
    text = text.replace("](../notebooks/", "](notebooks/").replace(
        "](../CHANGELOG.md", "](changelog.md"
    )
    source[0] = re.sub(
        r"\]\(\.\./([^)]+)\)", rf"]({REPOSITORY}/blob/main/\1)", text
    )
