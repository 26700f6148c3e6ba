"""The least time that a cost takes on a machine, and what it waits for.

    time >= sum over parts of max(operations / peak, bytes / bandwidth)

Source: Williams, Waterman and Patterson, Roofline: An Insightful Visual Performance Model (2009). A part that does
fewer operations for each byte than the machine could do meanwhile (its balance) waits for memory, any other for
multiply-adds.

It is a lower bound, for three reasons: no part runs at the peak, which large products alone reach; exponentials, norms
and the calls themselves take time that is not counted; and a part's operands may move more than once. What can
undercut it are caches: where one part leaves to the next what fits them, those bytes never see memory. A kernel that
fuses parts does so on purpose; `cost(..., backend="native")` counts bytes as ours moves them. If all bytes of a run
together fit the last cache, its bandwidth is used instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from regard.cost_model.cost import Cost
from regard.cost_model.machine import Machine, this_machine
from regard.cost_model.units import short
from regard.render.table import Cell, Column, Table
from regard.render.terminal import WIDTH

MOST_PARTS = 30  # beyond so many, the table shows them together, unless levels= is given


@dataclass(frozen=True)
class Timed:
    """The least time of one part.

    Attributes:
        flops, bytes: what it does and what it moves.
        compute, memory: seconds that each of them takes at best.
        seconds: the larger of the two; more only where several parts are shown as one.
    """

    name: str
    flops: float
    bytes: float
    compute: float
    memory: float
    seconds: float
    waits_for_memory: float = 0.0  # seconds of those parts in it that wait for memory

    @property
    def bound(self) -> str:
        """What it waits for most of the time: `"compute"` or `"memory"`."""
        return "memory" if 2 * self.waits_for_memory > self.seconds else "compute"

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def __add__(self, other: Timed) -> Timed:
        numbers = ("flops", "bytes", "compute", "memory", "seconds", "waits_for_memory")
        return Timed(self.name, *(getattr(self, name) + getattr(other, name) for name in numbers))


@dataclass(frozen=True)
class Prediction:
    """The least time of a cost on a machine, part by part: see this module for what it leaves out.

    >>> from regard import Attention, cost
    >>> from regard.cost_model.machine import Machine
    >>> slow = Machine("slow", threads=1, peak=1e9, bandwidth=1e9)
    >>> predicted = cost(Attention(), tokens=100, dim=50).roofline(slow)
    >>> predicted.bound, round(predicted.seconds, 3)
    ('compute', 0.002)
    """

    name: str
    machine: Machine
    parts: tuple[Timed, ...]

    @property
    def total(self) -> Timed:
        """All parts one after the other."""
        return _together("all", self.parts)

    @property
    def seconds(self) -> float:
        """The lower bound."""
        return self.total.seconds

    @property
    def bound(self) -> str:
        """What takes most of that time: `"compute"` or `"memory"`."""
        return self.total.bound

    @property
    def intensity(self) -> float:
        """Operations for each byte; compare it with `machine.balance`."""
        return self.total.intensity

    def grouped(self, levels: int | None = None) -> dict[str, Timed]:
        """Parts by the first `levels` words of their names; all of them without a number."""
        found: dict[str, list[Timed]] = {}
        for part in self.parts:
            name = part.name if levels is None else ".".join(part.name.split(".")[:levels])
            found.setdefault(name, []).append(part)
        return {name: _together(name, parts) for name, parts in found.items()}

    def table(self, levels: int | None = None, width: int = WIDTH) -> str:
        """The table that `print` shows."""
        total, rows = self.total, []
        for name, part in [*self._rows(levels).items(), ("all", total)]:
            share = part.seconds / total.seconds if total.seconds else 0.0
            cells = (short(part.flops), short(part.bytes, "B"), _ratio(part.intensity), *_times(part), f"{share:.0%}")
            rows.append((Cell(name, "strong" if part is total else ""), *cells, part.bound))
        numbers = (Column(name, "right") for name in COLUMNS)
        table = Table([Column("part", "left", "cut-start"), *numbers, Column("waits for")], rows)
        lines = [f"{self.name} takes at least {duration(self.seconds)}, and waits for {self.bound}.", ""]
        return "\n".join([*lines, table.to_text(width), "", str(self.machine)])

    def _rows(self, levels: int | None) -> dict[str, Timed]:
        """Parts that do something; coarser ones if there are too many."""
        deepest = max((part.name.count(".") + 1 for part in self.parts), default=1)
        rows: dict[str, Timed] = {}
        for depth in [levels] if levels is not None else range(deepest, 0, -1):
            rows = {name: part for name, part in self.grouped(depth).items() if part.seconds > 0}
            if len(rows) <= MOST_PARTS:
                break
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain Python."""
        parts = {name: _plain(part) for name, part in self.grouped().items()}
        balance = self.machine.balance
        return {
            "name": self.name,
            **_plain(self.total),
            "machine": str(self.machine),
            "balance": balance,
            "parts": parts,
        }

    def __str__(self) -> str:
        return self.table()


COLUMNS = ("FLOPs", "bytes", "FLOP/B", "compute", "memory", "at least", "share")


def predict(cost: Cost, machine: Machine | None = None) -> Prediction:
    """The least time of a cost, on this machine if no other is named: `cost.roofline()` is the same.

    Every size must have a number. The machine is measured at the first call, which takes two seconds.
    """
    amounts = {name: (part.flops.value, part.bytes.value) for name, part in cost.by_part().items()}
    machine = this_machine() if machine is None else machine
    peak = machine.peak_of(cost.mode.dtype)
    bandwidth = machine.bandwidth_for(sum(moved for _, moved in amounts.values()))
    parts = []
    for name, (flops, moved) in amounts.items():
        compute, memory = flops / peak, moved / bandwidth
        waits = memory if memory > compute else 0.0
        parts.append(Timed(name, flops, moved, compute, memory, max(compute, memory), waits))
    return Prediction(cost.name, machine, tuple(parts))


def _together(name: str, parts: Iterable[Timed]) -> Timed:
    return sum(parts, Timed(name, 0, 0, 0.0, 0.0, 0.0))


def _plain(part: Timed) -> dict[str, Any]:
    names = ("flops", "bytes", "compute", "memory", "seconds", "bound")
    return {name: getattr(part, name) for name in names} | {"intensity": part.intensity if part.bytes else None}


def _times(part: Timed) -> tuple[str, str, str]:
    return duration(part.compute), duration(part.memory), duration(part.seconds)


def _ratio(number: float) -> str:
    return "-" if number == float("inf") else f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Three digits and a unit: `1.23 ms`."""
    if seconds == 0:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 999.5 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
