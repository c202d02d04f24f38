"""The rooms and arrows of the design: who may import whom, and what `import optax_accum` loads."""

import ast
import pathlib
import subprocess
import sys

import pytest

import optax_accum

PACKAGE = pathlib.Path(optax_accum.__file__).parent
FLOORS = [
    {"_tracing"},
    {"_accumulator", "_state", "_report", "_collectives", "_mesh"},
    {"_roles", "_program"},
    {"_arguments", "_sharding"},
    {"_split", "_emit", "_inner", "_backward"},
    {"_outputs", "_micro_step", "_recompute"},
    {"_cut", "_transformation", "_placement"},
    {"_microbatch", "_train_step", "_planning", "_resume"},
    {"_loss"},
    {"_mixtures"},
    {"_probes"},
    {"_verify"},
    {"processes", "flax"},
    {"demo"},
]
FLAX_FLOORS = [
    {"_batch_norm", "_window", "_nnx_variables"},
    {"_checkpoint", "_loss_scale"},
    {"_linen", "_nnx", "_nnx_optimizer"},
    {"_linen_step", "_nnx_step"},
    {"__init__"},
]


def sources(room):
    """The sources of a room: of one module, or of all in a folder."""
    folder = PACKAGE / room
    return [path.read_text() for path in (folder.glob("*.py") if folder.is_dir() else [PACKAGE / f"{room}.py"])]


def imports_of(source, package="optax_accum"):
    """The rooms of a package that a module's source imports."""
    found, inside, depth = set(), f"{package}.", package.count(".") + 1
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(inside):
            found.add(node.module.split(".")[depth])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[depth] for a in node.names if a.name.startswith(inside)}
    return found


def wrong_arrows(room, source):
    floor = next(i for i, rooms in enumerate(FLOORS) if room in rooms)
    below = (
        set().union(*FLOORS[:floor])
        if room not in ("demo", "processes", "flax")
        else set(optax_accum.__all__) | {"processes", "flax"}
    )
    return imports_of(source) - below


def test_every_room_stands_on_a_floor():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert modules | folders == set().union(*FLOORS)
    assert {path.stem for path in (PACKAGE / "flax").glob("*.py")} == set().union(*FLAX_FLOORS)


@pytest.mark.parametrize("room", sorted(set().union(*FLOORS)))
def test_imports_go_one_way(room):
    assert sources(room)
    for source in sources(room):
        assert not wrong_arrows(room, source)


def test_imports_go_one_way_inside_the_flax_room():
    for number, rooms in enumerate(FLAX_FLOORS):
        below = set().union(*FLAX_FLOORS[:number])
        for room in rooms:
            source = (PACKAGE / "flax" / f"{room}.py").read_text()
            assert imports_of(source, "optax_accum.flax") <= below


def test_the_flax_room_shows_no_more_than_its_names():
    from optax_accum import flax

    assert sorted(flax.__all__) == flax.__all__
    for name in flax.__all__:
        assert len(getattr(flax, name).__doc__) > 60, name


def test_a_wrong_arrow_is_found():
    for source in (
        "from optax_accum._transformation import x",
        "from optax_accum import demo",
        "import optax_accum.demo",
    ):
        assert wrong_arrows("_accumulator", source)


def test_nothing_private_of_jax_is_used():
    for path in PACKAGE.rglob("*.py"):
        assert "jax._src" not in path.read_text(), path


def test_import_loads_neither_flax_nor_matplotlib():
    program = "import sys, optax_accum; print(*{'flax', 'matplotlib', 'sklearn', 'tqdm'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_the_flax_room_is_an_attribute_that_is_loaded_when_asked_for():
    program = "import sys, optax_accum; print('flax' in dir(optax_accum), 'flax' in sys.modules)"
    assert run(f"{program}; print(optax_accum.flax.TrainState.__name__)") == ["True", "False", "TrainState"]
    with pytest.raises(AttributeError, match="module 'optax_accum' has no attribute 'flux'"):
        _ = optax_accum.flux


@pytest.mark.parametrize(
    "ask", ["optax_accum.flax", "import optax_accum.flax", "from optax_accum.flax import TrainState"]
)
def test_without_flax_the_error_names_the_extra(ask):
    """Everything else works without it."""
    program = f"""
import sys
sys.modules["flax"] = None
import optax_accum
optax_accum.accumulate_gradients
try:
    {ask}
except ImportError as error:
    print(error)
"""
    assert " ".join(run(program)).endswith('not installed. Run pip install "optax_accum[flax]".')


def test_the_public_names_are_those_of_all():
    public = {name for name in vars(optax_accum) if not name.startswith("_")}
    assert public - {"demo", "processes", "flax"} == set(optax_accum.__all__)


def test_every_public_name_has_a_docstring():
    for name in optax_accum.__all__:
        assert len(getattr(optax_accum, name).__doc__) > 60, name
