"""A counterexample as a drawing: what was changed, what moved, and two matrices that should be one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.laws.verdict import Counterexample
from regard.render.markup import Markup, element
from regard.render.page import figure

# More cells than this are drawn as groups, each as its most telling member.
MOST_COLUMNS, MOST_ROWS = 140, 24
MOST_SIDE = 64
LEFT, TOP, GAP = 60, 38, 50


class Style(NamedTuple):
    """How a cell is drawn: its class, the text that appears when one points at it, and its opacity."""

    kind: str
    tooltip: str
    opacity: float | None = None


def draw(counterexample: Counterexample) -> list[Markup]:
    """The pictures of a counterexample, each a figure; none if there is nothing but words."""
    figures = []
    expected, actual = (_as_matrix(counterexample.extra.get(name)) for name in ("pattern_expected", "pattern_actual"))
    if expected is not None and actual is not None:
        figures.append(_draw_matrices(expected, actual, "Pairs allowed by the pattern, and pairs that interact"))
    elif (sides := _find_weight_matrices(counterexample)) is not None:
        figures.append(_draw_matrices(*sides, "Weights as the law requires, and as computed", counterexample.bound))
    if not figures and (strips := _draw_strips(counterexample)):
        figures.append(strips)
    return figures


# Tokens


def _draw_strips(counterexample: Counterexample) -> Markup:
    """The input's tokens above the output's: what was changed, and what moved because of it."""
    touched, moved = _as_rows(counterexample.touched), _as_rows(counterexample.map)
    if touched is None and moved is None:
        return Markup()
    tokens = max(rows.shape[1] for rows in (touched, moved) if rows is not None)
    group = -(-tokens // MOST_COLUMNS)
    cell = min(26.0, 600 / -(-tokens // group))
    parts: list[Markup] = []
    y, name = float(TOP), counterexample.place.split("[")[0].removeprefix("the ") or "output"
    if touched is not None:
        parts += _draw_strip(
            "input", _pool_columns(touched.double(), group), cell, y, group, lambda value: _style_input(value > 0)
        )
        y += _strip_height(touched, cell) + GAP
    if moved is not None:
        free = None if counterexample.where is None else _as_rows(~counterexample.where)
        if free is not None and free.shape == moved.shape:
            moved = moved.double().masked_fill(free, -1.0)
        top = float(moved[moved.isfinite()].max()) if bool(moved.isfinite().any()) else 0.0

        def style(value: float) -> Style:
            return _style_movement(value, counterexample.bound, top)

        parts += _draw_strip(
            name, _pool_columns(moved.double(), group), cell, y, group, style, counterexample.tokens, counterexample.row
        )
        y += _strip_height(moved, cell)
    width = LEFT + cell * -(-tokens // group) + 8
    words = ["The tokens of the input that were changed."] if touched is not None else []
    words += [f"The rows of the {name} that moved, darker by the logarithm."] if moved is not None else []
    words += [f"One cell is {group} tokens."] if group > 1 else []
    return _make_figure(parts, width, y + 12, " ".join(words), _make_legend(counterexample, moved))


def _draw_strip(
    name: str,
    rows: Tensor,
    cell: float,
    y: float,
    group: int,
    style: Callable[[float], Style],
    tokens: Sequence[int] | None = None,
    first: int = 0,
) -> list[Markup]:
    """One row of cells for each row of the batch, with the numbers of tokens above."""
    height = _cell_height(cell)
    parts = [element("text", name, x=0, y=f"{y - 24:.1f}", class_="name")]
    every = max(1, math.ceil(24 / cell))
    for column in range(rows.shape[1]):
        if column % every == 0:
            number = column * group
            number = tokens[number] if tokens is not None and number < len(tokens) else number
            middle = f"{LEFT + (column + 0.5) * cell:.1f}"
            parts.append(element("text", number, x=middle, y=f"{y - 8:.1f}", class_="tick"))
    for row in range(min(rows.shape[0], MOST_ROWS)):
        place = y + row * height
        middle = f"{place + height * 0.68:.1f}"
        parts.append(element("text", f"batch {row + first}", x=LEFT - 8, y=middle, class_="row"))
        for column, value in enumerate(rows[row].tolist()):
            parts.append(_draw_rect(LEFT + column * cell, place, cell, height, style(value)))
    return parts


def _style_input(yes: bool) -> Style:
    return Style("touched", "changed") if yes else Style("still", "as it was")


def _style_movement(value: float, bound: float, top: float) -> Style:
    """How an entry that moved by so much is drawn."""
    if value < 0:
        return Style("free", "free to move")
    if not math.isfinite(value):
        return Style("broken", "no number")
    if value <= bound:
        return Style("still", f"moved by {value:.1e}, which is rounding" if value else "as it was")
    floor = bound if bound > 0 else top * 1e-6
    span = math.log10(top / floor) if top > floor > 0 else 0.0
    level = min(max(math.log10(value / floor) / span, 0.0), 1.0) if span > 0 and value > 0 else 1.0
    return Style("broken", f"moved by {value:.1e}", 0.25 + 0.75 * level)


def _make_legend(counterexample: Counterexample, moved: Tensor | None) -> list[tuple[str, str]]:
    entries = [("touched", "changed")] if counterexample.touched is not None else []
    if moved is not None:
        bound = "moved" if counterexample.bound == 0 else f"moved by more than {counterexample.bound:.1e}"
        entries += [("still", "as it was"), ("broken", bound)]
        if bool((moved < 0).any()):
            entries.append(("free", "free to move"))
    return entries


# Matrices


def _draw_matrices(expected: Tensor, actual: Tensor, words: str, bound: float = 0.0) -> Markup:
    """Two matrices of queries and keys side by side; where they differ, the second has a red frame."""
    rows, columns = expected.shape
    group = -(-max(rows, columns) // MOST_SIDE)
    apart = ((expected.double() - actual.double()).abs() > bound) | (expected.isnan() != actual.isnan())
    expected, actual, apart = (_pool_matrix(side.double(), group) for side in (expected, actual, apart))
    rows, columns = expected.shape
    cell = min(20.0, 300 / max(columns, 1), 300 / max(rows, 1))
    finite = torch.cat([expected.flatten(), actual.flatten()])
    finite = finite[finite.isfinite()]
    top = max(float(finite.abs().max()), 1e-300) if finite.numel() else 1.0
    parts, x = [], 8.0
    for name, side in (("expected", expected), ("found", actual)):
        parts.append(element("text", name, x=f"{x:.1f}", y=TOP - 14, class_="name"))
        for row in range(rows):
            for column in range(columns):
                value = float(side[row, column])
                level = 1.0 if not math.isfinite(value) else min(abs(value) / top, 1.0)
                differs = name == "found" and bool(apart[row, column])
                title = f"query {row * group}, key {column * group}: {value:.3g}"
                style = Style("weight differs" if differs else "weight", title, 0.04 + 0.96 * level)
                parts.append(_draw_rect(x + column * cell, TOP + row * cell, cell, cell, style))
        x += columns * cell + GAP
    legend = [("weight", "seen"), ("differs", "differs")]
    words += ". Rows are queries, columns keys."
    if group > 1:
        words += f" One cell is {group} by {group} pairs."
    return _make_figure(parts, max(x - GAP, 130) + 8, TOP + rows * cell + 8, words, legend)


def _find_weight_matrices(counterexample: Counterexample) -> tuple[Tensor, Tensor] | None:
    """The worst head of two sets of weights `(batch, query, head, key)`, or the worst row of two sets of pairs
    `(batch, query, key)`, if that is what the law compared."""
    expected, actual = counterexample.expected, counterexample.actual
    if expected is None or actual is None or expected.shape != actual.shape or not expected.numel():
        return None
    if counterexample.place.startswith("weights") and expected.ndim == 4:
        expected, actual = (side.transpose(1, 2).flatten(0, 1) for side in (expected, actual))
    elif expected.ndim != 3 or counterexample.bound != 0 or not (_is_binary(expected) and _is_binary(actual)):
        return None
    apart = (expected.double() - actual.double()).abs().nan_to_num(nan=math.inf)
    worst = int(apart.flatten(1).sum(1).argmax())
    return expected[worst], actual[worst]


def _is_binary(side: Tensor) -> bool:
    return bool(((side == 0) | (side == 1)).all())


# Pieces


def _as_rows(value: object) -> Tensor | None:
    """`(batch, token)`, or None if it is something else."""
    if not isinstance(value, Tensor) or not value.numel() or value.ndim not in (1, 2):
        return None
    value = value.detach()
    return value[None] if value.ndim == 1 else value


def _as_matrix(value: object) -> Tensor | None:
    """`(query, key)`, the first head of the first row if there are more."""
    if not isinstance(value, Tensor) or value.ndim < 2 or not value.numel():
        return None
    return value.detach().flatten(0, -3)[0] if value.ndim > 2 else value.detach()


def _pool_columns(rows: Tensor, group: int) -> Tensor:
    """The largest of each `group` columns."""
    if group == 1:
        return rows
    return torch.stack([piece.amax(-1) for piece in rows.split(group, -1)], -1)


def _pool_matrix(square: Tensor, group: int) -> Tensor:
    return _pool_columns(_pool_columns(square, group).T, group).T


def _cell_height(cell: float) -> float:
    return max(cell, 14.0)


def _strip_height(rows: Tensor, cell: float) -> float:
    return min(rows.shape[0], MOST_ROWS) * _cell_height(cell)


def _draw_rect(x: float, y: float, width: float, height: float, style: Style) -> Markup:
    gap = 1.0 if min(width, height) > 6 else 0.3
    box = {"x": x, "y": y, "width": width - gap, "height": height - gap}
    opacity = None if style.opacity is None else f"{style.opacity:.2f}"
    place = {name: f"{value:.1f}" for name, value in box.items()}
    return element("rect", element("title", style.tooltip), **place, class_=style.kind, fill_opacity=opacity)


def _make_figure(parts: list[Markup], width: float, height: float, words: str, legend: list[tuple[str, str]]) -> Markup:
    # The width in pixels is the most it takes; on a narrow screen it shrinks with its text.
    box = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "style": f"max-width:{width:.0f}px"}
    drawing = element("svg", *parts, role="img", aria_label=words, **box)
    entries = (element("span", element("i", "", class_=kind), label) for kind, label in legend)
    return figure(Markup(f"{drawing}{element('div', *entries, class_='legend')}"), words)
