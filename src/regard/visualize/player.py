"""The player of a page: a drawing of the heads of each layer, a slider through the epochs, a play button."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from regard.errors import InputError
from regard.layers.profiles import HeadProfile
from regard.render.colors import HEADS
from regard.render.components import bundle, read_component
from regard.render.markup import Markup, element, join, script_data
from regard.render.page import Widget
from regard.visualize.contours import Contour, contours
from regard.visualize.heads import find_extent, read_trajectories, select_layers
from regard.visualize.labels import head_title, in_one_line

# Shares of the width of a panel; legible on a phone, about 310 pixels wide.
DOT, LETTER, THIN = 0.034, 0.047, 0.0035


def make_player(
    epochs: Sequence[Mapping[str, HeadProfile]],
    labels: Sequence[str],
    caption: str,
    *,
    eager: bool = False,
    layers: Sequence[int] | None = None,
) -> Widget:
    """The animated heads of every layer as a figure of a page (see `regard.visualize.draw_head_paths`).

    `labels` name the epochs. The figure shows the last epoch at first; `eager` plays it once when it comes into view,
    unless the reader's system prefers reduced motion. A layer whose number of heads changed stands still until then.
    `layers` are those to draw, counted from 0.
    """
    data = player_data(epochs, labels, layers=layers)
    panels = [
        element("div", Markup(f"\n{element('h3', title)}\n{_draw_panel(steps, data['reach'])}\n"))
        for title, steps in zip(data["titles"], data["layers"], strict=True)
    ]
    last = len(labels) - 1
    controls = element(
        "div",
        element("button", "Play", type="button"),
        Markup(f'<input type="range" min="0" max="{last}" step="1" value="{last}" aria-label="epoch">'),
        element("output", labels[-1]),
        class_="row",
    )
    drawing = element("div", Markup(f"\n{join(panels, chr(10))}\n"), class_="panels")
    body = join(["", drawing, controls, element("figcaption", caption), script_data(data), ""], "\n")
    return Widget(
        element("figure", element("regard-player", body), class_="player", data_eager=eager),
        style=read_component("player.css")[0].decode(),
        script=bundle("player.js"),
    )


def player_data(
    epochs: Sequence[Mapping[str, HeadProfile]], labels: Sequence[str], *, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """What the player shows, as plain numbers and texts: `labels`, `layers` (their frames), `titles` and `reach`."""
    trajectories, titles = select_layers(read_trajectories(epochs), layers)
    check_labels(labels, epochs)
    count = len(epochs)
    trajectories = {
        name: [state_at(steps, number, count) for number in range(count)] for name, steps in trajectories.items()
    }
    return {
        "labels": list(labels),
        "layers": [[_to_frame(profile) for profile in steps] for steps in trajectories.values()],
        "titles": [in_one_line(title[:1].upper() + title[1:]) for title in titles],
        "reach": [float(length) for length in find_extent(trajectories)],
    }


def check_labels(labels: Sequence[str], epochs: Sequence[Any]) -> None:
    """Raise if there is not one label for each epoch."""
    if len(labels) != len(epochs):
        raise InputError(
            "The labels do not fit the epochs.",
            asked=f"{len(labels)} labels",
            found=f"{len(epochs)} epochs",
            because="every epoch has one label",
            instead="a label for every epoch, or none, which numbers them",
        )


def state_at(steps: Sequence[HeadProfile], number: int, count: int) -> HeadProfile:
    """The state of a layer in an epoch; one whose number of heads changed stands still until then."""
    return steps[min(max(number - (count - len(steps)), 0), len(steps) - 1)]


def _to_frame(profile: HeadProfile) -> list[dict[str, Any]]:
    """The heads of a layer in one epoch, as plain numbers for the script."""
    lines = contours(profile)
    return [
        {
            "at": [_round(number) for number in mean],
            "half": _to_shape(half),
            "most": _to_shape(most),
            "fill": _round(half.opacity),
        }
        for mean, (half, most) in zip(profile.mean.tolist(), lines, strict=True)
    ]


def _to_shape(contour: Contour) -> Any:
    """An ellipse as five numbers (row, column, half axes, degrees from the column axis), or the path around pixels."""
    if contour.ellipse is None:
        return "".join(
            "M" + "L".join(f"{_round(column)} {_round(row)}" for row, column in loop) + "Z" for loop in contour.loops
        )
    own = contour.ellipse
    return [_round(value) for value in (own.row, own.column, own.long, own.short, 90 - math.degrees(own.angle))]


def _round(value: float) -> float:
    return round(value, 3) + 0.0


def _draw_panel(frames: list[list[dict[str, Any]]], reach: tuple[float, float]) -> Markup:
    down, across = reach
    rows, columns = range(-math.floor(down), math.ceil(down)), range(-math.floor(across), math.ceil(across))
    lattice = "".join(f"M{-across} {row + 0.5}H{across}" for row in rows)
    lattice += "".join(f"M{column + 0.5} {-down}V{down}" for column in columns)
    wide = 2 * across
    places = "; ".join(
        f"{head_title(head)} at {one['at'][0]:.1f}, {one['at'][1]:.1f}" for head, one in enumerate(frames[-1])
    )
    query = {"x": "-0.5", "y": "-0.5", "width": "1", "height": "1", "stroke_width": f"{2 * THIN * wide:.4f}"}
    parts = [
        "",
        element("path", class_="lattice", stroke_width=f"{THIN * wide / 2:.4f}", d=lattice),
        *(_draw_head(frames, head, wide) for head in _order_by_opacity(frames[-1])),
        element("rect", class_="query", **query),
        "",
    ]
    words = f"Rows and columns from the query in the last epoch: {places}"
    box = f"{-across} {-down} {2 * across} {2 * down}"
    return element("svg", join(parts, "\n"), viewBox=box, role="img", aria_label=words)


def _draw_head(frames: list[list[dict[str, Any]]], head: int, wide: float) -> Markup:
    """A head in the last epoch; the script moves it."""
    last = frames[-1][head]
    path = " ".join(f"{frame[head]['at'][1]},{frame[head]['at'][0]}" for frame in frames)
    row, column = last["at"]
    thin, thick = f"{THIN * wide:.4f}", f"{2 * THIN * wide:.4f}"
    return element(
        "g",
        element("path", class_="half", fill_opacity=last["fill"], **_to_path(last["half"])),
        element("path", class_="most", stroke_width=thin, **_to_path(last["most"])),
        element("polyline", class_="trail", stroke_width=thick, points=path),
        element(
            "g",
            element("circle", r=f"{DOT * wide:.3f}", stroke_width=thin),
            element("text", head, font_size=f"{LETTER * wide:.3f}"),
            class_="dot",
            transform=f"translate({column} {row})",
        ),
        class_="head",
        data_head=head,
        style=f"color:var(--h{head % len(HEADS)})",
    )


def _order_by_opacity(frame: list[dict[str, Any]]) -> list[int]:
    """The widest heads, which are the palest, first: below the others."""
    return sorted(range(len(frame)), key=lambda head: frame[head]["fill"])


def _to_path(shape: Any) -> dict[str, str]:
    if isinstance(shape, str):
        return {"d": shape}
    row, column, long, short, angle = shape
    path = f"M{-long} 0A{long} {short} 0 1 0 {long} 0A{long} {short} 0 1 0 {-long} 0Z"
    return {"transform": f"translate({column} {row}) rotate({angle})", "d": path}
