"""The picture of a plan: bars of bytes by kind, against the limit."""

import math
from typing import Any

from optax_accum._shared.checks import counted

_KINDS = {"arguments": "C0", "unaliased": "C4", "temporary": "C1", "code": "C7"}
_NAMES = {"unaliased": "outputs", "code": "the program"}


def draw(plan: Any) -> Any:
    """A matplotlib figure."""
    figure = _figure()
    figure.set_layout_engine("constrained")
    figure.set_size_inches(6, 3.8)
    axes = figure.subplots()
    devices = f"{plan.num_devices} x " if plan.num_devices > 1 else ""
    figure.suptitle(f"{counted(plan.global_batch, 'row')} on {devices}{plan.target}")
    unit = 1e9 if plan.limit >= 1e9 else 1e6
    _bars(axes, plan.rows, unit)
    axes.axhline(plan.limit / unit, color="black", linestyle="--", linewidth=1, label="what may be used")
    axes.set(xlabel="micro-batches, and rows of each", xlim=(-0.6, len(plan.rows) - 0.4))
    axes.set_ylabel(f"{'GB' if unit == 1e9 else 'MB'} on each device")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plan.plot draws with matplotlib, which is not installed: pip install matplotlib.") from error
    return Figure()


def _bars(axes: Any, rows: list[dict[str, Any]], unit: float) -> None:
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    highest = max((row["peak"] for row in rows if row["peak"] < math.inf), default=0.0)
    for kind, color in _KINDS.items():
        heights = [row[kind] / unit if row[kind] < math.inf else 0.0 for row in rows]
        if max(heights) > 0.002 * highest / unit:
            axes.bar(places, heights, bottom=bottom, color=color, width=0.7, label=_NAMES.get(kind, kind))
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for place, row in zip(places, rows, strict=True):
        if row["chosen"]:
            axes.bar(place, bottom[place], width=0.7, fill=False, edgecolor="C2", linewidth=2.5, label="chosen")
    axes.set_xticks(places, [f"{row['num_microbatches']}\n{row['rows']}" for row in rows])
