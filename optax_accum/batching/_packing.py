"""Packing by tokens: which rows go together, on which device."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from optax_accum._arguments import checks
from optax_accum._arguments.rows import check_groups
from optax_accum._core.messages import counted
from optax_accum.batching._buckets import Room, bucket_of, chosen_buckets
from optax_accum.batching._packed import Ints, TokenPacking

Cost = Literal["tokens", "squares"] | Callable[[Ints], Any]


def token_microbatches(
    lengths: Any,
    max_tokens: int,
    *,
    num_devices: int = 1,
    num_microbatches: int | None = None,
    cost: Cost = "tokens",
    group_size: int = 1,
    buckets: int | Sequence[int] | None = None,
) -> TokenPacking:
    """Packs rows of different lengths into micro-batches by their tokens.

    A micro-batch has at most `max_tokens` tokens on a device, padding
    included. Rows are sorted, longest first, and fill one micro-batch after
    the other. With L the bucket of its longest row (the shortest padded
    length that holds it), a micro-batch takes the next

        num_devices * floor(max_tokens / L)    rows

    So `rows * L <= max_tokens` on every device, and no other packing has
    fewer micro-batches for these buckets. JAX compiles one program for each
    shape, and the shapes are those of the buckets.

    Args:
      lengths: the tokens of each row of the batch, integers [n]; or those
        of a whole data set, to find its buckets.
      max_tokens: the most tokens of a micro-batch on one device, padding
        included.
      num_devices: the devices that share each micro-batch.
      num_microbatches: how many micro-batches to return, by default as many
        as are needed. Spare ones hold no row: they have weight 0 and the
        shape of another, so that nothing is compiled again.
      cost: the quantity to balance over devices: `"tokens"`, `"squares"` of
        lengths, as attention costs, or a function from lengths [n] to costs
        [n].
      group_size: this many consecutive rows always stay together, on one
        device.
      buckets: the padded lengths, or how many of them to choose for these
        rows. By default the lengths at which 1, 2, 3, ... rows fill the
        budget, the same for all batches: 31 of them for a `max_tokens` of
        256, 77 for 16384. If these need over 2 % more micro-batches than
        the best packing, buckets are added; with `num_microbatches`, only
        if they need more than that number.

    Returns:
      A `TokenPacking`. Its micro-batches may be added in any order, with
      their tokens as weights.

    Raises:
      TypeError, ValueError: lengths that are not integers of at least 1; a
        row, or a group, beyond the budget or the largest bucket; more
        micro-batches needed than `num_microbatches`.

    Guarantees:
      * Any lengths: every row is in one micro-batch, once; no device's
        share exceeds `max_tokens`.
      * The same input: the same packing; nothing is random.
      * Several devices: the numbers of rows of a micro-batch differ by at
        most one; the costs of all, by at most the cost of one row.
      * `group_size`: the same of groups, which count as their longest row.
      * Default buckets: the fewest micro-batches of any packing, or at most
        2 % more; under 50, the fewest.
      * `num_microbatches` above what is needed: maybe fewer buckets, and
        more micro-batches that hold rows.
      * Buckets that another packing returned: its shapes, if its budget and
        devices were the same.
      * Fewer rows than a micro-batch could take: one for as many, rounded
        up to a power of two.
      * Fewer rows than devices: devices without a row have weight 0; guard
        a 0 / 0 in the loss with `jnp.maximum`.

    Example:
      >>> import optax_accum
      >>> rows = [[5, 6, 7, 8], [1], [2, 3], [4], [9, 9, 9]]
      >>> lengths = [len(row) for row in rows]
      >>> packing = optax_accum.batching.token_microbatches(lengths, 8)
      >>> print(packing)
      5 rows, 11 tokens: 2 micro-batches, 68.8% of the budget of 8 tokens filled
            1 of     2 rows x      4 tokens,  87.5% of them no padding
            1 of     4 rows x      2 tokens,  50.0% of them no padding
      >>> packing.take(0, rows)
      array([[5, 6, 7, 8],
             [9, 9, 9, 0]])
      >>> packing.order.tolist(), packing.tokens.tolist()
      ([0, 4, 2, 1, 3], [[7], [4]])

    References:
      Batches of sorted lengths under a budget of tokens are those of
      fairseq's `--max-tokens` and of
      `tf.data.Dataset.bucket_by_sequence_length`. Dealing to the least
      loaded device, the costliest first, is from R. Graham, *Bounds on
      multiprocessing timing anomalies*, SIAM J. Appl. Math. 17 (1969).
    """
    budget, devices = checks.as_count("max_tokens", max_tokens), checks.as_count("num_devices", num_devices)
    group = checks.as_count("group_size", group_size)
    lengths = _checked(lengths, budget, group)
    longest = lengths.reshape(-1, group).max(-1)
    order = np.argsort(-longest, kind="stable")
    longest = longest[order]
    own = -(-len(order) // devices)  # groups of a device
    room = Room(min(budget // group, np.iinfo(np.int64).max), 1 << (own - 1).bit_length(), devices)
    count = checks.as_positive("num_microbatches", num_microbatches)
    chosen = chosen_buckets(buckets, longest, room, count)
    padded = bucket_of(longest, chosen)
    starts = room.starts(padded)
    spare = _spare(count, len(starts), max_tokens, ", or more buckets" * (buckets is not None))
    costs = _costs(cost, lengths).reshape(-1, group).sum(-1)[order]
    first = [*starts, *[starts[-1]] * spare]  # a spare micro-batch has the shape of the last
    return TokenPacking(
        rows=_laid_out(order, _dealt(costs.tolist(), starts, devices), starts, devices, spare, group),
        lengths=lengths,
        padded_lengths=tuple(padded[first].tolist()),
        device_rows=tuple((group * room.groups(padded[first])).tolist()),
        buckets=tuple(chosen.tolist()),
        max_tokens=budget,
    )


def _checked(lengths: Any, budget: int, group: int) -> Ints:
    """Returns the lengths as an array, if each is an integer of at least 1 that fits."""
    rule, remedy = "lengths must be one integer for each row", "Pass [len(row) for row in rows], say."
    try:
        found = np.asarray(lengths)
    except ValueError:
        raise TypeError(f"{rule}: they are no array. {remedy}") from None
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        raise TypeError(f"{rule}: lengths is {found.dtype}{list(found.shape)}. {remedy}")
    if not found.size:
        raise ValueError(f"{rule}: lengths is empty. Skip empty batches.")
    if found.min() < 1:
        row = int(found.argmin())
        raise ValueError(f"Every row must have a token: lengths[{row}]={found[row]}. Leave such rows out.")
    check_groups("lengths has", len(found), group)
    if group * int(found.max()) > budget:
        row, many = int(found.argmax()), int((found > budget // group).sum())
        more = f", and {many - 1} more {'is' if many == 2 else 'are'} too long" if many > 1 else ""
        together = f" {group} times, with the rows of its group" if group > 1 else ""
        raise ValueError(
            f"Every row must fit the budget{together}: row {row} has {counted(found[row], 'token')}, max_tokens="
            f"{budget}{more}. Cut such rows, leave them out, or raise max_tokens."
        )
    if len(found) * int(found.max()) >= 2**62:
        raise ValueError(
            f"Lengths must be numbers of tokens, which 64 bits count: {counted(len(found), 'row')} of up to "
            f"{found.max()}. Pass [len(row) for row in rows], say."
        )
    return found.astype(np.int64)


def _spare(count: int | None, needed: int, max_tokens: int, or_else: str) -> int:
    """Returns how many micro-batches are to hold no row."""
    count = count or needed
    if count < needed:
        raise ValueError(
            f"num_microbatches must be enough for the rows: num_microbatches={count}, and {needed} are needed for "
            f"max_tokens={max_tokens}. Pass at least as many, or a larger max_tokens{or_else}."
        )
    return count - needed


def _costs(cost: Cost, lengths: Ints) -> NDArray[Any]:
    """Returns what each row costs."""
    if not callable(cost):
        word = checks.one_of("cost", cost, ("tokens", "squares"), ", or a function of the lengths")
        return lengths if word == "tokens" else lengths.astype(float) ** 2
    found = np.asarray(cost(lengths))
    if found.shape != lengths.shape or found.dtype.kind not in "iuf" or not np.isfinite(found).all() or found.min() < 0:
        raise ValueError(
            f"A callable cost must return a number >= 0 for each row: it returned {found.dtype}{list(found.shape)} for "
            f"{counted(len(lengths), 'row')}, or a number that is negative or not finite. Return lengths**1.5, say."
        )
    return found


def _dealt(costs: list[float], starts: list[int], devices: int) -> list[int]:
    """Returns the device of each group: of so many as there are devices, the costliest goes where least was so far."""
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


def _laid_out(order: Ints, own: list[int], starts: list[int], devices: int, spare: int, group: int) -> Ints:
    """Returns the row numbers [k, d, r] of the groups in `order`, on the devices in `own`, with -1 elsewhere."""
    place = np.arange(len(order))
    microbatch = np.searchsorted(starts, place, "right") - 1
    slot = (place - np.asarray(starts)[microbatch]) // devices  # each device takes one at a time
    first = np.full((len(starts) + spare, devices, slot.max() + 1), -1, np.int32)  # the first row of each group
    first[microbatch, own, slot] = order * group
    rows = np.where(first[..., None] < 0, -1, first[..., None] + np.arange(group, dtype=np.int32))
    return rows.reshape(*first.shape[:2], -1)
