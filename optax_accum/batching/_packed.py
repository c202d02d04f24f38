"""Micro-batches of rows of different lengths: dealt to devices, gathered, put back in order, how full they are."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from optax_accum._shared.checks import counted

Ints = NDArray[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenPacking:
    """Which rows are in which micro-batch, on which device.

    See `token_microbatches`.

    Of k micro-batches on d devices, with the lengths of n rows:

    Attributes:
      rows: row numbers [k, d, r], int32; -1 where there is none.
      lengths: the tokens of each row [n].
      padded_lengths: the length to which the rows of each micro-batch are
        padded.
      device_rows: the rows of each micro-batch on one device, those of
        padding included.
      buckets: the padded lengths to choose from; pass them on for the next
        batch, which then compiles nothing anew.
      max_tokens: the budget: no `device_rows * padded_lengths` exceeds it.
    """

    rows: Ints
    lengths: Ints
    padded_lengths: tuple[int, ...]
    device_rows: tuple[int, ...]
    buckets: tuple[int, ...]
    max_tokens: int

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches, spare ones included."""
        return len(self.rows)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.rows.shape[1]

    @property
    def tokens(self) -> Ints:
        """The tokens of each micro-batch on each device [k, d].

        Padding is left out: these numbers are the weights.
        """
        return np.where(self.rows < 0, 0, self.lengths[self.rows]).sum(-1)

    @property
    def order(self) -> Ints:
        """The row numbers in the order in which they run [n]."""
        return self.rows[self.rows >= 0]

    @property
    def filled(self) -> float:
        """The share of the budget that tokens fill.

        Spare micro-batches are left out.
        """
        return float(self.tokens.sum()) / (self._used * self.num_devices * self.max_tokens)

    @property
    def padding(self) -> float:
        """The share of padding in the computation."""
        computed = np.multiply(self.device_rows, self.padded_lengths)[: self._used].sum()
        return 1 - float(self.tokens.sum()) / (self.num_devices * int(computed))

    def take(self, index: int, rows: Any, fill: Any = 0) -> NDArray[Any]:
        """Gathers micro-batch `index`: its rows, padded with `fill`.

        They come device after device, [d * device_rows, length].

        Args:
          index: which.
          rows: the n rows, each an array [length, ...], in a sequence or
            padded in one array [n, longest, ...]; or n numbers, one for
            each row, such as labels, which come as [d * device_rows]. Only
            rows that are needed are read, so any object with `rows[number]`
            will do.
          fill: what stands where there is no token.

        Raises:
          ValueError: fewer rows than were packed; a row of fewer tokens
            than `lengths` says, or of more, unless all are padded in one
            array.
        """
        rows = np.asarray(rows) if isinstance(rows, jax.Array) else rows
        padded, count = hasattr(rows, "shape"), len(self.lengths)
        if hasattr(rows, "__len__") and len(rows) < count:
            raise ValueError(
                f"take needs the rows that lengths counted: {counted(count, 'row')}, and {len(rows)} are given. Pass "
                "all rows of the batch; take chooses those of a micro-batch."
            )
        numbers, length, like = self._numbers(index), self.padded_lengths[index], np.asarray(rows[self.order[0]])
        shape = (len(numbers), length, *like.shape[1:]) if like.ndim else (len(numbers),)
        taken = np.full(shape, _as_fill(fill, like.dtype), like.dtype)
        for place in np.flatnonzero(numbers >= 0):
            number = numbers[place]
            row, tokens = np.asarray(rows[number]), self.lengths[number]
            if not np.can_cast(row.dtype, like.dtype):
                raise TypeError(
                    f"All rows must have one dtype: row {number} has {row.dtype}, row {self.order[0]} has "
                    f"{like.dtype}. Convert them, with np.asarray(row, np.{np.result_type(row, like)})."
                )
            if like.ndim == 0:
                taken[place] = row
            elif len(row) < tokens or not (padded or len(row) == tokens):
                raise ValueError(
                    f"A row must have as many tokens as lengths says: row {number} has {len(row)}, lengths[{number}]="
                    f"{tokens}. Pass the lengths of these rows"
                    f"{'.' if len(row) < tokens else ', or rows that are padded in one array, np.stack(rows).'}"
                )
            else:
                np.copyto(taken[place, :tokens], row[:tokens])
        return taken

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Tells the tokens of micro-batch `index` from padding.

        The mask has the shape [d * device_rows, length].
        """
        numbers = self._numbers(index)
        tokens = np.where(numbers < 0, 0, self.lengths[numbers])
        return np.arange(self.padded_lengths[index]) < tokens[:, None]

    def restore(self, outputs: Sequence[Any], *, ragged: bool = False) -> Any:
        """Undoes the order.

        One output [d * device_rows, ...] of each micro-batch becomes rows
        as they were.

        Args:
          outputs: one for each micro-batch; spare ones are not read and may
            be None.
          ragged: whether they have one entry for each token,
            [d * device_rows, length, ...].

        Returns:
          An array [n, ...]; or, with `ragged`, a list of n arrays
          [tokens of the row, ...], as `take` was given.
        """
        if len(outputs) != self.num_microbatches:
            raise ValueError(
                f"There must be one output for each micro-batch: {counted(len(outputs), 'output')}, "
                f"{counted(self.num_microbatches, 'micro-batch')}. Pass None for spare ones that were not run."
            )
        rows: list[Any] = []
        for index in range(self._used):
            numbers, output = self._numbers(index), np.asarray(outputs[index])
            if len(output) != len(numbers):
                raise ValueError(
                    f"An output must have one row for each row of its micro-batch: outputs[{index}] has {len(output)}, "
                    f"take({index}, ...) has {len(numbers)}. Return all rows, those of padding, too."
                )
            rows += list(output[numbers >= 0])
        back = np.argsort(self.order)
        if ragged:
            return [rows[place][: self.lengths[self.order[place]]] for place in back]
        return np.stack([rows[place] for place in back])

    def __str__(self) -> str:
        spare = self.num_microbatches - self._used
        lines = [
            f"{counted(len(self.lengths), 'row')}, {counted(self.lengths.sum(), 'token')}: "
            + counted(self._used, "micro-batch")
            + (f" and {spare} spare" if spare else "")
            + (f" on {self.num_devices} devices" if self.num_devices > 1 else "")
            + f", {self.filled:.1%} of the budget of {counted(self.max_tokens, 'token')} filled",
        ]
        shapes, tokens = list(zip(self.device_rows, self.padded_lengths, strict=True)), self.tokens.sum(-1)
        for shape in dict.fromkeys(shapes[: self._used]):
            which = [index for index in range(self._used) if shapes[index] == shape]
            share = tokens[which].sum() / (len(which) * self.num_devices * shape[0] * shape[1])
            lines.append(
                f"  {len(which):5} of {shape[0]:5} rows x {shape[1]:6} tokens, {share:6.1%} of them no padding"
            )
        return "\n".join(lines)

    @property
    def _used(self) -> int:
        return int((self.rows[:, :, 0] >= 0).any(-1).sum())  # spare ones come last

    def _numbers(self, index: int) -> Ints:
        """The row numbers of a micro-batch, -1 for padding, device after device [d * device_rows]."""
        if not 0 <= index < self.num_microbatches:
            raise IndexError(
                f"index must be that of a micro-batch: index={index}, and there are {self.num_microbatches}. Pass one "
                "of range(num_microbatches)."
            )
        numbers = np.full((self.num_devices, self.device_rows[index]), -1)
        own = self.rows[index, :, : self.device_rows[index]]
        numbers[:, : own.shape[1]] = own
        return numbers.reshape(-1)


def _as_fill(fill: Any, dtype: np.dtype[Any]) -> Any:
    """The fill in the dtype of the rows; raises if that dtype has no such number."""
    with np.errstate(invalid="ignore"):
        number = np.asarray(fill).astype(dtype)
    if dtype.kind in "biu" and number != fill:
        raise ValueError(f"fill must be a number of the dtype of the rows: fill={fill}, {dtype}. Convert the rows.")
    return number


def dealt(costs: list[float], starts: list[int], devices: int) -> list[int]:
    """The device of each group: the next groups, one for each device, are dealt, the costliest to the least loaded."""
    loads, own = [0.0] * devices, [0] * len(costs)
    if devices == 1:
        return own
    for start, end in itertools.pairwise([*starts, len(costs)]):
        for at in range(start, end, devices):
            together = sorted(range(at, min(at + devices, end)), key=costs.__getitem__, reverse=True)
            for group, device in zip(together, sorted(range(devices), key=loads.__getitem__), strict=False):
                own[group] = device
                loads[device] += costs[group]
    return own


def laid_out(order: Ints, own: list[int], starts: list[int], devices: int, spare: int, group: int) -> Ints:
    """The row numbers [k, d, r] of the groups in `order`, on the devices in `own`, with -1 elsewhere."""
    place = np.arange(len(order))
    microbatch = np.searchsorted(starts, place, "right") - 1
    slot = (place - np.asarray(starts)[microbatch]) // devices  # each device takes one at a time
    first = np.full((len(starts) + spare, devices, slot.max() + 1), -1, np.int32)  # the first row of each group
    first[microbatch, own, slot] = order * group
    rows = np.where(first[..., None] < 0, -1, first[..., None] + np.arange(group, dtype=np.int32))
    return rows.reshape(*first.shape[:2], -1)
