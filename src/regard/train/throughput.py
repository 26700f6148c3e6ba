"""How fast a run is: tokens or images a second, and the share of the machine's peak."""

from __future__ import annotations

from collections import deque

STEPS = 50  # over which the throughput is averaged


class Throughput:
    """Units a second over the last steps.

    flops: floating-point operations of one unit, forward and backward; peak: of the machine, a second.
    """

    def __init__(self, flops: float | None = None, peak: float | None = None) -> None:
        self.flops, self.peak = flops, peak
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEPS)

    def add(self, units: int, seconds: float) -> None:
        self._steps.append((units, seconds))

    @property
    def units_per_second(self) -> float | None:
        seconds = sum(each for _, each in self._steps)
        return sum(units for units, _ in self._steps) / seconds if seconds > 0 else None

    @property
    def peak_share(self) -> float | None:
        rate = self.units_per_second
        return None if rate is None or self.flops is None or not self.peak else rate * self.flops / self.peak
