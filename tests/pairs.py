"""Combinations of options, few enough to compile: nearly all faults are of one option, or of two together."""

import itertools


def every_pair(*options):
    """The fewest combinations that a greedy search finds in which each two values of different options stand together."""
    pairs = lambda chosen: set(itertools.combinations(enumerate(chosen), 2))
    left = list(itertools.product(*(range(len(values)) for values in map(list, options))))
    wanted, taken = set().union(*map(pairs, left)), []
    while wanted:
        taken.append(max(left, key=lambda chosen: len(pairs(chosen) & wanted)))
        wanted -= pairs(taken[-1])
    return [tuple(list(values)[n] for values, n in zip(options, chosen, strict=True)) for chosen in taken]
