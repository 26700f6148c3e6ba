"""Costs against a length as a chart with two logarithmic axes, and the points at which they cross."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.cost_model.cost import Cost
from regard.cost_model.curves import Crossing, Curve, Curves
from regard.cost_model.symbols import read_symbol
from regard.cost_model.units import exact, short
from regard.render.chart import LogChart, Mark, Series
from regard.render.files import check_suffix, write_file
from regard.render.markup import element, join
from regard.render.page import render_page
from regard.render.table import Column, Table

SUFFIXES = (".svg", ".html")
# Lines that stand below the plot; further crossings are counted.
MOST_NOTES = 10
UNITS = {"macs": "MAC", "flops": "FLOP", "bytes": "B", "activation_bytes": "B"}
NAMES = {"macs": "multiply-adds", "flops": "operations", "activation_bytes": "bytes saved for backward"}


def draw_curves(
    costs: Mapping[str, Cost], symbol: str = "tokens", of: str = "macs", low: int = 64, high: int = 65536
) -> CostChart:
    """Costs against a length, both on logarithmic axes, with the points at which they cross.

        >>> from regard import Attention, cost
        >>> softmax, linear = cost(Attention(), dim=64), cost(Attention(feature_map="elu1"), dim=64)
        >>> chart = draw_curves({"softmax": softmax, "linear": linear}, low=32)
        >>> print(*chart.crossings)
        65: linear costs as much as softmax, and less beyond

    Args:
        costs: each with its name in the chart.
        symbol: what grows from `low` to `high`: a keyword of `cost`, or its symbol.
        of: a quantity, such as `"macs"`, `"bytes"` or `"activation_bytes"`.
    """
    return CostChart(Curves(costs, symbol, of, low, high))


class CostChart:
    """A chart of cost curves.

    Attributes:
        crossings: where one becomes cheaper than another.
        svg: the drawing; a notebook shows it.
    """

    def __init__(self, drawn: Curves) -> None:
        self.curves = drawn
        self.crossings: list[Crossing] = drawn.crossings
        unit = UNITS.get(drawn.of, "")
        self._chart = LogChart(
            title=_title(drawn),
            x_label=f"{_keyword_name(drawn)} {read_symbol(drawn.keyword)}",
            x_range=(drawn.low, drawn.high),
            series=[Series(curve.name, drawn.points(curve)) for curve in drawn.curves],
            marks=[Mark(each.length, each.value, f"{each.length:,}", str(each)) for each in drawn.crossings],
            notes=_notes(drawn),
            description=_description(drawn),
            format_power=lambda power: _format_power(power, unit),
        )

    @property
    def svg(self) -> str:
        return self._chart.svg

    @property
    def html(self) -> str:
        """A page with the drawing, and the crossings as a list."""
        crossings = element("ul", *(element("li", str(crossing)) for crossing in self.crossings))
        drawing = element("div", self._chart.svg, class_="drawing")
        return render_page(self._chart.title, join([drawing, crossings], "\n"))

    def save(self, path: str | Path) -> Path:
        """Write it: `.svg` the drawing, `.html` a page that holds it and needs nothing else."""
        path = check_suffix(path, SUFFIXES)
        return write_file(path, f"{self.svg}\n" if path.suffix.lower() == ".svg" else self.html)

    def to_dict(self) -> dict[str, Any]:
        """Every point and every crossing, in plain Python."""
        return {
            "of": self.curves.of,
            "against": self.curves.keyword,
            "curves": {curve.name: self.curves.points(curve) for curve in self.curves.curves},
            "crossings": [asdict(crossing) for crossing in self.crossings],
        }

    def table(self) -> str:
        """The chart in words: where each curve begins and ends, and where they cross."""
        ends = (self.curves.low, self.curves.high)
        columns = [Column(), *(Column(f"at {length:,}", "right") for length in ends)]
        rows = [(curve.name, *(_format_value(curve, length) for length in ends)) for curve in self.curves.curves]
        notes = _notes(self.curves, every=True)
        return "\n".join([_title(self.curves), "", str(Table(columns, rows)), *([""] if notes else []), *notes])

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        names = ", ".join(curve.name for curve in self.curves.curves)
        return f"CostChart({self.curves.of} of {names}; {len(self.crossings)} crossings)"


def _title(drawn: Curves) -> str:
    name = NAMES.get(drawn.of, drawn.of)
    return f"{name[:1].upper()}{name[1:]} against {_keyword_name(drawn)}"


def _keyword_name(drawn: Curves) -> str:
    return drawn.keyword.replace("_", " ")


def _notes(drawn: Curves, every: bool = False) -> list[str]:
    """The crossings, and where a curve ends early."""
    notes = [str(crossing) for crossing in drawn.crossings]
    if not every and len(notes) > MOST_NOTES:
        notes = [*notes[: MOST_NOTES - 1], f"and {len(notes) - MOST_NOTES + 1} more"]
    for curve in drawn.curves:
        if curve.ends is not None:
            notes.append(f"{curve.name} ends at {drawn.points(curve)[-1][0]:,}: {curve.ends.headline}")
    return notes


def _description(drawn: Curves) -> str:
    """The chart for screen readers: where each curve begins and ends, and where they cross."""
    unit, sentences = UNITS.get(drawn.of, ""), []
    for curve in drawn.curves:
        (first, low), (last, high) = drawn.points(curve)[0], drawn.points(curve)[-1]
        sentences.append(f"{curve.name}: {short(low, unit)} at {first:,}, {short(high, unit)} at {last:,}.")
    return " ".join([*sentences, *(f"{note}." for note in _notes(drawn))])


def _format_value(curve: Curve, length: int) -> str:
    value = curve.at(length)
    return "-" if value is None else exact(value)


def _format_power(power: int, unit: str) -> str:
    """A power of ten with its prefix: `100 M`."""
    if power < 0:
        return f"{10.0**power:g} {unit}".rstrip()
    words = short(10**power, unit)
    number, _, rest = words.partition(" ")
    return f"{float(number):g} {rest}".rstrip() if "." in number else words
