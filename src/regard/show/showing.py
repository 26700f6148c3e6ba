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
from regard.layers.gaze import Gaze, gaze, gazes
from regard.patterns import Pattern
from regard.show.heads import heads as draw_heads
from regard.show.heads import moving_heads
from regard.show.lines import bias_lines, mask
from regard.show.looking import Look, check_alone, looks, seen
from regard.show.maps import maps
from regard.show.picture import Picture
from regard.show.places import Places, find_places
from regard.show.tokens import favourites, matrices

Index = int | Sequence[int] | None


def show(
    target: Any,
    input: Any = None,
    *,
    query: Any = None,
    layer: Index = None,
    head: Index = None,
    words: Sequence[str] | None = None,
    path: str | Path | None = None,
) -> Picture:
    """What heads look at.

        >>> from regard.models import ViT, ViTConfig
        >>> model = ViT(ViTConfig(image=(8, 12), patch=4, classes=5, dim=8, layers=2, heads=2))
        >>> picture = show(model, torch.rand(3, 8, 12), query=(2, 5))
        >>> picture.data["token"], [tuple(each.shape) for each in picture.data["layers"].values()]
        (2, [(2, 2, 3), (2, 2, 3)])
        >>> picture.save("looks.svg")  # doctest: +SKIP
        PosixPath('looks.svg')

    ============================================  ====================================================================
    target and input                              picture
    ============================================  ====================================================================
    model or layer, image                         weights of one pixel over the image, for each layer and head
    model or layer, tokens                        weights of all pairs, or with `query` what one token looks at most
    model, layer, bias or Gaze by position        centres and contours of the heads around the query
    list of gazes by layer, oldest first          the same, with the ways that the heads took
    pattern or bias, number of tokens             the pairs that may meet; the scores by distance
    ============================================  ====================================================================

    Models of Regard, torch, timm and Hugging Face are read. Only rows that are drawn are computed; what is left out of
    a picture is said in its caption.

    Args:
        input: an image `(channel, row, column)`, tokens `(token,)` or `(token, channel)`, a grid `(row, column,
            channel)` for a layer on a grid, each also as a batch of one; a dict for models that take keywords.
        query: who looks: `(row, column)` of a pixel, or the number of a token.
        layer, head: which, counted from 0; a number or several.
        words: the tokens in words, to label them.
        path: a file to write: .svg, .pdf, .png or .html.
    """
    picture = _drawn(target, input, query, _several(layer), _several(head), words)
    if path is not None:
        picture.save(path)
    return picture


def _drawn(target: Any, input: Any, query: Any, layers: Any, heads: Any, words: Any) -> Picture:
    if input is None and not isinstance(target, Pattern):
        _refuse_unread(query, heads)
    if isinstance(target, Pattern):
        return mask(target, _length(target, input), query)
    if isinstance(target, Sequence) and target and all(isinstance(epoch, Mapping) for epoch in target):
        return moving_heads([_picked(epoch, layers) for epoch in target])
    if isinstance(target, Mapping) and target and all(isinstance(each, Gaze) for each in target.values()):
        return draw_heads(_picked(target, layers))
    if isinstance(target, Bias) and getattr(target, "grid", None) is None:
        return bias_lines(target, _length(target, input))
    if isinstance(target, Gaze | Bias):
        found = target if isinstance(target, Gaze) else gaze(target)
        return draw_heads(found) if input is None else _gaze_map(found, input, query, heads)
    if not isinstance(target, nn.Module):
        raise InputError(
            f"{type(target).__name__} cannot be shown.",
            asked=f"show({type(target).__name__}, ...)",
            because="a picture is made of a module, a Gaze, gazes by layer, a bias or a pattern",
            instead="show(model, image), show(model, tokens), show(gazes(model)), show(Causal(), 24)",
        )
    if input is None:
        found = gazes(target)
        if not found:
            raise InputError(
                f"{type(target).__name__} looks by content.",
                asked=f"show({type(target).__name__}) without an input",
                because="where its heads look depends on what they see",
                instead="show(model, image) or show(model, tokens)",
            )
        return draw_heads(_picked(found, layers))
    return _looked(target, input, query, layers, heads, words)


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


def _read_input(input: Any) -> Tensor:
    try:
        found = torch.as_tensor(input)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise InputError(
            "This is nothing that heads could look at.",
            asked=f"a {type(input).__name__}",
            found=f"{type(failure).__name__}: {failure}",
            because="an input is a tensor, an array, or a dict of them",
            instead="an image (channel, row, column), or tokens; `regard show --image FILE` reads files",
        ) from failure
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise InputError(
            "The input holds what is no number.",
            asked=f"an input {tuple(found.shape)}",
            found=f"{int((~found.isfinite()).sum())} of {found.numel()} numbers are nan or infinite",
            because="what heads see of it would be no number either",
            instead="torch.nan_to_num(input), or the image as it was before",
        )
    return found


def _looked(model: nn.Module, input: Any, query: Any, layers: Any, heads: Any, words: Any) -> Picture:
    """Run the model on the input, and draw what its heads looked at."""
    if isinstance(input, Mapping):
        found = looks(model, **input)
        first = next((value for value in input.values() if isinstance(value, Tensor)), None)
    else:
        first = input = _as_batch(model, _read_input(input))
        if first.ndim == 4 and first.is_floating_point():
            check_alone(first)
        found = looks(model, input)
    found = _layers(found, layers)
    if first is not None and first.is_floating_point() and first.ndim == 4 and not _pairs(query):
        if _on_grid(model):
            places, image = Places((first.shape[1], first.shape[2])), first[0].permute(2, 0, 1)
        else:
            image = first[0]
            places = find_places(model, found[0].keys, (image.shape[1], image.shape[2]))
        fitting = [look for look in found if look.keys == places.first + places.grid[0] * places.grid[1]]
        return maps(fitting, image, places, query, heads)
    if query is None:
        return matrices(found, heads, words)
    if not isinstance(query, int):
        raise InputError(
            "A token has a number.",
            asked=f"query={query!r}",
            because="the tokens of a text lie in a line",
            instead="query=0 for the first",
        )
    return favourites(found, query, heads, words)


def _pairs(query: Any) -> bool:
    """`query="all"` asks for the matrix of all pairs, of an image too."""
    return isinstance(query, str) and query == "all"


def _gaze_map(found: Gaze, image: Any, query: Any, heads: Any) -> Picture:
    image = torch.as_tensor(image)
    image = image[0] if image.ndim == 4 else image if image.ndim == 3 else image[None]
    count = found.grid[0] * found.grid[1]

    def rows(queries: Sequence[int]) -> Tensor:
        return torch.stack([seen(found, divmod(each, found.grid[1])).flatten(1) for each in queries], 1)

    return maps([Look("", count, count, rows)], image, Places(found.grid), query, heads)


def _on_grid(model: nn.Module) -> bool:
    """Whether a layer reads a grid of tokens, channels last."""
    from regard.layers.grid import GridAttention
    from regard.models.spatial import SpatialHeads

    return isinstance(model, GridAttention | SpatialHeads)


def _as_batch(model: nn.Module, input: Tensor) -> Tensor:
    """The input with an axis for the batch, if it has none."""
    if not input.is_floating_point():
        return input[None] if input.ndim == 1 else input
    return input[None] if (input.ndim == 3 and not _reads_tokens(model)) or input.ndim == 2 else input


def _reads_tokens(model: nn.Module) -> bool:
    from regard.layers.multihead import MultiHeadAttention

    return isinstance(
        model, MultiHeadAttention | nn.MultiheadAttention | nn.TransformerEncoder | nn.TransformerEncoderLayer
    )


def _several(index: Index) -> list[int] | None:
    found = None if index is None else [index] if isinstance(index, int | Integral) else list(index)
    if found is not None and (not found or not all(isinstance(each, Integral) for each in found)):
        raise InputError(
            "Layers and heads have numbers.",
            asked=repr(index),
            because="they are counted from 0, and at least one is drawn",
            instead="layer=0, head=[0, 2], or None for all",
        )
    return None if found is None else [int(each) for each in found]


def _layers(found: list[Look], layers: list[int] | None) -> list[Look]:
    return found if layers is None else [found[_inside(index, len(found))] for index in layers]


def _picked(found: Mapping[str, Gaze], layers: list[int] | None) -> Mapping[str, Gaze]:
    names = list(found)
    return found if layers is None else {names[i]: found[names[i]] for i in (_inside(i, len(names)) for i in layers)}


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
    if not isinstance(input, int) or input < 1:
        raise InputError(
            "It is not said how many tokens there are.",
            asked=f"show({target!r}, {input!r})",
            because="a pattern or a bias along a line has no length of its own",
            instead=f"show({target!r}, 24)",
        )
    return input
