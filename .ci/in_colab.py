"""Runs each notebook as Colab would, from its first cell on, which installs the package: that of this checkout.

Run it with the Python of an environment of `.ci/colab.txt`, with nbclient. No package of that environment may change.
Prints the seconds of each notebook, and the memory that its process took at most. Names of notebooks are optional.
"""

import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parent.parent
INSTALL = re.compile(r"git\+https://[\w./-]+")


def main() -> None:
    """Runs those that are named, or all; the memory is the most that any process has taken so far."""
    named = [pathlib.Path(name) for name in sys.argv[1:]]
    for path in named or sorted((ROOT / "notebooks").glob("*.ipynb")):
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", "optax_accum"], check=True)
        before, start = packages(), time.perf_counter()
        run(path)
        seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        after = packages()
        if changed := [f"{name} {version}" for name, version in before.items() if after.get(name) != version]:
            sys.exit(f"{path.stem} changed what Colab has: {', '.join(changed)}")
        print(f"{path.stem}: {seconds:.0f} s with its installation, {memory:.1f} GB", flush=True)


def run(path: pathlib.Path) -> None:
    """Executes a notebook in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source, found = INSTALL.subn(ROOT.as_uri(), first.source)
    if not found:
        sys.exit(f"{path.stem}: its first cell installs nothing.")
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()


def packages() -> dict[str, str]:
    """Returns the version of each package."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    return dict(line.split("==", 1) for line in found.stdout.splitlines() if "==" in line)


if __name__ == "__main__":
    main()
