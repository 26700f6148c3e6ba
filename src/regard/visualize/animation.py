"""The heads on their way as a film: a GIF for slides, or a page with a slider."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.errors import InputError
from regard.layers.profiles import HeadProfile
from regard.render.colors import head_color
from regard.render.files import check_suffix, write_file
from regard.render.page import Page, Widget
from regard.visualize.contours import contours
from regard.visualize.heads import (
    MOST_COLUMNS,
    SEEN,
    by_size,
    draw_contours,
    draw_dot,
    draw_grid,
    extent,
    read_trajectories,
    select_layers,
)
from regard.visualize.picture import make_panels, style
from regard.visualize.player import make_player, state_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRAME, PAUSE = 125, 1500  # milliseconds of a frame, and of the last one before a GIF begins again
DOTS = 90
PANEL = 2.3


class Animation:
    """Heads that move: `.save("heads.gif")`, `.save("heads.html")`; a notebook shows the page's figure.

    Attributes:
        epochs: head profiles by layer, oldest first.
        labels: what each of them is, in words.
        caption: what one sees.
        layers: those that are drawn, counted from 0; None for all.
    """

    def __init__(
        self,
        epochs: Sequence[Mapping[str, HeadProfile]],
        labels: Sequence[str],
        caption: str,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.epochs, self.labels, self.caption, self.layers = list(epochs), list(labels), caption, layers

    def __repr__(self) -> str:
        return f"Animation({len(self.epochs)} states of {len(self.epochs[-1])} layers)"

    @property
    def figure(self) -> Widget:
        """The figure for a `Page`."""
        return make_player(self.epochs, self.labels, self.caption, layers=self.layers)

    def save(self, path: str | Path) -> Path:
        """Write it: `.gif`, or `.html`, one file that needs nothing else."""
        path = check_suffix(path, (".gif", ".html"))
        return write_file(path, self._gif() if path.suffix.lower() == ".gif" else self.page)

    @property
    def page(self) -> str:
        """The whole page."""
        page = Page("Where the heads look")
        page.open_with(self.figure)
        return page.html

    def _repr_html_(self) -> str:
        return self.figure.standalone

    def _gif(self) -> bytes:
        course, titles = select_layers(read_trajectories(self.epochs), self.layers)
        names = list(course)
        columns = min(MOST_COLUMNS, len(names))
        reach = extent(course)
        high = PANEL * min(1.4, max(0.6, reach[0] / reach[1]))
        with style():
            from PIL import Image

            figure, axes = make_panels(-(-len(names) // columns), columns, PANEL, high + 0.3)
            title = figure.suptitle(self.labels[0], fontsize=10)
            flat = [panel for row in axes for panel in row]
            for place, panel in enumerate(flat):
                panel.set_visible(place < len(names))
                if place < len(names):
                    draw_grid(panel, reach)
                    panel.set_title(titles[place])
            figure.set_dpi(DOTS)
            figure.canvas.draw()
            figure.set_layout_engine("none")  # panels stay where they are from frame to frame
            frames = []
            for number, label in enumerate(self.labels):
                title.set_text(label)
                moved = [
                    artist
                    for place, name in enumerate(names)
                    for artist in _heads(flat[place], state_at(course[name], number, len(self.epochs)))
                ]
                figure.canvas.draw()
                canvas: Any = figure.canvas  # of Agg, which knows its pixels
                frames.append(
                    Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
                )
                for artist in moved:
                    artist.remove()
        sheet = io.BytesIO()
        times = [FRAME] * (len(frames) - 1) + [PAUSE]
        frames[0].save(sheet, format="GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
        return sheet.getvalue()


def _heads(panel: Axes, profile: HeadProfile) -> list[Any]:
    artists = []
    lines = contours(profile)
    for head in by_size(lines):
        artists += draw_contours(panel, lines[head], head_color(head))
    for head, mean in enumerate(profile.mean.cpu()):
        artists += draw_dot(panel, mean, head)
    return artists


def animate_heads(
    epochs: Sequence[Mapping[str, HeadProfile]],
    labels: Sequence[str] | None = None,
    most: int | None = None,
    layers: Sequence[int] | None = None,
) -> Animation:
    """Heads on their way through the epochs of a training (see `draw_head_paths`), as a film.

        >>> from regard.layers.profiles import head_profile
        >>> from regard.visualize import animate_heads
        >>> biases = [Quadratic(2, grid=(5, 7), centre=[[0, step], [step, 0]]) for step in range(3)]
        >>> steps = [{"layer": head_profile(bias)} for bias in biases]
        >>> animate_heads(steps)
        Animation(3 states of 1 layers)

    `labels` are the epochs in words; `most` leaves out epochs so that no more than that remain, evenly, the first and
    the last among them. `layers` are those that are drawn, counted from 0.
    """
    course, _ = select_layers(read_trajectories(epochs), layers)  # which refuse what cannot be drawn
    labels = [f"epoch {number}" for number in range(len(epochs))] if labels is None else list(labels)
    if len(labels) != len(epochs):
        raise InputError(
            "The labels do not fit the epochs.",
            asked=f"{len(labels)} labels",
            found=f"{len(epochs)} epochs",
            because="every epoch has one",
            instead="no labels, which counts them",
        )
    kept = list(range(len(epochs)))
    if most is not None and most < len(epochs):
        kept = torch.linspace(0, len(epochs) - 1, max(most, 2)).round().long().tolist()
    caption = SEEN
    if len(kept) < len(epochs):
        caption += f" {len(kept)} of {len(epochs)} epochs are shown."
    if any(len(steps) < len(epochs) for steps in course.values()):
        caption += " Where the number of heads changed, the layer stands still until then."
    return Animation([epochs[index] for index in kept], [labels[index] for index in kept], caption, layers)
