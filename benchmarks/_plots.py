"""The pictures of what the peers took."""

import importlib.util
import pathlib
import sys
from typing import Any

DPI = 75  # pictures below 100 kB
COLORS = {"ours": "#1f77b4", "whole": "#202020", "others": "#b9c2cc"}
APART = 0.085  # of two names, in heights of a field
LINES = {
    "whole batch": "#202020",
    "ours: apply_gradients": "#1f77b4",
    "ours: value_and_grad": "#5aa9e6",
    "hand-written scan": "#d62728",
    "optax.MultiSteps": "#ff7f0e",
    "PyTorch": "#7f7f7f",
}
ROWS = (("seconds", "ms an update", 1e3, "log"), ("peak", "process, MB", 1e-6, "linear"))


def draw(record: dict[str, Any], output: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Draws the record of `benchmarks.peers` into PNG files beside `output`; returns a title and a path for each."""
    if importlib.util.find_spec("matplotlib") is None:
        print('No pictures: they need matplotlib. Run: pip install ".[demo]"', file=sys.stderr)
        return []
    beside = lambda name: output.with_name(f"{output.stem.lower()}_{name}.png")
    models = [table for table in record["tables"] if table["case"]["problem"] != "MLP"]
    grown = [table for table in record["tables"] if table["case"]["problem"] == "MLP"]
    pictures = []
    if models:
        pictures.append(("The time of an update with each way, by model", beside("models")))
        _bars(models, pictures[-1][1])
    if len(grown) > 2:
        pictures.append(("How time and memory grow with k and with parameters", beside("growth")))
        _growth(grown, pictures[-1][1])
    return pictures


def _color(way: str) -> str:
    return COLORS.get(way.split()[0].rstrip(":"), COLORS["others"])


def _bars(tables: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Time of an update, a field for each model."""
    from matplotlib.figure import Figure

    columns = min(2, len(tables))
    lines = -(-len(tables) // columns)
    figure = Figure(figsize=(2 + 4 * columns, 0.4 + 2.7 * lines), layout="constrained")
    axes: Any = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, table in zip(axes, tables, strict=False):
        ways = list(reversed(table["rows"]))
        ours = table["rows"]["ours: apply_gradients"]["seconds"]
        bars = axis.barh(ways, [table["rows"][w]["seconds"] / ours for w in ways], color=[_color(w) for w in ways])
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(f"{table['case']['problem']}, k={table['case']['k']}", fontsize=10)
    for axis in axes[len(tables) :]:
        axis.remove()
    figure.suptitle("Time of an update, in units of that with apply_gradients", fontsize=11)
    figure.savefig(path, format="png", dpi=DPI)


def _growth(tables: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Time and memory of an MLP, against k and against its parameters: a few ways, named where their lines end."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(10, 6.2), layout="constrained")
    axes: Any = figure.subplots(2, 2, sharex="col")
    columns = (
        ("k, with 1 million parameters", [t for t in tables if t["case"]["size"] == 512], lambda t: t["case"]["k"]),
        ("million parameters, k=8", [t for t in tables if t["case"]["k"] == 8], lambda t: t["copy"] / 4e6),
    )
    for column, (label, of, along) in enumerate(columns):
        of = sorted(of, key=along)
        for row, (what, name, scale, scaled) in enumerate(ROWS):
            axis, ends = axes[row, column], {}
            for way, color in LINES.items():
                points = [(along(t), scale * t["rows"][way][what]) for t in of if way in t["rows"]]
                if points:
                    width = 2.5 if way.startswith("ours") else 1.4
                    axis.plot(*zip(*points, strict=True), color=color, linewidth=width, marker="o", markersize=3)
                    ends[way] = points[-1]
            axis.set(xscale="log", yscale=scaled, ylabel=name)
            axis.set_ylim(None if scaled == "log" else 0)
            axis.set_xticks([along(t) for t in of], [f"{along(t):.3g}" for t in of])
            axis.set_xticks([], minor=True)
            if scaled == "log":
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
            axis.spines[["top", "right"]].set_visible(False)
            _name(axis, ends)
        axes[1, column].set_xlabel(label)
    figure.suptitle("How an MLP with AdamW grows", fontsize=11)
    figure.savefig(path, format="png", dpi=DPI)


def _name(axis: Any, ends: dict[str, tuple[float, float]]) -> None:
    """Writes the names of lines beside their ends, one below the other where these are close."""
    to_axis = lambda point: float(axis.transAxes.inverted().transform(axis.transData.transform(point))[1])
    ways = sorted(ends, key=lambda way: to_axis(ends[way]))
    heights = [to_axis(ends[way]) for way in ways]
    for above in range(1, len(heights)):
        heights[above] = max(heights[above], heights[above - 1] + APART)
    for below in reversed(range(len(heights))):
        heights[below] = min(heights[below], 1 - APART * (len(heights) - 1 - below))
    for way, height in zip(ways, heights, strict=True):
        place = {"xycoords": "axes fraction", "fontsize": 8, "va": "center"}
        axis.annotate(way.removeprefix("ours: "), (1.02, height), color=LINES[way], **place)
