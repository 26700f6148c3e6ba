"""What adapters share: recognising a library by the names of its modules, and layers whose abilities are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from regard.errors import InputError
from regard.laws.law import Dice
from regard.laws.subjects.base import Conventions, Subject
from regard.laws.subjects.layer import Layer

CONVENTIONS = tuple(Conventions.__dataclass_fields__)
SAID = ("heads", "kv_heads", "dim", "value_dim", "channels", "vocabulary", "longest", "image", "window")
# What any module promises, whatever it computes.
SOBER = ("batch-independence", "determinism", "gradients", "statelessness", "shape")
# What whoever reads a text promises.
READERS = ("padding", *SOBER, "paths")
# What everything called attention promises, whatever its pattern, its positions and its temperature.
UNIVERSAL = (*READERS, "row-stochasticity")


def comes_from(target: Any, *packages: str) -> bool:
    """Whether a class of the target was defined in one of these packages, which need not be imported for the answer."""
    return any(cls.__module__.split(".")[0] in packages for cls in type(target).__mro__)


def named(target: Any, *names: str) -> bool:
    """Whether the target's class, or one that it inherits from, has one of these names."""
    return any(cls.__name__ in names for cls in type(target).__mro__)


def conventions_of(options: dict[str, Any], **own: Any) -> Conventions:
    """The conventions of a known class; what the user says goes first. Sizes are known, so they may be said or not."""
    for key in options:
        if key not in CONVENTIONS and key not in SAID:
            raise InputError(
                f"{key!r} is no option here.",
                asked=f"{key}={options[key]!r}",
                because=f"the class is known, and only its conventions are open: {', '.join(CONVENTIONS)}",
                instead="one of these",
            )
    return Conventions(**{**own, **{key: value for key, value in options.items() if key in CONVENTIONS}})


class KnownLayer(Layer):
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
        self.shortest = self.longest = grid[0] * grid[1]

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        return self.target(x.unflatten(1, self.grid)).flatten(1, 2)


def companion(subject: Subject, batch: int, tokens: int, channels: int) -> Tensor:
    """The other text of an encoder-decoder, the same for every row and in every call."""
    row = Dice(0, "companion").normal(1, tokens, channels, dtype=subject.dtype)
    return row.expand(batch, tokens, channels)
