"""The site without building it: what Sphinx cannot know, and what is written in two places. `.ci/run` builds it."""

import importlib
import importlib.util
import inspect
import pydoc
import re
import subprocess
import tomllib

import pytest

import optax_accum
from tests import ROOT

DOCS = ROOT / "docs"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
MODULES = re.findall(r"^   (optax_accum[\w.]*)$", (DOCS / "api.md").read_text(), re.MULTILINE)


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docstrings, package_map = loaded("docstrings"), loaded("package_map")


def test_every_page_is_in_a_toctree():
    entries = lambda page: [
        line
        for tree in re.findall(r"```{toctree}\n(.*?)```", page.read_text(), re.DOTALL)
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    every = [entry for page in DOCS.glob("*.md") for entry in entries(page) if not entry.startswith("notebooks/")]
    assert sorted(every) == sorted({page.stem for page in DOCS.glob("*.md")} - {"index"})
    assert len(entries(DOCS / "index.md")) <= 25  # of the left bar


def test_start_leads_to_every_page():
    """Where a code host shows the pages, there is no menu."""
    linked = set(re.findall(r"\]\((\w+)\.md\)", (DOCS / "start.md").read_text()))
    assert {page.stem for page in DOCS.glob("*.md")} - {"index", "start", "changelog"} == linked


def test_every_public_module_is_in_the_api():
    files = (ROOT / "optax_accum").rglob("*.py")
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert set(MODULES) == {name for name in names if "._" not in name}


def public():
    for name in MODULES:
        module = importlib.import_module(name)
        yield from ((f"{name}.{each}", getattr(module, each)) for each in module.__all__)


@pytest.mark.parametrize(("name", "value"), list(public()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_public_name_has_a_docstring_without_tables(name, value):
    """`help()` shows a table as it was typed: edge cases are a list."""
    text = inspect.getdoc(value)
    assert text
    assert not re.search(r"^ *\|", text, re.MULTILINE)


def wide(value):
    """Lines of docstrings that help() prints beyond column 80; signatures, and what is inherited, are not ours."""
    members = vars(value) if inspect.isclass(value) else {}
    ours = [value, *(each for key, each in members.items() if key == "__init__" or not key.startswith("_"))]
    written = {line.strip() for each in ours for line in (inspect.getdoc(each) or "").splitlines()}
    head = f"{value.__name__} - "  # of a module, before the first line of its docstring
    printed = pydoc.plaintext.document(value).splitlines()
    return [line for line in printed if len(line) > 80 and line.lstrip(" |").removeprefix(head) in written]


@pytest.mark.quick
@pytest.mark.parametrize("name", MODULES)
def test_help_fits_a_terminal_of_80_columns(name):
    """Of a module, and of each of its names."""
    module = importlib.import_module(name)
    objects = {name: module, **{each: getattr(module, each) for each in module.__all__}}
    assert {each: lines for each, value in objects.items() if (lines := wide(value))} == {}


def test_a_line_beyond_column_80_is_seen():
    def function():
        """Short.

        A line that stands in four columns and has many words, so many that it ends beyond.
        """

    assert wide(function) == [f"    {function.__doc__.splitlines()[2].strip()}"]


def test_what_becomes_of_a_docstring():
    markdown = [
        "Of `tx`, `Leaf`s (docs/fsdp.md):",
        "",
        "    f = g / w",
    ]
    assert docstrings.restructured(markdown, {"tx": "package.tx"}) == [
        "Of :py:obj:`tx <package.tx>`, ``Leaf``\\ s (:doc:`/fsdp`):",
        "",
        "::",
        "",
        "    f = g / w",
    ]


def test_the_address_is_one_and_the_same():
    """Where it stands beside pyproject.toml, it is that of pyproject.toml; CONTRIBUTING.md says how to change it."""
    owner, name = PROJECT["urls"]["Repository"].removeprefix("https://github.com/").split("/")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = set()
    for file in tracked or ["pyproject.toml", *map(str, ROOT.rglob("*.md"))]:  # an sdist has no list of its files
        if (ROOT / file).suffix not in {".png", ".svg"}:
            address = rf"(?<=github\.com/)[\w-]+/{name}\b|[\w-]+/{name}(?=/blob|/issues|/tree|/security|\.git\b)"
            found |= set(re.findall(address, (ROOT / file).read_text()))
    assert found == {f"{owner}/{name}"}
    assert f"\ngit clone {PROJECT['urls']['Repository']} && cd {name}\n" in (ROOT / "README.md").read_text()


def test_a_release_has_one_version():
    for file, line in (("CITATION.cff", "version: {}"), ("recipe/recipe.yaml", '  version: "{}"')):
        assert f"\n{line.format(optax_accum.__version__)}\n" in (ROOT / file).read_text(), file


def test_who_cites_is_led_to_the_address():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f'repository-code: "{PROJECT["urls"]["Repository"]}"' in lines
    assert f'url: "{PROJECT["urls"]["Documentation"]}"' in lines


def test_the_recipe_asks_for_what_pyproject_asks_for():
    """What is built with, what is needed, and that it imports without Flax; read as lines, in which it is written."""
    recipe = (ROOT / "recipe/recipe.yaml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = lambda key: re.findall(r"- (.*)", re.search(rf"^ +{key}:\n((?: +- .*\n)+)", recipe, re.MULTILINE)[1])
    in_recipe = lambda requirement: re.sub(r"(?=>=)", " ", requirement)
    assert f'\n  python_min: "{PROJECT["requires-python"].removeprefix(">=")}"\n' in recipe
    assert listed("run") == ["python >=${{ python_min }}", *map(in_recipe, PROJECT["dependencies"])]
    assert listed("host") == ["python ${{ python_min }}.*", *map(in_recipe, project["build-system"]["requires"]), "pip"]
    assert set(listed("imports")) == {name for name in MODULES if "flax" not in name}
    about = {"summary": f'"{PROJECT["description"]}"', "license": PROJECT["license"], "license_file": "LICENSE"}
    about |= {key: PROJECT["urls"][key.title()] for key in ("repository", "documentation")}
    assert [key for key, value in about.items() if f"\n  {key}: {value}\n" not in recipe] == []


def test_pictures_of_the_pages_are_small_and_dark_on_a_dark_page():
    pictures = list((DOCS / "pictures").iterdir())
    assert len(pictures) >= 4
    assert max(picture.stat().st_size for picture in pictures) < 60_000
    assert [picture.name for picture in pictures if "(prefers-color-scheme: dark)" not in picture.read_text()] == []
    assert {f"pictures/{picture.name}" for picture in pictures} == set(
        re.findall(r"pictures/[\w.]+", (DOCS / "how_it_works.md").read_text())
    )


def test_actions_and_hooks_are_pinned():
    uses = [
        line
        for flow in (ROOT / ".github/workflows").iterdir()
        for line in flow.read_text().splitlines()
        if "uses:" in line
    ]
    assert len(uses) > 5
    assert [line for line in uses if not re.search(r"uses: (\./\S+|\S+@[0-9a-f]{40} # v[\d.]+)$", line)] == []
    [ruff] = [each for each in PYPROJECT["dependency-groups"]["lint"] if each.startswith("ruff")]
    assert f"rev: v{ruff.removeprefix('ruff==')}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


@pytest.mark.quick
def test_the_map_of_packages_is_made_of_their_docstrings():
    """`python docs/package_map.py` writes it."""
    page = package_map.PAGE.read_text()
    assert package_map.written(page) == page
    line = next(line for line in page.splitlines() if line.startswith("| `plan` |"))
    assert package_map.written(page.replace(line, line.replace("`accelerators`", "`flax`"))) == page
