"""The heads on their way, for a page: a drawing for each layer, a slider through the epochs, a button that plays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from regard.errors import InputError
from regard.layers.gaze import Gaze
from regard.show.colours import HEADS
from regard.show.contours import Contour, contours
from regard.show.heads import extent, layer_title, read_course
from regard.show.page import Html, html, script_data

# Shares of the width of a panel: on a telephone, some 310 pixels wide, a number must still be read.
DOT, LETTER, THIN = 0.034, 0.047, 0.0035


def player(epochs: Sequence[Mapping[str, Gaze]], labels: Sequence[str], caption: str, *, eager: bool = False) -> Html:
    """The moving heads of every layer as a figure of a page (see `regard.show.moving_heads`).

    `labels` say in words what each epoch is. The figure shows the last epoch until somebody moves it; `eager` plays it
    once when it comes into view, unless the reader's system asks for less motion. It needs the page's own script.
    """
    course = read_course(epochs)
    if len(labels) != len(epochs) or any(len(steps) != len(epochs) for steps in course.values()):
        raise InputError(
            "The epochs do not fit together.",
            asked=f"{len(labels)} labels, {len(epochs)} epochs",
            found=", ".join(f"{len(steps)} of {name}" for name, steps in course.items()),
            because="every layer has a state for every epoch, with as many heads, and every epoch a label",
            instead="epochs since the number of heads last changed",
        )
    reach = extent(course)
    frames = {name: [_frame(gaze) for gaze in steps] for name, steps in course.items()}
    panels = "\n".join(
        f"<div>\n<h3>{html(layer_title(name, place).capitalize())}</h3>\n{_panel(steps, reach, name)}\n</div>"
        for place, (name, steps) in enumerate(frames.items())
    )
    last = len(labels) - 1
    return Html(
        f'<figure class="player"{" data-eager" if eager else ""}>\n<div class="panels">\n{panels}\n</div>\n'
        f'<div class="row"><button type="button">Play</button>'
        f'<input type="range" min="0" max="{last}" step="1" value="{last}" aria-label="epoch">'
        f"<output>{html(labels[-1])}</output></div>\n<figcaption>{html(caption)}</figcaption>\n"
        f"{script_data({'labels': list(labels), 'layers': list(frames.values())})}\n</figure>"
    )


def _frame(gaze: Gaze) -> list[dict[str, Any]]:
    """Every head of a layer at one moment, in numbers that a script can move."""
    lines = contours(gaze)
    return [
        {
            "at": [_short(number) for number in mean],
            "half": _shape(half),
            "most": _shape(most),
            "fill": _short(half.opacity),
        }
        for mean, (half, most) in zip(gaze.mean.tolist(), lines, strict=True)
    ]


def _shape(contour: Contour) -> Any:
    """An ellipse as five numbers (row, column, half axes, degrees from the column axis), or the path around pixels."""
    if contour.ellipse is None:
        return "".join(
            "M" + "L".join(f"{_short(column)} {_short(row)}" for row, column in loop) + "Z" for loop in contour.loops
        )
    own = contour.ellipse
    return [_short(value) for value in (own.row, own.column, own.long, own.short, 90 - math.degrees(own.angle))]


def _short(value: float) -> float:
    return round(value, 3) + 0.0


def _panel(frames: list[list[dict[str, Any]]], reach: tuple[float, float], name: str) -> str:
    down, across = reach
    rows, columns = range(-math.floor(down), math.ceil(down)), range(-math.floor(across), math.ceil(across))
    lattice = "".join(f"M{-across} {row + 0.5}H{across}" for row in rows)
    lattice += "".join(f"M{column + 0.5} {-down}V{down}" for column in columns)
    wide = 2 * across
    heads = "\n".join(_head(frames, head, wide) for head in _order(frames[-1]))
    places = "; ".join(
        f"head {head + 1} at {one['at'][0]:.1f}, {one['at'][1]:.1f}" for head, one in enumerate(frames[-1])
    )
    return (
        f'<svg viewBox="{-across} {-down} {2 * across} {2 * down}" role="img" '
        f'aria-label="Rows and columns from the query in the last epoch: {html(places)}">\n'
        f'<path class="lattice" stroke-width="{THIN * wide / 2:.4f}" d="{lattice}"/>\n{heads}\n'
        f'<rect class="asking" x="-0.5" y="-0.5" width="1" height="1" stroke-width="{2 * THIN * wide:.4f}"/>\n</svg>'
    )


def _head(frames: list[list[dict[str, Any]]], head: int, wide: float) -> str:
    """One head in the last epoch; the script moves it."""
    last = frames[-1][head]
    way = " ".join(f"{frame[head]['at'][1]},{frame[head]['at'][0]}" for frame in frames)
    row, column = last["at"]
    return (
        f'<g class="head" data-head="{head}" style="color:var(--h{head % len(HEADS)})">'
        f'<path class="half" fill-opacity="{last["fill"]}"{_drawn(last["half"])}/>'
        f'<path class="most" stroke-width="{THIN * wide:.4f}"{_drawn(last["most"])}/>'
        f'<polyline class="trail" stroke-width="{2 * THIN * wide:.4f}" points="{way}"/>'
        f'<g class="dot" transform="translate({column} {row})">'
        f'<circle r="{DOT * wide:.3f}" stroke-width="{THIN * wide:.4f}"/>'
        f'<text font-size="{LETTER * wide:.3f}">{head + 1}</text></g></g>'
    )


def _order(frame: list[dict[str, Any]]) -> list[int]:
    """The widest heads, which are the palest, below the others."""
    return sorted(range(len(frame)), key=lambda head: frame[head]["fill"])


def _drawn(shape: Any) -> str:
    if isinstance(shape, str):
        return f' d="{shape}"'
    row, column, long, short, angle = shape
    path = f"M{-long} 0A{long} {short} 0 1 0 {long} 0A{long} {short} 0 1 0 {-long} 0Z"
    return f' transform="translate({column} {row}) rotate({angle})" d="{path}"'
