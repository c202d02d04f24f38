"""Owns the picture of a plan: bars of bytes by kind against the limit. Computes nothing."""

from typing import Any

_KINDS = {"arguments": "C0", "kept": "C4", "temporary": "C1", "code": "C7"}
_NAMES = {"kept": "outputs", "code": "the program"}


def draw(plan: Any) -> Any:
    """Returns matplotlib's figure, one panel for each option."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plan.plot draws with matplotlib, which is not installed: pip install matplotlib.") from error
    options = list(dict.fromkeys(one.option for one in plan.compiled))
    figure = Figure(figsize=(2.5 + 3.5 * len(options), 3.8), layout="constrained")
    panels = figure.subplots(1, len(options), sharey=True, squeeze=False)[0]
    title = f"{plan.global_batch} rows on {plan.num_devices} x {plan.target}"
    unit = 1e9 if plan.limit >= 1e9 else 1e6
    for axes, option in zip(panels, options, strict=True):
        _bars(axes, [row for row in plan.rows if row["option"] == option], unit)
        axes.axhline(plan.limit / unit, color="black", linestyle="--", linewidth=1, label="what may be used")
        axes.set(xlabel="micro-batches", title=title if option is None else f"{title}, {option}")
    panels[0].set_ylabel(f"{'GB' if unit == 1e9 else 'MB'} on each device")
    named = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside right upper", frameon=False)
    return figure


def _bars(axes: Any, rows: list[dict[str, Any]], unit: float) -> None:
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for kind, color in _KINDS.items():
        heights = [row[kind] / unit if row[kind] < float("inf") else 0.0 for row in rows]
        if max(heights) > 0.002 * max(row["peak"] for row in rows if row["peak"] < float("inf")) / unit:
            axes.bar(places, heights, bottom=bottom, color=color, width=0.7, label=_NAMES.get(kind, kind))
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for place, row in zip(places, rows, strict=True):
        if row["chosen"]:
            axes.bar(place, bottom[place], width=0.7, fill=False, edgecolor="C2", linewidth=2.5, label="chosen")
    axes.set_xticks(places, [f"{row['num_microbatches']}\n{row['rows']} rows" for row in rows])
