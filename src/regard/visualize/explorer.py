"""The explorer of a page: select a pixel of an image, and see the attention of each head from there."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.render.components import bundle, read_component
from regard.render.markup import Markup, element, script_data
from regard.render.page import Widget
from regard.render.png import data_uri
from regard.visualize.attention_map import attention_maps
from regard.visualize.image_maps import to_grayscale
from regard.visualize.labels import in_one_line
from regard.visualize.token_grid import TokenGrid, find_token_grid

MOST_BYTES = 2_000_000  # of weights, before they become text


@dataclass(frozen=True, eq=False)
class ExplorerModel:
    """An image model whose attention the page shows.

    Attributes:
        name: on its button.
        model: any that `regard.visualize.attention_maps` supports.
        inputs: the input of the model for each image, `(image, channel, row, column)`.
        captions: a sentence for each image, such as its prediction.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    captions: Sequence[str]


def make_explorer(models: Sequence[ExplorerModel], images: Tensor, names: Sequence[str], caption: str) -> Widget:
    """A figure of a page: images `(image, channel, row, column)` to choose from, and the attention of each pixel.

    Weights are quantised to 255 steps of the largest of each row. Models with positional attention have the same
    weights for every image, which are stored once.
    """
    _check_arguments(models, images, names)
    size = [images.shape[2], images.shape[3]]
    pictures = [_to_ink(image) for image in images]
    entries = [_read_weights(shown, (size[0], size[1])) for shown in models]
    total = sum(entry.pop("bytes") for entry in entries)
    if total > MOST_BYTES:
        raise InputError(
            "The page would be too large.",
            asked=f"{total:,} weights",
            because=f"all of them are stored in the page, and the limit is {MOST_BYTES:,}",
            instead="fewer images, or a smaller model",
        )
    data = {
        "size": size,
        "images": [{"picture": picture, "name": name} for picture, name in zip(pictures, names, strict=True)],
        "models": entries,
    }
    thumbnails = [
        element(
            "button",
            element("img", class_="pixels inked", alt="", src=picture),
            type="button",
            aria_pressed=str(not index).lower(),
            aria_label=name,
        )
        for index, (picture, name) in enumerate(zip(pictures, names, strict=True))
    ]
    buttons = [
        element("button", shown.name, type="button", aria_pressed=str(not index).lower())
        for index, shown in enumerate(models)
    ]
    body = Markup(
        f"""
{element("div", *buttons, class_="row", data_models=True, role="group", aria_label="model")}
{element("div", *thumbnails, class_="row thumbs", data_images=True, role="group", aria_label="image")}
<div class="row"><div class="row" data-layers role="tablist" aria-label="layer"></div><button type="button" \
data-class-token aria-pressed="false" hidden>class token</button></div>
<div class="stage">
{_draw_image(size, pictures[0])}
<div class="views" data-views id="views" role="tabpanel" aria-label="heads"></div>
</div>
<p class="status" data-status aria-live="polite"></p>
{element("figcaption", caption)}
{script_data(data)}
"""
    )
    return Widget(
        element("figure", element("regard-explorer", body), class_="explorer"),
        style=read_component("explorer.css")[0].decode(),
        script=bundle("explorer.js"),
    )


def _draw_image(size: list[int], picture: str) -> Markup:
    """The image, with a frame around the query."""
    rows, columns = size
    return element(
        "svg",
        element("image", class_="inked", width=columns, height=rows, href=picture),
        element("rect", width=1, height=1, stroke_width=f"{columns / 60:.2f}"),
        class_="board",
        data_board=True,
        viewBox=f"0 0 {columns} {rows}",
        tabindex=0,
        role="application",
        aria_label="The image. Arrow keys move the query.",
    )


def _check_arguments(models: Sequence[ExplorerModel], images: Tensor, names: Sequence[str]) -> None:
    """Raise unless every image has a name, and for every model an input and a caption."""
    problem = ""
    if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
        problem = f"images {tuple(getattr(images, 'shape', ()))}, not (image, channel, row, column)"
    elif not models or not all(isinstance(shown, ExplorerModel) for shown in models):
        problem = "no model" if not models else "a model that is not an ExplorerModel"
    elif len(names) != len(images):
        problem = f"{len(names)} names for {len(images)} images"
    else:
        counts = {shown.name: (len(shown.inputs), len(shown.captions)) for shown in models}
        unequal = [name for name, count in counts.items() if count != (len(images), len(images))]
        if unequal:
            inputs, captions = counts[unequal[0]]
            problem = f"{inputs} inputs and {captions} captions of {unequal[0]!r} for {len(images)} images"
    if problem:
        raise InputError(
            "The arguments of the explorer do not match.",
            asked=f"make_explorer({len(models)} models, ...)",
            found=problem,
            because="every image has a name, and for every model an input and a caption",
            instead="make_explorer([ExplorerModel(name, model, inputs, captions)], images, names, caption)",
        )


def _read_weights(shown: ExplorerModel, size: tuple[int, int]) -> dict[str, Any]:
    """Every row of weights of every image, as bytes in the order image, layer, head, query, key."""
    squares, shared = [], True
    found = []
    for image in shown.inputs:
        found = attention_maps(shown.model, image[None])
        if len({(attention.queries, attention.keys) for attention in found}) > 1:
            raise InputError(
                f"The layers of {shown.name!r} do not share one grid.",
                asked=f"explorer with {type(shown.model).__name__}",
                found=", ".join(sorted({f"{attention.queries} x {attention.keys} pairs" for attention in found})),
                because="the page has one grid for all layers of a model",
                instead="show(model, image, layer=...) for each grid",
            )
        squares.append(torch.stack([attention.rows(range(attention.queries)) for attention in found]).float())
        shared = shared and torch.equal(squares[0], squares[-1])
    kept = torch.stack(squares[:1] if shared else squares)  # (image, layer, head, query, key)
    largest = kept.amax(-1)
    share = kept / largest.clamp(min=1e-30).unsqueeze(-1)
    own = found[0].grid
    tokens = find_token_grid(shown.model, found[0].keys, size) if own is None else TokenGrid(own)
    return {
        "name": shown.name,
        "layers": [in_one_line(attention.title) for attention in found],
        "heads": kept.shape[2],
        "grid": list(tokens.grid),
        "first": tokens.first,
        "shared": shared,
        "captions": list(shown.captions),
        "weights": _encode_bytes(share),
        "largest": _encode_bytes(largest),
        "bytes": share.numel() + largest.numel(),
    }


def _encode_bytes(values: Tensor) -> str:
    data = (255 * values.clamp(0, 1)).round().to(torch.uint8).flatten()
    return base64.b64encode(data.numpy().tobytes()).decode("ascii")


def _to_ink(image: Tensor) -> str:
    """An image as black with an alpha channel, so that the page's background shows through."""
    dark = to_grayscale(image)
    return data_uri(torch.cat((torch.zeros(*dark.shape, 3), dark[..., None]), -1))
