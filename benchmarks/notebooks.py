"""What the compilers of accelerators make of the notebooks' train steps.

Run `python -m benchmarks.notebooks` in an environment that has the compilers of NVIDIA and of TPUs, as
docs/accelerators.md says. It runs each notebook whose train step can be had by name, compiles that for a T4 and for a
v5e, and writes benchmarks/notebooks.json. `--page notebooks/README.md` writes the table of that page and runs nothing.
"""

import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("MPLBACKEND", "agg")

import jax
from tqdm import tqdm

import optax_accum
from benchmarks import _measure
from optax_accum import accelerators

ROOT = pathlib.Path(__file__).parent.parent
FACTS = pathlib.Path(__file__).with_suffix(".json")
TARGETS = {"t4": "T4", "v5e:1x1": "v5e"}
Names = dict[str, Any]
# What is compiled: (function, arguments, arguments by keyword), of the names that the notebook leaves.
STEPS: dict[str, Callable[[Names], tuple[Any, Any, Names]]] = {
    "01_quickstart": lambda n: (
        n["micro_step"],
        (n["shapes"], n["state"](n["tx"].init), n["rows"](n["BATCH"] // n["EVERY"])),
        {"weight": 1.0},
    ),
    "02_language_model": lambda n: (
        jax.jit(optax_accum.value_and_grad(n["loss_of"], num_microbatches=2)),
        (n["weights"], (n["tokens"][: n["BATCH"]], n["mask"][: n["BATCH"]])),
        {},
    ),
    "03_large_images": lambda n: (n["train_step"], (n["state"], n["crops"](n["rng"], n["ROWS"])), {}),
    "04_speech": lambda n: (n["step"], (n["params"], n["state"], n["batch"]), {}),
    "05_reinforcement_learning": lambda n: (n["step"], (n["params"], n["state"], n["episode"]), {"flush": True}),
    "06_recommender": lambda n: (jax.jit(n["ways"]["value_and_grad"]), (n["params"], n["batch"]), {}),
    "08_mixture_of_experts": lambda n: (jax.jit(n["WAYS"]["the whole batch"]), (n["params"], n["tokens"]), {}),
}


def main() -> None:
    """Adds what the compilers say to the record, or writes the page."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--page", type=_measure.writable, help="a Markdown file whose table is to be that of the JSON")
    options = parser.parse_args()
    record = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    if options.page:
        options.page.write_text(page(options.page.read_text(), record))
        return
    # Before JAX is used: it then asks for no library of a GPU.
    targets = {name: accelerators.target(name).one() for name in TARGETS}
    for name in tqdm(STEPS):
        record.setdefault(name, {}).update(compiled(name, targets))
        FACTS.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    print(table(record))


def compiled(name: str, targets: dict[str, accelerators.Target]) -> dict[str, Any]:
    """Returns what each compiler makes of a notebook's train step, and the seconds of one core that it took."""
    fun, args, kwargs = STEPS[name](names_of(name))
    found = {}
    for target, on in targets.items():
        start = time.process_time()
        program = on.compile(fun.lower(*map(on.shapes, args), **kwargs))
        seconds = time.process_time() - start
        traffic = accelerators.count_traffic(program)
        found[target] = {"seconds": round(seconds, 1), "bytes": traffic.most, "temporary": traffic.temporary}
    return found


def names_of(name: str) -> Names:
    """Returns the names that a notebook leaves when it has run, here and without what only IPython knows."""
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    names: Names = {"__name__": name}
    for cell in cells:
        if cell["cell_type"] == "code":
            source = re.sub(r"^(\s*)%.*$", r"\1pass", "".join(cell["source"]), flags=re.MULTILINE)
            exec(compile(source, name, "exec"), names)
    return names


def page(text: str, record: dict[str, Any]) -> str:
    """Returns a page with the table after its mark."""
    return _measure.filled(text, "compiled", lambda _: table(record))


def table(record: dict[str, Any]) -> str:
    """Returns a row for each notebook whose step was compiled."""
    what = "s", "MB", "MB moved"  # a phone has room for no more
    head = ["notebook", *(f"{on}: {one}" for on in TARGETS.values() for one in what)]
    megabytes = lambda size: _measure.digits(size / 1e6)
    cells = lambda facts: [f"{facts['seconds']:.1f}", megabytes(facts["temporary"]), megabytes(facts["bytes"])]
    rows = [
        [name.replace("_", " "), *(cell for on in TARGETS for cell in cells(facts[on]))]
        for name, facts in record.items()
    ]
    return _measure.markdown([head, *rows])


if __name__ == "__main__":
    main()
