"""Costs against a length as a drawing, both as logarithms, with the points at which they cross: SVG, no library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from regard.cost.cost import Cost
from regard.cost.curves import Crossing, Curve, Curves
from regard.cost.letters import read_letter
from regard.cost.units import exact, short
from regard.errors import CostError

# The plot within the picture, and what is left of it on the right for names.
LEFT, TOP, WIDE, HIGH = 84.0, 56.0, 520.0, 330.0
FONT, SMALL = 13, 12
# How wide a letter is, of its height, at most; fonts differ, and nothing here can measure them.
LETTER = 0.58
LINE = 18.0
# Names and crossings that are told below the plot; more are counted.
MOST_TOLD = 10
DOT = 4.5
UNITS = {"macs": "MAC", "flops": "FLOP", "bytes": "B", "activation_bytes": "B"}
WORDS = {"macs": "multiply-adds", "flops": "operations", "activation_bytes": "bytes kept for the way back"}
# Okabe and Ito's colours, which people tell apart however they see them; for dark paper they are lighter. Dashes tell
# the curves apart where there is no colour at all.
COLOURS = ("#0072b2", "#d55e00", "#00805c", "#a8508a", "#8a6a00", "#2a8fc7", "#5a5a5a")
LIGHTER = ("#5db3ea", "#ff8a3d", "#35c99c", "#eba3cc", "#f0c04a", "#9bd4f5", "#bdbdbd")
DASHES = ("", "9 4", "2 3", "12 3 2 3", "5 3", "1 4", "14 4")

STYLE = (
    "text{font:%dpx system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#4a4f57}"
    ".title{font-size:16px;font-weight:600;fill:#1d1f23}.strong{fill:#1d1f23}.mark{font-weight:600;fill:#1d1f23;"
    "stroke:#fcfcfa;stroke-width:3px;paint-order:stroke}.paper{fill:#fcfcfa}"
    ".grid{stroke:#e3e2dc}.edge{stroke:#8b9099}.lead{stroke:#8b9099}.dot{fill:#fcfcfa;stroke:#1d1f23;stroke-width:2}"
    ".curve{fill:none;stroke-width:2.5;stroke-linejoin:round}%s"
    "@media(prefers-color-scheme:dark){text{fill:#b3b8c0}.title,.strong{fill:#f0eee8}.mark{fill:#f0eee8;stroke:#15171a}"
    ".paper{fill:#15171a}.grid{stroke:#2b2f35}.edge,.lead{stroke:#7b818a}.dot{fill:#15171a;stroke:#f0eee8}%s}"
)


def curves(
    costs: Mapping[str, Cost], letter: str = "tokens", of: str = "macs", low: int = 64, high: int = 65536
) -> Picture:
    """Costs against a length, both as logarithms, with the points at which they cross.

        >>> from regard import Attention, cost
        >>> softmax, linear = cost(Attention(), dim=64), cost(Attention(feature_map="elu1"), dim=64)
        >>> picture = curves({"softmax": softmax, "linear": linear}, low=32)
        >>> print(*picture.crossings)
        65: linear costs as much as softmax, and less beyond

    Args:
        costs: each with its name in the picture.
        letter: what grows from `low` to `high`: a keyword of `cost`, or its letter.
        of: a quantity, such as `"macs"`, `"bytes"` or `"activation_bytes"`.
    """
    return Picture(Curves(costs, letter, of, low, high))


class Picture:
    """A drawing of curves.

    Attributes:
        crossings: where one becomes cheaper than another.
        svg: the drawing; a notebook shows it.
    """

    def __init__(self, drawn: Curves) -> None:
        self.curves = drawn
        self.crossings: list[Crossing] = drawn.crossings
        self.svg = _svg(drawn)

    def save(self, path: str | Path) -> None:
        """Write it: `.svg` the drawing, `.html` a page that holds it and needs nothing else."""
        path = check_ending(path)
        text = self.svg if path.suffix.lower() == ".svg" else self.html
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as failure:
            raise CostError(
                f"{path} cannot be written.",
                found=f"{type(failure).__name__}: {failure}",
                because="the system refuses",
                instead="a file in a folder that exists",
            ) from failure

    @property
    def html(self) -> str:
        """A page with the drawing, and the crossings as words."""
        told = "".join(f"<li>{escape(str(crossing))}</li>" for crossing in self.crossings)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(_title(self.curves))}</title>\n"
            "<style>:root{color-scheme:light dark}body{margin:0 auto;max-width:64rem;padding:1rem;"
            "font:16px/1.5 system-ui,sans-serif;background:#fcfcfa;color:#1d1f23}svg{width:100%;height:auto}"
            "@media(prefers-color-scheme:dark){body{background:#15171a;color:#e6e4de}}</style>\n</head>\n"
            f"<body>\n<main>\n{self.svg}\n<ul>{told}</ul>\n</main>\n</body>\n</html>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Every point and every crossing, in plain Python."""
        return {
            "of": self.curves.of,
            "against": self.curves.keyword,
            "curves": {curve.name: self.curves.points(curve) for curve in self.curves.curves},
            "crossings": [asdict(crossing) for crossing in self.crossings],
        }

    def table(self) -> str:
        """The drawing in words: where each curve begins and ends, and where they cross."""
        rows = [("", f"at {self.curves.low:,}", f"at {self.curves.high:,}")]
        for curve in self.curves.curves:
            low, high = (curve.at(length) for length in (self.curves.low, self.curves.high))
            rows.append((curve.name, "-" if low is None else exact(low), "-" if high is None else exact(high)))
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{name:<{wide[0]}}  {low:>{wide[1]}}  {high:>{wide[2]}}" for name, low, high in rows]
        below = _below(self.curves, every=True)
        return "\n".join([_title(self.curves), "", *lines, *([""] if below else []), *below])

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        names = ", ".join(curve.name for curve in self.curves.curves)
        return f"Picture({self.curves.of} of {names}; {len(self.crossings)} crossings)"


def check_ending(path: str | Path) -> Path:
    """Whether a picture can be written into a file of this name."""
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".html", ".htm"):
        raise CostError(
            f"A picture cannot be written as {path.suffix or 'a file without an ending'}.",
            asked=str(path),
            because="a picture is drawn as SVG, by itself or in a page",
            instead=f"{path.with_suffix('.svg')} or {path.with_suffix('.html')}",
        )
    return path


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class _Scale:
    """From lengths and numbers to places in the plot."""

    def __init__(self, drawn: Curves) -> None:
        values = [value for curve in drawn.curves for _, value in drawn.points(curve)]
        self.low, self.high = math.log2(drawn.low), math.log2(drawn.high)
        floor, top = math.log10(min(values)), math.log10(max(values))
        margin = max(0.04 * (top - floor), 0.15)
        self.floor, self.top = floor - margin, top + margin
        if math.ceil(self.floor) > math.floor(self.top):  # no power of ten between them: the one below is
            self.floor = float(math.floor(self.top))

    def x(self, length: float) -> float:
        return LEFT + WIDE * (math.log2(length) - self.low) / (self.high - self.low)

    def y(self, value: float) -> float:
        return TOP + HIGH * (self.top - math.log10(value)) / (self.top - self.floor)


def _svg(drawn: Curves) -> str:
    scale = _Scale(drawn)
    lines = {curve.name: [(scale.x(n), scale.y(value)) for n, value in drawn.points(curve)] for curve in drawn.curves}
    names = _names(drawn, lines)
    below = _below(drawn)
    longest = max((_wide(curve.name, FONT) for curve in drawn.curves), default=0.0)
    width = max(LEFT + WIDE + 34 + longest + 14, LEFT + max((_wide(told, SMALL) for told in below), default=0) + 20)
    width = max(width, LEFT + _wide(_title(drawn), 16) + 20)
    height = TOP + HIGH + 62 + (LINE * len(below) + 8 if below else 0)
    parts = [
        f'<title id="regard-title">{escape(_title(drawn))}</title>',
        f'<desc id="regard-desc">{escape(_words(drawn))}</desc>',
        f"<style>{_style(len(drawn.curves))}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text class="title" x="{LEFT:.0f}" y="30">{escape(_title(drawn))}</text>',
        *_axes(drawn, scale),
        *(_polyline(lines[curve.name], index) for index, curve in enumerate(drawn.curves)),
        *names,
        *_marks(drawn, scale, list(lines.values())),
    ]
    for row, told in enumerate(below):
        parts.append(_text(LEFT, TOP + HIGH + 72 + LINE * row, told, size=SMALL))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-labelledby="regard-title regard-desc">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


# Axes


def _axes(drawn: Curves, scale: _Scale) -> list[str]:
    right, bottom = LEFT + WIDE, TOP + HIGH
    parts = []
    for length in _length_ticks(drawn.low, drawn.high):
        x = scale.x(length)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP:.1f}V{bottom:.1f}"/>')
        parts.append(_text(x, bottom + 20, f"{length:,}", anchor="middle", size=SMALL))
    for power in _value_ticks(scale):
        y = scale.y(10.0**power)
        parts.append(f'<path class="grid" d="M{LEFT:.1f} {y:.1f}H{right:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, _power(power, UNITS.get(drawn.of, "")), anchor="end", size=SMALL))
    parts.append(f'<path class="edge" fill="none" d="M{LEFT:.1f} {TOP:.1f}V{bottom:.1f}H{right:.1f}"/>')
    letter = read_letter(drawn.keyword)
    parts.append(_text(LEFT + WIDE / 2, bottom + 42, f"{_spoken(drawn.keyword)} {letter}", anchor="middle"))
    return parts


def _length_ticks(low: int, high: int) -> list[int]:
    """Powers of two; every second, third, ... of them where they would stand too close."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    widest = _wide(f"{2**last:,}", SMALL) + 12
    apart = WIDE / max(math.log2(high / low), 1e-9)
    step = max(1, math.ceil(widest / apart))
    found = [2**power for power in range(first, last + 1) if (power - first) % step == 0]
    return found or [low, high]


def _value_ticks(scale: _Scale) -> list[int]:
    """Powers of ten, a handful of them, and one at least."""
    first, last = math.ceil(scale.floor), math.floor(scale.top)
    step = max(1, math.ceil((last - first) / 8))
    return [power for power in range(first, last + 1) if (power - first) % step == 0]


def _power(power: int, unit: str) -> str:
    """A power of ten with its prefix: `100 M`."""
    if power < 0:
        return f"{10.0**power:g} {unit}".rstrip()
    words = short(10**power, unit)
    number, _, rest = words.partition(" ")
    return f"{float(number):g} {rest}".rstrip() if "." in number else words


# Curves and their names


def _polyline(points: list[tuple[float, float]], index: int) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = DASHES[index % len(DASHES)]
    return f'<polyline class="curve c{index}" points="{path}"' + (f' stroke-dasharray="{dash}"/>' if dash else "/>")


def _names(drawn: Curves, lines: Mapping[str, list[tuple[float, float]]]) -> list[str]:
    """Each name beside the end of its curve, moved up or down until no two touch."""
    ends = sorted((lines[curve.name][-1][1], index, curve) for index, curve in enumerate(drawn.curves))
    places = _spread([y for y, _, _ in ends], LINE, TOP + 8, TOP + HIGH - 4)
    parts = []
    for (y, index, curve), place in zip(ends, places, strict=True):
        x = lines[curve.name][-1][0]
        right = LEFT + WIDE
        if x > right - 1:
            parts.append(f'<path class="lead" fill="none" d="M{right + 3:.1f} {y:.1f}L{right + 12:.1f} {place:.1f}"/>')
        dash = DASHES[index % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<path class="curve c{index}" d="M{right + 13:.1f} {place:.1f}h18"{dashed}/>')
        parts.append(_text(right + 36, place + 4.5, curve.name, name="strong"))
    return parts


def _spread(wanted: list[float], apart: float, low: float, high: float) -> list[float]:
    """The nearest places to those that are wanted, in the same order, so far apart."""
    if not wanted:
        return []
    places = [max(wanted[0], low)]
    for each in wanted[1:]:
        places.append(max(each, places[-1] + apart))
    # What went past the end moves back, and what is before it with it.
    limit = max(high, low + apart * (len(places) - 1))
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], limit)
        limit = places[index] - apart
    return places


# Crossings


def _marks(drawn: Curves, scale: _Scale, lines: list[list[tuple[float, float]]]) -> list[str]:
    """A ring on each crossing and its length beside it, where there is room."""
    rings, labels, taken = [], [], []
    dots = [(scale.x(crossing.length), scale.y(crossing.value)) for crossing in drawn.crossings]
    around = [_Box(x - DOT - 2, y - DOT - 2, x + DOT + 2, y + DOT + 2) for x, y in dots]
    told: set[tuple[int, int]] = set()
    for crossing, (x, y) in zip(drawn.crossings, dots, strict=True):
        rings.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"><title>{escape(str(crossing))}</title></circle>'
        )
        key = (crossing.length, round(y))
        if key in told:  # three curves through one point have one label
            continue
        told.add(key)
        words = f"{crossing.length:,}"
        box, far = _place(x, y, _wide(words, FONT) * 1.06, taken, around, lines)
        taken.append(box)
        if far:
            near = (min(max(x, box.left), box.right), min(max(y, box.top), box.bottom))
            labels.append(f'<path class="lead" d="M{x:.1f} {y:.1f}L{near[0]:.1f} {near[1]:.1f}"/>')
        labels.append(_text((box.left + box.right) / 2, box.bottom - 4, words, anchor="middle", name="mark"))
    leads = [label for label in labels if label.startswith("<path")]
    return [*leads, *rings, *(label for label in labels if not label.startswith("<path"))]


def _place(
    x: float, y: float, wide: float, taken: list[_Box], dots: list[_Box], lines: list[list[tuple[float, float]]]
) -> tuple[_Box, bool]:
    """The nearest place for a label that covers no other label and no ring, and as little of the curves as can be."""
    tall, best, least = FONT + 5.0, None, math.inf
    for step, distance in enumerate((10.0, 18.0, 30.0, 44.0, 60.0, 80.0)):
        for turn in range(16):
            angle = math.pi / 8 * turn + math.pi / 8
            middle_x = x + math.cos(angle) * (distance + wide / 2)
            middle_y = y + math.sin(angle) * (distance + tall / 2)
            box = _Box(middle_x - wide / 2, middle_y - tall / 2, middle_x + wide / 2, middle_y + tall / 2)
            if not (box.left > LEFT + 2 and box.right < LEFT + WIDE and box.top > TOP - 4 and box.bottom < TOP + HIGH):
                continue
            if any(box.meets(other) for other in [*taken, *dots]):
                continue
            covered = sum(_covered(box, line) for line in lines)
            penalty = covered + 6.0 * step
            if penalty < least:
                best, least = (box, step >= 2), penalty
    if best is None:  # no room anywhere: on top of its own ring, which at least says where it is
        return _Box(x - wide / 2, y - tall - DOT, x + wide / 2, y - DOT), False
    return best


def _covered(box: _Box, line: list[tuple[float, float]]) -> float:
    """How much of a curve lies under a box, in pixels."""
    found = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        # Most of a curve is elsewhere.
        if max(x0, x1) < box.left - 2 or min(x0, x1) > box.right + 2:
            continue
        if max(y0, y1) < box.top - 1 or min(y0, y1) > box.bottom + 1:
            continue
        pieces = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0)) / 2))
        for piece in range(pieces):
            part = (piece + 0.5) / pieces
            x, y = x0 + part * (x1 - x0), y0 + part * (y1 - y0)
            if box.left - 2 < x < box.right + 2 and box.top - 1 < y < box.bottom + 1:
                found += math.hypot(x1 - x0, y1 - y0) / pieces
    return found


# Words


def _title(drawn: Curves) -> str:
    what = WORDS.get(drawn.of, drawn.of)
    return f"{what[:1].upper()}{what[1:]} against {_spoken(drawn.keyword)}"


def _spoken(keyword: str) -> str:
    return keyword.replace("_", " ")


def _below(drawn: Curves, every: bool = False) -> list[str]:
    """What is written under the plot: the crossings, and where a curve ends early."""
    told = [str(crossing) for crossing in drawn.crossings]
    if not every and len(told) > MOST_TOLD:
        told = [*told[: MOST_TOLD - 1], f"and {len(told) - MOST_TOLD + 1} more"]
    return told + [_ending(drawn, curve) for curve in drawn.curves if curve.ends is not None]


def _ending(drawn: Curves, curve: Curve) -> str:
    assert curve.ends is not None
    return f"{curve.name} ends at {drawn.points(curve)[-1][0]:,}: {curve.ends.headline}"


def _words(drawn: Curves) -> str:
    """The picture for those who do not see it: where each curve begins and ends, and where they cross."""
    told = []
    for curve in drawn.curves:
        (first, low), (last, high) = drawn.points(curve)[0], drawn.points(curve)[-1]
        unit = UNITS.get(drawn.of, "")
        told.append(f"{curve.name}: {short(low, unit)} at {first:,}, {short(high, unit)} at {last:,}.")
    return " ".join([*told, *(f"{line}." for line in _below(drawn))])


def _text(x: float, y: float, words: str, *, anchor: str = "", size: int = 0, name: str = "") -> str:
    more = (f' class="{name}"' if name else "") + (f' text-anchor="{anchor}"' if anchor else "")
    more += f' style="font-size:{size}px"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'


def _wide(words: str, size: float) -> float:
    return LETTER * size * len(words)


def _style(count: int) -> str:
    light = "".join(f".c{i}{{stroke:{COLOURS[i % len(COLOURS)]}}}" for i in range(count))
    dark = "".join(f".c{i}{{stroke:{LIGHTER[i % len(LIGHTER)]}}}" for i in range(count))
    return STYLE % (FONT, light, dark)
