"""Owns the pictures of what the peers took. Measures nothing."""

import importlib.util
import pathlib
import sys
from typing import Any

COLORS = {"ours": "#1f77b4", "whole": "#202020", "others": "#b9c2cc"}


def draw(record: dict[str, Any], output: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Draws the record of `benchmarks.peers` into PNG files beside `output`; returns a title and a path for each."""
    if importlib.util.find_spec("matplotlib") is None:
        print('No pictures: they need matplotlib. Run: pip install "optax_accum[bench]"', file=sys.stderr)
        return []
    beside = lambda name: output.with_name(f"{output.stem.lower()}_{name}.png")
    models = [table for table in record["tables"] if table["case"]["problem"] != "MLP"]
    grown = [table for table in record["tables"] if table["case"]["problem"] == "MLP"]
    pictures = []
    if models:
        pictures.append(("An update with each way, by model", beside("models")))
        _bars(models, pictures[-1][1])
    if len(grown) > 2:
        pictures.append(("How time and memory grow with k and with parameters", beside("growth")))
        _growth(grown, pictures[-1][1])
    return pictures


def _color(way: str) -> str:
    return COLORS.get(way.split()[0].rstrip(":"), COLORS["others"])


def _bars(tables: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Time of an update and memory of the process, a row of two for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.2 + 2.6 * len(tables)), layout="constrained")
    axes: Any = figure.subplots(len(tables), 2, squeeze=False)
    for (left, right), table in zip(axes, tables, strict=True):
        ways = list(reversed(table["rows"]))
        ours = table["rows"]["ours: apply_gradients"]["seconds"]
        for axis, values, form in (
            (left, [table["rows"][way]["seconds"] / ours for way in ways], "%.2f"),
            (right, [table["rows"][way]["peak"] / 1e6 for way in ways], "%.0f"),
        ):
            bars = axis.barh(ways, values, color=[_color(way) for way in ways], height=0.7)
            axis.bar_label(bars, fmt=form, padding=3, fontsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(axis="y", labelsize=8)
            axis.margins(x=0.12)
        left.set_title(f"{table['case']['problem']}, k={table['case']['k']}: time / apply_gradients", fontsize=10)
        right.set_title("largest memory of the process, MB", fontsize=10)
        right.set_yticklabels([])
    figure.savefig(path, format="png", dpi=100)


def _growth(tables: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Time and memory of an MLP, against k and against its parameters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes: Any = figure.subplots(2, 2, sharex="col")
    columns = (
        ([t for t in tables if t["case"]["size"] == 512], lambda t: t["case"]["k"], "k", 2),
        ([t for t in tables if t["case"]["k"] == 8], lambda t: t["copy"] / 4e6, "million parameters", 10),
    )
    for column, (of, along, label, base) in enumerate(columns):
        of = sorted(of, key=along)
        for way in of[0]["rows"]:
            style = {"color": _color(way), "marker": "o", "markersize": 3, "linewidth": 2} if "ours" in way else {}
            style |= {"linestyle": "--"} if "value_and_grad" in way else {}
            for row, (what, scale) in enumerate((("seconds", 1e3), ("peak", 1e-6))):
                there = [t for t in of if way in t["rows"]]
                values = [scale * t["rows"][way][what] for t in there]
                axes[row, column].plot([along(t) for t in there], values, label=way, **style)
        for row, name in enumerate(("ms an update", "largest memory of the process, MB")):
            axes[row, column].set(xscale="log", yscale="log")
            axes[row, column].set_xscale("log", base=base)
            axes[row, column].set_ylabel(name)
            axes[row, column].spines[["top", "right"]].set_visible(False)
        axes[1, column].set_xlabel(label)
    axes[0, 0].legend(fontsize=8)
    figure.suptitle("An MLP with AdamW: 1 million parameters on the left, k=8 on the right")
    figure.savefig(path, format="png", dpi=100)
