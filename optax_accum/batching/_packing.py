"""Packing by tokens: the rows that go together, and the lengths to which they are padded."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optax_accum._shared import checks
from optax_accum._shared.checks import counted
from optax_accum.batching._packed import Ints, TokenPacking, dealt, laid_out

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
        rows=laid_out(order, dealt(costs.tolist(), starts, devices), starts, devices, spare, group),
        lengths=lengths,
        padded_lengths=tuple(padded[first].tolist()),
        device_rows=tuple((group * room.groups(padded[first])).tolist()),
        buckets=tuple(chosen.tolist()),
        max_tokens=budget,
    )


def _checked(lengths: Any, budget: int, group: int) -> Ints:
    """The lengths as an array; raises unless each is an integer of at least 1 that fits."""
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
    checks.check_groups("lengths has", len(found), group)
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
    """The number of micro-batches that hold no row."""
    count = count or needed
    if count < needed:
        raise ValueError(
            f"num_microbatches must be enough for the rows: num_microbatches={count}, and {needed} are needed for "
            f"max_tokens={max_tokens}. Pass at least as many, or a larger max_tokens{or_else}."
        )
    return count - needed


def _costs(cost: Cost, lengths: Ints) -> NDArray[Any]:
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


STEP = 1.1  # the rows that fit a default bucket, relative to the next longer one
MORE = 1.02  # the most micro-batches with default buckets, relative to the fewest of any packing
MOST = 512  # lengths among which buckets are chosen


class Room(NamedTuple):
    """How many groups a micro-batch takes."""

    budget: int  # tokens for one row of each group, on one device
    most: int  # groups, if all are in one micro-batch: a power of two, so that batches of other sizes have the same
    devices: int

    def groups(self, padded: Ints) -> Ints:
        """The groups of one device, at these padded lengths."""
        return np.minimum(self.budget // padded, self.most)

    def starts(self, padded: Ints) -> list[int]:
        """Where micro-batches start among sorted groups: each takes as many as the padded length of its first fits."""
        taken, starts, at = (self.devices * self.groups(padded)).tolist(), list[int](), 0
        while at < len(taken):
            starts.append(at)
            at += taken[at]
        return starts


def bucket_of(longest: Ints, buckets: Ints) -> Ints:
    """The shortest bucket that holds the longest row of each group."""
    return buckets[np.searchsorted(buckets, longest)]


def chosen_buckets(asked: Any, longest: Ints, room: Room, count: int | None) -> Ints:
    """The padded lengths to choose from, shortest first."""
    if asked is None:
        return _default(longest, room, count)
    if np.ndim(asked) == 0:
        return _best(longest, room, checks.as_count("buckets", asked))
    chosen = np.unique([checks.as_count("buckets", length) for length in asked])
    if not len(chosen) or not longest[0] <= chosen[-1] <= room.budget:
        raise ValueError(
            f"The largest bucket must hold the longest row, and fit max_tokens: buckets={chosen.tolist()}, the longest "
            f"row has {counted(longest[0], 'token')}, and {room.budget} fit. Pass such lengths, or how many to choose."
        )
    return chosen


def _default(longest: Ints, room: Room, count: int | None) -> Ints:
    """The coarsest buckets that make `count` micro-batches at most, or `MORE` times the fewest of any packing.

    Three sets are tried: lengths of which 1, 2, 3, ... fit the budget, and then `STEP` times as many from one to the
    next; these and lengths between them; these and the lengths with which the fewest micro-batches begin.
    """
    first = longest[room.starts(longest)]  # of the fewest micro-batches, each padded to its longest
    most = count or MORE * len(first)
    numbers = _numbers(room.budget)
    between = numbers[:-1] + np.diff(numbers) // 2
    for fit in (numbers, np.append(numbers, between)):
        buckets = np.unique(room.budget // fit)
        if len(room.starts(bucket_of(longest, buckets))) <= most:
            return buckets
    return np.unique(room.budget // np.append(numbers, room.budget // first))


def _numbers(budget: int) -> Ints:
    """1, 2, 3, ..., and then `STEP` times as many from one to the next, up to the budget."""
    numbers, fit = list[int](), 1
    while fit <= budget:
        numbers.append(fit)
        fit = max(fit + 1, int(fit * STEP))
    return np.array(numbers)


def _best(longest: Ints, room: Room, count: int) -> Ints:
    """The buckets, at most `count`, for which these groups need the fewest micro-batches.

    A group whose bucket lets c of them into a micro-batch takes 1 / c of it. Dynamic programming over the lengths that
    end a class of equal c makes the sum least: of p classes, the last q may share a bucket.
    """
    edges, number = np.unique(longest, return_counts=True)
    ends = np.flatnonzero(np.append(np.diff(room.groups(edges)) != 0, True))
    ends = ends[np.unique(np.linspace(0, len(ends) - 1, MOST).astype(int))]
    edges, below = edges[ends], np.append(0, np.cumsum(number)[ends])  # [p], [p + 1]
    shared = (below - below[:, None]) / np.append(1, room.groups(edges))  # [from, to]
    shared[np.tri(len(below), k=-1, dtype=bool)] = np.inf
    least, came = np.where(below > 0, np.inf, 0.0), list[Ints]()
    for _ in range(min(count, len(edges))):
        paths = least[:, None] + shared
        came.append(paths.argmin(0))
        least = paths.min(0)
    to, chosen = len(edges), set[int]()
    for source in reversed(came):
        if source[to] != to:
            chosen.add(int(edges[to - 1]))
        to = source[to]
    return np.array(sorted(chosen))
