"""Positional heads of each layer, drawn around the query, with their trajectories through training."""

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
from regard.visualize.selection import select_indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = 2.5  # inches
MOST_COLUMNS = 3
CAPTION = (
    "Attention positions relative to the query (the square in the middle): a dot is the centre of mass of a head's "
    "weights, half of which lie in the filled shape and nine tenths within the line. Rows count downward; one square "
    "is one token of the grid."
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
    """The same with trajectories: the path of each head's centre through the epochs, paler where it is older.

    `epochs` are head profiles by the names of layers, oldest first, as `head_profiles(model)` returns them after each
    epoch. The figure is the paper's (Cordonnier, Loukas and Jaggi 2020, figures 3 and 4), with contours and
    without smoothing. `layers` are those to draw, counted from 0; `labels` name the epochs. Saved as
    `.html`, several epochs become a page with a slider, as from `animate_heads`.
    """
    trajectories, titles = select_layers(read_trajectories(epochs), layers)
    names = list(trajectories)
    columns = min(MOST_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    reach = find_extent(trajectories)
    drawn = {}
    with style():
        high = PANEL * min(1.4, max(0.6, reach[0] / reach[1]))
        figure, axes = make_panels(rows, columns, PANEL, high + 0.25)
        for place, panel in enumerate(panel for row in axes for panel in row):
            if place >= len(names):
                panel.set_visible(False)
                continue
            drawn[names[place]] = _draw_layer(panel, trajectories[names[place]], reach)
            panel.set_ylabel("row" if place % columns == 0 else "")
            panel.set_xlabel("column" if place + columns >= len(names) else "")
            panel.set_title(titles[place] if len(names) > 1 or names[0] else "")
    caption = CAPTION
    if len(epochs) > 1:
        caption += (
            f" Lines show the path of each centre through {len(epochs)} epochs, older parts paler; a ring is the first."
        )
    shorter = {name: len(steps) for name, steps in trajectories.items() if len(steps) < len(epochs)}
    if shorter:
        caption += " Where the number of heads changed, the path begins after the change."
    picture = Picture(figure, caption, {"layers": drawn, "extent": reach})
    if len(epochs) > 1:
        picture.page = lambda _: _render_animation(epochs, layers, labels)
    return picture


def _render_animation(
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
            "These are not head profiles by epoch.",
            asked=f"epochs of {type(epochs).__name__}",
            because="epochs are a list of dicts from the names of layers to head profiles",
            instead="draw_head_paths([head_profiles(model)]), or draw_heads(head_profiles(model)) for one epoch",
        )
    if not epochs or not epochs[-1]:
        raise InputError(
            "There are no heads to draw.",
            asked=f"{len(epochs)} epochs" if epochs else "no epochs",
            found="no layer with positional heads" if epochs else "",
            because="only positional heads can be drawn without an input",
            instead="head_profiles(model) of a SpatialTransformer; show(model, image) for attention by content",
        )
    trajectories = {}
    for name, last in epochs[-1].items():
        steps = [epoch[name] for epoch in epochs if name in epoch]
        if any(bool(profile.scores.isnan().any()) for profile in steps):
            raise InputError(
                "Some heads have no position.",
                asked=f"the heads of {name or 'the layer'}",
                found="scores that are NaN",
                because="the training diverged, or the file is damaged",
                instead="an earlier epoch, or a smaller learning rate",
            )
        cut = max((index for index, profile in enumerate(steps) if profile.heads != last.heads), default=-1)
        trajectories[name] = steps[cut + 1 :]
    return trajectories


def find_extent(trajectories: Mapping[str, list[HeadProfile]]) -> tuple[float, float]:
    """The extent of the panels around the query, in rows and columns, at most the grid's.

    Two standard deviations beyond every centre, and the whole ellipses of the last step.
    """
    reach = [2.5, 2.5]
    most = [1.5, 1.5]
    for steps in trajectories.values():
        outlines = [contour.ellipse.points() for lines in contours(steps[-1]) for contour in lines if contour.ellipse]
        for axis in range(2):
            ends = [abs(point[axis]) for outline in outlines for point in outline]
            reach[axis] = max([reach[axis], *(math.ceil(end - 0.5) + 0.5 for end in ends)])
        for profile in steps:
            spread = profile.covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
            far = (profile.mean.abs() + 2 * spread).amax(0).tolist()
            for axis in range(2):
                reach[axis] = max(reach[axis], math.floor(far[axis]) + 0.5)
                most[axis] = max(most[axis], profile.grid[axis] - 0.5)
    return min(reach[0], most[0]), min(reach[1], most[1])


def select_layers(
    trajectories: Mapping[str, list[HeadProfile]], layers: Sequence[int] | None
) -> tuple[dict[str, list[HeadProfile]], list[str]]:
    """The selected layers, and their titles, which have the indices that select them."""
    names, titles = list(trajectories), layer_titles(list(trajectories))
    chosen = select_indices("layer", layers, len(names), "layers with positional heads")
    return {names[index]: trajectories[names[index]] for index in chosen}, [titles[index] for index in chosen]


def _draw_layer(axes: Axes, steps: list[HeadProfile], reach: tuple[float, float]) -> dict[str, Any]:
    """Draw a layer, and return the numbers that were drawn."""
    draw_grid(axes, reach)
    means = torch.stack([profile.mean.cpu().double() for profile in steps])  # (epoch, head, 2)
    lines = contours(steps[-1])
    for head in range(len(lines)):
        _draw_path(axes, means[:, head], head_color(head))
    for head in order_by_area(lines):
        draw_contours(axes, lines[head], head_color(head))
    for head in range(len(lines)):
        draw_dot(axes, means[-1, head], head)
    return {"mean": means, "contours": lines}


def draw_grid(axes: Axes, reach: tuple[float, float]) -> None:
    """Draw the grid around the query, and the query."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    down, across = reach
    axes.set(xlim=(-across, across), ylim=(down, -down), aspect="equal")
    axes.set_xticks([tick + 0.5 for tick in range(-math.ceil(across), math.ceil(across))], minor=True)
    axes.set_yticks([tick + 0.5 for tick in range(-math.ceil(down), math.ceil(down))], minor=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.grid(which="minor", color=LINE, linewidth=0.6)
    axes.tick_params(which="both", length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, edgecolor=ACCENT, linewidth=1.6, zorder=3.5))


def draw_contours(axes: Axes, lines: list[Contour], color: str) -> list[Any]:
    """Draw the first contour filled, the others as lines."""
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


def order_by_area(lines: list[list[Contour]]) -> list[int]:
    """The heads from the widest to the narrowest: the order in which none is hidden."""
    return sorted(range(len(lines)), key=lambda head: -lines[head][0].area)


def draw_dot(axes: Axes, centre: Tensor, head: int) -> list[Any]:
    """Draw the centre of mass, with the number of the head."""
    row, column = centre.tolist()
    color = head_color(head)
    dots = axes.plot([column], [row], "o", color=color, markersize=8.5, markeredgecolor="white", zorder=5)
    font: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 5.8, "weight": "bold", "zorder": 6}
    return [*dots, axes.annotate(str(head), (column, row), color="white", **font)]


def _draw_path(axes: Axes, path: Tensor, color: str) -> None:
    if len(path) < 2:
        return
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    points = path.flip(-1).tolist()  # column across, row down
    pieces = list(itertools.pairwise(points))
    shades = [to_rgba(color, 0.12 + 0.78 * (step + 1) / len(pieces)) for step in range(len(pieces))]
    axes.add_collection(LineCollection(pieces, colors=shades, linewidths=1.5, capstyle="round", zorder=4))
    axes.plot(
        *zip(points[0], strict=True), "o", color=FAINT, fillstyle="none", markersize=3, markeredgewidth=0.7, zorder=4
    )
