"""Timing on a noisy machine: warm up, interleave the competitors, take medians, print the spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Run = Callable[[], object]

TURN = 0.02  # seconds that one competitor runs in a row, when its calls are shorter than that
MOST_CALLS = 8  # calls in one turn
SETTLING = 0.05  # calls longer than this many seconds need no settling: what lingers is gone after a few milliseconds


@dataclass(frozen=True)
class Timing:
    """Milliseconds of many runs: the median and the two quartiles."""

    median: float
    low: float
    high: float
    calls: int = 0
    checksum: float = 0.0

    def __str__(self) -> str:
        return f"{self.median:9.1f} ms  [{self.low:.1f}, {self.high:.1f}]"

    @property
    def seconds(self) -> float:
        return self.median / 1e3


def race(runners: Mapping[str, Run], *, rounds: int, seconds: float = 0.0, warm_up: int = 2) -> dict[str, Timing]:
    """Time all runners in turn, at least `rounds` times and until `seconds` have passed; quartiles of each.

    A turn begins with a call that does not count: the threads and the cached data of the one before still linger. The
    first of a round comes last in the next, so that none always follows the same neighbour.
    """
    entrants = [_Competitor(name, run, warm_up) for name, run in runners.items()]
    begin, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        first = done % len(entrants)
        for entrant in entrants[first:] + entrants[:first]:
            entrant.turn()
        done += 1
    return {entrant.name: entrant.timing() for entrant in entrants}


class _Competitor:
    """One competitor, its times so far and a checksum of its results, so that no result goes unused."""

    def __init__(self, name: str, run: Run, warm_up: int) -> None:
        self.name, self.run = name, run
        self.times: list[float] = []
        self.checksum = 0.0
        self.typical = min((self.call() for _ in range(warm_up)), default=SETTLING)

    def turn(self) -> None:
        if self.typical < SETTLING:
            self.call()
        for _ in range(max(1, min(MOST_CALLS, round(TURN / self.typical)))):
            self.times.append(self.call())

    def call(self) -> float:
        begin = time.perf_counter()
        result = self.run()
        spent = time.perf_counter() - begin
        self.checksum += _reduce_to_number(result)
        return spent

    def timing(self) -> Timing:
        if len(self.times) < 2:
            self.times.append(self.call())
        low, median, high = (1e3 * q for q in statistics.quantiles(self.times, n=4, method="inclusive"))
        return Timing(median, low, high, len(self.times), self.checksum)


def _reduce_to_number(result: object) -> float:
    """Any one number of a tensor, or of the first of several."""
    if isinstance(result, tuple | list):
        return _reduce_to_number(result[0]) if result else 0.0
    if isinstance(result, Tensor):
        return result.detach()[(0,) * result.ndim].item()
    return 0.0
