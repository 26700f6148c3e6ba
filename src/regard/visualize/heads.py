"""Where the heads of each layer look, around the query: now, and on the way there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.layers.profiles import HeadProfile
from regard.render.colors import ACCENT, FAINT, LINE, head_color
from regard.visualize.contours import Contour, contours
from regard.visualize.labels import layer_titles
from regard.visualize.picture import Picture, make_panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = 2.5  # inches
MOST_COLUMNS = 3
SEEN = (
    "Where the heads look, seen from the query (the square in the middle): a dot is the centre of mass of a head's "
    "weights, half of which lie in the filled shape and nine tenths within the line. Rows count downward; one square "
    "is one place of the grid."
)


def draw_heads(head_profiles: HeadProfile | Mapping[str, HeadProfile], layers: Sequence[int] | None = None) -> Picture:
    """Centres and contours of all heads, one panel for each layer.

    >>> from regard.layers.profiles import head_profile
    >>> from regard.visualize import draw_heads
    >>> draw_heads({"first": head_profile(Quadratic(9, grid=(8, 9)))}).save("heads.svg")  # doctest: +SKIP
    PosixPath('heads.svg')
    """
    return draw_head_paths([{"": head_profiles} if isinstance(head_profiles, HeadProfile) else head_profiles], layers)


def draw_head_paths(
    epochs: Sequence[Mapping[str, HeadProfile]],
    layers: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Picture:
    """The same with the ways that the centres took: each head's trail, paler where it is older.

    `epochs` are head profiles by the names of layers, oldest first, as `head_profiles(model)` returns them after each
    epoch. The figure is the paper's (Cordonnier, Loukas and Jaggi 2020, figures 3 and 4), with contours and
    without smoothing. `layers` are those that are drawn, counted from 0; `labels` are the epochs in words. Written as
    `.html`, several epochs are a page with a slider, as `animate_heads` makes it.
    """
    course, titles = select_layers(read_trajectories(epochs), layers)
    names = list(course)
    columns = min(MOST_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    reach = extent(course)
    drawn = {}
    with style():
        high = PANEL * min(1.4, max(0.6, reach[0] / reach[1]))
        figure, axes = make_panels(rows, columns, PANEL, high + 0.25)
        for place, panel in enumerate(panel for row in axes for panel in row):
            if place >= len(names):
                panel.set_visible(False)
                continue
            drawn[names[place]] = _panel(panel, course[names[place]], reach)
            panel.set_ylabel("row" if place % columns == 0 else "")
            panel.set_xlabel("column" if place + columns >= len(names) else "")
            panel.set_title(titles[place] if len(names) > 1 or names[0] else "")
    caption = SEEN
    if len(epochs) > 1:
        caption += (
            f" Trails show the way of each centre through {len(epochs)} states, older parts paler; a ring is the first."
        )
    shorter = {name: len(steps) for name, steps in course.items() if len(steps) < len(epochs)}
    if shorter:
        caption += " Where the number of heads changed, the trail begins after the change."
    picture = Picture(figure, caption, {"layers": drawn, "extent": reach})
    if len(epochs) > 1:
        picture.page = lambda: _page(epochs, layers, labels)
    return picture


def _page(
    epochs: Sequence[Mapping[str, HeadProfile]], layers: Sequence[int] | None, labels: Sequence[str] | None
) -> str:
    from regard.visualize.animation import animate_heads

    return animate_heads(epochs, labels, layers=layers).page


def read_trajectories(epochs: Sequence[Mapping[str, HeadProfile]]) -> dict[str, list[HeadProfile]]:
    """The head profiles of each layer through the epochs, from when it has as many heads as in the end."""
    if not isinstance(epochs, Sequence) or not all(
        isinstance(epoch, Mapping) and all(isinstance(profile, HeadProfile) for profile in epoch.values())
        for epoch in epochs
    ):
        raise InputError(
            "These are no heads on their way.",
            asked=f"epochs of {type(epochs).__name__}",
            because="epochs are a list, and each of them the head profiles of all layers by their names",
            instead="draw_head_paths([head_profiles(model)]), or draw_heads(head_profiles(model)) for one epoch",
        )
    if not epochs or not epochs[-1]:
        raise InputError(
            "There are no heads to draw.",
            asked=f"{len(epochs)} epochs" if epochs else "no epochs",
            found="no layer that looks by position" if epochs else "",
            because="only heads that look by position look at a place that can be drawn without an image",
            instead="head_profiles(model) of a SpatialTransformer; show(model, image) for what looks by content",
        )
    course = {}
    for name, last in epochs[-1].items():
        steps = [epoch[name] for epoch in epochs if name in epoch]
        if any(bool(profile.scores.isnan().any()) for profile in steps):
            raise InputError(
                "Some heads look nowhere.",
                asked=f"the heads of {name or 'the layer'}",
                found="scores that are no numbers (nan)",
                because="the training came apart, or the model was damaged",
                instead="a model from before that, or a smaller learning rate",
            )
        cut = max((index for index, profile in enumerate(steps) if profile.heads != last.heads), default=-1)
        course[name] = steps[cut + 1 :]
    return course


def extent(course: Mapping[str, list[HeadProfile]]) -> tuple[float, float]:
    """How far from the query the panels reach, in rows and in columns: two deviations beyond every centre."""
    reach = [2.5, 2.5]
    most = [0.0, 0.0]
    for profile in (profile for steps in course.values() for profile in steps):
        spread = profile.covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        far = (profile.mean.abs() + 2 * spread).amax(0).tolist()
        for axis in range(2):
            reach[axis] = max(reach[axis], math.floor(far[axis]) + 0.5)
            most[axis] = max(most[axis], profile.grid[axis] - 0.5)
    return min(reach[0], max(most[0], 1.5)), min(reach[1], max(most[1], 1.5))


def select_layers(
    course: Mapping[str, list[HeadProfile]], layers: Sequence[int] | None
) -> tuple[dict[str, list[HeadProfile]], list[str]]:
    """The layers that are drawn, and their titles, which have the indices that choose them."""
    names, titles = list(course), layer_titles(list(course))
    chosen = list(range(len(names))) if layers is None else list(dict.fromkeys(layers))
    if any(not 0 <= index < len(names) for index in chosen) or not chosen:
        raise InputError(
            "There is no such layer.",
            asked=f"layer={', '.join(map(str, layers or []))}",
            found=f"{len(names)} layers that look by position",
            because="layers are counted from 0",
            instead=f"layer=0 to layer={len(names) - 1}" if len(names) > 1 else "layer=0",
        )
    return {names[index]: course[names[index]] for index in chosen}, [titles[index] for index in chosen]


def _panel(axes: Axes, steps: list[HeadProfile], reach: tuple[float, float]) -> dict[str, Any]:
    """Draw a layer; what was drawn is returned."""
    draw_grid(axes, reach)
    means = torch.stack([profile.mean.cpu().double() for profile in steps])  # (epoch, head, 2)
    lines = contours(steps[-1])
    for head in range(len(lines)):
        _trail(axes, means[:, head], head_color(head))
    for head in by_size(lines):
        draw_contours(axes, lines[head], head_color(head))
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


def draw_contours(axes: Axes, lines: list[Contour], color: str) -> list[Any]:
    """The first contour filled, the others as lines."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    drawn = []
    for index, contour in enumerate(lines):
        loops = [[(column, row) for row, column in (*loop, loop[0])] for loop in contour.loops]
        if not loops:
            continue
        path = Path.make_compound_path(*(Path(loop, closed=True) for loop in loops))
        patch: dict[str, Any] = {"facecolor": color, "alpha": contour.opacity, "linewidth": 0.0}
        if index:
            patch = {"fill": False, "edgecolor": color, "linewidth": 0.9, "alpha": 0.75}
        drawn.append(axes.add_patch(PathPatch(path, zorder=3, **patch)))
    return drawn


def by_size(lines: list[list[Contour]]) -> list[int]:
    """The heads from the widest to the narrowest: the order in which none is hidden."""
    return sorted(range(len(lines)), key=lambda head: -lines[head][0].area)


def draw_dot(axes: Axes, place: Tensor, head: int) -> list[Any]:
    """The centre of mass, with the number of the head."""
    row, column = place.tolist()
    color = head_color(head)
    dots = axes.plot([column], [row], "o", color=color, markersize=8.5, markeredgecolor="white", zorder=5)
    font: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 5.8, "weight": "bold", "zorder": 6}
    return [*dots, axes.annotate(str(head), (column, row), color="white", **font)]


def _trail(axes: Axes, way: Tensor, color: str) -> None:
    if len(way) < 2:
        return
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    points = way.flip(-1).tolist()  # column across, row down
    pieces = list(itertools.pairwise(points))
    shades = [to_rgba(color, 0.12 + 0.78 * (step + 1) / len(pieces)) for step in range(len(pieces))]
    axes.add_collection(LineCollection(pieces, colors=shades, linewidths=1.5, capstyle="round", zorder=4))
    axes.plot(
        *zip(points[0], strict=True), "o", color=FAINT, fillstyle="none", markersize=3, markeredgewidth=0.7, zorder=4
    )


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, integer=True)
