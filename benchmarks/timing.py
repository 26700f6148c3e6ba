"""Honest timing on a noisy machine: warm up, interleave the competitors, take medians, print the spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds of many runs."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:9.1f} ms  [{self.low:.1f}, {self.high:.1f}]"


def race(runners: dict[str, Callable[[], object]], *, rounds: int, warm_up: int = 2) -> dict[str, Timing]:
    """Time all runners in turn, `rounds` times; quartiles of each."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for run in runners.values():
        for _ in range(warm_up):
            run()
    for _ in range(rounds):
        for name, run in runners.items():
            begin = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begin))
    quartiles = {name: statistics.quantiles(spent, n=4, method="inclusive") for name, spent in times.items()}
    return {name: Timing(q[1], q[0], q[2]) for name, q in quartiles.items()}
