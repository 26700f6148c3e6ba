"""Trajectories of heads as an animation: a GIF, or a page with a slider."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.layers.profiles import HeadProfile
from regard.render.colors import head_color
from regard.render.files import check_suffix, write_file
from regard.render.page import Page, Widget
from regard.visualize.contours import contours
from regard.visualize.heads import (
    CAPTION,
    MOST_COLUMNS,
    draw_contours,
    draw_dot,
    draw_grid,
    find_extent,
    order_by_area,
    read_trajectories,
    select_layers,
)
from regard.visualize.picture import make_panels, style
from regard.visualize.player import check_labels, make_player, state_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRAME, PAUSE = 125, 1500  # milliseconds of a frame, and of the last one
DPI = 90
PANEL = 2.3


@dataclass(frozen=True, repr=False)
class Animation:
    """An animation of heads: `.save("heads.gif")`, `.save("heads.html")`; a notebook displays the player.

    Attributes:
        epochs: head profiles by layer, oldest first.
        labels: of the epochs.
        caption: of the figure.
        layers: those to draw, counted from 0; None for all.
    """

    epochs: list[Mapping[str, HeadProfile]]
    labels: list[str]
    caption: str
    layers: Sequence[int] | None = None

    def __repr__(self) -> str:
        return f"Animation({len(self.epochs)} epochs of {len(self.epochs[-1])} layers)"

    @property
    def figure(self) -> Widget:
        """The figure for a `Page`."""
        return make_player(self.epochs, self.labels, self.caption, layers=self.layers)

    def save(self, path: str | Path) -> Path:
        """Write a `.gif`, or a self-contained `.html`."""
        path = check_suffix(path, (".gif", ".html"))
        return write_file(path, self._render_gif() if path.suffix.lower() == ".gif" else self.page)

    @property
    def page(self) -> str:
        """The whole page."""
        page = Page("Attention positions of the heads")
        page.open_with(self.figure)
        return page.html

    def _repr_html_(self) -> str:
        return self.figure.standalone

    def _render_gif(self) -> bytes:
        trajectories, titles = select_layers(read_trajectories(self.epochs), self.layers)
        names = list(trajectories)
        columns = min(MOST_COLUMNS, len(names))
        reach = find_extent(trajectories)
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
            figure.set_dpi(DPI)
            figure.canvas.draw()
            figure.set_layout_engine("none")  # the panels do not move between frames
            frames = []
            for number, label in enumerate(self.labels):
                title.set_text(label)
                artists = [
                    artist
                    for place, name in enumerate(names)
                    for artist in _draw_layer(flat[place], state_at(trajectories[name], number, len(self.epochs)))
                ]
                figure.canvas.draw()
                canvas: Any = figure.canvas  # Agg
                frames.append(
                    Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
                )
                for artist in artists:
                    artist.remove()
        buffer = io.BytesIO()
        times = [FRAME] * (len(frames) - 1) + [PAUSE]
        frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
        return buffer.getvalue()


def _draw_layer(panel: Axes, profile: HeadProfile) -> list[Any]:
    artists = []
    lines = contours(profile)
    for head in order_by_area(lines):
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
    """The trajectories of heads through training (see `draw_head_paths`) as an animation.

        >>> from regard.layers.profiles import head_profile
        >>> from regard.visualize import animate_heads
        >>> biases = [Quadratic(2, grid=(5, 7), centre=[[0, step], [step, 0]]) for step in range(3)]
        >>> steps = [{"layer": head_profile(bias)} for bias in biases]
        >>> animate_heads(steps)
        Animation(3 epochs of 1 layers)

    `labels` name the epochs; `most` is the largest number of epochs to show, evenly spaced with the first and the last.
    `layers` are those to draw, counted from 0.
    """
    trajectories, _ = select_layers(read_trajectories(epochs), layers)  # raise for what cannot be drawn
    labels = [f"epoch {number}" for number in range(len(epochs))] if labels is None else list(labels)
    check_labels(labels, epochs)
    kept = list(range(len(epochs)))
    if most is not None and most < len(epochs):
        kept = torch.linspace(0, len(epochs) - 1, max(most, 2)).round().long().tolist()
    caption = CAPTION
    if len(kept) < len(epochs):
        caption += f" {len(kept)} of {len(epochs)} epochs are shown."
    if any(len(steps) < len(epochs) for steps in trajectories.values()):
        caption += " Where the number of heads changed, the layer stands still until then."
    return Animation([epochs[index] for index in kept], [labels[index] for index in kept], caption, layers)
