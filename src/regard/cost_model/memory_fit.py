"""The largest number with which a run still fits."""

from __future__ import annotations

import math
from collections.abc import Callable

FIRST = 64
# Where no limit is met up to here, there is none.
ENDLESS = 1 << 40


def largest(needed: Callable[[int], int], limit: int, most: int | None = None) -> int | float:
    """The largest whole `n <= most` with `needed(n) <= limit`; 0 if there is none, `inf` if there is no largest.

    `needed` grows with `n`, and is made of lines and parabolas, so that chords and slopes say where to look next: a
    handful of calls in place of some twenty, each of which follows a whole run.

    >>> largest(lambda n: 1000 + 8 * n * n, 24 << 30)
    56755
    """
    ceiling = ENDLESS if most is None else most
    known: dict[int, int] = {}

    def over(n: int) -> bool:
        if n not in known:
            known[n] = needed(n)
        return known[n] > limit

    low, high = 0, min(FIRST, ceiling)
    while high and not over(high):  # `low` fits, and what does not is still to be found
        if high == ceiling:
            return ceiling if most is not None else math.inf
        slope = (known[high] - known[low]) / (high - low) if low else 0
        further = high + (limit - known[high]) / slope + 1 if slope > 0 else math.inf
        low, high = high, int(min(max(further, 2 * high), ceiling, 1000 * high))
    halves = False
    while high - low > 1:
        guess = math.isqrt(low * high) if low and high > 4 * low else (low + high) // 2
        if low and not halves:
            # By the slope at `low` if its neighbour is known: a good one is exact, a bad one halves the next time.
            run, rise = high - low, known[high] - known[low]
            if low - 1 in known and known[low] > known[low - 1]:
                run, rise = 1, known[low] - known[low - 1]
            guess = min(max(low + int((limit - known[low]) * run / max(rise, 1)), low + 1), high - 1)
        before = high - low
        if over(guess):
            high = guess
        else:
            low = guess
            if not halves and low + 1 < high:  # confirms a guess that was right, or tells the slope
                low, high = (low, low + 1) if over(low + 1) else (low + 1, high)
        halves = not halves and 4 * (high - low) > before
    return low
