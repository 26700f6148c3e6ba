"""Attention maps of one pixel: the weights of each layer and head, laid over the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.render.colors import ACCENT, FAINT, overlay
from regard.visualize.attention_map import AttentionMap
from regard.visualize.interactive import attention_data, fits_a_page, render_attention
from regard.visualize.labels import Percent
from regard.visualize.picture import Picture, draw_per_head, hide_axes, style
from regard.visualize.selection import select_indices
from regard.visualize.token_grid import TokenGrid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_SHARE = 0.005  # of the weight on padding that is mentioned; rounding is far below


def draw_image_maps(
    maps: Sequence[AttentionMap],
    image: Tensor,
    grids: Sequence[TokenGrid],
    query: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
    left_out: int = 0,
) -> Picture:
    """The attention of one pixel over an image `(channel, row, column)`: a row for each layer, a column for each head.

    Without a `query` it is that of the class token, or of the pixel in the middle where there is none. Only the rows of
    that one token are computed. `grids` has the tokens of each layer, and `left_out` is the number of layers whose
    tokens are not a grid of the image.
    """
    size = (image.shape[-2], image.shape[-1])
    is_pixel = query is not None or any(tokens.first == 0 for tokens in grids)
    pixel = (size[0] // 2, size[1] // 2) if query is None else query
    queries = [tokens.token(pixel, size) if is_pixel else 0 for tokens in grids]
    rows = [  # (head, key)
        attention.rows([token])[:, 0].detach().float().cpu() for attention, token in zip(maps, queries, strict=True)
    ]
    selected = [select_indices("head", heads, len(weights)) for weights in rows]
    drawn = [tokens.maps(weights[chosen]) for tokens, weights, chosen in zip(grids, rows, selected, strict=True)]
    largest = [weights.amax((-1, -2)).tolist() for weights in drawn]
    percent = Percent([weight for layer in largest for weight in layer])
    gray = to_grayscale(image)

    def draw(panel: Axes, layer: int, column: int) -> None:
        hide_axes(panel, frame=True)
        most, tokens = largest[layer][column], grids[layer]
        weights = tokens.spread(drawn[layer][column] / max(most, 1e-30), size)
        panel.imshow(overlay(gray, weights).numpy(), interpolation="nearest")
        if is_pixel:
            _draw_outline(panel, tokens.box(queries[layer], size))
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
    caption += _describe_weight_outside(maps, rows, grids)
    data = {attention.name: weights for attention, weights in zip(maps, drawn, strict=True)}
    picture = Picture(figure, caption, {"layers": data, "token": queries[0], "query": pixel if is_pixel else None})
    if fits_a_page(maps, [len(chosen) for chosen in selected]) and len({(*one.grid, one.first) for one in grids}) == 1:
        picture.page = lambda caption: render_attention(
            attention_data(maps, selected, image=image, tokens=grids[0]), caption
        )
    return picture


def _describe_weight_outside(maps: Sequence[AttentionMap], rows: Sequence[Tensor], grids: Sequence[TokenGrid]) -> str:
    """How much of the weight is on tokens before the image, and on padding of windows; empty where there is none."""
    first, text = max(tokens.first for tokens in grids), ""
    if first:
        outside = [weights[:, : tokens.first] for weights, tokens in zip(rows, grids, strict=True) if tokens.first]
        name = "class token" if first == 1 else f"{first} tokens"
        text += _format_shares([weights.sum(-1).mean().item() for weights in outside], f"{name} outside the image")
    padding = [
        1 - weights.sum(-1).mean().item()
        for attention, weights in zip(maps, rows, strict=True)
        if attention.grid is not None
    ]
    if max(padding, default=0.0) >= LEAST_SHARE:
        text += _format_shares(padding, "zeros that complete its windows")
    return text


def _format_shares(shares: Sequence[float], name: str) -> str:
    low, high = f"{max(min(shares), 0.0):.0%}", f"{max(shares):.0%}"
    share = low if low == high else f"Between {low} and {high}"
    return f" {share} of the weight, on average, goes to the {name}."


def to_grayscale(image: Tensor) -> Tensor:
    """An image `(channel, row, column)` as darkness from 0 to 1, `(row, column)`: the mean of its channels."""
    mean = image.detach().float().cpu().mean(0)
    low, high = mean.min(), mean.max()
    return (mean - low) / (high - low) if high > low else torch.zeros_like(mean)


def _draw_outline(axes: Axes, box: tuple[float, float, float, float]) -> None:
    from matplotlib.patches import Rectangle

    top, left, high, wide = box
    axes.add_patch(Rectangle((left - 0.5, top - 0.5), wide, high, fill=False, edgecolor=ACCENT, linewidth=1.4))
