"""Attention maps of one pixel: the weights of each layer and head, laid over the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.render.colors import ACCENT, FAINT, overlay
from regard.visualize.attention_map import AttentionMap
from regard.visualize.labels import Percent
from regard.visualize.picture import Picture, draw_per_head, hide_axes, style
from regard.visualize.selection import select_indices
from regard.visualize.token_grid import TokenGrid

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_image_maps(
    maps: Sequence[AttentionMap],
    image: Tensor,
    tokens: TokenGrid,
    query: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
    left_out: int = 0,
) -> Picture:
    """The attention of one pixel over an image `(channel, row, column)`: a row for each layer, a column for each head.

    Without a `query` it is that of the class token, or of the pixel in the middle where there is none. Only the rows of
    that one token are computed. `left_out` is the number of layers whose tokens are not a grid of the image.
    """
    size = (image.shape[-2], image.shape[-1])
    is_pixel = query is not None or tokens.first == 0
    pixel = (size[0] // 2, size[1] // 2) if query is None else query
    token = tokens.token(pixel, size) if is_pixel else 0
    rows = [attention.rows([token])[:, 0].detach().float().cpu() for attention in maps]  # (head, key)
    selected = [select_indices("head", heads, len(weights)) for weights in rows]
    drawn = [tokens.maps(weights[chosen]) for weights, chosen in zip(rows, selected, strict=True)]
    largest = [weights.amax((-1, -2)).tolist() for weights in drawn]
    percent = Percent([weight for layer in largest for weight in layer])
    gray = to_grayscale(image)

    def draw(panel: Axes, layer: int, column: int) -> None:
        hide_axes(panel, frame=True)
        most = largest[layer][column]
        weights = tokens.spread(drawn[layer][column] / max(most, 1e-30), size)
        panel.imshow(overlay(gray, weights).numpy(), interpolation="nearest")
        if is_pixel:
            _draw_outline(panel, tokens.box(token, size))
        panel.set_xlabel(f"max {percent(most)}", fontsize=7, color=FAINT, labelpad=2)

    with style():
        side = 1.15 if max(map(len, selected)) > 4 else 1.5
        figure = draw_per_head(maps, selected, side, side * min(1.6, size[0] / size[1]) + 0.22, draw)
    name = f"the pixel at row {pixel[0]}, column {pixel[1]} (outlined)" if is_pixel else "the class token"
    caption = (
        f"Attention of {name}, for each layer and head: the bluer, the larger the weight. Each panel has its own "
        "scale; the number below is its largest weight."
    )
    if left_out:
        caption += f" {left_out} layers are left out: their tokens are not a grid of the whole image."
    if tokens.first:
        outside = [f"{weights[:, : tokens.first].sum(-1).mean():.0%}" for weights in rows]
        low, high = (f(outside, key=lambda share: float(share[:-1])) for f in (min, max))
        share = low if low == high else f"Between {low} and {high}"
        name = "class token" if tokens.first == 1 else f"{tokens.first} tokens"
        caption += f" {share} of the weight, on average, goes to the {name} outside the image."
    data = {attention.name: weights for attention, weights in zip(maps, drawn, strict=True)}
    return Picture(figure, caption, {"layers": data, "token": token, "query": pixel if is_pixel else None})


def to_grayscale(image: Tensor) -> Tensor:
    """An image `(channel, row, column)` as darkness from 0 to 1, `(row, column)`: the mean of its channels."""
    mean = image.detach().float().cpu().mean(0)
    low, high = mean.min(), mean.max()
    return (mean - low) / (high - low) if high > low else torch.zeros_like(mean)


def _draw_outline(axes: Axes, box: tuple[float, float, float, float]) -> None:
    from matplotlib.patches import Rectangle

    top, left, high, wide = box
    axes.add_patch(Rectangle((left - 0.5, top - 0.5), wide, high, fill=False, edgecolor=ACCENT, linewidth=1.4))
