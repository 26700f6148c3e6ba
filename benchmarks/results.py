"""What a measurement found, as plain values that print, save and draw."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from benchmarks.machine import Load
from benchmarks.timing import Timing

OURS = "regard"


@dataclass(frozen=True)
class Verdict:
    """One number against its bar.

    Attributes:
        against: what the number compares ours with.
        by: the competitor that counted, the fastest of its group.
        value: the number, `None` when it could not be measured; `why` then says the reason.
        bar: what we want, `None` when the number is only shown.
        at_least: whether the bar is a floor; otherwise it is a ceiling.
    """

    case: str
    against: str
    value: float | None
    bar: float | None
    by: str = ""
    why: str = ""
    at_least: bool = True

    @property
    def holds(self) -> bool | None:
        if self.value is None or self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    @property
    def word(self) -> str:
        """In the margin of every table; what is lost or missing is marked."""
        if self.bar is None:
            return "no bar" if self.value is not None else "not measured"
        return {True: "holds", False: "<<< LOSES", None: "<<< NOT MEASURED"}[self.holds]


@dataclass
class Result:
    """Everything about one case in one run of the table.

    Attributes:
        about: pattern and sizes in words.
        timings: of the race, `OURS` among them.
        heats: peers that were timed briefly and left out of the race: simple forms, and slower peers of a group.
        groups: the group of each peer.
        gflop: useful operations of one call, for the rate.
        errors: the largest difference to float64 or to ours, for each that was checked.
        absent: competitors that could not run, and why.
        notes: further lines for the reader.
        failed: why there is no measurement at all.
    """

    name: str
    about: str = ""
    timings: dict[str, Timing] = field(default_factory=dict)
    heats: dict[str, Timing] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    gflop: float | None = None
    load: Load | None = None
    errors: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: str | None = None

    def as_json(self) -> dict:
        plain = dataclasses.asdict(self)
        for verdict, saved in zip(self.verdicts, plain["verdicts"], strict=True):
            saved["holds"] = verdict.holds
        if OURS in self.timings and self.gflop is not None:
            plain["useful_gflops"] = {name: self.gflop / timing.seconds for name, timing in self.timings.items()}
        return plain
