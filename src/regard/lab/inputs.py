"""Inputs that were given to a model, with what its attention held: kept up to a limit in bytes."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from regard.caching import ByteLimitedCache
from regard.errors import InputError
from regard.lab.head_numbers import Tokens
from regard.lab.layer_heads import LayerHeads

LEAST_BYTES = 4096  # of the bookkeeping of an input
LABEL_BYTES = 64
HEAD_BYTES = 4096  # of a thumbnail in base64, and of the numbers of a head


class Gone(InputError):
    """An input that is no longer kept."""


@dataclass(eq=False)
class LabInput:
    """One input of one model.

    Attributes:
        id: a digest of the model and the input, which only this server can compute.
        model: the id of the model.
        arguments: the token ids or the image, as the model takes them.
        texts: what was typed, for lines of Python.
        sides: the tokens of each attention: queries and keys by the name of the attention.
        layers: the heads of each attention, once they are recorded.
        image: of an image model, as a data URI.
        cut: why there are fewer tokens than the text has.
        python: lines that show the same attention.
        overview: thumbnails and numbers of the heads, by attention and layer, once they are computed.
        predictions: shares of all tokens or classes, by position and heads that are off.
    """

    id: str
    model: str
    arguments: tuple[Tensor, ...]
    texts: tuple[str, ...] = ()
    sides: dict[str, tuple[Tokens, Tokens]] = field(default_factory=dict)
    layers: dict[str, list[LayerHeads]] | None = None
    image: str | None = None
    cut: str | None = None
    python: tuple[str, ...] = ()
    overview: dict[tuple[str, int], Any] = field(default_factory=dict)
    predictions: dict[Any, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        labels = sum(len(side.labels) for pair in self.sides.values() for side in pair)
        held = sum(part.untyped_storage().nbytes() for part in self.arguments)
        held += sum(layer.bytes for layers in (self.layers or {}).values() for layer in layers)
        held += sum(HEAD_BYTES * len(heads) for heads in self.overview.values())
        held += sum(shares.untyped_storage().nbytes() for shares in self.predictions.values())
        return LEAST_BYTES + held + LABEL_BYTES * labels + len(self.image or "") + sum(4 * len(t) for t in self.texts)


class InputStore:
    """The least recently used inputs are dropped first; the page gives a dropped input again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept = ByteLimitedCache(limit)
        self._salt = secrets.token_bytes(16)

    @property
    def bytes(self) -> int:
        return self._kept.bytes

    def make_id(self, model: str, *content: bytes) -> str:
        digest = hashlib.blake2b(key=self._salt, digest_size=15)
        for part in (model.encode(), *content):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()

    def find(self, id: str) -> LabInput | None:
        found = self._kept.get(id)
        return None if found is None else found[0]

    def get(self, id: str) -> LabInput:
        found = self.find(id)
        if found is None:
            raise Gone(
                "This input is no longer here.",
                asked=f"input {id[:40]!r}",
                because=f"the server keeps the last inputs, {self.limit >> 20:,} MB of them",
                instead="the text or the image again",
            )
        return found

    def put(self, kept: LabInput) -> None:
        """Keep an input, or count it anew after more of it is held."""
        self._kept.put(kept.id, kept, kept.bytes)
