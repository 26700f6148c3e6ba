"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ResumePoint:
    """The progress of a run.

    Attributes:
        step, evaluations: optimizer steps and evaluations so far.
        loss, steps, units, seconds: sums since the last evaluation.
        best: the best metric so far; waited: evaluations since then.
        finished: whether no further step is needed.
    """

    step: int = 0
    evaluations: int = 0
    loss: float = 0.0
    steps: int = 0
    units: int = 0
    seconds: float = 0.0
    best: float | None = None
    waited: int = 0
    finished: bool = False


def parse_position(fields: dict[str, Any]) -> ResumePoint:
    """The resume point with these fields; raises TypeError or ValueError for others."""
    position = ResumePoint(**fields)
    counts = (position.step, position.evaluations, position.steps, position.units, position.waited)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(repr(position))
    return position
