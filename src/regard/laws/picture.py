"""A witness as a drawing: what was changed, what moved, and two matrices that should be one. SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from regard.laws.verdict import Witness

# More cells than this are drawn as groups, each as its most telling member.
MOST_COLUMNS, MOST_ROWS = 140, 24
MOST_SIDE = 64
LEFT, TOP, GAP = 60, 38, 50


def draw(witness: Witness) -> list[str]:
    """The pictures of a witness, each a figure; none if there is nothing but words."""
    figures = []
    patterns = [_square(witness.extra.get(name)) for name in ("pattern_expected", "pattern_actual")]
    if all(pattern is not None for pattern in patterns):
        figures.append(_two(patterns[0], patterns[1], "The pairs that may meet, and those that do"))  # type: ignore[arg-type]
    elif (sides := _weights(witness)) is not None:
        figures.append(_two(*sides, "The weights as the law has them, and as they were found", witness.bound))
    if not figures and (strips := _strips(witness)):
        figures.append(strips)
    return figures


# Tokens


def _strips(witness: Witness) -> str:
    """The input's tokens above the output's: what was changed, and what moved because of it."""
    touched, moved = _rows(witness.touched), _rows(witness.map)
    if touched is None and moved is None:
        return ""
    tokens = max(rows.shape[1] for rows in (touched, moved) if rows is not None)
    group = -(-tokens // MOST_COLUMNS)
    cell = min(26.0, 600 / -(-tokens // group))
    parts, y, name = [], float(TOP), witness.place.split("[")[0].removeprefix("the ") or "output"
    if touched is not None:
        parts.append(
            _strip("input", _pooled(touched.double(), group), cell, y, group, lambda value: _touched(value > 0))
        )
        y += _height(touched, cell) + GAP
    if moved is not None:
        free = None if witness.where is None else _rows(~witness.where)
        if free is not None and free.shape == moved.shape:
            moved = moved.double().masked_fill(free, -1.0)
        top = float(moved[moved.isfinite()].max()) if bool(moved.isfinite().any()) else 0.0

        def look(value: float) -> tuple[str, str]:
            return _movement(value, witness.bound, top)

        parts.append(_strip(name, _pooled(moved.double(), group), cell, y, group, look, witness.tokens, witness.row))
        y += _height(moved, cell)
    width = LEFT + cell * -(-tokens // group) + 8
    words = ["The tokens of the input that were changed."] if touched is not None else []
    words += [f"The rows of the {name} that moved, darker by the logarithm."] if moved is not None else []
    words += [f"One cell is {group} tokens."] if group > 1 else []
    return _figure(parts, width, y + 12, " ".join(words), _legend(witness, moved))


def _strip(
    name: str,
    rows: Tensor,
    cell: float,
    y: float,
    group: int,
    look: Any,
    tokens: Sequence[int] | None = None,
    first: int = 0,
) -> str:
    """One row of cells for each row of the batch, with the numbers of tokens above."""
    height, parts = _cell(cell), []
    parts.append(f'<text x="0" y="{y - 24:.1f}" class="name">{escape(name)}</text>')
    every = max(1, math.ceil(24 / cell))
    for column in range(rows.shape[1]):
        if column % every == 0:
            number = column * group
            number = tokens[number] if tokens is not None and number < len(tokens) else number
            parts.append(f'<text x="{LEFT + (column + 0.5) * cell:.1f}" y="{y - 8:.1f}" class="tick">{number}</text>')
    for row in range(min(rows.shape[0], MOST_ROWS)):
        place = y + row * height
        label = f"batch {row + first}"
        parts.append(f'<text x="{LEFT - 8}" y="{place + height * 0.68:.1f}" class="row">{label}</text>')
        for column, value in enumerate(rows[row].tolist()):
            style, title = look(value)
            parts.append(_rect(LEFT + column * cell, place, cell, height, style, title))
    return "".join(parts)


def _touched(yes: bool) -> tuple[str, str]:
    return ('class="touched"', "changed") if yes else ('class="still"', "as it was")


def _movement(value: float, bound: float, top: float) -> tuple[str, str]:
    """How an entry that moved by so much is drawn."""
    if value < 0:
        return 'class="free"', "free to move"
    if not math.isfinite(value):
        return 'class="broken"', "no number"
    if value <= bound:
        return 'class="still"', f"moved by {value:.1e}, which is rounding" if value else "as it was"
    floor = bound if bound > 0 else top * 1e-6
    span = math.log10(top / floor) if top > floor > 0 else 0.0
    level = min(max(math.log10(value / floor) / span, 0.0), 1.0) if span > 0 and value > 0 else 1.0
    return f'class="broken" fill-opacity="{0.25 + 0.75 * level:.2f}"', f"moved by {value:.1e}"


def _legend(witness: Witness, moved: Tensor | None) -> str:
    entries = [("touched", "changed")] if witness.touched is not None else []
    if moved is not None:
        bound = "moved" if witness.bound == 0 else f"moved by more than {witness.bound:.1e}"
        entries += [("still", "as it was"), ("broken", bound)]
        if bool((moved < 0).any()):
            entries.append(("free", "free to move"))
    return "".join(f'<span><i class="{style}"></i>{escape(words)}</span>' for style, words in entries)


# Matrices


def _two(expected: Tensor, actual: Tensor, words: str, bound: float = 0.0) -> str:
    """Two matrices of queries and keys side by side; where they differ, the second has a red frame."""
    rows, columns = expected.shape
    group = -(-max(rows, columns) // MOST_SIDE)
    apart = ((expected.double() - actual.double()).abs() > bound) | (expected.isnan() != actual.isnan())
    expected, actual, apart = (_pooled_square(side.double(), group) for side in (expected, actual, apart))
    rows, columns = expected.shape
    cell = min(20.0, 300 / max(columns, 1), 300 / max(rows, 1))
    finite = torch.cat([expected.flatten(), actual.flatten()])
    finite = finite[finite.isfinite()]
    top = max(float(finite.abs().max()), 1e-300) if finite.numel() else 1.0
    parts, x = [], 8.0
    for name, side in (("expected", expected), ("found", actual)):
        parts.append(f'<text x="{x:.1f}" y="{TOP - 14}" class="name">{name}</text>')
        for row in range(rows):
            for column in range(columns):
                value = float(side[row, column])
                level = 1.0 if not math.isfinite(value) else min(abs(value) / top, 1.0)
                differs = name == "found" and bool(apart[row, column])
                style = f'class="{"weight differs" if differs else "weight"}" fill-opacity="{0.04 + 0.96 * level:.2f}"'
                title = f"query {row * group}, key {column * group}: {value:.3g}"
                parts.append(_rect(x + column * cell, TOP + row * cell, cell, cell, style, title))
        x += columns * cell + GAP
    legend = '<span><i class="weight"></i>seen</span><span><i class="differs"></i>differs</span>'
    words += ". Rows are queries, columns keys."
    if group > 1:
        words += f" One cell is {group} by {group} pairs."
    return _figure(parts, max(x - GAP, 130) + 8, TOP + rows * cell + 8, words, legend)


def _weights(witness: Witness) -> tuple[Tensor, Tensor] | None:
    """The worst head of two sets of weights `(batch, query, head, key)`, or the worst row of two sets of pairs
    `(batch, query, key)`, if that is what the law compared."""
    expected, actual = witness.expected, witness.actual
    if expected is None or actual is None or expected.shape != actual.shape or not expected.numel():
        return None
    if witness.place.startswith("weights") and expected.ndim == 4:
        expected, actual = (side.transpose(1, 2).flatten(0, 1) for side in (expected, actual))
    elif expected.ndim != 3 or witness.bound != 0 or not (_binary(expected) and _binary(actual)):
        return None
    apart = (expected.double() - actual.double()).abs().nan_to_num(nan=math.inf)
    worst = int(apart.flatten(1).sum(1).argmax())
    return expected[worst], actual[worst]


def _binary(side: Tensor) -> bool:
    return bool(((side == 0) | (side == 1)).all())


# Pieces


def _rows(value: object) -> Tensor | None:
    """`(batch, token)`, or None if it is something else."""
    if not isinstance(value, Tensor) or not value.numel() or value.ndim not in (1, 2):
        return None
    value = value.detach()
    return value[None] if value.ndim == 1 else value


def _square(value: object) -> Tensor | None:
    """`(query, key)`, the first head of the first row if there are more."""
    if not isinstance(value, Tensor) or value.ndim < 2 or not value.numel():
        return None
    return value.detach().flatten(0, -3)[0] if value.ndim > 2 else value.detach()


def _pooled(rows: Tensor, group: int) -> Tensor:
    """The largest of each `group` columns."""
    if group == 1:
        return rows
    return torch.stack([piece.amax(-1) for piece in rows.split(group, -1)], -1)


def _pooled_square(square: Tensor, group: int) -> Tensor:
    return _pooled(_pooled(square, group).T, group).T


def _cell(cell: float) -> float:
    return max(cell, 14.0)


def _height(rows: Tensor, cell: float) -> float:
    return min(rows.shape[0], MOST_ROWS) * _cell(cell)


def _rect(x: float, y: float, width: float, height: float, style: str, title: str) -> str:
    gap = 1.0 if min(width, height) > 6 else 0.3
    size = f'width="{width - gap:.1f}" height="{height - gap:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} {style}><title>{escape(title)}</title></rect>'


def _figure(parts: list[str], width: float, height: float, words: str, legend: str) -> str:
    # The width in pixels is the most it takes; on a narrow screen it shrinks with its letters.
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px"'
    svg = f'<svg role="img" aria-label="{escape(words)}" {box}>{"".join(parts)}</svg>'
    return f'<figure>{svg}<div class="legend">{legend}</div><figcaption>{escape(words)}</figcaption></figure>'
