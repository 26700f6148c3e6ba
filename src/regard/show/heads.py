"""Where the heads of each layer look, around the query: now, and on the way there."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.layers.gaze import Gaze
from regard.show.colours import ACCENT, FAINT, LINE, head_colour
from regard.show.contours import Contour, contours
from regard.show.picture import Picture, panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = 2.5  # inches
MOST_COLUMNS = 3
SEEN = (
    "Where the heads look, seen from the query (the square in the middle): a dot is the centre of mass of a head's "
    "weights, half of which lie in the filled shape and nine tenths within the line. Rows count downward; one square "
    "is one place of the grid."
)


def heads(gazes: Gaze | Mapping[str, Gaze]) -> Picture:
    """Centres and contours of all heads, one panel for each layer.

    >>> from regard.layers.gaze import gaze
    >>> from regard.show import heads
    >>> heads({"first": gaze(Quadratic(9, grid=(8, 9)))}).save("heads.svg")  # doctest: +SKIP
    PosixPath('heads.svg')
    """
    return moving_heads([{"": gazes} if isinstance(gazes, Gaze) else gazes])


def moving_heads(epochs: Sequence[Mapping[str, Gaze]]) -> Picture:
    """The same with the ways that the centres took: each head's trail, paler where it is older.

    `epochs` are gazes by the names of layers, oldest first, as `gazes(model)` finds them after each epoch. The figure
    is the paper's (Cordonnier, Loukas and Jaggi 2020, figures 3 and 4), with contours and without smoothing.
    """
    course = read_course(epochs)
    names = list(course)
    columns = min(MOST_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    reach = extent(course)
    drawn = {}
    with style():
        high = PANEL * min(1.4, max(0.6, reach[0] / reach[1]))
        figure, axes = panels(rows, columns, PANEL, high + 0.25)
        for place, panel in enumerate(panel for row in axes for panel in row):
            if place >= len(names):
                panel.set_visible(False)
                continue
            drawn[names[place]] = _panel(panel, course[names[place]], reach)
            panel.set_ylabel("row" if place % columns == 0 else "")
            panel.set_xlabel("column" if place + columns >= len(names) else "")
            panel.set_title(layer_title(names[place], place) if len(names) > 1 or names[0] else "")
    caption = SEEN
    if len(epochs) > 1:
        caption += (
            f" Trails show the way of each centre through {len(epochs)} states, older parts paler; a ring is the first."
        )
    shorter = {name: len(steps) for name, steps in course.items() if len(steps) < len(epochs)}
    if shorter:
        caption += " Where the number of heads changed, the trail begins after the change."
    return Picture(figure, caption, {"layers": drawn, "extent": reach})


def read_course(epochs: Sequence[Mapping[str, Gaze]]) -> dict[str, list[Gaze]]:
    """The gazes of each layer through the epochs; of each only those with as many heads as it has in the end."""
    if not epochs or not epochs[-1]:
        raise InputError(
            "There are no heads to draw.",
            asked=f"{len(epochs)} epochs" if epochs else "no epochs",
            found="no layer that looks by position" if epochs else "",
            because="only heads that look by position look at a place that can be drawn without an image",
            instead="gazes(model) of a SpatialTransformer; show(model, image) for what looks by content",
        )
    course = {}
    for name, last in epochs[-1].items():
        steps = [epoch[name] for epoch in epochs if name in epoch]
        if any(bool(gaze.scores.isnan().any()) for gaze in steps):
            raise InputError(
                "Some heads look nowhere.",
                asked=f"the heads of {name or 'the layer'}",
                found="scores that are no numbers (nan)",
                because="the training came apart, or the model was damaged",
                instead="a model from before that, or a smaller learning rate",
            )
        cut = max((index for index, gaze in enumerate(steps) if gaze.heads != last.heads), default=-1)
        course[name] = steps[cut + 1 :]
    return course


def extent(course: Mapping[str, list[Gaze]]) -> tuple[float, float]:
    """How far from the query the panels reach, in rows and in columns: two deviations beyond every centre."""
    reach = [2.5, 2.5]
    most = [0.0, 0.0]
    for gaze in (gaze for steps in course.values() for gaze in steps):
        spread = gaze.covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        far = (gaze.mean.abs() + 2 * spread).amax(0).tolist()
        for axis in range(2):
            reach[axis] = max(reach[axis], math.floor(far[axis]) + 0.5)
            most[axis] = max(most[axis], gaze.grid[axis] - 0.5)
    return min(reach[0], max(most[0], 1.5)), min(reach[1], max(most[1], 1.5))


def layer_title(name: str, place: int) -> str:
    """`blocks.3.attention` is called layer 4; a name without a number keeps itself."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if number is not None and re.fullmatch(r"(?:.*\.)?(?:blocks?|layers?|layer|h|encoder|decoder)\.\d+(?:\..*)?", name):
        return f"layer {int(number.group(1)) + 1}"
    return name or f"layer {place + 1}"


def _panel(axes: Axes, steps: list[Gaze], reach: tuple[float, float]) -> dict[str, Any]:
    """Draw a layer; what was drawn is returned."""
    draw_grid(axes, reach)
    means = torch.stack([gaze.mean.cpu().double() for gaze in steps])  # (epoch, head, 2)
    lines = contours(steps[-1])
    for head in range(len(lines)):
        _trail(axes, means[:, head], head_colour(head))
    for head in by_size(lines):
        draw_contours(axes, lines[head], head_colour(head))
    for head in range(len(lines)):
        draw_dot(axes, means[-1, head], head)
    return {"mean": means, "contours": lines}


def draw_grid(axes: Axes, reach: tuple[float, float]) -> None:
    """The pixels around the query, and the query."""
    down, across = reach
    axes.set(xlim=(-across, across), ylim=(down, -down), aspect="equal")
    axes.set_xticks([tick + 0.5 for tick in range(-math.ceil(across), math.ceil(across))], minor=True)
    axes.set_yticks([tick + 0.5 for tick in range(-math.ceil(down), math.ceil(down))], minor=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_whole_numbers())
    axes.grid(which="minor", color=LINE, linewidth=0.6)
    axes.tick_params(which="both", length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, edgecolor=ACCENT, linewidth=1.6, zorder=3.5))


def draw_contours(axes: Axes, lines: list[Contour], colour: str) -> list[Any]:
    """The first contour filled, the others as lines."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    drawn = []
    for index, contour in enumerate(lines):
        loops = [[(column, row) for row, column in (*loop, loop[0])] for loop in contour.loops]
        if not loops:
            continue
        path = Path.make_compound_path(*(Path(loop, closed=True) for loop in loops))
        look: dict[str, Any] = {"facecolor": colour, "alpha": contour.opacity, "linewidth": 0.0}
        if index:
            look = {"fill": False, "edgecolor": colour, "linewidth": 0.9, "alpha": 0.75}
        drawn.append(axes.add_patch(PathPatch(path, zorder=3, **look)))
    return drawn


def by_size(lines: list[list[Contour]]) -> list[int]:
    """The heads from the widest to the narrowest: the order in which none is hidden."""
    return sorted(range(len(lines)), key=lambda head: -lines[head][0].area)


def draw_dot(axes: Axes, place: Tensor, head: int) -> list[Any]:
    """The centre of mass, with the number of the head."""
    row, column = place.tolist()
    colour = head_colour(head)
    dots = axes.plot([column], [row], "o", color=colour, markersize=8.5, markeredgecolor="white", zorder=5)
    look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 5.8, "weight": "bold", "zorder": 6}
    return [*dots, axes.annotate(str(head + 1), (column, row), color="white", **look)]


def _trail(axes: Axes, way: Tensor, colour: str) -> None:
    if len(way) < 2:
        return
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    points = way.flip(-1).tolist()  # column across, row down
    pieces = list(itertools.pairwise(points))
    shades = [to_rgba(colour, 0.12 + 0.78 * (step + 1) / len(pieces)) for step in range(len(pieces))]
    axes.add_collection(LineCollection(pieces, colors=shades, linewidths=1.5, capstyle="round", zorder=4))
    axes.plot(
        *zip(points[0], strict=True), "o", color=FAINT, fillstyle="none", markersize=3, markeredgewidth=0.7, zorder=4
    )


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, integer=True)
