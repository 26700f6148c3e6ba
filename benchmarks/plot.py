"""The verdicts as a picture: one bar for each ratio, a mark where we want it to reach."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.report import collect
from benchmarks.results import Result

HOLDS, LOSES, UNBARRED = "#3b6ea5", "#d1603d", "#b8b8b8"


def draw(repeats: list[list[Result]], title: str, file: Path) -> str | None:
    """Save the picture; returns why there is none when there is none."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return "matplotlib is not installed"
    rows = [
        (f"{case}\nagainst {against}", verdicts, [verdict.value for verdict in verdicts if verdict.value is not None])
        for (case, against), verdicts in collect(repeats).items()
    ]
    rows = [row for row in rows if row[2]]
    if not rows:
        return "nothing was measured"
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, (_, verdicts, values) in enumerate(rows):
        middle, first = statistics.median(values), verdicts[0]
        held = all(verdict.holds for verdict in verdicts)
        colour = UNBARRED if first.bar is None else HOLDS if held else LOSES
        axes.barh(place, middle, color=colour, height=0.62)
        if len(values) > 1:
            axes.plot([min(values), max(values)], [place, place], color="black", linewidth=1)
        if first.bar is not None:
            axes.plot([first.bar, first.bar], [place - 0.42, place + 0.42], color="black", linewidth=2.2)
        sign = "" if first.at_least else " (at most)"
        axes.annotate(
            f"{middle:.2f}{sign}",
            (max(*values, first.bar or 0), place),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    # Twice as fast and half as fast should look equally far from a draw.
    axes.set_xscale("log")
    every = [number for _, verdicts, values in rows for number in (*values, verdicts[0].bar or 1)]
    left, right = min(0.5, 0.8 * min(every)), 1.6 * max(every)  # on the right there is room for the numbers
    axes.set_xlim(left, right)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    ticks = [2.0**power for power in range(-6, 12) if left <= 2.0**power <= right]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        "peer's time over ours, or the share or exponent named; thick mark: the bar; thin line: all repeats"
    )
    axes.set_title(title, fontsize=10, loc="left")
    kinds = {"holds in every repeat": HOLDS, "loses in a repeat": LOSES, "no bar": UNBARRED}
    words = [Patch(color=colour, label=word) for word, colour in kinds.items()]
    # Above the bars: inside, it would hide the longest of them.
    axes.legend(handles=words, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(words), frameon=False)
    figure.savefig(file, dpi=110)
    return None
