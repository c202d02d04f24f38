"""The rooms and arrows of the design: who may import whom, and what `import optax_accum` loads."""

import ast
import functools
import graphlib
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import pytest

import optax_accum
from benchmarks import code_size
from tests.engine import versions
from tests.quirks import QUIRKS

pytestmark = pytest.mark.quick

PACKAGE = pathlib.Path(optax_accum.__file__).parent
ROOMS = {  # and what each stands on
    "_shared": set(),
    "_core": {"_shared"},
    "_arguments": {"_shared", "_core"},
    "_rows": {"_core"},
    "_loss": {"_shared", "_core", "_arguments"},
    "_space": {"_shared", "_core", "_arguments", "_rows", "_loss"},
    "_across": {"_shared", "_core", "_arguments", "_loss", "_space", "_explain"},
    "_within": {"_shared", "_core", "_arguments", "_rows", "_loss", "_space"},
    "_explain": {"_shared", "_core", "_arguments", "_rows", "_loss", "_within"},
    "verify": {"_shared"},  # it sees a step from outside
    "sharding": {"_core", "_space", "_across", "accelerators"},
    "checkpoint": {"_shared", "_core", "sharding"},
    "batching": {"_shared", "_core", "_arguments", "_loss", "_across"},
    "accelerators": {"_shared"},
    "__main__": set(),
    "plan": {"_shared", "accelerators"},  # it takes the accumulator as users do
    "primitives": {"_core", "_rows"},
    "statistics": {"_loss", "_across"},
    "flax": {"_shared", "_core", "_arguments", "_loss", "_space", "_across", "_explain"},
}
FACES = {name for name in ROOMS if not name.startswith("_")}


@functools.cache
def modules(room):
    """The sources of a room, by module."""
    path = PACKAGE / room
    return {p.stem: p.read_text() for p in (path.glob("*.py") if path.is_dir() else [PACKAGE / f"{room}.py"])}


def imports_of(source, package="optax_accum"):
    """The rooms of a package, or the modules of a room, that a module's source imports."""
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
    return imports_of(source) - ROOMS[room] - {room}


def test_every_module_stands_in_a_room():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders | {path.stem for path in PACKAGE.glob("*.py")} == set(ROOMS) | FACES | {"__init__"}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room):
    for name, source in modules(room).items():
        assert not wrong_arrows(room, source), name


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_stands_on_others_no_longer_than_it_needs_them(room):
    assert ROOMS[room] <= set().union(*map(imports_of, modules(room).values()))


def held(module):
    """The files that a reader of a module holds: its own, and those that it imports, and so on."""
    of_package = {f"optax_accum.{room}.{name}" for room in ROOMS for name in modules(room)}
    files, todo = set(), [f"optax_accum.{module}"]
    while todo:
        if (name := todo.pop()) not in files:
            files.add(name)
            _, room, module = name.split(".")
            froms = (node for node in nodes(modules(room)[module]) if isinstance(node, ast.ImportFrom))
            todo += of_package & {
                part for node in froms for part in (node.module, *(f"{node.module}.{a.name}" for a in node.names))
            }
    return files


@pytest.mark.parametrize(("module", "most"), [("_across.transformation", 58), ("_within.value_and_grad", 78)])
def test_a_reader_holds_few_files(module, most):
    assert 30 < len(held(module)) <= most


def order_of(sources, package):
    """The modules of a room, each after those that it imports; a `CycleError` names those that import each other."""
    return list(
        graphlib.TopologicalSorter(
            {name: imports_of(source, package) for name, source in sources.items()}
        ).static_order()
    )


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way_inside_a_room(room):
    assert set(order_of(modules(room), f"optax_accum.{room}")) >= set(modules(room))


def test_a_cycle_is_found():
    sources = {"a": "from optax_accum._core import b", "b": "from optax_accum._core.a import name"}
    with pytest.raises(graphlib.CycleError, match="'a', 'b', 'a'|'b', 'a', 'b'"):
        order_of(sources, "optax_accum._core")


def taken_elsewhere(source):
    """The names that a module's source takes from modules that only import them, too."""
    found = set()
    for node in nodes(source):
        module = re.fullmatch(r"optax_accum\.(\w+)\.(\w+)", getattr(node, "module", None) or "")
        if module and module[2] in modules(module[1]):
            there = (node for node in nodes(modules(module[1])[module[2]]) if isinstance(node, ast.ImportFrom))
            imported = {alias.asname or alias.name for node in there for alias in node.names}
            found |= {alias.name for alias in node.names} & imported
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_name_is_taken_from_the_module_that_defines_it(room):
    assert set().union(*map(taken_elsewhere, modules(room).values())) <= {"inner_programs"}


def test_a_name_that_is_taken_elsewhere_is_found():
    assert taken_elsewhere("from optax_accum._core.messages import inspect, warn, warnings") == set()
    assert taken_elsewhere("from optax_accum._core.leaves import by_path, short") == {"short"}


def test_an_example_imports_what_users_do():
    for path in (PACKAGE.parent / "examples").glob("*.py"):
        assert imports_of(path.read_text()) <= FACES | set(optax_accum.__all__), path


# Each question is asked in one room.

WHERE = {"is_manual", "axis_index", "psum", "shard_map", "PartitionSpec", "axis_names", "mesh_of", "manual_axes"}
ANSWERED = {  # by modules whose work it is
    "sharding/_shardings": "where a state lives",
    "accelerators/_targets": "devices that are not here",
    "plan/_steps": "shapes on such devices",
}


@functools.cache
def nodes(source):
    """All of a source, parsed."""
    return list(ast.walk(ast.parse(source)))


def names_in(source):
    """What a source names, but for its strings and comments."""
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes(source)
        if isinstance(node, ast.Name | ast.Attribute)
    }


def test_where_is_asked_in_space_alone():
    asked = {
        f"{room}/{name}"
        for room in ROOMS
        if room != "_space"
        for name, source in modules(room).items()
        if names_in(source) & WHERE
    }
    assert asked == set(ANSWERED)
    assert all(names_in(modules("_space")[name]) & WHERE for name in ("meshes", "mapped", "collectives", "device"))


def branches(source):
    """What is asked in the conditions of a source."""
    tests = (node.test for node in nodes(source) if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert))
    return {ast.unparse(test) for test in tests}


def test_axes_are_asked_for_at_the_doors_alone():
    """No `if devices.axes` but where an option is read."""
    asked = {
        (f"{room}/{name}", test)
        for room in ("_core", "_arguments", "_loss", "_across", "_within")
        for name, source in modules(room).items()
        for test in branches(source)
        if "axes" in test
    }
    assert asked == {
        ("_across/transformation", "callable(nonfinite) and rules.devices.axes"),
        ("_across/transformation", "not (schedule.holds or rules.devices.axes)"),
    }


def test_policies_are_compared_in_their_table_alone():
    for room in ROOMS:
        for name, source in modules(room).items():
            if (room, name) != ("_across", "policy"):
                for node in nodes(source):
                    if isinstance(node, ast.Compare):
                        text = ast.unparse(node)
                        assert not any(f"'{policy}'" in text for policy in ("propagate", "skip", "omit", "discard"))


# What is asked many times is a noun: who may ask, by the names that asking takes.

ASKED = {
    "which form has a loss": (
        {"is_ratio", "isinstance Ratio"},
        "_loss/ratio _across/loss",
    ),
    "how is a micro-batch differentiated": ({"vjp"}, "_across/loss"),
    "which kind of every": ({"isinstance Schedule", "as_schedule"}, "_across/schedules _across/transformation"),
    "what is measured": (
        {"as_meter", "Measuring", "Counting"},
        "_loss/meter _across/transformation _within/call_rules",
    ),
    "is a gradient measured": ({"measures"}, "_loss/meter"),
    "is the sum divided": ({"as_divisor"}, "_across/transformation"),
    "does a state hold a sum": ({"holds_sum"}, "_across/accumulator _space/devices flax/_window"),
    "how do devices that weigh differently share a loss": ({"communicates"}, "_space/device"),
    "where does the sum over devices go": (
        {"is_partial", "PARTIAL", "ToShards"},
        "_space/devices _space/here _space/several _within/call_rules flax/_calls",
    ),
    "is the divisor a weight": (
        {"is_mean"},
        "_across/accumulator _across/window _across/steps _across/state_changes _across/transformation flax/_calls",
    ),
    "does it lie in host memory": (
        {"to_memory_of"},
        "_across/accumulator _across/inner _across/outcomes",
    ),
    "does it run outside jit": (
        {"is_staged", "is_again"},
        "_core/tracing _core/traced _core/convolutions _within/by_level _within/microbatches _within/value_and_grad "
        "_within/reduce_microbatches _within/fold _across/loss _explain/weigher",
    ),
}
ALSO = {  # that ask something else by the same name
    "_across/window": {"communicates"},  # whether the space does
    "_space/space": {"communicates"},
    "_space/several": {"is_staged", "communicates"},  # whether it can add over devices; that it does
    "_explain/answers": {"is_ratio"},
    "_within/whole_batch": {"measures", "is_staged"},  # whether the trace of all rows tells everything
    "_within/traced_call": {"is_staged"},
    "_rows/resized": {"is_partial"},
    "_core/custom_derivatives": {"vjp"},  # of one equation
    "_within/by_level": {"PARTIAL"},
    "_within/some_rows": {"PARTIAL"},
    "_rows/levels": {"PARTIAL"},  # of rows
    "_rows/leveling": {"PARTIAL"},
    "_rows/division": {"PARTIAL", "is_partial"},
    "_rows/layers": {"PARTIAL", "is_partial"},
    "_rows/analysis": {"PARTIAL"},
    "_rows/orders": {"PARTIAL"},
    "_rows/jax_primitives": {"PARTIAL"},
    "_explain/explain": {"PARTIAL"},
    "_rows/locality": {"PARTIAL", "is_partial"},
    "_rows/derivatives": {"vjp"},  # of one equation
    "flax/_nnx_module": {"is_partial"},  # what `_calls` has told
    "flax/_calls": {"isinstance Ratio"},  # for the metrics of a train step
    "_space/here": {"is_staged"},  # whether zeros can be placed, and a reduction in place
}


@functools.cache
def asks(source):
    """The names that a source uses, and the classes that it tells instances of."""
    calls = [node for node in nodes(source) if isinstance(node, ast.Call)]
    tests = [ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func) == "isinstance"]
    return names_in(source) | {f"isinstance {name}" for test in tests for name in re.findall(r"\w+", test)}


@pytest.mark.parametrize("question", ASKED)
def test_a_question_is_asked_by_its_noun(question):
    names, owners = ASKED[question]
    asking = {
        f"{room}/{name}"
        for room in ROOMS
        for name, source in modules(room).items()
        if asks(source) & names - ALSO.get(f"{room}/{name}", set())
    }
    assert asking == set(owners.split())


def test_the_questions_are_found():
    assert names_in("x = jax.lax.psum(1, axes)") & WHERE
    assert "rules.devices" in branches("if rules.devices:\n    pass")


PRIVATE = re.compile(r"optax_accum\._(?!_)|from optax_accum import _(?!_)")


def test_tests_ask_public_functions():
    """What private modules do is told by results, by `explain`, and by traced or compiled programs; else by `tests.engine`."""
    tests = PACKAGE.parent / "tests"
    asking = {str(path.relative_to(tests)) for path in tests.rglob("*.py") if PRIVATE.search(path.read_text())}
    here = {"test_architecture.py"}  # sources as text, and this rule
    assert asking - here == {"engine.py"}


OF_VERSIONS = {"JAX", "FLOOR", "HOST"}  # names of `_core.versions`


def asks_for_a_version(source):
    """Whether a source compares versions of JAX or of Flax, or asks which names they have."""
    tree = ast.parse(source)
    spoken = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    of_them = lambda node: any(
        isinstance(part, ast.Name) and part.id in ("jax", "jnp", "flax", "nnx") for part in ast.walk(node)
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("__version_info__", "JAX"):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "__version__" and of_them(node) and id(node) not in spoken:
            return True
        if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & OF_VERSIONS:
            return True
        if isinstance(node, ast.Compare) and re.search(rf"versions\.({'|'.join(OF_VERSIONS)})", ast.unparse(node)):
            return True
        asked = isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr")
        if asked and of_them(node.args[0]) and ast.unparse(node.args[0]) != "jax.config":
            return True
    return False


def test_versions_are_asked_for_by_their_owners_alone():
    asked = {(room, name) for room in ROOMS for name, source in modules(room).items() if asks_for_a_version(source)}
    assert asked == {("_core", "versions"), ("_core", "compilers"), ("accelerators", "_absent"), ("flax", "_versions")}
    assert not asks_for_a_version((PACKAGE / "__init__.py").read_text())


@pytest.mark.parametrize(
    "source",
    [
        "hasattr(jax, 'typeof')",
        "getattr(jax.config, 'x'); hasattr(jax, 'P')",
        "jax.__version_info__ > (1,)",
        "versions.JAX",
        "versions.HOST > (0,)",
        "from optax_accum._core.versions import JAX",
        "jax.__version__.split('.')",
        "getattr(jax.lax, 'x', 0)",
    ],
)
def test_a_question_for_a_version_is_found(source):
    assert asks_for_a_version(source)
    assert not asks_for_a_version("hasattr(leaf, 'dtype'); f'{jax.__version__}'; f(versions.HOST)")


def chains(source):
    """What a source takes from JAX, as `jax.sharding.reshard`."""
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"jax(\.\w+)+", ast.unparse(node)):
            yield ast.unparse(node)


YOUNG = {"jax.new_ref", "jax.freeze"}  # asked for where gradients are added in place


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_taken_from_jax_is_there(room):
    """Where it is not, `compilers` asks."""
    missing = set()
    for name, source in modules(room).items():
        if name != "compilers":
            for chain in chains(source):
                try:
                    functools.reduce(getattr, chain.split(".")[1:], jax)
                except AttributeError:
                    missing.add(chain)
    assert missing - YOUNG == set()


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda quirk: quirk.where)
def test_a_quirk_is_owned_and_needed(quirk):
    """A row whose versions are no longer supported goes, and what it owns; another one names the test that says so."""
    path, _, name = quirk.where.rpartition(".")
    module = importlib.import_module(f"optax_accum.{path or '_core.compilers'}")
    assert hasattr(module, name)
    assert bool(quirk.until) != bool(quirk.test)
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    (floor,) = (line.removeprefix("jax>=") for line in project["dependencies"] if line.startswith("jax"))
    if quirk.until:
        assert quirk.until > tuple(map(int, floor.split(".")))
        owner = getattr(module, name)
        source = inspect.getsource(owner if callable(owner) else module)
        named = {getattr(versions, name) for name in OF_VERSIONS if re.search(rf"JAX (<|>=) (\w+\.)?{name}\b", source)}
        literal = {ast.literal_eval(found) for found in re.findall(r"\(0, \d+, \d+\)", source)}
        required = re.findall(r"require\(.*\(0, \d+, \d+\)", source)
        asks = ("hasattr", "except TypeError", "in equation.params")  # what there is, not the version
        assert quirk.until in named | literal or required or any(question in source for question in asks)
    else:
        file, test = quirk.test.split("::")
        assert f"def {test}(" in (PACKAGE.parent / "tests" / file).read_text()


@pytest.mark.parametrize(
    "face",
    [
        "",
        "sharding",
        "checkpoint",
        "batching",
        "accelerators",
        "plan",
        "primitives",
        "statistics",
        "verify",
        "flax",
        "flax.linen",
        "flax.nnx",
    ],
)
def test_a_face_shows_its_names_and_no_more(face):
    module = importlib.import_module(f"optax_accum.{face}".rstrip("."))
    assert sorted(module.__all__) == module.__all__
    for name in module.__all__:
        assert len(getattr(module, name).__doc__) > 60, name
    public = {name for name in vars(module) if not name.startswith("_")}
    assert public - {"flax", "plan", "verify"} <= set(module.__all__)


def test_dir_shows_what_users_need():
    assert dir(optax_accum) == sorted([*optax_accum.__all__, "__version__", "flax", "plan", "verify"])


# What is there, rounded up: what adds a mechanism takes away another, and what makes it smaller lowers the budget.
# The goals: a core of 15,200 lines, 100,000 tokens and 100 files, 21,000 lines with the products, 75 options.
BUDGET = {
    "core": {"files": 151, "lines": 21_326, "tokens": 154_502},
    "products": {"files": 36, "lines": 6_440, "tokens": 50_150},
}
OPTIONS = 75


def over(counts, budget):
    """What is larger than its budget, by part."""
    return {
        f"{part}: {name}": counts[part][name]
        for part, most in budget.items()
        for name in most
        if counts[part][name] > most[name]
    }


def test_the_library_keeps_its_budget():
    """`python -m benchmarks.code_size` prints it."""
    counts = code_size.counted(code_size.of_tree())
    assert over(counts, BUDGET) == {}
    assert sum(code_size.public_options().values()) <= OPTIONS
    assert set(over(counts, {"core": {"lines": 1}, "products": {"files": 1}})) == {"core: lines", "products: files"}


def test_a_wrong_arrow_is_found():
    for source in (
        "from optax_accum._across.transformation import x",
        "from optax_accum import sharding",
        "import optax_accum.flax",
    ):
        assert wrong_arrows("_core", source)


def test_nothing_private_of_jax_is_used():
    for path in PACKAGE.rglob("*.py"):
        assert "jax._src" not in path.read_text(), path


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


# Products beside the accumulator: each could be a wheel of its own, of these files and of public names.

PRODUCTS = {  # what it is made of, and a program of a user's
    "accelerators": ("accelerators/*", "from alone.accelerators import target; print(target(None, 1).name)"),
    "batching": (
        "batching/_pack*",
        "from alone.batching._packing import token_microbatches as pack; print(pack([3, 2, 4], 8).filled)",
    ),
    "plan": (
        "plan/* accelerators/*",
        """
import jax, optax
from alone import plan
args = jax.ShapeDtypeStruct((2,), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
steps = plan.of_loss(lambda w, x: ((x @ w) ** 2).mean(), optax.sgd(0.1))
print(plan.fit(steps, *args, run=False, budget="1GB", progress=False).num_microbatches)
""",
    ),
    "verify": (
        "verify/*",
        """
import jax, numpy as np, optax
from alone.verify import verify_step
def make_step(every):
    tx = optax.MultiSteps(optax.sgd(0.1), every)
    def step(carry, x):
        w, state = carry
        updates, state = tx.update(jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(w), state, w)
        return w + updates, state
    w = np.ones(4, "f")
    return jax.jit(step), (w, tx.init(w))
print(verify_step(make_step, np.random.default_rng(0).normal(size=(16, 4)).astype("f"), every=2, uneven=False).holds)
""",
    ),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_builds_alone(product, tmp_path):
    """Beside an accumulator of which it takes public names: copied out of the package, it runs."""
    files, program = PRODUCTS[product]
    moved = {"_shared", *re.findall(r"(\w+)/", files)}
    for pattern in ("_shared/*", *files.split()):
        for path in filter(pathlib.Path.is_file, PACKAGE.glob(pattern)):
            source = re.sub(rf"\boptax_accum\.({'|'.join(moved)})\b", r"alone.\1", path.read_text())
            assert not re.search(r"\b(from|import) optax_accum\._", source), path
            copy = tmp_path / "alone" / path.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source)
    taken = "import sys; print(*(name for name in sys.modules if name.startswith('optax_accum.plan')))"
    assert len(run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{program}\n{taken}")) == 1


def test_import_loads_no_room_that_nobody_has_asked_for():
    program = """
import sys, optax_accum
here = lambda: {name.split('.')[1] for name in sys.modules if name.startswith('optax_accum.')}
later = {'_explain', 'accelerators', 'plan', 'verify'}
print(*later & here(), '|')
from optax_accum import explain, plan, accelerators
print(explain.__name__, accelerators.target.__name__, optax_accum.verify_step.__name__, '|')
print(*later & here(), '|', *{'flax', 'matplotlib', 'sklearn', 'tqdm'} & set(sys.modules))
"""
    before, names, after, others = " ".join(run(program)).split("|")
    assert (before.split(), names.split(), others.split()) == ([], ["explain", "target", "verify_step"], [])
    assert len(after.split()) == 4  # so these are their names


def test_the_flax_room_is_an_attribute_that_is_loaded_when_asked_for():
    program = "import sys, optax_accum; print('flax' in dir(optax_accum), 'flax' in sys.modules)"
    assert run(f"{program}; print(optax_accum.flax.linen.TrainState.__name__)") == ["True", "False", "TrainState"]
    with pytest.raises(AttributeError, match="module 'optax_accum' has no attribute 'flux'"):
        _ = optax_accum.flux


def test_without_flax_the_error_names_the_extra():
    """Everything else works without it."""
    program = """
import sys
sys.modules["flax"] = None
import optax_accum
optax_accum.accumulate_gradients
for ask in ("optax_accum.flax", "import optax_accum.flax", "from optax_accum.flax.linen import TrainState"):
    try:
        exec(ask)
    except ImportError as error:
        print(error)
"""
    assert " ".join(run(program)).count('not installed. Run pip install "flax>=0.11.2".') == 3
