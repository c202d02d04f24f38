"""The lengths that rows are padded to, and how many rows of each length a micro-batch takes."""

from typing import Any, NamedTuple

import numpy as np

from optax_accum._arguments import checks
from optax_accum._core.messages import counted
from optax_accum.batching._packed import Ints

STEP = 1.1  # the rows that fit a default bucket, by those that fit the next longer one
MORE = 1.02  # micro-batches with default buckets, at most, by the fewest of any packing
MOST = 512  # lengths among which buckets are chosen


class Room(NamedTuple):
    """How many groups a micro-batch takes."""

    budget: int  # tokens for one row of each group, on one device
    most: int  # groups, if all are in one micro-batch: a power of two, for batches of another size to have the same
    devices: int

    def groups(self, padded: Ints) -> Ints:
        """The groups of one device, at these padded lengths."""
        return np.minimum(self.budget // padded, self.most)

    def starts(self, padded: Ints) -> list[int]:
        """Where micro-batches start among sorted groups, if each takes what its first is padded to allows."""
        taken, starts, at = (self.devices * self.groups(padded)).tolist(), list[int](), 0
        while at < len(taken):
            starts.append(at)
            at += taken[at]
        return starts


def bucket_of(longest: Ints, buckets: Ints) -> Ints:
    """Returns the bucket of each group."""
    return buckets[np.searchsorted(buckets, longest)]


def chosen_buckets(asked: Any, longest: Ints, room: Room, count: int | None) -> Ints:
    """Returns the padded lengths to choose from, shortest first."""
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
    """Returns the coarsest buckets that make `count` micro-batches at most, or `MORE` times the fewest of any packing.

    They are lengths of which 1, 2, 3, ... fit the budget, and then `STEP` times as many from one to the next; these and
    those between; or those that the fewest micro-batches begin with.
    """
    first = longest[room.starts(longest)]  # of the fewest, each padded to its longest
    most = count or MORE * len(first)
    numbers = _numbers(room.budget)
    between = numbers[:-1] + np.diff(numbers) // 2
    for fit in (numbers, np.append(numbers, between)):
        buckets = np.unique(room.budget // fit)
        if len(room.starts(bucket_of(longest, buckets))) <= most:
            return buckets
    return np.unique(room.budget // np.append(numbers, room.budget // first))


def _numbers(budget: int) -> Ints:
    """Returns 1, 2, 3, ..., and then `STEP` times as many from one to the next, up to the budget."""
    numbers, fit = list[int](), 1
    while fit <= budget:
        numbers.append(fit)
        fit = max(fit + 1, int(fit * STEP))
    return np.array(numbers)


def _best(longest: Ints, room: Room, count: int) -> Ints:
    """Returns the buckets, at most `count`, for which these groups need the fewest micro-batches.

    A group whose bucket lets c of them into a micro-batch takes 1 / c of it. The sum of that is least by dynamic
    programming over the lengths that end a class of equal c: of p classes, the last q may share a bucket.
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
