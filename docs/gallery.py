"""The gallery of notebooks: a card for each, with its title and the picture of the cell tagged `gallery`.

A picture of several panels shows one: the cell's metadata say where it begins and ends, `"panel": [0.5, 1]`.
"""

import base64
import io
import json
import pathlib

from PIL import Image

HEAD = "# Gallery\n\nEach notebook runs on a CPU in a minute or two, and in Colab. A picture leads to its notebook.\n"
MENU = "```{toctree}\n:hidden:\n:glob:\n\nREADME\n[0-9]*\n```\n"
CARD = """\
:::{{grid-item-card}} {title}
:link: {name}
:link-type: doc
:img-bottom: {name}.png
:img-alt: A plot: {title}
:::
"""


def write(folder: pathlib.Path) -> None:
    """Writes `gallery.md` and the pictures that it shows beside the notebooks of a folder."""
    cards = []
    for path in sorted(folder.glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
        (folder / f"{path.stem}.png").write_bytes(picture(path))
        cards.append(CARD.format(title=title, name=path.stem))
    grid = "::::{grid} 1 2 3 3\n:gutter: 3\n\n" + "\n".join(cards) + "\n::::\n"
    (folder / "gallery.md").write_text(f"{HEAD}\n{grid}\n{MENU}")


def picture(path: pathlib.Path) -> bytes:
    """Returns the picture of the cell that is tagged `gallery`, or one panel of it."""
    cells = json.loads(path.read_text())["cells"]
    tagged = [
        cell for cell in cells if "gallery" in cell["metadata"].get("tags", ())
    ]
    pictures = [
        output["data"]["image/png"]
        for cell in tagged
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    if len(pictures) != 1:
        rule = "One cell, with one picture, has the tag `gallery`"
        raise ValueError(f"{rule}: {path.name} has {len(pictures)} of them.")
    whole = Image.open(io.BytesIO(base64.b64decode("".join(pictures[0]))))
    left, right = tagged[0]["metadata"].get("panel", (0, 1))
    edges = (
        round(left * whole.width),
        0,
        round(right * whole.width),
        whole.height,
    )
    panel = io.BytesIO()
    whole.crop(edges).save(panel, "PNG")
    return panel.getvalue()
