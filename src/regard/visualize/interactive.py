"""Attention maps as a figure that a reader explores: every layer and head, as matrix, as lines, over the image."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.render.components import make_component
from regard.render.page import Page, Widget
from regard.render.png import data_uri
from regard.visualize.attention_map import AttentionMap
from regard.visualize.labels import in_one_line
from regard.visualize.token_grid import TokenGrid

MOST_WEIGHTS = 2_000_000  # of a page, a byte each
CAPTION = (
    "Choose a head, and a token to see what it attends to. Rows of a matrix are queries, columns are keys; weights are "
    "rounded to 255 steps of the largest of their row."
)


def fits_a_page(maps: Sequence[AttentionMap], heads: Sequence[int]) -> bool:
    """Whether all weights can be stored in one page: layers of one size, `heads` of them each, not too many."""
    sizes = {(attention.queries, attention.keys) for attention in maps}
    weights = sum(count * each.queries * each.keys for count, each in zip(heads, maps, strict=True))
    return len(sizes) == 1 and weights <= MOST_WEIGHTS


def attention_data(
    maps: Sequence[AttentionMap],
    selected: Sequence[Sequence[int]] | None = None,
    words: Sequence[str] | None = None,
    query_words: Sequence[str] | None = None,
    *,
    image: Tensor | None = None,
    tokens: TokenGrid | None = None,
) -> dict[str, Any]:
    """What `<regard-attention>` shows, as plain texts and numbers.

    Weights are quantised to 255 steps of the largest of each row. `selected` are the heads of each layer, all by
    default; `image`, `(channel, row, column)`, and its `tokens` are those of an image model.
    """
    queries, keys = maps[0].queries, maps[0].keys
    layers = []
    for place, attention in enumerate(maps):
        weights = attention.rows(range(queries)).detach().float().cpu()
        if selected is not None:
            weights = weights[list(selected[place])]
        largest = weights.amax(-1)
        share = (255 * weights / largest.clamp(min=1e-30).unsqueeze(-1)).round().clamp(0, 255).to(torch.uint8)
        layers.append(
            {"title": in_one_line(attention.title), "weights": encode_array(share), "largest": encode_array(largest)}
        )
    own = query_words if query_words is not None else words if queries == keys else None
    data: dict[str, Any] = {"queries": _label(own, queries), "keys": _label(words, keys), "layers": layers}
    if tokens is not None and image is not None:
        data |= {"grid": list(tokens.grid), "start": tokens.first, "image": data_uri(_to_rgb(image))}
    return data


def make_attention(data: dict[str, Any], caption: str) -> Widget:
    """The figure of a page around `attention_data`."""
    return make_component("regard-attention", data, "attention.js", caption=caption)


def render_attention(data: dict[str, Any], caption: str) -> str:
    """A whole page with one such figure; the caption is that of the picture, with all its notes."""
    page = Page("What every head attends to")
    page.open_with(make_attention(data, f"{caption} {CAPTION}"))
    return page.html


def encode_array(values: Tensor) -> dict[str, Any]:
    """A tensor of bytes or of float32 as the components read it: dtype, shape and base64, little endian."""
    data = values.contiguous().numpy()
    return {
        "dtype": str(data.dtype),
        "shape": list(data.shape),
        "data": base64.b64encode(data.astype(data.dtype.newbyteorder("<"), copy=False).tobytes()).decode("ascii"),
    }


def _label(words: Sequence[str] | None, count: int) -> list[str]:
    return [str(word) for word in words] if words is not None and len(words) == count else list(map(str, range(count)))


def _to_rgb(image: Tensor) -> Tensor:
    """An image `(channel, row, column)` as colors from 0 to 1, `(row, column, 3)`; one or two channels are gray."""
    values = image.detach().float().cpu()
    low, high = values.min(), values.max()
    values = (values - low) / (high - low) if high > low else torch.zeros_like(values)
    return (values[:3] if len(values) >= 3 else values.mean(0, keepdim=True).expand(3, -1, -1)).permute(1, 2, 0)
