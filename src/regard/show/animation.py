"""The heads on their way as a film: a GIF for slides, or a page with a slider."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.errors import InputError
from regard.layers.gaze import Gaze
from regard.show.colours import head_colour
from regard.show.contours import contours
from regard.show.heads import (
    MOST_COLUMNS,
    SEEN,
    by_size,
    draw_contours,
    draw_dot,
    draw_grid,
    extent,
    layer_title,
    read_course,
)
from regard.show.page import Html, Page, web
from regard.show.picture import check_ending, panels, style, write
from regard.show.player import player

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRAME, PAUSE = 125, 1500  # milliseconds of a frame, and of the last one before a GIF begins again
DOTS = 90
PANEL = 2.3


class Animation:
    """Heads that move: `.save("heads.gif")`, `.save("heads.html")`; a notebook shows the page's figure.

    Attributes:
        epochs: gazes by layer, oldest first.
        labels: what each of them is, in words.
        caption: what one sees.
    """

    def __init__(self, epochs: Sequence[Mapping[str, Gaze]], labels: Sequence[str], caption: str) -> None:
        self.epochs, self.labels, self.caption = list(epochs), list(labels), caption

    def __repr__(self) -> str:
        return f"Animation({len(self.epochs)} states of {len(self.epochs[-1])} layers)"

    @property
    def figure(self) -> Html:
        """The figure for a `Page`."""
        return player(self.epochs, self.labels, self.caption)

    def save(self, path: str | Path) -> Path:
        """Write it: `.gif`, or `.html`, one file that needs nothing else."""
        path = check_ending(path, (".gif", ".html"))
        return write(path, self._gif() if path.suffix.lower() == ".gif" else self._page().encode())

    def _page(self) -> str:
        page = Page("Where the heads look")
        page.open_with(self.figure)
        return page.html

    def _repr_html_(self) -> str:
        return f"<style>{web('style.css')}</style>{self.figure}<script>{web('heads.js')}</script>"

    def _gif(self) -> bytes:
        course = read_course(self.epochs)
        names = list(course)
        columns = min(MOST_COLUMNS, len(names))
        reach = extent(course)
        high = PANEL * min(1.4, max(0.6, reach[0] / reach[1]))
        with style():
            from PIL import Image

            figure, axes = panels(-(-len(names) // columns), columns, PANEL, high + 0.3)
            title = figure.suptitle(self.labels[0], fontsize=10)
            flat = [panel for row in axes for panel in row]
            for place, panel in enumerate(flat):
                panel.set_visible(place < len(names))
                if place < len(names):
                    draw_grid(panel, reach)
                    panel.set_title(layer_title(names[place], place))
            figure.set_dpi(DOTS)
            figure.canvas.draw()
            figure.set_layout_engine("none")  # panels stay where they are from frame to frame
            frames = []
            for number, label in enumerate(self.labels):
                title.set_text(label)
                moved = [
                    artist
                    for place, name in enumerate(names)
                    for artist in _heads(flat[place], _at(course[name], number, len(self.epochs)))
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


def _at(steps: list[Gaze], number: int, count: int) -> Gaze:
    """The state of a layer at a time; one whose heads changed stands still until then."""
    return steps[min(max(number - (count - len(steps)), 0), len(steps) - 1)]


def _heads(panel: Axes, gaze: Gaze) -> list[Any]:
    artists = []
    lines = contours(gaze)
    for head in by_size(lines):
        artists += draw_contours(panel, lines[head], head_colour(head))
    for head, mean in enumerate(gaze.mean.cpu()):
        artists += draw_dot(panel, mean, head)
    return artists


def animate_heads(
    epochs: Sequence[Mapping[str, Gaze]], labels: Sequence[str] | None = None, most: int | None = None
) -> Animation:
    """Heads on their way through the epochs of a training (see `moving_heads`), as a film.

        >>> from regard.layers.gaze import gaze
        >>> from regard.show import animate_heads
        >>> steps = [{"layer": gaze(Quadratic(2, grid=(5, 7), centre=[[0, step], [step, 0]]))} for step in range(3)]
        >>> animate_heads(steps)
        Animation(3 states of 1 layers)

    `labels` are the epochs in words; `most` leaves out epochs so that no more than that remain, evenly, the first and
    the last among them.
    """
    read_course(epochs)  # which refuses what cannot be drawn
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
    return Animation([epochs[index] for index in kept], [labels[index] for index in kept], caption)
