"""SVG documents, estimated text widths, and placement of labels without overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from regard.render.markup import Markup, element, join

NAMESPACE = "http://www.w3.org/2000/svg"
# An upper bound of the width of a character as a share of the font size; fonts differ.
LETTER_WIDTH = 0.58
Point = tuple[float, float]


def document(parts: Iterable[Any], width: float, height: float, **attributes: Any) -> Markup:
    """An SVG document of this size in pixels, with one part on each line."""
    size = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}", "height": f"{height:g}"}
    return element("svg", Markup(f"\n{join(parts, chr(10))}\n"), xmlns=NAMESPACE, **size, **attributes)


def estimate_width(text: str, size: float) -> float:
    """The width of a text in pixels at a font size, at most."""
    return LETTER_WIDTH * size * len(text)


def format_points(points: Iterable[Point]) -> str:
    """The `points` of a polyline."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


class Box(NamedTuple):
    """A rectangle that a label takes."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def contains(self, other: Box) -> bool:
        return (
            self.left < other.left and other.right < self.right and self.top < other.top and other.bottom < self.bottom
        )

    def covered_length(self, line: Sequence[Point]) -> float:
        """How much of a polyline lies under the box, in pixels."""
        covered = 0.0
        for (x0, y0), (x1, y1) in pairwise(line):
            if max(x0, x1) < self.left - 2 or min(x0, x1) > self.right + 2:
                continue
            if max(y0, y1) < self.top - 1 or min(y0, y1) > self.bottom + 1:
                continue
            pieces = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0)) / 2))
            for piece in range(pieces):
                share = (piece + 0.5) / pieces
                x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
                if self.left - 2 < x < self.right + 2 and self.top - 1 < y < self.bottom + 1:
                    covered += math.hypot(x1 - x0, y1 - y0) / pieces
        return covered


def place_label(
    x: float, y: float, width: float, height: float, inside: Box, taken: Sequence[Box], lines: Sequence[Sequence[Point]]
) -> tuple[Box, bool] | None:
    """The best place for the label of a point: over no box that is taken, and over as little of the lines as can be.

    Returns the place and whether it is so far from the point that it needs a leader line; None if there is none.
    """
    best, least = None, math.inf
    for step, distance in enumerate((10.0, 18.0, 30.0, 44.0, 60.0, 80.0)):
        for turn in range(16):
            angle = math.pi / 8 * turn + math.pi / 8
            middle_x = x + math.cos(angle) * (distance + width / 2)
            middle_y = y + math.sin(angle) * (distance + height / 2)
            box = Box(middle_x - width / 2, middle_y - height / 2, middle_x + width / 2, middle_y + height / 2)
            if not inside.contains(box) or any(box.overlaps(other) for other in taken):
                continue
            penalty = sum(box.covered_length(line) for line in lines) + 6.0 * step
            if penalty < least:
                best, least = (box, step >= 2), penalty
    return best


def spread_labels(
    positions: Sequence[float], distance: float, low: float = -math.inf, high: float = math.inf
) -> list[float]:
    """Positions moved as little as possible, in their order, until they are `distance` apart and within the limits.

    Labels that touch share their middle.

        >>> from regard.render.svg import spread_labels
        >>> spread_labels([0.0, 5.0, 5.5], 1.0), spread_labels([5.5, 5.0], 1.0, high=5.5)
        ([0.0, 4.75, 5.75], [5.5, 4.5])
    """
    groups: list[list[int]] = []
    middles: list[float] = []
    for index in sorted(range(len(positions)), key=lambda index: positions[index]):
        groups.append([index])
        middles.append(positions[index])
        while True:
            room = distance * (len(groups[-1]) - 1) / 2
            middles[-1] = max(min(middles[-1], high - room), low + room)
            if len(groups) == 1 or middles[-1] - middles[-2] >= distance * (len(groups[-1]) + len(groups[-2])) / 2:
                break
            last = groups.pop()
            middles.pop()
            groups[-1] += last
            middles[-1] = sum(positions[each] for each in groups[-1]) / len(groups[-1])
    moved = list(positions)
    for group, middle in zip(groups, middles, strict=True):
        for place, index in enumerate(group):
            moved[index] = middle + distance * (place - (len(group) - 1) / 2)
    return moved
