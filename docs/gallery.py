"""Owns the gallery of notebooks: a card for each, with its title and its largest picture. Runs no notebook."""

import base64
import json
import pathlib
from typing import Any

HEAD = "# Gallery\n\nEach notebook runs on a CPU in a minute or two, and in Colab. A picture leads to its notebook.\n"
CARD = """\
:::{{grid-item-card}} {title}
:link: {name}
:link-type: doc
:img-bottom: {name}.png
:::
"""


def write(folder: pathlib.Path) -> None:
    """Writes `gallery.md` and the pictures that it shows beside the notebooks of a folder."""
    cards = []
    for path in sorted(folder.glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
        (folder / f"{path.stem}.png").write_bytes(
            max(_pictures(cells), key=len)
        )
        cards.append(CARD.format(title=title, name=path.stem))
    grid = "::::{grid} 1 2 2 2\n:gutter: 3\n\n" + "\n".join(cards) + "\n::::\n"
    (folder / "gallery.md").write_text(f"{HEAD}\n{grid}")


def _pictures(cells: list[dict[str, Any]]) -> list[bytes]:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    found = [
        output["data"]["image/png"]
        for output in outputs
        if "image/png" in output.get("data", {})
    ]
    return [base64.b64decode("".join(picture)) for picture in found]
