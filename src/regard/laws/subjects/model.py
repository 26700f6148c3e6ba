"""A model: token ids or images in, logits or features out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.errors import InputError
from regard.laws.law import Dice
from regard.laws.subjects.base import Conventions
from regard.laws.subjects.calling import parameters
from regard.laws.subjects.layer import Sequences, said_channels

IDS = ("input_ids", "ids", "tokens", "token_ids", "idx", "input", "x")
SAYS_LENGTH = (
    "max_position_embeddings",
    "block_size",
    "context",
    "max_len",
    "max_length",
    "max_seq_len",
    "n_positions",
)
SAYS_IMAGE = ("img_size", "image_size", "input_size")


class Model(Sequences):
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
        vocabulary: int | None = None,
        longest: int | None = None,
        reserved: int = 0,
    ) -> None:
        super().__init__(target, name, conventions)
        self.vocabulary = vocabulary or _said_vocabulary(target) or 16
        self.reserved = reserved
        self.longest = longest or _said_length(target)
        self._try()
        self.find_abilities()

    @property
    def channels(self) -> int:
        return max([64, *said_channels(self.target)[:4]])

    def draw(self, batch: int, tokens: int, dice: Dice) -> Tensor:
        return dice.integers(self.reserved, self.vocabulary, batch, tokens)

    def _try(self) -> None:
        failure: Exception | None = None
        for vocabulary in dict.fromkeys([self.vocabulary, 8, 4, 2]):
            self.vocabulary = vocabulary
            try:
                self.run(self.draw(2, self.lengths(5)[0], Dice(0, "model")))
                return
            except Exception as reason:  # a stranger may refuse a size in any way
                failure = failure or reason
        raise InputError(
            f"{self.name} does not run as a model.",
            asked="f(ids) with ids of (2, 5)",
            found=f"{type(failure).__name__}: {failure}",
            because="a law has to call it before it can judge it",
            instead='vocabulary= or longest= if they are unusual; image=(3, 224, 224) for images; kind="layer" for rows'
            " of numbers",
        ) from failure


class Images(Sequences):
    """Pictures in; logits, or a map of features. Its tokens are patches, which nobody outside can name."""

    kind = "model"

    def __init__(
        self, target: Any, name: str, conventions: Conventions | None = None, *, image: tuple[int, int, int]
    ) -> None:
        super().__init__(target, name, conventions)
        self.image = image
        self.longest = self.shortest = 1
        try:
            self.run(self.draw(2, 1, Dice(0, "images")))
        except Exception as failure:  # a stranger may refuse a picture in any way
            raise InputError(
                f"{self.name} does not run as a model of images.",
                asked=f"f(image) with (batch, channel, row, column) = (2, {', '.join(map(str, tuple(image)))})"
                if isinstance(image, tuple | list)
                else f"image={image!r}",
                found=f"{type(failure).__name__}: {failure}",
                because="a law has to call it before it can judge it",
                instead="image=(channels, rows, columns) of a picture that it takes",
            ) from failure
        self.find_abilities()
        self.abilities -= {"aligned", "lengths", "mask"}

    @property
    def channels(self) -> int:
        return max([64, *said_channels(self.target)[:4]])

    def draw(self, batch: int, tokens: int, dice: Dice) -> Tensor:
        return dice.normal(batch, *self.image, dtype=self.dtype)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        return []


def takes_ids(target: Any) -> bool:
    """Whether a module's or function's first input is whole numbers: it embeds something, or says so by name."""
    first = next(iter(parameters(target)), "")
    if first in IDS[:5]:
        return True
    return isinstance(target, nn.Module) and any(isinstance(part, nn.Embedding) for part in target.modules())


def said_image(target: Any) -> tuple[int, int, int] | None:
    """The picture that a module wants: channels of its first convolution, and the size it mentions."""
    if not isinstance(target, nn.Module):
        return None
    first = next((part for part in target.modules() if isinstance(part, nn.Conv2d)), None)
    if first is None:
        return None
    for holder in target.modules():
        for name in SAYS_IMAGE:
            size = getattr(holder, name, None)
            if isinstance(size, int):
                return first.in_channels, size, size
            if isinstance(size, tuple) and len(size) == 2:
                return first.in_channels, *size
            if isinstance(size, tuple) and len(size) == 3:
                return size
    return first.in_channels, 32, 32


def _said_vocabulary(target: Any) -> int | None:
    if not isinstance(target, nn.Module):
        return None
    config = getattr(target, "config", None)
    if isinstance(size := getattr(config, "vocab_size", None), int):
        return size
    sizes = [part.num_embeddings for part in target.modules() if isinstance(part, nn.Embedding)]
    return sizes[0] if sizes else None


def _said_length(target: Any) -> int | None:
    for holder in (target, getattr(target, "config", None)):
        for name in SAYS_LENGTH:
            if isinstance(value := getattr(holder, name, None), int) and not isinstance(value, bool) and value > 0:
                return value
    if not isinstance(target, nn.Module):
        return None
    # A second table beside the words is most likely one of positions.
    sizes = [part.num_embeddings for part in target.modules() if isinstance(part, nn.Embedding)]
    tables = [p.shape[-2] for n, p in target.named_parameters() if "pos" in n.lower() and p.ndim >= 2]
    return min([*sizes[1:], *tables], default=None)
