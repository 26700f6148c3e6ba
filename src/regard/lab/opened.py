"""A model that was opened: it reads inputs, and records what its attention holds."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.lab import kinds
from regard.lab.head_numbers import Tokens
from regard.lab.inputs import LEAST_BYTES, LabInput
from regard.lab.layer_heads import LayerHeads
from regard.lab.record import record_run
from regard.lab.sources import LoadedModel, Source
from regard.lab.words import NumberWords, Words
from regard.models import GPT
from regard.render.png import data_uri
from regard.visualize.token_grid import find_token_grid

Check = Callable[[], None]
MOST_TOKENS = 16_384  # of a model that names no limit
PROBE_TOKENS = 5


class OpenedModel:
    """A loaded model of the lab.

    Attributes:
        kind: "encoder", "decoder", "image" or "translation".
        head: what it predicts: "next", "mask", "class", or None.
        words: its tokenizer, for texts.
        most_tokens: how many it reads.
        image_shape: channels, rows and columns, for images.
        streams: for each attention the number of heads in each layer.
    """

    def __init__(self, id: str, source: Source, loaded: LoadedModel, check: Check = lambda: None) -> None:
        self.id, self.source, self.loaded = id, source, loaded
        self.module = loaded.module.eval()
        self.kind: kinds.Kind = kinds.find_kind(self.module)
        self.head = kinds.find_head(self.module, self.kind)
        self.words = self._make_words()
        self.most_tokens = kinds.find_most_tokens(self.module) or MOST_TOKENS
        self.image_shape = kinds.find_image_shape(self.module) if self.kind == "image" else None
        probe = self._make_probe()
        found = self.record(probe, check, None)
        self.streams = {name: [layer.heads for layer in layers] for name, layers in found.items()}
        self.weighted = all(layer.value is not None for layers in found.values() for layer in layers)
        self.can_mix = all(layer.output is not None for layers in found.values() for layer in layers)

    def describe(self) -> dict[str, Any]:
        abilities = ["check", "cost"]
        if self.head is not None and not (self.head == "mask" and self.words is not None and self.words.mask is None):
            abilities.insert(0, "mlm" if self.head == "mask" else "predict")
            if self.head == "mask":
                abilities.insert(0, "predict")
        if self.kind == "decoder" and self.head == "next":
            abilities.append("generate")
        if self.kind == "translation":
            abilities.append("generate")
        if self.weighted:
            abilities.append("weighted")
        if self.can_mix:
            abilities.append("output_weighted")
            abilities.append("switch_off")
        return {
            "model": self.id,
            "name": self.source.name,
            "kind": self.kind,
            "max_tokens": None if self.kind == "image" else self.most_tokens,
            "image_size": None if self.image_shape is None else list(self.image_shape[1:]),
            "attentions": [{"name": name, "heads": heads} for name, heads in self.streams.items()],
            "abilities": abilities,
            "real_weights": self.source.has_real_weights,
        }

    # Inputs

    def read_texts(self, texts: Sequence[str], id: str) -> LabInput:
        """The tokens of a text, or of both sides of a translation."""
        if self.kind == "image" or len(texts) != (2 if self.kind == "translation" else 1):
            wanted = {"image": "an image", "translation": "a source and a target"}.get(self.kind, "a text")
            raise InputError(
                f"{self.source.name} reads {wanted}.",
                asked=f"{len(texts)} texts",
                because=f"it is a model of the kind {self.kind!r}",
                instead=wanted,
            )
        assert self.words is not None
        sides, cut, arguments = [], None, []
        for place, text in enumerate(texts):
            ids = self._begin_target(text) if place else self.words.encode(text)
            if len(ids) > self.most_tokens:
                cut = f"The text has {len(ids):,} tokens; the model reads the first {self.most_tokens:,}."
                ids = ids[: self.most_tokens]
            arguments.append(torch.tensor([ids]))
            sides.append(self._describe_tokens(ids))
        return LabInput(
            id,
            self.id,
            tuple(arguments),
            tuple(texts),
            self._name_sides(sides),
            cut=cut,
            python=tuple(self._write_python(texts)),
        )

    def read_ids(self, rows: Sequence[Sequence[int]], texts: Sequence[str], id: str) -> LabInput:
        """An input of token ids, such as a text that was continued."""
        assert self.words is not None
        sides = [self._describe_tokens(list(ids)) for ids in rows]
        arguments = tuple(torch.tensor([list(ids)]) for ids in rows)
        return LabInput(
            id,
            self.id,
            arguments,
            tuple(texts),
            self._name_sides(sides),
            python=tuple(self._write_python(texts)),
        )

    def read_image(self, image: Tensor, id: str, check: Check, most_bytes: int | None) -> LabInput:
        """An image `(channel, row, column)` of numbers from 0 to 1, of the size that the model reads."""
        normalize = self.loaded.normalize
        given = image[None] if normalize is None else normalize(image[None])
        picture = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
        found = LabInput(id, self.id, (given,), image=data_uri(picture.permute(1, 2, 0)))
        found.layers = self.record(found, check, most_bytes)
        size = (image.shape[1], image.shape[2])
        for name, layers in found.layers.items():
            side = self._describe_patches(layers[0], size)
            found.sides[name] = (side, side)
        found.python = tuple(self._write_python(()))
        return found

    def record(self, given: LabInput, check: Check, most_bytes: int | None) -> dict[str, list[LayerHeads]]:
        """The heads of every layer by the name of their attention; the model runs."""
        arguments, keywords = self._make_call(given.arguments)
        limit = None if most_bytes is None else most_bytes - LEAST_BYTES
        layers = record_run(self.module, arguments, keywords, check, limit)
        if self.kind == "decoder":
            layers = [dataclasses.replace(layer, causal=True) if layer.stream == "self" else layer for layer in layers]
        streams: dict[str, list[LayerHeads]] = {}
        sizes = {(layer.queries, layer.grid) for layer in layers if layer.stream == "self"}
        for layer in layers:
            name = layer.stream
            if name == "self" and len(sizes) > 1:  # stages of an image model have grids of their own
                name = "x".join(map(str, layer.grid)) if layer.grid else f"{layer.queries} tokens"
            streams.setdefault(name, []).append(layer)
        return streams

    # Parts of reading

    def _make_words(self) -> Words | None:
        if self.kind == "image":
            return None
        if self.loaded.tokenizer is not None:
            return Words(self.loaded.tokenizer)
        return NumberWords(kinds.find_vocab_size(self.module) or 256)

    def _make_probe(self) -> LabInput:
        """The smallest input that shows which attention layers there are."""
        if self.image_shape is not None:
            return LabInput("", self.id, (torch.zeros(1, *self.image_shape),))
        vocab_size = kinds.find_vocab_size(self.module) or PROBE_TOKENS + 2
        ids = [1 + number % max(min(vocab_size, 300) - 1, 1) for number in range(PROBE_TOKENS)]
        ids = [min(number, vocab_size - 1) for number in ids]
        return LabInput("", self.id, tuple(torch.tensor([ids]) for _ in range(2 if self.kind == "translation" else 1)))

    def _begin_target(self, text: str) -> list[int]:
        """A target begins with the start token; of an empty one that is all."""
        assert self.words is not None
        config = getattr(self.module, "config", None)
        start = getattr(config, "decoder_start_token_id", None)
        start = getattr(config, "start", None) if start is None else start
        ids = self.words.encode(text) if text.strip() else []
        while ids and ids[-1] in self.words.ends and len(ids) > 1:
            ids.pop()  # what the tokenizer adds at the end is what the model is to predict
        return ids if start is None or ids[:1] == [start] else [int(start), *ids]

    def _describe_tokens(self, ids: list[int]) -> Tokens:
        assert self.words is not None
        special = frozenset(place for place, number in enumerate(ids) if self.words.is_special(number))
        return Tokens(tuple(self.words.label(ids)), special)

    def _describe_patches(self, layer: LayerHeads, size: tuple[int, int]) -> Tokens:
        grid, start = layer.grid, 0
        if grid is None:
            try:
                found = find_token_grid(self.module, layer.keys, size)
            except InputError:
                return Tokens(tuple(f"token {number}" for number in range(layer.keys)))
            grid, start = found.grid, found.first
        names = [f"token {number}" if start > 1 else "class token" for number in range(start)]
        names += [f"row {row}, column {column}" for row in range(grid[0]) for column in range(grid[1])]
        return Tokens(tuple(names), frozenset(range(start)), grid, start)

    def _name_sides(self, sides: list[Tokens]) -> dict[str, tuple[Tokens, Tokens]]:
        if len(sides) == 1:
            return dict.fromkeys(self.streams, (sides[0], sides[0]))
        source, target = sides
        pairs = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
        return {name: pairs[name] for name in self.streams}

    def _make_call(self, arguments: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call that runs every layer and spares the logits of all tokens."""
        if isinstance(self.module, GPT) and self.module.output is not None:
            return arguments, {"last_only": True}
        positional, keywords = kinds.make_call(self.module, self.kind, arguments)
        if self.kind == "decoder" and "logits_to_keep" in inspect.signature(self.module.forward).parameters:
            keywords["logits_to_keep"] = 1
        return positional, keywords

    def _write_python(self, texts: Sequence[str]) -> list[str]:
        """Lines that show the same attention from Python."""
        lines = ["import torch", "from regard import show", *self.loaded.python]
        if self.kind == "image":
            return [
                *lines,
                f"image = torch.rand(1, *{self.image_shape})  # your image, from 0 to 1",
                "show(model, image)",
            ]
        if self.kind == "translation":
            return [*lines, f"source, target = {texts[0]!r}, {texts[1]!r}"]
        if self.loaded.tokenizer is None:
            assert self.words is not None
            return [*lines, f"show(model, torch.tensor([{self.words.encode(texts[0])}]))"]
        return [
            *lines,
            "from regard.visualize.text_input import encode_text",
            f"tokens = torch.tensor([encode_text(tokenizer, {texts[0]!r})])",
            "show(model, tokens, words=tokenizer)",
        ]


def describe_input(opened: OpenedModel, given: LabInput) -> dict[str, Any]:
    """What the page is told of an input."""
    causal = {"decoder": True, "self": opened.kind == "decoder"}
    return {
        "input": given.id,
        "model": given.model,
        "attentions": {
            name: {
                "queries": list(queries.labels),
                "keys": list(keys.labels),
                "grid": None if keys.grid is None else list(keys.grid),
                "start": keys.start,
                "causal": causal.get(name, False),
            }
            for name, (queries, keys) in given.sides.items()
        },
        "image": given.image,
        "cut": given.cut,
        "python": "\n".join(given.python),
    }
