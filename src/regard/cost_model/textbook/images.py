"""Questions about patterns: of text as Prince draws them, of images, and of DaViT's two kinds of attention."""

from __future__ import annotations

from typing import Any

import sympy

from regard.cost_model.attention.pairs import count_pairs
from regard.cost_model.quantity import Quantity
from regard.cost_model.symbols import size_symbol, size_symbols
from regard.cost_model.textbook.table import Row, Table, rows, sizes
from regard.errors import CostError
from regard.patterns import (
    Axial,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Neighborhood,
    Pattern,
    Window,
    layers_to_connect,
)


def davit(grid: tuple[int, int], channels: int, window: int | None = 7, group_dim: int | None = 32) -> Table:
    """Patches that attend to patches, and channels that attend to channels: N^2 C against C^2 N for each product.

    Prince, problem 12.9: both over everything; equal where C = N. The real DaViT (Ding et al. 2022) cuts both: patches
    into windows, for which the grid is filled up with zeros, and channels into groups.
    """
    N, R, W, C, w, d = size_symbols("N R W C w d")
    values = sizes(N=grid[0] * grid[1], R=grid[0], W=grid[1], C=channels)
    counts: list[tuple[str, Any]] = [
        ("patches: scores", N**2 * C),
        ("patches: scores and values", 2 * N**2 * C),
        ("patches: exponentials", N**2),
        ("channels: scores", C**2 * N),
        ("channels: scores and values", 2 * C**2 * N),
        ("channels: exponentials", C**2),
        ("channels to patches", C / N),
        ("projections", 4 * N * C**2),
        ("patches: with projections", 2 * N**2 * C + 4 * N * C**2),
        ("channels: with projections", 6 * N * C**2),
        ("channels to patches, with projections", sympy.cancel(6 * N * C**2 / (2 * N**2 * C + 4 * N * C**2))),
    ]
    if group_dim is not None:
        values |= sizes(d=group_dim)
        counts += [
            ("groups of channels: scores", N * C * d),
            ("groups of channels: scores and values", 2 * N * C * d),
            ("groups of channels: exponentials", C * d),
        ]
    if window is not None:
        values |= sizes(w=window)
        cut = sympy.ceiling(R / w) * sympy.ceiling(W / w)
        counts += [
            ("windows", cut),
            ("windows: scores", cut * w**4 * C),
            ("windows: scores and values", 2 * cut * w**4 * C),
            ("windows: projections", 4 * cut * w**2 * C**2),
        ]
    return Table(
        f"Patches and channels: {grid[0]} x {grid[1]} patches with {channels:,} channels",
        rows(values, counts),
        "Multiply-adds. Windows and their projections work on a grid filled up to whole windows.",
        meanings={"N": "patches, R W", "d": "channels of a group", "C": "channels of a patch"},
    )


MOST = 4096
_ON_A_GRID = ("pairs", "density", "MAC", "layers until connected")


def patterns(grid: tuple[int, int] = (16, 16), channels: int = 512) -> Table:
    """Ways to make a vision transformer cheaper: pairs, their share of all, products, and how soon all tokens meet.

    Prince, problem 12.8. `MAC = 2 pairs C`. Windows alone never connect; with a stride in turn, two layers do.
    """
    values = sizes(R=grid[0], W=grid[1], C=channels)
    cells = grid[0] * grid[1]
    if cells > MOST:
        raise CostError(
            "The grid is too large to see when all its tokens have met.",
            asked=f"{grid[0]} x {grid[1]} patches",
            because=f"that is found by products of the whole square, for at most {MOST:,} patches",
            instead="grid=(64, 64); cost(Attention(pattern=...), tokens=..., dim=...) counts pairs of any length",
        )
    several: dict[str, tuple[tuple[Pattern, ...], int]] = {
        "full": ((Full(),), cells),
        "neighbours 1 away": ((Neighborhood(grid, 1),), cells),
        "neighbours 2 away": ((Neighborhood(grid, 2),), cells),
        "neighbours 3 away": ((Neighborhood(grid, 3),), cells),
        "row and column": ((Axial(grid),), cells),
        "windows of 4 x 4": ((GridWindow(grid, 4),), cells),
        "windows of 8 x 8": ((GridWindow(grid, 8),), cells),
        "every 4th": ((GridStride(grid, 4),), cells),
        "windows of 4 x 4, then every 4th": ((GridWindow(grid, 4), GridStride(grid, 4)), cells),
        "2 global tokens, neighbours 1 away": ((First(2) | Neighborhood(grid, 1, start=2),), cells + 2),
    }
    made = []
    for label, (layers, tokens) in several.items():
        N, C = size_symbols("N C")
        numbers = {**values, N: tokens}
        counted = count_pairs(layers[0], sympy.Integer(1), N, N, (tokens, tokens), numbers)
        numbers = {**numbers, **counted.values}
        connected = layers_to_connect(*layers, tokens=tokens)
        made.append(
            Row(
                label,
                (
                    Quantity(counted.formula, numbers),
                    Quantity(counted.formula / N**2, numbers),
                    Quantity(2 * counted.formula * C, numbers),
                    None if connected is None else Quantity(connected),
                ),
            )
        )
    title = f"Patterns on {grid[0]} x {grid[1]} patches with {channels:,} channels"
    return Table(title, tuple(made), "A pattern that alternates with another costs as much in each layer.", _ON_A_GRID)


def panels(tokens: int, radius: int = 1, width: int = 3, count: int = 2) -> Table:
    """Pairs of the patterns that Prince draws in figure 12.15: encoders, decoders, windows, dilation, global tokens.

    radius: of the window of panels c and h; width: of those that look back, d to g; count: global tokens of panel h.
    Panel g is a window in which every fourth token sees all before it: 1 + 4 k keys instead of `width`, where more.
    """
    N = size_symbol("N")
    values = sizes(N=tokens)
    named: dict[str, Pattern] = {
        "a": Full(),
        "b": Causal(),
        "c": Window(radius, radius),
        "d": Window(width - 1, 0),
        "e": Window(width - 1, 0, step=2),
        "f": Window(width - 1, 0, step=3),
    }
    found = {name: _line(pattern, tokens, values) for name, pattern in named.items()}
    # The n fourth tokens, from number 4 k0 on, see 4 k + 1 - width keys beyond their window.
    fourths, first = sympy.ceiling(N / 4), -(-(width - 1) // 4)
    if -(-tokens // 4) > first:
        beyond = 2 * fourths * (fourths - 1) - 2 * first * (first - 1) + (1 - width) * (fourths - first)
        found["g"] = found["d"] + sympy.expand(beyond)
    else:
        found["g"] = found["d"]
    found["h"] = _line(First(count) | Window(radius, radius), tokens, values)
    made = tuple(Row(name, (quantity,)) for name, quantity in found.items())
    title = f"Pairs of the patterns of figure 12.15 at {N} = {tokens:,}"
    return Table(title, made, columns=("pairs",))


def _line(pattern: Pattern, tokens: int, values: dict[sympy.Symbol, int]) -> Quantity:
    N = size_symbol("N")
    counted = count_pairs(pattern, sympy.Integer(1), N, N, (tokens, tokens), values)
    return Quantity(counted.formula, {**values, **counted.values})
