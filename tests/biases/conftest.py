"""Every bias, with the same score computed pair by pair in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from regard.biases import Alibi, Bias, Gaussian, Quadratic, RelativeTable, RowColumn, Shift, TransformerXL

GRID = (3, 5)


def place(position: int, grid: tuple[int, int], start: int) -> tuple[int, int] | None:
    """Row and column of a token, found by counting; None when it is not on the grid."""
    places = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
    return places[position - start] if 0 <= position - start < len(places) else None


def delta(i: int, j: int, grid: tuple[int, int] | None, start: int) -> list[int] | None:
    if grid is None:
        return [j - i]
    query, key = place(i, grid, start), place(j, grid, start)
    if query is None or key is None:
        return None
    return [key[0] - query[0], key[1] - query[1]]


def alibi(bias: Alibi, h: int, i: int, j: int) -> float:
    return -bias.slopes[h].item() * abs(i - j)


def relative_table(bias: RelativeTable, h: int, i: int, j: int) -> float:
    d = delta(i, j, bias.grid, bias.start)
    if d is None:
        return 0.0
    if bias.distance is not None:
        return bias.table[h, min(max(d[0], -bias.distance), bias.distance) + bias.distance].item()
    return bias.table[h, d[0] + bias.grid[0] - 1, d[1] + bias.grid[1] - 1].item()


def row_column(bias: RowColumn, h: int, i: int, j: int) -> float:
    d = delta(i, j, bias.grid, bias.start)
    if d is None:
        return 0.0
    return bias.row[h, d[0] + bias.grid[0] - 1].item() + bias.column[h, d[1] + bias.grid[1] - 1].item()


def quadratic(bias: Quadratic, h: int, i: int, j: int) -> float:
    d = delta(i, j, bias.grid, bias.start)
    if d is None:
        return 0.0
    return -bias.alpha[h].item() * sum((a - c) ** 2 for a, c in zip(d, bias.centre[h].tolist(), strict=True))


def gaussian(bias: Gaussian, h: int, i: int, j: int) -> float:
    d = delta(i, j, bias.grid, bias.start)
    if d is None:
        return 0.0
    offset = [a - c for a, c in zip(d, bias.centre[h].tolist(), strict=True)]
    precision = bias.precision[h].tolist()
    axes = range(len(offset))
    return -0.5 * sum(offset[a] * precision[a][b] * offset[b] for a in axes for b in axes)


def shift(bias: Shift, h: int, i: int, j: int) -> float:
    step = bias.steps[h].tolist()
    if bias.grid is None:
        return 0.0 if j == i + step[0] else -math.inf
    query, key = place(i, bias.grid, 0), place(j, bias.grid, 0)
    if query is None or key is None:
        return 0.0
    found = tuple(edge(bias.edges, a + b, n) for a, b, n in zip(query, step, bias.grid, strict=True))
    return 0.0 if found == key else -math.inf


def edge(edges: str, at: int, size: int) -> int:
    """Where a place along an axis is found, one step at a time."""
    if edges == "replicate":
        return min(max(at, 0), size - 1)
    while edges == "circular" and not 0 <= at < size:
        at += size if at < 0 else -size
    while edges == "reflect" and not 0 <= at < size:
        at = -at if at < 0 else 2 * (size - 1) - at
    return at


@dataclass(frozen=True)
class Case:
    """How to make a bias, and its score by another way."""

    name: str
    make: Callable[..., Bias]
    oracle: Callable[..., float]


# A new bias is one new line here, and the tests of every bias run on it.
EVERY = [
    Case("alibi", lambda **k: Alibi(5, **k), alibi),
    Case("alibi with given slopes", lambda **k: Alibi(2, slopes=[0.3, -0.7], **k), alibi),
    Case("table on a line", lambda **k: RelativeTable(2, distance=3, **k), relative_table),
    Case("table on a grid", lambda **k: RelativeTable(2, grid=GRID, **k), relative_table),
    Case("table after a class token", lambda **k: RelativeTable(2, grid=GRID, start=1, **k), relative_table),
    Case("row and column", lambda **k: RowColumn(2, GRID, **k), row_column),
    Case("row and column after two tokens", lambda **k: RowColumn(2, GRID, start=2, **k), row_column),
    Case("quadratic on a line", lambda **k: Quadratic(3, **k), quadratic),
    Case("quadratic on a grid", lambda **k: Quadratic(3, GRID, start=1, **k), quadratic),
    Case("quadratic with given alpha", lambda **k: Quadratic(2, GRID, alpha=[0.3, 7.0], **k), quadratic),
    Case("gaussian on a line", lambda **k: Gaussian(3, **k), gaussian),
    Case("shift on a line", lambda **k: Shift(2, [[1], [-3]], **k), shift),
    Case("shift replicates", lambda **k: Shift(3, [[0, 1], [4, -2], [-1, 0]], GRID, **k), shift),
    Case("shift with zeros", lambda **k: Shift(2, [[0, 1], [4, -2]], GRID, "zeros", **k), shift),
    Case("shift goes round", lambda **k: Shift(2, [[0, 6], [-4, -2]], GRID, "circular", **k), shift),
    Case("shift reflects", lambda **k: Shift(2, [[1, 6], [-7, -2]], GRID, "reflect", **k), shift),
    Case("gaussian on a grid", lambda **k: Gaussian(3, GRID, start=1, **k), gaussian),
]
CONTENT = [
    Case("transformer-xl on a line", lambda **k: TransformerXL(2, 3, **k), lambda: 0.0),
    Case("transformer-xl on a grid", lambda **k: TransformerXL(2, 3, grid=GRID, start=1, **k), lambda: 0.0),
]


@pytest.fixture(params=EVERY, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    """Each bias that depends on position only."""
    torch.manual_seed(7)
    return request.param


@pytest.fixture(params=EVERY + CONTENT, ids=lambda case: case.name)
def any_case(request: pytest.FixtureRequest) -> Case:
    """Each bias, also those that read content."""
    torch.manual_seed(7)
    return request.param
