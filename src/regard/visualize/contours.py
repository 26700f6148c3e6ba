"""Contours of a head's attention: the outlines of half and of nine tenths of its weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.layers.profiles import HeadProfile

MASSES = (0.5, 0.9)
# An ellipse is drawn for a Gaussian at least this wide, in pixels, along each axis (else the grid is too coarse), and
# with its centre of mass at most this far from its centre (else the border of the image truncates it).
NARROWEST, NEAREST = 0.5, 0.25
STRONGEST, SMALL = 0.24, 5.0  # opacity of shapes up to this many pixels; larger ones are paler

Point = tuple[float, float]  # (row, column)


@dataclass(frozen=True)
class Ellipse:
    """Half axes along two directions, the first turned by `angle` from the row axis towards the columns, in radians."""

    row: float
    column: float
    long: float
    short: float
    angle: float

    def points(self, count: int = 96) -> list[Point]:
        """Its outline, with the orientation of pixel outlines."""
        turns = (-2 * math.pi * step / count for step in range(count))
        return [self._rotate(self.long * math.cos(turn), self.short * math.sin(turn)) for turn in turns]

    def _rotate(self, along: float, across: float) -> Point:
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        return self.row + along * cos - across * sin, self.column + along * sin + across * cos


@dataclass(frozen=True)
class Contour:
    """The outline of a share of a head's weight: an ellipse, or the edges of the pixels that hold it."""

    mass: float
    ellipse: Ellipse | None
    loops: tuple[tuple[Point, ...], ...]

    @property
    def area(self) -> float:
        """In pixels of the grid, without holes."""
        return sum(_signed_area(loop) for loop in self.loops)

    @property
    def opacity(self) -> float:
        """Of the filling: a wide head must not hide a narrow one."""
        return STRONGEST * min(1.0, math.sqrt(SMALL / self.area)) if self.area > 0 else 0.0


def contours(profile: HeadProfile, masses: Iterable[float] = MASSES) -> list[list[Contour]]:
    r"""For each head its contours, in relative positions (row, column).

    A normal distribution with covariance `Sigma` has the share `m` of its mass inside the ellipse

        (delta - centre)^T Sigma^-1 (delta - centre) = -2 ln(1 - m)

    so a head that has a `precision` is outlined by it, while it is wide enough for the grid and not cut off by it.
    Any other head (tables, hard heads, heads that point beyond the image) is outlined pixel by pixel: around the
    smallest set of pixels with this share.

        >>> from regard.layers.profiles import head_profile
        >>> from regard.visualize.contours import contours
        >>> half, most = contours(head_profile(Quadratic(1, grid=(9, 11), centre=[[1, -2]], alpha=0.5)))[0]
        >>> half.ellipse.row, half.ellipse.column, round(half.ellipse.long, 3)
        (1.0, -2.0, 1.177)
    """
    masses = tuple(masses)
    is_elliptic = _find_elliptic(profile)
    found = []
    for head in range(profile.heads):
        if is_elliptic[head]:
            assert profile.centre is not None
            assert profile.precision is not None
            ellipses = (_make_ellipse(profile.centre[head], profile.precision[head], mass) for mass in masses)
            found.append([Contour(mass, e, (tuple(e.points()),)) for mass, e in zip(masses, ellipses, strict=True)])
        else:
            found.append(
                [Contour(mass, None, _trace_outlines(profile.inside(mass)[head], profile.grid)) for mass in masses]
            )
    return found


def _find_elliptic(profile: HeadProfile) -> list[bool]:
    """Whether an ellipse describes each head."""
    if profile.centre is None or profile.precision is None:
        return [False] * profile.heads
    largest = torch.linalg.eigvalsh(profile.precision.double())[:, -1]
    off = (profile.mean - profile.centre).double().norm(dim=-1)
    fine = (largest <= NARROWEST**-2) & (off <= NEAREST) & ~profile.degenerate()
    return fine.tolist()


def _make_ellipse(centre: Tensor, precision: Tensor, mass: float) -> Ellipse:
    values, vectors = torch.linalg.eigh(precision.double())  # ascending: the first is the long axis
    radius = math.sqrt(-2 * math.log1p(-mass))
    long, short = (radius / math.sqrt(float(value)) for value in values)
    along = vectors[:, 0]
    row, column = (float(number) for number in centre)
    return Ellipse(row, column, long, short, math.atan2(float(along[1]), float(along[0])))


def _signed_area(loop: tuple[Point, ...]) -> float:
    """By the shoelace formula; a hole, which runs the other way round, is negative."""
    following = (*loop[1:], loop[0])
    return sum(after[0] * here[1] - here[0] * after[1] for here, after in zip(loop, following, strict=True)) / 2


def _trace_outlines(inside: Tensor, grid: tuple[int, int]) -> tuple[tuple[Point, ...], ...]:
    """The closed outlines of a set of pixels, corners only."""
    rows, columns = grid
    cells = {(row - rows + 1, column - columns + 1) for row, column in inside.nonzero().tolist()}
    # Each edge of a cell, with the cell on its right; one that two cells share disappears.
    following: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, column in cells:
        corners = [(row, column), (row, column + 1), (row + 1, column + 1), (row + 1, column)]
        beside = [(row - 1, column), (row, column + 1), (row + 1, column), (row, column - 1)]
        for start, stop, other in zip(corners, [*corners[1:], corners[0]], beside, strict=True):
            if other not in cells:
                following.setdefault(start, []).append(stop)
    loops = []
    while following:
        first = min(following)
        loop, here = [first], _take_next(following, first, None)
        before = first
        while here != first:
            loop.append(here)
            before, here = here, _take_next(following, here, before)
        loops.append(tuple((row - 0.5, column - 0.5) for row, column in _keep_corners(loop)))
    return tuple(loops)


def _take_next(following: dict, here: tuple[int, int], before: tuple[int, int] | None) -> tuple[int, int]:
    """The next corner; where two cells touch at a corner the outline turns right, to stay with its own cell."""
    options = following[here]
    if len(options) > 1 and before is not None:
        came = (here[0] - before[0], here[1] - before[1])
        options.sort(key=lambda corner: (corner[0] - here[0], corner[1] - here[1]) != (came[1], -came[0]))
    corner = options.pop(0)
    if not options:
        del following[here]
    return corner


def _keep_corners(loop: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The points of a loop at which it turns."""
    kept = []
    for index, here in enumerate(loop):
        before, after = loop[index - 1], loop[(index + 1) % len(loop)]
        if (here[0] - before[0], here[1] - before[1]) != (after[0] - here[0], after[1] - here[1]):
            kept.append(here)
    return kept
