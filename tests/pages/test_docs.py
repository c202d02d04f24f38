"""What is written runs: the examples of the docstrings, the code of the README and of the docs. What cannot is parsed."""

import ast
import doctest
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import pytest
import yaml

import optax_accum
from benchmarks import accelerators
from tests import ROOT, versions
from tests.tiers import sweep

README = (ROOT / "README.md").read_text()
PACKAGE = pathlib.Path(optax_accum.__file__).parent
WITH_EXAMPLES = [
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text()
]


def why_not(code):
    """What the JAX or the Flax that is here cannot do of the code of a page."""
    if versions.JAX < (0, 11) and "overlap=True" in code:
        return "JAX 0.11: overlap"
    return None


def test_most_rooms_have_examples():
    assert len(WITH_EXAMPLES) >= 20


@pytest.mark.quick
@pytest.mark.parametrize("room", WITH_EXAMPLES)
def test_the_examples_of_the_docstrings(room):
    module = importlib.import_module(f"optax_accum.{room}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_readme_has_code_of_each_kind():
    assert len(blocks("python")) >= 1
    assert len(blocks("bash")) >= 2
    assert set(re.findall(r"^```(\w+)", README, re.MULTILINE)) <= {"python", "bash", "bibtex", "diff"}


@pytest.mark.quick
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().splitlines()[0][:40])
def test_a_python_block_of_the_readme(code):
    exec(compile(code, "README.md", "exec"), {})


NEEDS = {"other_libraries": ("equinox", "haiku", "numpyro")}


# What all that follows would see.
ALONE = re.compile(r"XLA_FLAGS|set_mesh|os\.environ|config\.update|num_cpu_devices|logging")
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if blocks("python", page.read_text())]


def test_most_pages_have_code():
    assert len(PAGES) >= 12


@pytest.mark.parametrize("page", sweep(PAGES, but=[ROOT / "docs/weights.md"]), ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page):
    """In a process of their own if they set the mesh, say, or the number of devices."""
    if missing := [name for name in NEEDS.get(page.stem, ()) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: pip install --group ecosystem")
    code = "\n".join(blocks("python", page.read_text()))
    if reason := why_not(code):
        pytest.skip(reason)
    if not ALONE.search(code):
        with jax.numpy_rank_promotion("allow"):
            exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
        return
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_bash_blocks_of_the_readme_are_lines():
    """`.ci/run` runs the line of the tests, tests/pages/test_demo.py what that of the demo runs."""
    assert [code for code in blocks("bash") if code.count("\n") != 1] == []


WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PARSERS = {"py": ast.parse, "yaml": lambda code: list(yaml.safe_load_all(code))}
OTHERS = [(page, kind, code) for page in WRITTEN for kind in PARSERS for code in blocks(kind, page.read_text())]
SHELL = [(page, code) for page in WRITTEN for kind in ("bash", "sh") for code in blocks(kind, page.read_text())]


@pytest.mark.parametrize(("page", "code"), SHELL, ids=lambda value: getattr(value, "stem", ""))
def test_a_shell_can_parse(page, code):
    done = subprocess.run(["bash", "-n", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "kind", "code"), OTHERS, ids=lambda value: getattr(value, "stem", ""))
def test_what_is_not_run_can_be_parsed(page, kind, code):
    """The code of other systems, and what a cluster reads."""
    assert PARSERS[kind](code)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_the_extras_groups_and_modules_that_a_page_names_exist(page):
    """In its blocks and between them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = re.findall(r"\.\[([\w,]+)\](?!\()", page.read_text())
    assert {extra for each in named for extra in each.split(",")} <= project["project"]["optional-dependencies"].keys()
    assert set(re.findall(r"--group (\w+)", page.read_text())) <= project["dependency-groups"].keys()
    for module in re.findall(r"-m ((?:optax_accum|benchmarks|examples)\b[\w.]*\w)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_kinds_of_blocks():
    """A block of another kind would be looked at by nobody."""
    kinds = {kind for page in WRITTEN for kind in re.findall(r"^```(\w+)", page.read_text(), re.MULTILINE)}
    assert kinds == {"python", "bash", "sh", "diff", *PARSERS}


WORDS = """OOM, out of memory, gradient checkpointing, remat, mixed precision, loss scaling, GradScaler, EMA, ZeRO, FSDP,
HSDP, DDP, DeepSpeed, all-reduce, no_sync, effective batch, virtual batch, GPU memory, throughput, gradient accumulation,
LoRA, GRPO, PPO, InfoNCE, contrastive, padding, packing, Colab, NaN, clipping, warm-up, learning rate, dropout, BatchNorm,
GAN, pmap, DP-SGD, L-BFGS, SAM, TBPTT, physics-informed, chunked, Jacobian, sparse, embedding table, profiling, zero_grad,
optimizer step, global step, Muon, MultiSteps, microbatch, Hugging Face, Lightning, resume, offload, multi-host, Slurm, Kubernetes, critical batch"""


def test_the_words_that_users_search_for_are_in_the_docs():
    """The search of the site finds what stands on a page."""
    text = " ".join(" ".join(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")).lower()
    assert [word for word in " ".join(WORDS.split()).split(", ") if word.lower() not in text] == []


BEGIN = ("index", "start", "faq")


def test_which_mechanism_to_take_is_said_in_the_same_words():
    """Wherever a user may begin to read."""
    said = [
        " ".join(page.split()) for page in (README, *((ROOT / "docs" / f"{name}.md").read_text() for name in BEGIN))
    ]
    choices = [re.search(r"\* \*\*Within a call\*\*.*?if numbers of tokens or rows differ\.", text)[0] for text in said]
    assert len(set(choices)) == 1


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_code_fits_the_column_of_its_page(page):
    """At 1280 pixels a page shows 80 characters; a manifest and a diff are as long as what they show."""
    text = page.read_text()
    lines = [line for kind in ("python", "py", "bash") for block in blocks(kind, text) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 80] == []


def test_the_first_page_shows_the_first_diff_of_the_readme():
    """tests/flax/test_flax_examples.py applies it, and those of docs/flax.md; tests/pages/test_trainers.py those of its page."""
    assert blocks("diff", (ROOT / "docs/index.md").read_text()) == blocks("diff")[:1]
    with_diffs = {page.name for page in WRITTEN if blocks("diff", page.read_text())}
    assert with_diffs == {"README.md", "CONTRIBUTING.md", "index.md", "flax.md", "in_a_trainer.md"}


def applied(part, folder):
    """Applies those hunks of the diff of CONTRIBUTING.md whose files begin so to a copy in a folder."""
    (diff,) = blocks("diff", (ROOT / "CONTRIBUTING.md").read_text())
    found = re.findall(rf"^--- a/({part}.*)\n((?:[-+ @](?!-- ).*\n)+)", diff, re.MULTILINE)
    for path, hunks in found:
        text = (folder / path).read_text()
        for lines in hunks.split("@@\n")[1:]:
            old, new = ("".join(re.findall(rf"^[{sign} ](.*\n)", lines, re.MULTILINE)) for sign in "-+")
            if new not in text:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
        (folder / path).write_text(text)
    return [path for path, _ in found]


def test_the_example_of_contributing_fits_the_library(tmp_path):
    """Whether its test passes, the sweep asks."""
    (diff,) = blocks("diff", (ROOT / "CONTRIBUTING.md").read_text())
    for path in re.findall(r"^--- a/(.*)$", diff, re.MULTILINE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for path in applied("", tmp_path):
        assert '"guard"' in (tmp_path / path).read_text(), path
        if path.endswith(".py"):
            ast.parse((tmp_path / path).read_text())


@pytest.mark.sweep
def test_the_example_of_contributing_works(tmp_path):
    """Its diff, applied to a copy: the test that it adds passes there, and only there."""
    for folder in ("optax_accum", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    test = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/across/test_faults.py",
        "-k",
        "guard",
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    results = []
    for part in ("tests", ""):  # its test alone, then all of it
        applied(part, tmp_path)
        done = subprocess.run(test, check=False, capture_output=True, text=True, cwd=tmp_path, env=env)
        results.append(done.stdout)
    assert "nonfinite must be one of" in results[0]
    assert "1 passed" in results[1], done.stderr or results[1]


def test_the_readme_is_read_in_minutes():
    assert len(README.replace("|", " ").split()) <= 700


@pytest.mark.parametrize(
    ("name", "tables"),
    [("accelerators.md", 2), ("fsdp.md", 2), ("many_devices.md", 1)],
)
def test_the_tables_of_a_page_are_those_of_the_facts(name, tables):
    """`python -m benchmarks.accelerators --pages docs/accelerators.md ...` writes them."""
    text, record = (ROOT / "docs" / name).read_text(), accelerators.record()
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
