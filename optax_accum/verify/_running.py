"""A sum that is clipped each time that something is added, as `.grad` is if a clip follows each backward()."""

import functools

import numpy as np

from optax_accum.verify._explanations import Change, Explanations

SCALES = np.geomspace(1e-2, 1e3, 41)  # of gradients, compared with the limit
FINER = (0.3, 0.06, 0.012, 0.0024)  # of the scale, around the best so far


def distance(e: Explanations, slot: str, found: Change, opposite: Change) -> float:
    """How far a window's change is from acc = clip(acc + g) at each micro-batch, and that of the opposite order, too.

    The limit is the length of what came out, without as much decay as makes both orders equally long. If the reference
    clips, too, nobody knows how long the gradients were: one scale of them all is sought.
    """
    entries = lambda change: np.concatenate([change[name].reshape(-1) for name in e.names(slot)])
    (a, b), drift = map(entries, (found, opposite)), entries(e.drift)
    along = float(2 * (a - b) @ drift)
    decay = float(a @ a - b @ b) / along * drift if along else 0 * drift
    parts, ends = [entries(part) - decay for part in e.parts], [a - decay, b - decay]
    lengths = [float(np.linalg.norm(end)) for end in ends]
    if not np.all(np.isfinite([*parts, *ends])) or np.ptp(lengths) > e.near * lengths[0]:
        return 1.0
    weights = e.combined(slot)[0], [1.0] * len(parts)
    return min(_nearest([w * part for w, part in zip(of, parts, strict=True)], ends, lengths[0]) for of in weights)


def _nearest(terms: list[np.ndarray], ends: list[np.ndarray], limit: float) -> float:
    """The distance of both ends from running sums of the terms, at the best scale of these."""
    clipped = lambda acc: acc * min(1.0, limit / max(float(np.linalg.norm(acc)), 1e-300))

    def far(scale: float) -> float:
        sums = [
            functools.reduce(lambda acc, g: clipped(acc + scale * g), order, np.zeros_like(terms[0]))
            for order in (terms, terms[::-1])
        ]
        return max(float(np.linalg.norm(acc - end)) / limit for acc, end in zip(sums, ends, strict=True))

    best = min(SCALES * limit / max(float(np.linalg.norm(terms, axis=1).mean()), 1e-300), key=far)
    for by in FINER:
        best = min(best * (1 + by) ** np.linspace(-1, 1, 9), key=far)
    return far(best)
