"""The verdict on an answer: right, right but for a convention, or wrong with the smallest case where it differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Grade = Literal["right", "convention", "wrong", "unread"]


@dataclass(frozen=True)
class Verdict:
    """What the grader found.

    Attributes:
        grade: `right`, `convention`, `wrong`, or `unread` for an answer that cannot be read.
        because: how it was compared, the name of the convention, or what is forgotten.
        case: the smallest case where the answer differs, `N = 1, D = 2`.
        expected, found: the values there.
    """

    grade: Grade
    because: str
    case: str = ""
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        head = {"right": "right", "convention": "right but for a convention", "wrong": "wrong", "unread": "not read"}
        lines = [f"{head[self.grade]}: {self.because}" if self.because else head[self.grade]]
        if self.case:
            lines.append(f"  smallest case  {self.case}")
            lines.append(f"  your answer    {self.found}")
            lines.append(f"  expected       {self.expected}")
        return "\n".join(lines)


def format_number(value: Any) -> str:
    """Whole numbers in full, others with eight digits."""
    if value is None:
        return "no value"
    near = round(float(value)) if abs(float(value)) < 1e15 else None
    if near is not None and abs(float(value) - near) <= 1e-12 * max(1.0, abs(near)):
        return str(near)
    if near is None and value == int(value):
        return str(int(value))
    return f"{float(value):.8g}"


def format_case(sizes: dict[str, Any]) -> str:
    """`N = 1, D = 2`."""
    return ", ".join(f"{name} = {value}" for name, value in sizes.items())
