"""What is written runs: the examples of the docstrings and every code block of the README."""

import doctest
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import optax_accum
from benchmarks import accelerators

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


WITH_EXAMPLES = """
_across.schedules _across.train_step _across.transformation _core.ratio _core.state _space.partials _tools.advise
_tools.batches _tools.collectives _tools.noise_scale _tools.packing _tools.placement _tools.planning _tools.resume
_tools.steps _tools.targets _tools.traffic _tools.verify _tools.verify_step _within.microbatched_apply
_within.value_and_grad
"""


@pytest.mark.parametrize("room", WITH_EXAMPLES.split())
def test_the_examples_of_the_docstrings(room):
    module = importlib.import_module(f"optax_accum.{room}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("room", ["batch_norm", "linen", "nnx", "nnx_optimizer"])
def test_the_examples_of_the_flax_room(room):
    module = importlib.import_module(f"optax_accum.flax._{room}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 4
    assert result.failed == 0


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_readme_has_code_of_each_kind():
    assert len(blocks("python")) >= 2
    assert len(blocks("bash")) >= 2
    assert set(re.findall(r"^```(\w+)", README, re.MULTILINE)) <= {"python", "bash", "bibtex", "diff"}


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().splitlines()[0][:40])
def test_a_python_block_of_the_readme(code):
    exec(compile(code, "README.md", "exec"), {})


QUICK = {  # pages whose numbers alone are asserted
    "batch_norm",
    "check_your_step",
    "coming_from",
    "faq",
    "growing_batches",
    "how_it_works",
    "losses",
    "nan_policy",
    "once_per_update",
    "outliers",
    "start",
    "weights",
    "when_not",
    "which_mechanism",
}
NEEDS = {"other_libraries": ("equinox", "haiku", "numpyro")}


PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if blocks("python", page.read_text())]


def test_most_pages_have_code():
    assert len(PAGES) >= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page):
    """In a process of their own: they set the mesh and the number of devices for all that follows."""
    if missing := [name for name in NEEDS.get(page.stem, ()) if importlib.util.find_spec(name) is None]:
        pytest.skip(f'needs {", ".join(missing)}: pip install ".[ecosystem]"')
    code = "\n".join(blocks("python", page.read_text()))
    env = {**os.environ, **({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if page.stem in QUICK else {})}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", blocks("bash"), ids=lambda code: code.strip().splitlines()[0][:40])
def test_a_bash_block_of_the_readme(code):
    """Each is one line that a shell can parse, whose extras and modules exist; `.ci/run` runs them."""
    assert len(code.strip().splitlines()) == 1
    assert subprocess.run(["bash", "-n", "-c", code], check=False).returncode == 0
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[(\w+)\]", code):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    for module in re.findall(r"-m (optax_accum\.\w+|benchmarks\.\w+)", code):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()


@pytest.mark.parametrize(("name", "tables"), [("accelerators.md", 11), ("fsdp.md", 1)])
def test_the_tables_of_a_page_are_those_of_the_facts(name, tables):
    """`python -m benchmarks.accelerators --pages docs/accelerators.md docs/fsdp.md` writes them."""
    text, record = (ROOT / "docs" / name).read_text(), json.loads(accelerators.FACTS.read_text())
    assert accelerators.page(text, record) == text
    assert len(re.findall(r"<!-- facts: .* -->\n\n\|", text)) == text.count("<!-- facts") == tables


def test_links_and_pictures_of_the_readme_exist():
    targets = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^":]+)"', README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_the_version_stands_in_one_place_and_in_the_changelog():
    assert f"## {optax_accum.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert "version =" not in re.sub(r"(?s)\[tool.*", "", (ROOT / "pyproject.toml").read_text())
