"""A model: token ids or images in, logits or features out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.adapters.base import Conventions
from regard.adapters.call_signature import parameters
from regard.adapters.layer import SequenceAdapter, find_channels
from regard.adapters.rng import Rng
from regard.errors import InputError

IDS = ("input_ids", "ids", "tokens", "token_ids", "idx", "input", "x")
LENGTH_ATTRIBUTES = (
    "max_position_embeddings",
    "block_size",
    "context_length",
    "max_len",
    "max_length",
    "max_seq_len",
    "n_positions",
)
IMAGE_ATTRIBUTES = ("img_size", "image_size", "input_size")


class ModelAdapter(SequenceAdapter):
    """Whole numbers in, one row of logits or features for each, or one for all.

    Attributes:
        vocabulary: ids are drawn from 0 to this, not included; the first `reserved` are left out, being special.
    """

    kind = "model"

    def __init__(
        self,
        target: Any,
        name: str,
        conventions: Conventions | None = None,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        reserved: int = 0,
    ) -> None:
        super().__init__(target, name, conventions)
        self.vocab_size = vocab_size or _find_vocab_size(target) or 16
        self.reserved = reserved
        self.max_length = max_length or _find_max_length(target)
        self._find_running_vocab_size()
        self.find_abilities()

    @property
    def channels(self) -> int:
        return max([64, *find_channels(self.target)[:4]])

    def draw(self, batch: int, tokens: int, rng: Rng) -> Tensor:
        return rng.integers(self.reserved, self.vocab_size, batch, tokens)

    def _find_running_vocab_size(self) -> None:
        failure: Exception | None = None
        for vocab_size in dict.fromkeys([self.vocab_size, 8, 4, 2]):
            self.vocab_size = vocab_size
            try:
                self.run(self.draw(2, self.lengths(5)[0], Rng(0, "model")))
                return
            except Exception as reason:  # any error is a refusal of this size
                failure = failure or reason
        raise InputError(
            f"{self.name} does not run as a model.",
            asked="f(ids) with ids of (2, 5)",
            found=f"{type(failure).__name__}: {failure}",
            because="it has to be called before it can be checked",
            instead="vocab_size= or max_length= if they are unusual; image_size=(3, 224, 224) for images; "
            'kind="layer" for rows of numbers',
        ) from failure


class ImageModelAdapter(SequenceAdapter):
    """Images in; logits, or a feature map. Its tokens are patches, which a caller cannot address."""

    kind = "model"

    def __init__(
        self, target: Any, name: str, conventions: Conventions | None = None, *, image_size: tuple[int, int, int]
    ) -> None:
        super().__init__(target, name, conventions)
        self.image_size = image_size
        self.max_length = self.min_length = 1
        try:
            self.run(self.draw(2, 1, Rng(0, "images")))
        except Exception as failure:  # any error is a refusal of this image
            raise InputError(
                f"{self.name} does not run as a model of images.",
                asked=f"f(image) with (batch, channel, row, column) = (2, {', '.join(map(str, tuple(image_size)))})"
                if isinstance(image_size, tuple | list)
                else f"image_size={image_size!r}",
                found=f"{type(failure).__name__}: {failure}",
                because="it has to be called before it can be checked",
                instead="image_size=(channels, rows, columns) of a picture that it takes",
            ) from failure
        self.find_abilities()
        self.abilities -= {"aligned", "lengths", "mask"}

    @property
    def channels(self) -> int:
        return max([64, *find_channels(self.target)[:4]])

    def draw(self, batch: int, tokens: int, rng: Rng) -> Tensor:
        return rng.normal(batch, *self.image_size, dtype=self.dtype)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        return []


def takes_ids(target: Any) -> bool:
    """Whether a module's or function's first input is whole numbers: it has an embedding, or such a name."""
    first = next(iter(parameters(target)), "")
    if first in IDS[:5]:
        return True
    return isinstance(target, nn.Module) and any(isinstance(part, nn.Embedding) for part in target.modules())


def find_image_size(target: Any) -> tuple[int, int, int] | None:
    """The image shape of a module: channels of its first convolution, and the size of its configuration."""
    if not isinstance(target, nn.Module):
        return None
    first = next((part for part in target.modules() if isinstance(part, nn.Conv2d)), None)
    if first is None:
        return None
    for holder in target.modules():
        for name in IMAGE_ATTRIBUTES:
            size = getattr(holder, name, None)
            if isinstance(size, int):
                return first.in_channels, size, size
            if isinstance(size, tuple) and len(size) == 2:
                return first.in_channels, *size
            if isinstance(size, tuple) and len(size) == 3:
                return size
    return first.in_channels, 32, 32


def _find_vocab_size(target: Any) -> int | None:
    if not isinstance(target, nn.Module):
        return None
    config = getattr(target, "config", None)
    if isinstance(size := getattr(config, "vocab_size", None), int):
        return size
    sizes = [part.num_embeddings for part in target.modules() if isinstance(part, nn.Embedding)]
    return sizes[0] if sizes else None


def _find_max_length(target: Any) -> int | None:
    for holder in (target, getattr(target, "config", None)):
        for name in LENGTH_ATTRIBUTES:
            if isinstance(value := getattr(holder, name, None), int) and not isinstance(value, bool) and value > 0:
                return value
    if not isinstance(target, nn.Module):
        return None
    # A second table beside the words is most likely one of positions.
    sizes = [part.num_embeddings for part in target.modules() if isinstance(part, nn.Embedding)]
    tables = [p.shape[-2] for n, p in target.named_parameters() if "pos" in n.lower() and p.ndim >= 2]
    return min([*sizes[1:], *tables], default=None)
