"""Point at a pixel and see what the heads see from there: a figure of a page, with every weight inside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.show.colours import data_uri
from regard.show.heads import layer_title
from regard.show.looking import looks
from regard.show.maps import greys
from regard.show.page import Html, html, script_data
from regard.show.places import find_places

MOST_BYTES = 2_000_000  # of weights, before they become text


@dataclass(frozen=True, eq=False)
class Seer:
    """A model of images that the page lets look.

    Attributes:
        name: on its button.
        model: any that `regard.show.looks` can watch.
        inputs: what the model reads for each image, `(image, channel, row, column)`.
        says: a sentence for each image: what the model takes it for.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    says: Sequence[str]


def explorer(seers: Sequence[Seer], images: Tensor, names: Sequence[str], caption: str) -> Html:
    """A figure of a page: images `(image, channel, row, column)` to choose from, and what each pixel looks at.

    Weights are rounded to 255 steps of each row's largest. Models that look by position alone see every image alike,
    and are kept once.
    """
    size = [images.shape[2], images.shape[3]]
    pictures = [_inked(image) for image in images]
    models = [_read(seer, (size[0], size[1])) for seer in seers]
    total = sum(model["bytes"] for model in models)
    if total > MOST_BYTES:
        raise InputError(
            "The page would be too heavy.",
            asked=f"{total:,} weights",
            because=f"they all lie inside the page, and beyond {MOST_BYTES:,} it opens slowly",
            instead="fewer images, or a smaller model",
        )
    for model in models:
        del model["bytes"]
    data = {
        "size": size,
        "images": [{"picture": picture, "name": name} for picture, name in zip(pictures, names, strict=True)],
        "models": models,
    }
    choices = "".join(
        f'<button type="button" aria-pressed="{str(not index).lower()}" aria-label="{escape(name)}">'
        f'<img class="pixels inked" alt="" src="{picture}"></button>'
        for index, (picture, name) in enumerate(zip(pictures, names, strict=True))
    )
    kinds = "".join(
        f'<button type="button" aria-pressed="{str(not index).lower()}">{html(seer.name)}</button>'
        for index, seer in enumerate(seers)
    )
    return Html(
        '<figure class="explorer">\n'
        f'<div class="row" data-models role="group" aria-label="model">{kinds}</div>\n'
        f'<div class="row thumbs" data-images role="group" aria-label="image">{choices}</div>\n'
        '<div class="row"><div class="row" data-layers role="tablist" aria-label="layer"></div>'
        '<button type="button" data-whole aria-pressed="false" hidden>class token</button></div>\n'
        '<div class="stage">\n'
        f'<svg class="board" data-board viewBox="0 0 {size[1]} {size[0]}" tabindex="0" role="application" '
        'aria-label="The image. Arrow keys move the pixel that looks.">'
        f'<image class="inked" width="{size[1]}" height="{size[0]}" href="{pictures[0]}"/>'
        f'<rect width="1" height="1" stroke-width="{size[1] / 60:.2f}"/></svg>\n'
        '<div class="views" data-views id="views" role="tabpanel" aria-label="heads"></div>\n</div>\n'
        '<p class="says" data-says aria-live="polite"></p>\n'
        f"<figcaption>{html(caption)}</figcaption>\n{script_data(data)}\n</figure>"
    )


def _read(seer: Seer, size: tuple[int, int]) -> dict[str, Any]:
    """Every row of weights of every image, as bytes in the order image, layer, head, query, key."""
    squares, shared = [], True
    found = []
    for image in seer.inputs:
        found = looks(seer.model, image[None])
        squares.append(torch.stack([look.rows(range(look.queries)) for look in found]).float())
        shared = shared and torch.equal(squares[0], squares[-1])
    kept = torch.stack(squares[:1] if shared else squares)  # (image, layer, head, query, key)
    largest = kept.amax(-1)
    share = kept / largest.clamp(min=1e-30).unsqueeze(-1)
    places = find_places(seer.model, found[0].keys, size)
    return {
        "name": seer.name,
        "layers": [layer_title(look.name, place) for place, look in enumerate(found)],
        "heads": kept.shape[2],
        "grid": list(places.grid),
        "first": places.first,
        "shared": shared,
        "says": list(seer.says),
        "weights": _bytes(share),
        "largest": _bytes(largest),
        "bytes": share.numel() + largest.numel(),
    }


def _bytes(values: Tensor) -> str:
    data = (255 * values.clamp(0, 1)).round().to(torch.uint8).flatten()
    return base64.b64encode(data.numpy().tobytes()).decode("ascii")


def _inked(image: Tensor) -> str:
    """An image as black ink of that darkness on nothing, so that the page's paper shows through."""
    dark = greys(image)
    return data_uri(torch.cat((torch.zeros(*dark.shape, 3), dark[..., None]), -1))
