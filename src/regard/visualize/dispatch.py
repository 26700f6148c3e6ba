"""`show`: one word for every picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.biases import Bias
from regard.errors import InputError
from regard.layers.profiles import HeadProfile, head_profile, head_profiles
from regard.patterns import Pattern
from regard.visualize.attention_map import AttentionMap, attention_maps, check_single, grid_weights
from regard.visualize.descriptions import draw_bias, draw_mask
from regard.visualize.heads import draw_head_paths, draw_heads
from regard.visualize.image_maps import draw_image_maps
from regard.visualize.inputs import read_inputs
from regard.visualize.labels import read_words
from regard.visualize.picture import Picture
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
    """What heads look at.

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
    model or layer, image                         weights of one pixel over the image, for each layer and head
    model or layer, tokens                        weights of all pairs, or with `query` what one token looks at most
    model, layer, bias, HeadProfile by position   centres and contours of the heads around the query
    list of head profiles by layer, oldest first  the same, with the ways that the heads took
    pattern or bias, number of tokens             the pairs that may meet; the scores by distance
    ============================================  ====================================================================

    Models of Regard, torch, timm and Hugging Face are read. Only rows that are drawn are computed; what is left out of
    a picture is said in its caption.

    Args:
        input: an image `(channel, row, column)`, tokens `(token,)` or `(token, channel)`, a grid `(row, column,
            channel)` for a layer on a grid, each also as a batch of one; a dict for models that take keywords.
        query: who looks: `(row, column)` of a pixel, or the number of a token.
        layer, head: which, counted from 0, as their labels are; a number or several.
        words: the tokens in words, one for each, to label them; or the tokenizer, which reads their ids.
        path: a file to write: .svg, .pdf, .png or .html.
    """
    picture = _draw_target(target, input, query, _several(layer), _several(head), words)
    if path is not None:
        picture.save(path)
    return picture


def _draw_target(target: Any, input: Any, query: Any, layers: Any, heads: Any, words: Any) -> Picture:
    if input is None and not isinstance(target, Pattern):
        _refuse_unread(query, heads)
    if words is not None and (input is None or not isinstance(target, nn.Module) or isinstance(target, Bias)):
        raise _no_words()
    if layers is not None and isinstance(target, Pattern | HeadProfile | Bias):
        raise InputError(
            "There is no layer to choose.",
            asked=f"layer={layers}",
            found=f"one {type(target).__name__}",
            because="layers are those of a model",
            instead=f"show({type(target).__name__}(...)) without layer",
        )
    if isinstance(target, Pattern):
        return draw_mask(target, _length(target, input), query)
    if isinstance(target, Sequence) and target and all(isinstance(epoch, Mapping) for epoch in target):
        return draw_head_paths(target, layers)
    if isinstance(target, Mapping) and target and all(isinstance(each, HeadProfile) for each in target.values()):
        return draw_heads(target, layers)
    if isinstance(target, Bias) and getattr(target, "grid", None) is None:
        return draw_bias(target, _length(target, input))
    if isinstance(target, HeadProfile | Bias):
        found = target if isinstance(target, HeadProfile) else head_profile(target)
        return draw_heads(found) if input is None else _draw_profile_map(found, input, query, heads)
    if not isinstance(target, nn.Module):
        raise InputError(
            f"{type(target).__name__} cannot be shown.",
            asked=f"show({type(target).__name__}, ...)",
            because="a picture is made of a module, a HeadProfile, head profiles by layer, a bias or a pattern",
            instead="show(model, image), show(model, tokens), show(head_profiles(model)), show(Causal(), 24)",
        )
    if input is None:
        found = head_profiles(target)
        if not found:
            raise InputError(
                f"{type(target).__name__} looks by content.",
                asked=f"show({type(target).__name__}) without an input",
                because="where its heads look depends on what they see",
                instead="show(model, image) or show(model, tokens)",
            )
        return draw_heads(found, layers)
    return _draw_attention(target, input, query, layers, heads, words)


def _refuse_unread(query: Any, heads: Any) -> None:
    """Heads by position are drawn all together, from the query in the middle: a choice would not be heard."""
    for name, value in (("query", query), ("head", heads)):
        if value is not None:
            raise InputError(
                f"Without an input there is no {name} to choose.",
                asked=f"{name}={value!r}",
                because="all heads of a layer are drawn in one picture, around whoever asks",
                instead="show(model, image, query=..., head=...), or layer=... alone",
            )


def _draw_attention(model: nn.Module, input: Any, query: Any, layers: Any, heads: Any, words: Any) -> Picture:
    """Run the model on the input, and draw what its heads looked at."""
    inputs, keywords = read_inputs(model, (input,), {})
    first = next((value for value in (*inputs, *keywords.values()) if isinstance(value, Tensor)), None)
    if inputs and first is not None and first.ndim == 4 and first.is_floating_point():
        check_single(first)
    found = attention_maps(model, *inputs, **keywords)
    found = _layers(found, layers)
    if first is not None and first.is_floating_point() and first.ndim == 4 and not _pairs(query):
        if _on_grid(model):
            places, image = TokenGrid((first.shape[1], first.shape[2])), first[0].permute(2, 0, 1)
        else:
            image = first[0]
            places = find_token_grid(model, found[0].keys, (image.shape[1], image.shape[2]))
        if words is not None:
            raise _no_words()
        fitting = [attention for attention in found if attention.keys == places.first + places.grid[0] * places.grid[1]]
        return draw_image_maps(fitting, image, places, query, heads, len(found) - len(fitting))
    labels = read_words(words, _read_ids(first), [attention.keys for attention in found])
    if query is None or _pairs(query):
        return draw_matrices(found, heads, labels)
    if not isinstance(query, Integral) or isinstance(query, bool):
        raise InputError(
            "A token has a number.",
            asked=f"query={query!r}",
            because="the tokens of a text lie in a line",
            instead="query=0 for the first",
        )
    return draw_top_keys(found, int(query), heads, labels)


def _read_ids(input: Any) -> list[int] | None:
    """The token ids of an input, if it is a list of them."""
    if not isinstance(input, Tensor) or input.dtype.is_floating_point or input.dtype == torch.bool:
        return None
    return input[0].tolist() if input.ndim == 2 else input.tolist() if input.ndim == 1 else None


def _no_words() -> InputError:
    return InputError(
        "There are no tokens to label.",
        asked="words=...",
        because="words stand beside the tokens of a text that a model reads",
        instead="show(model, tokens, words=words)",
    )


def _pairs(query: Any) -> bool:
    """`query="all"` asks for the matrix of all pairs, of an image too."""
    return isinstance(query, str) and query == "all"


def _draw_profile_map(found: HeadProfile, image: Any, query: Any, heads: Any) -> Picture:
    image = torch.as_tensor(image)
    image = image[0] if image.ndim == 4 else image if image.ndim == 3 else image[None]
    count = found.grid[0] * found.grid[1]

    def rows(queries: Sequence[int]) -> Tensor:
        return torch.stack([grid_weights(found, divmod(each, found.grid[1])).flatten(1) for each in queries], 1)

    return draw_image_maps([AttentionMap("", count, count, rows)], image, TokenGrid(found.grid), query, heads)


def _on_grid(model: nn.Module) -> bool:
    """Whether a layer reads a grid of tokens, channels last."""
    from regard.layers.grid import GridAttention
    from regard.models.spatial import SpatialHeads

    return isinstance(model, GridAttention | SpatialHeads)


def _several(index: Any) -> list[int] | None:
    if index is None:
        return None
    several = index if isinstance(index, Sequence) and not isinstance(index, str | bytes) else [index]
    if not several or not all(isinstance(each, Integral) and not isinstance(each, bool) for each in several):
        raise InputError(
            "Layers and heads have numbers.",
            asked=repr(index)[:80],
            because="they are counted from 0, and at least one is drawn",
            instead="layer=0, head=[0, 2], or None for all",
        )
    return [int(each) for each in several]


def _layers(found: list[AttentionMap], layers: list[int] | None) -> list[AttentionMap]:
    return found if layers is None else [found[_inside(index, len(found))] for index in layers]


def _inside(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise InputError(
            "There is no such layer.",
            asked=f"layer={index}",
            found=f"{count} layers that attend",
            because="layers are counted from 0",
            instead=f"layer=0 to layer={count - 1}",
        )
    return index


def _length(target: Any, input: Any) -> int:
    if input is None and (grid := getattr(target, "grid", None)) is not None:
        return grid[0] * grid[1]
    if not isinstance(input, Integral) or isinstance(input, bool) or input < 1:
        raise InputError(
            "It is not said how many tokens there are.",
            asked=f"show({target!r}, {input!r})",
            because="a pattern or a bias along a line has no length of its own",
            instead=f"show({target!r}, 24)",
        )
    return int(input)
