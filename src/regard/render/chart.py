"""Line charts as SVG: values over two logarithmic axes, and shares over steps as a figure of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from regard.render.colors import CURVES, CURVES_DARK, DASHES
from regard.render.markup import Markup, element, join
from regard.render.page import figure
from regard.render.svg import Box, Point, document, estimate_width, format_points, place_label, spread_labels

# The plot area; the names of the lines are on its right.
LEFT, TOP, WIDTH, HEIGHT = 84.0, 56.0, 520.0, 330.0
RIGHT, BOTTOM = LEFT + WIDTH, TOP + HEIGHT
FONT, SMALL, TITLE = 13, 12, 16
LINE = 18.0  # from one line of text to the next
DOT = 4.5

STYLE = (
    "text{font:%dpx system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#4a4f57}"
    ".title{font-size:16px;font-weight:600;fill:#1d1f23}.strong{fill:#1d1f23}.mark{font-weight:600;fill:#1d1f23;"
    "stroke:#fcfcfa;stroke-width:3px;paint-order:stroke}.paper{fill:#fcfcfa}"
    ".grid{stroke:#e3e2dc}.edge{stroke:#8b9099}.lead{stroke:#8b9099}.dot{fill:#fcfcfa;stroke:#1d1f23;stroke-width:2}"
    ".curve{fill:none;stroke-width:2.5;stroke-linejoin:round}%s"
    "@media(prefers-color-scheme:dark){text{fill:#b3b8c0}.title,.strong{fill:#f0eee8}.mark{fill:#f0eee8;stroke:#15171a}"
    ".paper{fill:#15171a}.grid{stroke:#2b2f35}.edge,.lead{stroke:#7b818a}.dot{fill:#15171a;stroke:#f0eee8}%s}"
)


class Series(NamedTuple):
    """A named line through points with positive coordinates, from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A ring on a point, with a label beside it and a tooltip."""

    x: float
    y: float
    label: str
    tooltip: str


@dataclass(frozen=True)
class LogChart:
    """Lines over two logarithmic axes: powers of two along x, powers of ten along y.

    Attributes:
        x_range: the ends of the x axis.
        format_power: the label of a power of ten on the y axis.
        notes: lines below the plot.
        description: alternative text for screen readers.
    """

    title: str
    x_label: str
    x_range: tuple[int, int]
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    notes: Sequence[str] = ()
    description: str = ""
    format_power: Callable[[int], str] = str

    @cached_property
    def svg(self) -> Markup:
        """The drawing, an SVG document that follows the reader's color scheme."""
        lines = [[self._to_pixels(*point) for point in series.points] for series in self.series]
        width, height = self._measure_size()
        parts = [
            element("title", self.title, id="regard-title"),
            element("desc", self.description, id="regard-desc"),
            element("style", Markup(_make_style(len(self.series)))),
            element("rect", class_="paper", width=f"{width:.0f}", height=f"{height:.0f}"),
            element("text", self.title, class_="title", x=f"{LEFT:.0f}", y="30"),
            *self._draw_axes(),
            *(_draw_curve("polyline", index, points=format_points(line)) for index, line in enumerate(lines)),
            *self._draw_names(lines),
            *self._draw_marks(lines),
            *(_draw_text(note, LEFT, BOTTOM + 72 + LINE * row, size=SMALL) for row, note in enumerate(self.notes)),
        ]
        return document(parts, round(width), round(height), role="img", aria_labelledby="regard-title regard-desc")

    def _measure_size(self) -> tuple[float, float]:
        widths = [RIGHT + 48 + max((estimate_width(series.name, FONT) for series in self.series), default=0.0)]
        widths += [LEFT + 20 + estimate_width(note, SMALL) for note in self.notes]
        widths.append(LEFT + 20 + estimate_width(self.title, TITLE))
        return max(widths), BOTTOM + 62 + (LINE * len(self.notes) + 8 if self.notes else 0)

    # Axes

    @cached_property
    def _y_range(self) -> tuple[float, float]:
        """The logarithms at the bottom and at the top, with a power of ten between them."""
        values = [value for series in self.series for _, value in series.points]
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max(0.04 * (high - low), 0.15)
        low, high = low - margin, high + margin
        return (low if math.ceil(low) <= math.floor(high) else float(math.floor(high))), high

    def _to_pixels(self, x: float, y: float) -> Point:
        first, last = (math.log2(end) for end in self.x_range)
        low, high = self._y_range
        return (
            LEFT + WIDTH * (math.log2(x) - first) / (last - first),
            TOP + HEIGHT * (high - math.log10(y)) / (high - low),
        )

    def _draw_axes(self) -> list[Markup]:
        parts = []
        for value in x_ticks(*self.x_range):
            x, _ = self._to_pixels(value, 1.0)
            parts.append(element("path", class_="grid", d=f"M{x:.1f} {TOP:.1f}V{BOTTOM:.1f}"))
            parts.append(_draw_text(f"{value:,}", x, BOTTOM + 20, anchor="middle", size=SMALL))
        for power in _y_ticks(*self._y_range):
            _, y = self._to_pixels(1.0, 10.0**power)
            parts.append(element("path", class_="grid", d=f"M{LEFT:.1f} {y:.1f}H{RIGHT:.1f}"))
            parts.append(_draw_text(self.format_power(power), LEFT - 8, y + 4, anchor="end", size=SMALL))
        edge = f"M{LEFT:.1f} {TOP:.1f}V{BOTTOM:.1f}H{RIGHT:.1f}"
        parts.append(element("path", class_="edge", fill="none", d=edge))
        parts.append(_draw_text(self.x_label, LEFT + WIDTH / 2, BOTTOM + 42, anchor="middle"))
        return parts

    # Names of the lines, and labels of the marks

    def _draw_names(self, lines: Sequence[Sequence[Point]]) -> list[Markup]:
        """Each name beside the end of its line, moved up or down until no two touch."""
        ends = sorted((line[-1][1], index) for index, line in enumerate(lines))
        places = spread_labels([y for y, _ in ends], LINE, TOP + 8, BOTTOM - 4)
        parts = []
        for (y, index), place in zip(ends, places, strict=True):
            if lines[index][-1][0] > RIGHT - 1:
                lead = f"M{RIGHT + 3:.1f} {y:.1f}L{RIGHT + 12:.1f} {place:.1f}"
                parts.append(element("path", class_="lead", fill="none", d=lead))
            parts.append(_draw_curve("path", index, d=f"M{RIGHT + 13:.1f} {place:.1f}h18"))
            parts.append(_draw_text(self.series[index].name, RIGHT + 36, place + 4.5, kind="strong"))
        return parts

    def _draw_marks(self, lines: Sequence[Sequence[Point]]) -> list[Markup]:
        """A ring on each mark and its label beside it, where there is room."""
        rings, leads, labels = [], [], []
        dots = [self._to_pixels(mark.x, mark.y) for mark in self.marks]
        around = [Box(x - DOT - 2, y - DOT - 2, x + DOT + 2, y + DOT + 2) for x, y in dots]
        taken: list[Box] = []
        known: set[tuple[str, int]] = set()
        for mark, (x, y) in zip(self.marks, dots, strict=True):
            title = element("title", mark.tooltip)
            rings.append(element("circle", title, class_="dot", cx=f"{x:.1f}", cy=f"{y:.1f}", r=DOT))
            if (mark.label, round(y)) in known:  # several lines through one point share a label
                continue
            known.add((mark.label, round(y)))
            wide, high = estimate_width(mark.label, FONT) * 1.06, FONT + 5.0
            inside = Box(LEFT + 2, TOP - 4, RIGHT, BOTTOM)
            found = place_label(x, y, wide, high, inside, [*taken, *around], lines)
            # Without room the label covers its own ring.
            box, far = found or (Box(x - wide / 2, y - high - DOT, x + wide / 2, y - DOT), False)
            taken.append(box)
            if far:
                near = (min(max(x, box.left), box.right), min(max(y, box.top), box.bottom))
                leads.append(element("path", class_="lead", d=f"M{x:.1f} {y:.1f}L{near[0]:.1f} {near[1]:.1f}"))
            labels.append(
                _draw_text(mark.label, (box.left + box.right) / 2, box.bottom - 4, anchor="middle", kind="mark")
            )
        return [*leads, *rings, *labels]


def x_ticks(low: int, high: int) -> list[int]:
    """Powers of two; every second, third, ... of them where the labels would overlap."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    widest = estimate_width(f"{2**last:,}", SMALL) + 12
    apart = WIDTH / max(math.log2(high / low), 1e-9)
    step = max(1, math.ceil(widest / apart))
    return [2**power for power in range(first, last + 1) if (power - first) % step == 0] or [low, high]


def _y_ticks(low: float, high: float) -> list[int]:
    """Powers of ten, eight at most and one at least."""
    first, last = math.ceil(low), math.floor(high)
    step = max(1, math.ceil((last - first) / 8))
    return [power for power in range(first, last + 1) if (power - first) % step == 0]


def _draw_curve(tag: str, index: int, **attributes: Any) -> Markup:
    dash = DASHES[index % len(DASHES)] or None
    return element(tag, class_=f"curve c{index}", **attributes, stroke_dasharray=dash)


def _draw_text(words: str, x: float, y: float, *, anchor: str = "", size: int = 0, kind: str = "") -> Markup:
    style = f"font-size:{size}px" if size else None
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
    return element("text", words, **place, class_=kind or None, text_anchor=anchor or None, style=style)


def _make_style(count: int) -> str:
    light = "".join(f".c{i}{{stroke:{CURVES[i % len(CURVES)]}}}" for i in range(count))
    dark = "".join(f".c{i}{{stroke:{CURVES_DARK[i % len(CURVES_DARK)]}}}" for i in range(count))
    return STYLE % (FONT, light, dark)


def share_chart(
    series: Mapping[str, Sequence[float]],
    caption: str,
    ends: tuple[str, str],
    low: float,
    high: float,
    form: str = ".0%",
    places: Mapping[str, Sequence[float]] | None = None,
) -> Markup:
    """Shares, or other numbers, over steps as a figure of a page; `ends` name the first and the last step.

    `places` are where the values of each line lie between the ends, from 0 to 1; at equal distances if not given.
    `low` and `high` are the numbers at the bottom and the top, written by the format `form`. Text is outside the SVG,
    so that it keeps its size on any screen.
    """
    marks = [low + (high - low) * step / 4 for step in range(5)]
    grid = element("path", d="".join(f"M0 {100 * (high - mark) / (high - low):.2f}H100" for mark in marks))
    lines, names = [], []
    for index, (name, values) in enumerate(series.items()):
        last = max(len(values) - 1, 1)
        across = [step / last for step in range(len(values))] if places is None else places[name]
        points = " ".join(
            f"{100 * place:.2f},{100 * (high - min(max(value, low), high)) / (high - low):.2f}"
            for place, value in zip(across, values, strict=True)
        )
        color = f"var(--h{(1, 6, 3, 8, 5)[index % 5]})"
        lines.append(element("polyline", points=points, style=f"stroke:{color}"))
        names.append(element("li", element("i", ""), element("span", name), style=f"color:{color}"))
    words = "; ".join(
        f"{name} ends at {values[-1]:{'.1%' if '%' in form else form}}" for name, values in series.items()
    )
    frame = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none"}
    drawing = element("svg", grid, *lines, **frame, role="img", aria_label=words)
    scale = [
        element("span", f"{mark:{form}}", class_="scale", style=side)
        for side, mark in (("top:0", high), ("bottom:1.6em", low))
    ]
    below = element("div", *(element("span", end) for end in ends), class_="ends")
    plot = element("div", Markup(f"\n{drawing}\n{join(scale)}\n{below}\n"), class_="chart")
    return figure(join([element("ul", *names, class_="legend"), plot], "\n"), caption)
