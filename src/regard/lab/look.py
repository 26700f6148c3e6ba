"""The requests of the view Look: models, inputs, thumbnails, tiles, rows and rollout."""

from __future__ import annotations

from typing import Any

import torch

from regard.lab.answers import encode_array
from regard.lab.fields import Fields
from regard.lab.head_numbers import summarize_heads
from regard.lab.images import decode_image
from regard.lab.jobs import Job
from regard.lab.maps import compute_rollout, compute_row, compute_tile
from regard.lab.opened import describe_input
from regard.lab.state import Lab

WEIGHTINGS = ("weights", "value", "output")


def open_model(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    id = fields.text("model")
    job.progress(0, 1, f"loading {lab.find_source(id).name}")
    return lab.open(id, job).describe()


def read_input(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """A text, or both sides of a translation, or the bytes of an image."""
    opened = lab.open(fields.text("model"), job)
    content = fields.content.get("image")
    if isinstance(content, bytes):
        id = lab.inputs.make_id(opened.id, b"image", content)
        found = lab.inputs.find(id)
        if found is None:
            if opened.image_shape is None:
                opened.read_texts([], id)  # refuses: this model reads something else
            assert opened.image_shape is not None
            found = opened.read_image(decode_image(content, opened.image_shape), id, job.check, lab.inputs.limit)
            lab.inputs.put(found)
        return describe_input(opened, found)
    names = [name for name in ("text", "source", "target") if fields.has(name)]
    texts = [fields.text(name) for name in names]
    if opened.kind == "translation" and names == ["source"]:
        texts.append("")
    id = lab.inputs.make_id(opened.id, *(text.encode() for text in texts))
    found = lab.inputs.find(id)
    if found is None:
        found = opened.read_texts(texts, id)
        lab.inputs.put(found)
    return describe_input(opened, found)


def make_overview(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """Thumbnails and numbers of every head, layer by layer; each layer is also sent as soon as it is there."""
    given, attention = lab.inputs.get(fields.text("input")), fields.text("attention", "self")
    job.progress(0, 1, "running the model")
    layers = lab.find_attention(given, attention, job)
    queries, keys = given.sides[attention]
    found = []
    for number, layer in enumerate(layers):
        key = (attention, number)
        if key not in given.overview:
            given.overview[key] = _describe_layer(*summarize_heads(layer, queries, keys, job.check))
            lab.inputs.put(given)
        found.append(given.overview[key])
        label = f"layer {number + 1} of {len(layers)}"
        job.progress(number + 1, len(layers), label, layer=number, heads=found[-1])
    return {"layers": found}


def _describe_layer(thumbnails: torch.Tensor, numbers: list[dict[str, float]]) -> list[dict[str, Any]]:
    return [
        {"head": head, "thumbnail": encode_array(thumbnails[head]), "numbers": values}
        for head, values in enumerate(numbers)
    ]


def make_tile(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    given = lab.inputs.get(fields.text("input"))
    head = fields.integer("head", 0, 100_000)
    layer = lab.find_layer(given, fields.text("attention", "self"), fields.integer("layer", 0, 100_000), head, job)
    rows, columns = fields.range("rows", layer.queries), fields.range("columns", layer.keys)
    size, weighting = fields.integer("size", 1, 512, 128), fields.choice("weighting", WEIGHTINGS, "weights")
    tile, exact, largest = compute_tile(layer, head, rows, columns, size, weighting, job.check)
    return {"tile": encode_array(tile), "exact": exact, "max": largest}


def make_row(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    given = lab.inputs.get(fields.text("input"))
    head = fields.integer("head", 0, 100_000)
    layer = lab.find_layer(given, fields.text("attention", "self"), fields.integer("layer", 0, 100_000), head, job)
    side, weighting = (
        fields.choice("side", ("query", "key"), "query"),
        fields.choice("weighting", WEIGHTINGS, "weights"),
    )
    token = fields.integer("token", 0, (layer.queries if side == "query" else layer.keys) - 1)
    return {"row": encode_array(compute_row(layer, head, token, side, weighting, job.check))}


def make_rollout(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    given = lab.inputs.get(fields.text("input"))
    layers = lab.find_attention(given, fields.text("attention", "self"), job)
    token = fields.integer("token", 0, layers[-1].queries - 1)
    return {"row": encode_array(compute_rollout(layers, token, job.check))}
