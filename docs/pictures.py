"""Draws the pictures of docs/how_it_works.md: `python docs/pictures.py`, with matplotlib."""

import io
import pathlib

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = pathlib.Path(__file__).parent / "pictures"
PARTS = ["#4477aa", "#cc6644", "#338866", "#aa6688"]  # micro-batches
INK, PALE, PAPER, BAD = "#333333", "#dddddd", "#fefefe", "#bb5522"
DARK = {INK: "#ced6dd", PALE: "#48566b", PAPER: "#14181e", BAD: "#ee8866"}
plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "optax_accum",
        "font.size": 13,
        "axes.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor"), INK
        ),
        **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    }
)
plt.rcParams["font.family"] = ["DejaVu Sans", "sans-serif"]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns an empty page whose unit is about a tenth of an inch."""
    figure, axes = plt.subplots(figsize=(width / 10, height / 10))
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str = "",
    color: str = PALE,
) -> None:
    """A rounded box with a text in its middle."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            "round,pad=0,rounding_size=0.8",
            fc=color,
            ec="none",
        )
    )
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        color={PALE: INK, INK: PAPER}.get(color, "white"),
    )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = INK,
) -> None:
    """An arrow."""
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, color=color, lw=1.2
        )
    )


def law() -> Figure:
    """A batch of 12 rows, whole and as micro-batches of 5, 1 and 6."""
    figure, axes = canvas(80, 38)
    sizes, x = (5, 1, 6), 4.0
    axes.text(4, 35, "one batch of 12 rows, whole", va="center")
    box(axes, 4, 28, 38, 4.5, "rows", PALE)
    arrow(axes, (43, 30.2), (58, 30.2))
    box(axes, 59, 28, 17, 4.5, "g", INK)
    axes.text(4, 22, "split into micro-batches of 5, 1 and 6", va="center")
    for part, (size, color) in enumerate(zip(sizes, PARTS, strict=False)):
        width = size * 3
        for row in range(size):
            axes.add_patch(
                Rectangle(
                    (x + 3 * row + 0.2, 15), 2.6, 4.5, fc=color, ec="none"
                )
            )
        middle = x + width / 2
        arrow(axes, (middle, 14.6), (middle, 11), color)
        axes.text(
            middle,
            9.2,
            f"{size} g{'₁₂₃'[part]}",
            ha="center",
            va="center",
        )
        x += width + 1
    for plus in (16.5, 27.2):
        axes.text(plus, 9.2, "+", ha="center", va="center")
    arrow(axes, (43, 9.2), (58, 9.2))
    axes.text(50.5, 11, "/ (5 + 1 + 6)", ha="center", va="center")
    box(axes, 59, 7, 17, 4.5, "g, the same", INK)
    axes.text(
        4,
        2.2,
        "a mean of three means would count the one row of the second too often",
        color=BAD,
    )
    return figure


def window() -> Figure:
    """Ten micro-steps: two windows of four, and one that is flushed after two."""
    figure, axes = canvas(97, 46)
    weights = (3, 5, 2, 4, 4, 1, 5, 3, 4, 2)
    closes = {3: "step", 7: "step", 9: "flush"}
    total, level, x = 0.0, 8.0, 20.5
    names = {
        "micro-step": 42,
        "weight so far": 30,
        "mini_step": 20.5,
        "gradient_step": 16.5,
        "parameters": 9,
    }
    for name, y in names.items():
        axes.text(1.5, y, name, va="center", fontsize=12)
    mini = updates = 0
    for number, weight in enumerate(weights):
        color = PARTS[updates]
        total, mini = total + weight, mini + 1
        box(
            axes,
            x + 0.5,
            40,
            6.4,
            4,
            closes.get(number, "add"),
            color if number in closes else PALE,
        )
        axes.add_patch(
            Rectangle(
                (x + 1.5, 24), 4.4, total, fc=color, alpha=0.45, ec="none"
            )
        )
        axes.add_patch(
            Rectangle(
                (x + 1.5, 24 + total - weight), 4.4, weight, fc=color, ec="none"
            )
        )
        new = level
        if number in closes:
            total, mini, updates, new = 0.0, 0, updates + 1, level + 2.2
        axes.text(x + 3.7, 20.5, str(mini), ha="center", va="center")
        axes.text(x + 3.7, 16.5, str(updates), ha="center", va="center")
        axes.plot(
            [x, x + 6.4, x + 6.4, x + 7.4],
            [level, level, new, new],
            color=INK,
            lw=1.6,
        )
        level, x = new, x + 7.4
    axes.plot([20.5, 94.5], [24, 24], color=INK, lw=0.6)
    axes.text(
        20.5,
        3,
        "until a step, parameters and optimizer state stay the same, bit for bit",
        va="center",
        fontsize=12,
    )
    return figure


def program() -> Figure:
    """What a micro-step moves, in copies of the parameters: AdamW on an H100, docs/accelerators.md."""
    figure, axes = plt.subplots(figsize=(8.4, 4))
    steps = range(1, 9)
    axes.bar(
        [s - 0.2 for s in steps],
        [9] * 8,
        0.38,
        color=PALE,
        label="optax.MultiSteps: 72 in all",
    )
    axes.bar(
        [s + 0.2 for s in steps],
        [3] * 8,
        0.38,
        color=PARTS[0],
        label="add: read sum, read gradient, write sum",
    )
    axes.bar(
        [8.2],
        [7],
        0.38,
        bottom=[3],
        color=PARTS[1],
        label="update: read 4, write 3;  31 in all",
    )
    axes.set(
        xlabel="micro-step of a window of 8",
        ylabel="HBM bytes / parameters' bytes",
        xticks=list(steps),
        ylim=(0, 17),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=12)
    figure.tight_layout()
    return figure


def devices() -> Figure:
    """Four devices, four micro-batches, one reduction."""
    figure, axes = canvas(84, 44)
    for step in range(4):
        axes.text(
            17.5 + 10 * step,
            41,
            f"{step + 1}",
            ha="center",
            va="center",
            fontsize=12,
        )
    axes.text(1, 41, "micro-step", va="center", fontsize=12)
    for device in range(4):
        y = 32 - 8 * device
        axes.text(1, y + 2.5, f"device {device + 1}", va="center", fontsize=12)
        for step in range(4):
            box(
                axes,
                13.5 + 10 * step,
                y,
                8,
                5,
                f"g{'₁₂₃₄'[step]}",
                PARTS[device],
            )
            arrow(
                axes,
                (21.6 + 10 * step, y + 2.5),
                (23.6 + 10 * step, y + 2.5),
                PARTS[device],
            )
        box(axes, 53.6, y, 9, 5, "sum", PARTS[device])
        arrow(axes, (63, y + 2.5), (67.4, y + 2.5), PARTS[device])
    box(axes, 67.5, 8, 6, 29, "", INK)
    axes.text(
        70.5,
        22.5,
        "one reduction",
        rotation=90,
        ha="center",
        va="center",
        color=PAPER,
    )
    arrow(axes, (73.6, 22.5), (78, 22.5))
    axes.text(78.5, 22.5, "g", va="center")
    axes.text(
        13.5,
        3,
        "devices send nothing to one another until the window closes",
        va="center",
        fontsize=12,
    )
    return figure


def themed(svg: str) -> str:
    """Returns a picture that is dark where the page around it is."""
    rules = "".join(
        f'[style*="{part}: {light}"] {{ {part}: {dark} !important }}\n'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    )
    dark = f"@media (prefers-color-scheme: dark) {{\n{rules}}}\n"
    return svg.replace("<defs>", f"<style>\n{dark}</style>\n <defs>", 1)


def main() -> None:
    """Writes all pictures, each the same from run to run."""
    HERE.mkdir(exist_ok=True)
    for draw in (law, window, program, devices):
        drawn = io.StringIO()
        draw().savefig(drawn, format="svg", metadata={"Date": None})
        lines = (
            line.rstrip() for line in themed(drawn.getvalue()).splitlines()
        )  # matplotlib's end with spaces
        (HERE / f"{draw.__name__}.svg").write_text(
            "".join(f"{line}\n" for line in lines)
        )


if __name__ == "__main__":
    main()
