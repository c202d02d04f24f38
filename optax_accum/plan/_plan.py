"""`Plan`: its table, its rows, its picture."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from optax_accum._shared.checks import counted
from optax_accum.plan._budgets import as_text
from optax_accum.plan._search import Compiled

KINDS = ("arguments", "unaliased", "temporary", "code")  # they add up to the peak
NETWORK = ("network", "exposed")  # of several devices
WIDTH = 88  # of a table, at most
NAMED = 0.01  # the share of the limit from which a table names the memory kept for all rows


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The fewest micro-batches that fit, and all compilations that were tried.

    Printed, it is a table.

    Attributes:
      num_microbatches: the fewest that fit; None in the plan of an error
        that says that none does.
      global_batch: the rows of one update.
      num_devices: the devices that share each micro-batch.
      target: what it was compiled for.
      budget: the bytes of one device.
      limit: the part of them that the plan may use, `safety * budget`.
      compiled: what was compiled, by number.
      copy: the bytes of the parameters on one device; of `of_loss` alone.
      sum: the bytes of the sum of their gradients; of `of_loss` alone.
      monotone: whether larger micro-batches, compiled in a loop, need more
        memory.
      shards: the parts into which the devices deal the rows, by default one
        for each device.
      skipped: what did not lower, and why.
      kept: the bytes on each device that are kept for all rows, however
        many micro-batches; 0 where they are not known. The table names
        them from 1 % of the limit on.
    """

    num_microbatches: int | None
    global_batch: int
    num_devices: int
    target: str
    budget: int
    limit: float
    compiled: tuple[Compiled, ...]
    copy: int | None = None
    sum: int | None = None
    monotone: bool = True
    shards: int | None = None
    skipped: tuple[str, ...] = ()
    kept: int = 0

    @property
    def microbatch_size(self) -> int:
        """The rows of the largest micro-batch, over all devices."""
        shards = self.shards or self.num_devices
        local_rows = -(-self.global_batch // shards)
        return min(self.global_batch, -(-local_rows // (self.num_microbatches or local_rows)) * shards)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each micro-batch, over all devices.

        They add to `global_batch`.
        """
        whole, rest = divmod(self.global_batch, self.microbatch_size)
        return (self.microbatch_size,) * whole + (rest,) * (rest > 0)

    @property
    def peak(self) -> float:
        """The bytes that the chosen step holds on each device."""
        if (chosen := self._chosen) is None:
            raise ValueError("Nothing fits: there is no number of micro-batches. See the table for what was compiled.")
        return chosen.footprint.peak

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table: a dict for each compiled number of micro-batches."""
        return [
            {
                "num_microbatches": one.candidate.number,
                "rows": one.candidate.rows,
                **{kind: getattr(one.footprint, kind) for kind in KINDS},
                "peak": one.footprint.peak,
                **{kind: getattr(one.footprint, kind) for kind in NETWORK},
                "refused": one.footprint.refused,
                "fits": one.fits,
                "chosen": one is self._chosen,
                "seconds": one.footprint.seconds,
            }
            for one in self.compiled
        ]

    def __str__(self) -> str:
        memory = ("arguments", "outputs", "temporary", "peak")
        head = ("micro-batches", "rows each", *memory, "fits", "compiled", *self._network)
        rows = _aligned([head, *map(self._cells, self.compiled)])
        fill = textwrap.TextWrapper(80, subsequent_indent="  ", break_on_hyphens=False).fill
        return "\n".join([fill(self._title()), *rows, *map(fill, self._notes())])

    __repr__ = __str__

    def plot(self) -> Any:
        """Draws the memory that each number of micro-batches needs.

        It is shown by kind, beside the limit. Returns matplotlib's figure.
        """
        from optax_accum.plan import _picture as picture

        return picture.draw(self)

    @property
    def _network(self) -> tuple[str, ...]:
        return NETWORK if self.num_devices > 1 else ()

    @property
    def _chosen(self) -> Compiled | None:
        return next((one for one in self.compiled if one.candidate.number == self.num_microbatches), None)

    def _title(self) -> str:
        devices = f"{self.num_devices} x " if self.num_devices > 1 else ""
        device = " a device" if self.num_devices > 1 else ""
        memory = f"{as_text(self.limit)}{device} of {as_text(self.budget)}"
        title = f"{counted(self.global_batch, 'row')} on {devices}{self.target}, {memory}: "
        if self.num_microbatches is None:
            return f"{title}nothing fits."
        return f"{title}{counted(self.num_microbatches, 'micro-batch')}."

    def _cells(self, one: Compiled) -> tuple[str, ...]:
        found, mark = one.footprint, "*" if one is self._chosen else " "
        rows = f"{one.candidate.rows}{' a device' if self.num_devices > 1 else ''}"
        sizes = [as_text(size) for size in (found.arguments, found.unaliased, found.temporary, found.peak)]
        moved = [as_text(getattr(found, kind)) for kind in self._network]
        if found.refused:
            sizes, moved = ["", "", *(f">{size}" for size in sizes[2:])], ["" for _ in moved]
        fits = "yes" if one.fits else "no"
        return f"{mark} {one.candidate.number}", rows, *sizes, fits, f"{found.seconds:.1f} s", *moved

    def _notes(self) -> list[str]:
        notes = ["Bytes on each device, as the compiler counts them."]
        if self._network:
            notes.append("Network: bytes that collectives move in a step; exposed: those beside which no product runs.")
        if not self.monotone:
            notes.append(
                "Memory is not monotone: of what was compiled, some larger micro-batches need less. Fewer may fit, too."
            )
        notes.extend(f"Not planned: {why.splitlines()[0]}" for why in self.skipped)
        if self.sum and self.copy and any(one.candidate.number > 1 for one in self.compiled):
            copies = f"{self.sum / self.copy:.3g} P = {as_text(self.sum)}"
            notes.append(f"Accumulating itself holds one sum of gradients, {copies}; one micro-batch needs none.")
        if self.kept > NAMED * self.limit:
            notes.append(
                f"Of the temporary memory {as_text(self.kept)} are kept for all rows, however many micro-batches: "
                "explain(loss, params, batch) names the lines."
            )
        if (line := self._line()) is not None:
            fixed, row = line
            notes.append(
                f"What does not shrink with the rows: {as_text(max(0.0, fixed))} beside arguments and outputs; each "
                f"row of a micro-batch adds {as_text(row)}."
            )
        return notes

    def _line(self) -> tuple[float, float] | None:
        """The memory at no rows, beside arguments and outputs, and the memory that a row adds to the peak.

        Both are those of the line through the two sizes of a kind that are farthest apart; None without two.
        """
        beside = lambda found: found.peak - found.arguments - found.unaliased
        loops = [one for one in self.compiled if one.candidate.number > 1]
        for ragged in (False, True):
            kind = [one for one in loops if one.candidate.ragged == ragged and not one.footprint.refused]
            if len(kind) > 1 and self._chosen:
                less, more = kind[-1], kind[0]
                rows = more.candidate.rows - less.candidate.rows
                adds = lambda of, less=less, more=more, rows=rows: (of(more.footprint) - of(less.footprint)) / rows
                fixed = beside(less.footprint) - adds(beside) * less.candidate.rows
                return fixed, adds(lambda found: found.peak)
        return None


class NothingFitsError(ValueError):
    """What `fit` raises where nothing fits.

    Attributes:
      plan: a `Plan` of all compilations, without a number of micro-batches.
    """

    def __init__(self, says: str, plan: Plan):
        super().__init__(says)
        self.plan = plan
        self.add_note(str(plan))


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; if it is too wide, of several tables, each with the first column."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    parts = [[0]]
    for column in range(1, len(widths)):
        wide = sum(widths[i] + 2 for i in (*parts[-1], column)) - 2 > WIDTH
        if wide and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(column)
    line = lambda part, cells: "  ".join(cells[i].rjust(widths[i]) for i in part).rstrip()
    return [line(part, cells) for part in parts for cells in table]
