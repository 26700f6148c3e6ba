"""The sizes of a run, and the breakdown of its cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy

from regard.cost_model.cost_part import CostPart
from regard.errors import CostError


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run. What is `None` stays a symbol in the formulas, without a number.

    Attributes:
        batch: batch size.
        tokens: query length; in a decode step, the number of cached tokens.
        keys: key length, where it is another.
        context_tokens: sequence length of the encoder.
        image: rows and columns of pixels; of tokens where a layer works on a grid of tokens.
        heads, kv_heads, dim, value_dim: of a description, which has no sizes of its own.
        inputs: tensors, or their shapes, for a target whose inputs cannot be inferred.
    """

    batch: int = 1
    tokens: int | None = None
    keys: int | None = None
    context_tokens: int | None = None
    image: tuple[int, int] | None = None
    heads: int | None = None
    kv_heads: int | None = None
    dim: int | None = None
    value_dim: int | None = None
    inputs: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.image, int):
            object.__setattr__(self, "image", (self.image, self.image))
        for name in (f.name for f in dataclasses.fields(self) if f.name != "inputs"):
            value = getattr(self, name)
            whole = value if isinstance(value, tuple) else (value,)
            if value is not None and not all(isinstance(each, int) and each >= 1 for each in whole):
                raise CostError(
                    f"{name} is not a size.",
                    asked=f"{name}={value!r}",
                    because="sizes are whole numbers of at least 1",
                    instead=f"{name}=16",
                )


class Breakdown(NamedTuple):
    """A cost in parts, the numbers of their symbols, and notes for the reader."""

    parts: list[CostPart]
    values: Mapping[sympy.Symbol, Any]
    notes: tuple[str, ...] = ()
    name: str = ""
