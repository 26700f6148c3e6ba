"""What adapters share: recognising a library by the names of its modules, and layers whose abilities are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from regard.adapters.base import Adapter, Conventions
from regard.adapters.layer import LayerAdapter
from regard.adapters.rng import Rng
from regard.errors import InputError

CONVENTIONS = tuple(Conventions.__dataclass_fields__)
SIZE_OPTIONS = ("heads", "kv_heads", "dim", "value_dim", "channels", "vocab_size", "max_length", "image_size", "window")
# What any module promises, whatever it computes.
MODULE_CLAIMS = ("batch-independence", "determinism", "gradients", "statelessness", "shape")
# What every text model promises.
TEXT_CLAIMS = ("padding", *MODULE_CLAIMS, "paths")
# What everything called attention promises, whatever its pattern, its positions and its temperature.
ATTENTION_CLAIMS = (*TEXT_CLAIMS, "row-stochasticity")


def comes_from(target: Any, *packages: str) -> bool:
    """Whether a class of the target was defined in one of these packages, without importing them."""
    return any(cls.__module__.split(".")[0] in packages for cls in type(target).__mro__)


def named(target: Any, *names: str) -> bool:
    """Whether the target's class, or one that it inherits from, has one of these names."""
    return any(cls.__name__ in names for cls in type(target).__mro__)


def conventions_of(options: dict[str, Any], **own: Any) -> Conventions:
    """The conventions of a known class; the user's options go first. Its sizes are known, and may be given too."""
    for key in options:
        if key not in CONVENTIONS and key not in SIZE_OPTIONS:
            raise InputError(
                f"Unknown option {key!r}.",
                asked=f"{key}={options[key]!r}",
                because=f"the class is known, and only its conventions are open: {', '.join(CONVENTIONS)}",
                instead="one of these",
            )
    return Conventions(**{**own, **{key: value for key, value in options.items() if key in CONVENTIONS}})


class KnownLayer(LayerAdapter):
    """A layer whose class is known, so that nothing has to be found out by trying."""

    can: ClassVar[tuple[str, ...]] = ("aligned", "float", "lengths", "gradients")

    def __init__(self, target: Any, name: str, conventions: Conventions, *, channels: int, claims: Sequence[str]):
        super().__init__(target, name, conventions, channels=channels)
        self.claims = tuple(claims)

    def find_abilities(self) -> None:
        self.abilities |= set(self.can)


class GridLayer(KnownLayer):
    """A layer on a grid of places; its tokens are the places, read row by row."""

    can = ("aligned", "float", "gradients")

    def __init__(self, *args: Any, grid: tuple[int, int], **more: Any) -> None:
        super().__init__(*args, **more)
        self.grid = grid
        self.min_length = self.max_length = grid[0] * grid[1]

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        return self.target(x.unflatten(1, self.grid)).flatten(1, 2)


def other_sequence(adapter: Adapter, batch: int, tokens: int, channels: int) -> Tensor:
    """The other text of an encoder-decoder, the same for every row and in every call."""
    row = Rng(0, "companion").normal(1, tokens, channels, dtype=adapter.dtype)
    return row.expand(batch, tokens, channels)
