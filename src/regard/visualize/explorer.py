"""Point at a pixel and see what the heads see from there: a figure of a page, with every weight inside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.render.markup import Markup, element, script_data
from regard.render.page import Widget, read_asset
from regard.render.png import data_uri
from regard.visualize.attention_map import attention_maps
from regard.visualize.image_maps import to_grayscale
from regard.visualize.labels import in_one_line
from regard.visualize.token_grid import find_token_grid

MOST_BYTES = 2_000_000  # of weights, before they become text


@dataclass(frozen=True, eq=False)
class ExplorerModel:
    """An image model whose attention the page shows.

    Attributes:
        name: on its button.
        model: any that `regard.visualize.attention_maps` can read.
        inputs: what the model reads for each image, `(image, channel, row, column)`.
        says: a sentence for each image: the prediction.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    says: Sequence[str]


def make_explorer(models: Sequence[ExplorerModel], images: Tensor, names: Sequence[str], caption: str) -> Widget:
    """A figure of a page: images `(image, channel, row, column)` to choose from, and what each pixel looks at.

    Weights are rounded to 255 steps of each row's largest. The weights of models with
    positional attention are the same for every image, and are kept once.
    """
    _check_arguments(models, images, names)
    size = [images.shape[2], images.shape[3]]
    pictures = [_inked(image) for image in images]
    entries = [_read_weights(shown, (size[0], size[1])) for shown in models]
    total = sum(entry.pop("bytes") for entry in entries)
    if total > MOST_BYTES:
        raise InputError(
            "The page would be too heavy.",
            asked=f"{total:,} weights",
            because=f"they all lie inside the page, and beyond {MOST_BYTES:,} it opens slowly",
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
data-whole aria-pressed="false" hidden>class token</button></div>
<div class="stage">
{_board(size, pictures[0])}
<div class="views" data-views id="views" role="tabpanel" aria-label="heads"></div>
</div>
<p class="says" data-says aria-live="polite"></p>
{element("figcaption", caption)}
{script_data(data)}
"""
    )
    return Widget(
        element("figure", body, class_="explorer"),
        style=read_asset("regard.visualize", "web/explorer.css"),
        script=read_asset("regard.visualize", "web/explorer.js"),
    )


def _board(size: list[int], picture: str) -> Markup:
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
        aria_label="The image. Arrow keys move the pixel that looks.",
    )


def _check_arguments(models: Sequence[ExplorerModel], images: Tensor, names: Sequence[str]) -> None:
    """Refuse what does not belong together: every image has a name, and every model reads and judges each of them."""
    wrong = ""
    if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
        wrong = f"images {tuple(getattr(images, 'shape', ()))}, not (image, channel, row, column)"
    elif not models or not all(isinstance(shown, ExplorerModel) for shown in models):
        wrong = "no model" if not models else "a model that is no ExplorerModel"
    elif len(names) != len(images):
        wrong = f"{len(names)} names for {len(images)} images"
    else:
        counts = {shown.name: (len(shown.inputs), len(shown.says)) for shown in models}
        unequal = [name for name, count in counts.items() if count != (len(images), len(images))]
        if unequal:
            inputs, says = counts[unequal[0]]
            wrong = f"{inputs} inputs and {says} sentences of {unequal[0]!r} for {len(images)} images"
    if wrong:
        raise InputError(
            "The parts of the explorer do not belong together.",
            asked=f"make_explorer({len(models)} models, ...)",
            found=wrong,
            because="every image has a name, and for every model an input and a sentence",
            instead="make_explorer([ExplorerModel(name, model, inputs, says)], images, names, caption)",
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
                because="the page has one grid of places for all layers of a model",
                instead="show(model, image, layer=...) for each grid",
            )
        squares.append(torch.stack([attention.rows(range(attention.queries)) for attention in found]).float())
        shared = shared and torch.equal(squares[0], squares[-1])
    kept = torch.stack(squares[:1] if shared else squares)  # (image, layer, head, query, key)
    largest = kept.amax(-1)
    share = kept / largest.clamp(min=1e-30).unsqueeze(-1)
    places = find_token_grid(shown.model, found[0].keys, size)
    return {
        "name": shown.name,
        "layers": [in_one_line(attention.title) for attention in found],
        "heads": kept.shape[2],
        "grid": list(places.grid),
        "first": places.first,
        "shared": shared,
        "says": list(shown.says),
        "weights": _bytes(share),
        "largest": _bytes(largest),
        "bytes": share.numel() + largest.numel(),
    }


def _bytes(values: Tensor) -> str:
    data = (255 * values.clamp(0, 1)).round().to(torch.uint8).flatten()
    return base64.b64encode(data.numpy().tobytes()).decode("ascii")


def _inked(image: Tensor) -> str:
    """An image as black ink of that darkness on nothing, so that the page's paper shows through."""
    dark = to_grayscale(image)
    return data_uri(torch.cat((torch.zeros(*dark.shape, 3), dark[..., None]), -1))
