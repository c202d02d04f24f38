"""What people see of the notebooks on a code host; that they run is `.ci/run`'s, through nbmake."""

import ast
import base64
import importlib.util
import io
import json
import re
import tomllib

import pytest
from PIL import Image

from benchmarks import notebooks
from tests import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
INSTALL = f"""\
# On Colab: adds what is missing, and keeps the JAX that fits its GPU or TPU.
try:
    import optax_accum
except ModuleNotFoundError:
    # Colab's JAX 0.7.2 can multiply by replaced parameters on a CPU
    %env XLA_FLAGS=--xla_cpu_use_xnnpack=false
    from importlib.util import find_spec

    import jax

    repo = "optax_accum[demo] @ git+{ADDRESS}"
    %pip install -q "jax=={{jax.__version__}}" "{{repo}}"EXTRAS
    assert find_spec("optax_accum"), (
        f"pip cannot add optax_accum beside JAX {{jax.__version__}}: see above."
    )\
"""

spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)


def cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def outputs(path):
    return [output for cell in cells(path) for output in cell["outputs"]]


def test_the_notebooks_are_found():
    assert len(NOTEBOOKS) >= 9


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_saved_with_what_it_prints_and_draws(path):
    """By `python notebooks/execute.py`: pictures of modest size, no error, nothing of a machine."""
    assert path.stat().st_size <= 300_000
    assert any("image/png" in output.get("data", {}) for output in outputs(path))
    assert [cell["execution_count"] for cell in cells(path)] == list(range(1, len(cells(path)) + 1))
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs(path))
    texts = [output.get("text", output.get("data", {}).get("text/plain", "")) for output in outputs(path)]
    assert not re.search(r"(?<![\w.:/])/\w+/\w", "\n".join("".join(text) for text in texts))  # a path of a machine
    drawn = [
        output["data"] for output in outputs(path) if "<Figure" in "".join(output.get("data", {}).get("text/plain", ""))
    ]
    assert all("image/png" in data for data in drawn)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tag_says_which_picture_the_gallery_shows(path):
    assert gallery.picture(path).startswith(b"\x89PNG")


def test_the_gallery_shows_the_tagged_picture_and_not_the_largest(tmp_path):
    """Of 03 that is the memory."""
    tagged = gallery.picture(ROOT / "notebooks" / "03_large_images.ipynb")
    assert any("GB" in "".join(cell["source"]) for cell in cells(NOTEBOOKS[2]) if cell["metadata"])
    pictures = [
        output["data"]["image/png"] for output in outputs(NOTEBOOKS[2]) if "image/png" in output.get("data", {})
    ]
    assert len(tagged) < max(len(base64.b64decode(picture)) for picture in pictures)
    (tmp_path / "03_large_images.ipynb").write_text(NOTEBOOKS[2].read_text())
    gallery.write(tmp_path)
    assert (tmp_path / "03_large_images.png").read_bytes() == tagged
    assert "03_large_images.png" in (tmp_path / "gallery.md").read_text()


def test_the_gallery_shows_one_panel_of_several():
    (cell,) = [cell for cell in cells(NOTEBOOKS[3]) if cell["metadata"]]
    (drawn,) = [output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})]
    width, height = Image.open(io.BytesIO(base64.b64decode(drawn))).size
    panel = Image.open(io.BytesIO(gallery.picture(NOTEBOOKS[3])))
    assert (panel.width, panel.height) == (round(cell["metadata"]["panel"][1] * width), height)
    assert panel.width < 0.6 * width


def test_who_executes_a_notebook_keeps_its_panel():
    """`python notebooks/execute.py` cleans what a run leaves in a notebook."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
    execute = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execute)
    read = nbformat.read(NOTEBOOKS[3], as_version=4)
    (tagged,) = [cell for cell in read.cells if cell.metadata.get("tags")]
    tagged.metadata["execution"] = {"iopub.status.busy": "2026"}
    execute.cleaned(read)
    assert tagged.metadata == {"tags": ["gallery"], "panel": [0, 0.505]}


def test_a_notebook_without_the_tag_is_refused(tmp_path):
    notebook = json.loads(NOTEBOOKS[0].read_text())
    for cell in notebook["cells"]:
        cell["metadata"] = {}
    (tmp_path / "01_quickstart.ipynb").write_text(json.dumps(notebook))
    with pytest.raises(ValueError, match="`gallery`: 01_quickstart.ipynb has 0 of them"):
        gallery.write(tmp_path)


REMOVED = ["weight_fn", "weight_of", "rng_argnum", "carry_argnum", "whole_argnums", "group_size"]
REMOVED += ["stacked", "aux_reduction", "unroll"]


@pytest.mark.parametrize("path", [*NOTEBOOKS, *sorted((ROOT / "examples").glob("*.py"))], ids=lambda path: path.stem)
def test_value_and_grad_is_told_nothing(path):
    """Within a call the loss tells all; `reduce_microbatches` and steps across calls may still be told."""
    text = "\n".join("".join(cell["source"]) for cell in cells(path)) if path.suffix == ".ipynb" else path.read_text()
    code = re.sub(r"^( *)%.*$", r"\1pass", text, flags=re.MULTILINE)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    told = [key.arg for call in calls if "value_and_grad" in ast.unparse(call.func) for key in call.keywords]
    assert not set(told) & set(REMOVED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_last_cell_prints_the_largest_difference_and_asserts(path):
    last = cells(path)[-1]
    code, printed = "".join(last["source"]), "".join(line for output in last["outputs"] for line in output["text"])
    assert "assert " in code
    assert "largest difference" in printed
    assert re.search(r"\de-\d", printed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_says_where_it_runs_and_multiplies_in_float32(path):
    """What a TPU or a newer GPU rounds is not what the last cell compares."""
    source = "\n".join("".join(cell["source"]) for cell in cells(path))
    assert 'jax.config.update("jax_default_matmul_precision", "float32")' in source
    printed = "".join(line for output in outputs(path) for line in output.get("text", ()))
    assert re.search(r"^JAX [\d.]+ on \d+ x \w+", printed, re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_installed_from_the_one_address(path):
    """It is on no index yet. `.ci/in_colab.py` runs the cell in Colab's versions, of which none changes."""
    install = "".join(cells(path)[0]["source"])
    assert re.sub('"{repo}"( [a-z-]+)*$', '"{repo}"EXTRAS', install, flags=re.MULTILINE) == INSTALL


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_code_fits_the_column_of_its_page(path):
    """At 1280 pixels the site shows 80 characters, as of the other pages."""
    lines = [line for cell in cells(path) for line in "".join(cell["source"]).splitlines()]
    assert [line for line in lines if len(line) > 80] == []


def test_the_table_of_compiled_steps_is_that_of_the_record():
    """`python -m benchmarks.notebooks` makes it."""
    record, text = json.loads(notebooks.FACTS.read_text()), (ROOT / "notebooks" / "README.md").read_text()
    assert notebooks.page(text, record) == text
    assert "T4: MB moved" in text
    assert max(facts["t4"]["bytes"] for facts in record.values()) / 320e9 < 6.1e-3  # as it says
    assert list(record) == list(notebooks.STEPS)
    assert set(record) < {path.stem for path in NOTEBOOKS}
