"""Executes notebooks and saves them with what they print and draw: `python notebooks/execute.py`, or names of some.

What only this machine would print is left out: times of execution, warnings and progress bars, which go to stderr.
"""

import argparse
import pathlib

import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python notebooks/execute.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "notebooks",
        nargs="*",
        type=pathlib.Path,
        help="by default all that are here",
    )
    for path in tqdm(
        parser.parse_args().notebooks or sorted(HERE.glob("*.ipynb")),
        unit="notebook",
    ):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook,
            timeout=1800,
            record_timing=False,
            resources={"metadata": {"path": HERE}},
        ).execute()
        nbformat.write(cleaned(notebook), path)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Returns a notebook without what differs from machine to machine."""
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        # they say which picture the gallery shows, and which panel of it
        kept = ("tags", "panel")
        cell.metadata = {
            key: cell.metadata[key] for key in kept if key in cell.metadata
        }
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if output.get("name") != "stderr"
            ]
    return notebook


if __name__ == "__main__":
    main()
