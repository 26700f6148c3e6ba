"""`show`: one function for every picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.biases import Bias
from regard.errors import InputError
from regard.layers.profiles import HeadProfile, head_profile, head_profiles
from regard.patterns import Pattern
from regard.visualize.attention_map import AttentionMap, check_single, grid_weights, read_attention
from regard.visualize.descriptions import draw_bias, draw_mask
from regard.visualize.heads import draw_head_paths, draw_heads
from regard.visualize.image_maps import draw_image_maps
from regard.visualize.labels import read_words
from regard.visualize.picture import Picture
from regard.visualize.selection import is_index, read_indices, select_indices
from regard.visualize.token_grid import TokenGrid, find_token_grid
from regard.visualize.token_maps import draw_matrices, draw_top_keys

Index = int | Sequence[int] | None


def show(
    target: Any,
    input: Any = None,
    *,
    query: Any = None,
    layer: Index = None,
    head: Index = None,
    words: Any = None,
    path: str | Path | None = None,
) -> Picture:
    """Plot attention: maps of a model on an input, positional heads, patterns and biases.

        >>> from regard.models import ViT, ViTConfig
        >>> model = ViT(ViTConfig(image=(8, 12), patch=4, classes=5, dim=8, layers=2, heads=2))
        >>> picture = show(model, torch.rand(3, 8, 12), query=(2, 5))
        >>> picture.data["token"], [tuple(each.shape) for each in picture.data["layers"].values()]
        (2, [(2, 2, 3), (2, 2, 3)])
        >>> picture.save("pixel.svg")  # doctest: +SKIP
        PosixPath('pixel.svg')

    ============================================  ====================================================================
    target and input                              picture
    ============================================  ====================================================================
    model or layer, image                         attention weights of one pixel over the image, by layer and head
    model or layer, tokens                        weights of all pairs, or with `query` the largest of one token
    positional model, layer, bias, HeadProfile    centres and contours of the heads around the query
    list of head profiles by layer, oldest first  the same, with the trajectories of the heads
    pattern or bias, number of tokens             the allowed pairs; the scores by distance
    ============================================  ====================================================================

    Models of Regard, torch, timm and Hugging Face are supported. Only the rows that are drawn are computed; the caption
    says what a picture leaves out.

    Args:
        input: an image `(channel, row, column)`, tokens `(token,)` or `(token, channel)`, a grid `(row, column,
            channel)` for a layer on a grid, each also as a batch of one; a dict for models that take keywords.
        query: `(row, column)` of a pixel, the number of a token, or "all" for the matrix of all pairs.
        layer, head: which to draw, counted from 0; a number or several.
        words: a label for each token, or the tokenizer.
        path: a file to write: .svg, .pdf, .png or .html.
    """
    picture = _draw_target(target, input, query, read_indices(layer), read_indices(head), words)
    if path is not None:
        picture.save(path)
    return picture


def _draw_target(target: Any, input: Any, query: Any, layers: Any, heads: Any, words: Any) -> Picture:
    if input is None and not isinstance(target, Pattern):
        _refuse_unused(query, heads)
    if words is not None and (input is None or not isinstance(target, nn.Module) or isinstance(target, Bias)):
        raise _no_words()
    if layers is not None and isinstance(target, Pattern | HeadProfile | Bias):
        raise InputError(
            "There is no layer to select.",
            asked=f"layer={layers}",
            found=f"one {type(target).__name__}",
            because="only a model has layers",
            instead=f"show({type(target).__name__}(...)) without layer",
        )
    if isinstance(target, Pattern):
        return draw_mask(target, _read_length(target, input), query)
    if isinstance(target, Sequence) and target and all(isinstance(epoch, Mapping) for epoch in target):
        return draw_head_paths(target, layers)
    if isinstance(target, Mapping) and target and all(isinstance(each, HeadProfile) for each in target.values()):
        return draw_heads(target, layers)
    if isinstance(target, Bias) and getattr(target, "grid", None) is None:
        return draw_bias(target, _read_length(target, input))
    if isinstance(target, HeadProfile | Bias):
        found = target if isinstance(target, HeadProfile) else head_profile(target)
        return draw_heads(found) if input is None else _draw_profile_map(found, input, query, heads)
    if not isinstance(target, nn.Module):
        raise InputError(
            f"{type(target).__name__} cannot be shown.",
            asked=f"show({type(target).__name__}, ...)",
            because="it is not a module, a HeadProfile, head profiles by layer, a bias or a pattern",
            instead="show(model, image), show(model, tokens), show(head_profiles(model)), show(Causal(), 24)",
        )
    if input is None:
        found = head_profiles(target)
        if not found:
            raise InputError(
                f"{type(target).__name__} attends by content.",
                asked=f"show({type(target).__name__}) without an input",
                because="its attention depends on the input",
                instead="show(model, image) or show(model, token_ids); from a shell --image, --ids or --text",
            )
        return draw_heads(found, layers)
    return _draw_attention(target, input, query, layers, heads, words)


def _refuse_unused(query: Any, heads: Any) -> None:
    """Raise for arguments without effect: positional heads are drawn together, around the query."""
    for name, value in (("query", query), ("head", heads)):
        if value is not None:
            raise InputError(
                f"Without an input there is no {name} to select.",
                asked=f"{name}={value!r}",
                because="all heads of a layer are drawn in one panel, around the query",
                instead="show(model, image, query=..., head=...), or layer=... alone",
            )


def _draw_attention(model: nn.Module, input: Any, query: Any, layers: Any, heads: Any, words: Any) -> Picture:
    """Run the model on the input, and draw its attention maps."""
    inputs, maps = read_attention(model, (input,), {})
    first = inputs.first_tensor
    batch = first if first is not None and first.ndim == 4 and first.is_floating_point() else None  # of images
    if batch is not None and inputs.positional:
        check_single(batch)
    maps = [maps[index] for index in select_indices("layer", layers, len(maps), "attention layers")]
    if batch is not None and not _is_all(query):
        if words is not None:
            raise _no_words()
        image = batch[0].permute(2, 0, 1) if _takes_grid(model) else batch[0]
        grids = _find_token_grids(model, maps, (image.shape[1], image.shape[2]))
        drawn = [attention for attention in maps if attention.name in grids]
        tokens = [grids[attention.name] for attention in drawn]
        return draw_image_maps(drawn, image, tokens, query, heads, len(maps) - len(drawn))
    labels = read_words(words, _read_ids(first), [attention.keys for attention in maps])
    if query is None or _is_all(query):
        return draw_matrices(maps, heads, labels)
    if not is_index(query):
        raise InputError(
            "A token has a number.",
            asked=f"query={query!r}",
            because="the query of a text is the index of a token",
            instead="query=0 for the first",
        )
    return draw_top_keys(maps, int(query), heads, labels)


def _find_token_grids(model: nn.Module, maps: Sequence[AttentionMap], size: tuple[int, int]) -> dict[str, TokenGrid]:
    """The grid of each layer's tokens by its name; layers whose tokens are not a grid of the image have none."""
    grids = {attention.name: TokenGrid(attention.grid) for attention in maps if attention.grid is not None}
    others = [attention for attention in maps if attention.grid is None]
    if not others:
        return grids
    common = TokenGrid(size) if _takes_grid(model) else find_token_grid(model, others[0].keys, size)
    keys = common.first + common.grid[0] * common.grid[1]
    return grids | {attention.name: common for attention in others if attention.keys == keys}


def _read_ids(input: Any) -> list[int] | None:
    """The token ids of an input, if it has integers."""
    if not isinstance(input, Tensor) or input.dtype.is_floating_point or input.dtype == torch.bool:
        return None
    return input[0].tolist() if input.ndim == 2 else input.tolist() if input.ndim == 1 else None


def _no_words() -> InputError:
    return InputError(
        "There are no tokens to label.",
        asked="words=...",
        because="words label the tokens of a text",
        instead="show(model, tokens, words=words)",
    )


def _is_all(query: Any) -> bool:
    """Whether the matrix of all pairs is drawn, of an image too."""
    return isinstance(query, str) and query == "all"


def _draw_profile_map(found: HeadProfile, image: Any, query: Any, heads: Any) -> Picture:
    image = torch.as_tensor(image)
    image = image[0] if image.ndim == 4 else image if image.ndim == 3 else image[None]
    count = found.grid[0] * found.grid[1]

    def rows(queries: Sequence[int]) -> Tensor:
        return torch.stack([grid_weights(found, divmod(each, found.grid[1])).flatten(1) for each in queries], 1)

    return draw_image_maps([AttentionMap("", count, count, rows)], image, [TokenGrid(found.grid)], query, heads)


def _takes_grid(model: nn.Module) -> bool:
    """Whether a layer takes a grid of tokens, channels last."""
    from regard.layers.grid import GridAttention
    from regard.layers.windows import WindowAttention
    from regard.models.spatial import SpatialHeads

    return isinstance(model, GridAttention | SpatialHeads | WindowAttention)


def _read_length(target: Any, input: Any) -> int:
    if input is None and (grid := getattr(target, "grid", None)) is not None:
        return grid[0] * grid[1]
    if not is_index(input) or input < 1:
        raise InputError(
            "It is not clear how many tokens there are.",
            asked=f"show({target!r}, {input!r})",
            because="a one-dimensional pattern or bias has no length of its own",
            instead=f"show({target!r}, 24)",
        )
    return int(input)
