"""Rotary position embedding: queries and keys are rotated by their position, so that scores depend on distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.errors import ConfigError, InputError


class Rotation(NamedTuple):
    """Cosines and sines in float32 or float64, made once and used by every layer.

    `(token, dim / 2)`, or `(batch, 1, token, dim / 2)` where the positions of rows differ.
    """

    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: rotate each pair of channels by an angle proportional to the position.

        (a, b) -> (a cos(w_i p) - b sin(w_i p),  b cos(w_i p) + a sin(w_i p)),     w_i = base^(-2i / dim)

    p: position; i: the pair. Rotated queries and keys have scores `q_p . k_s = q^T R(s - p) k`.

    Source: Su et al., RoFormer (2021), equation 34.

    Where we differ: `layout="halves"` pairs channel `i` with `i + dim / 2`, as LLaMA's checkpoints at Hugging Face do;
    `"pairs"` takes neighbours, as the paper does. Angles are computed in float64 and kept in float32 or better: in
    bfloat16 position 300 would be rounded to 300 ± 1, and neighbours would become one.

        >>> from regard.layers import Rotary
        >>> x = torch.randn(1, 2, 5, 8)
        >>> rotary = Rotary(8)
        >>> rotary(x, rotary.rotation(torch.arange(5), x.dtype)).shape
        torch.Size([1, 2, 5, 8])

    Args:
        dim: channels that rotate, an even number; further channels of a head stay.
        base: of the frequencies `w_i`.
        layout: which channels form a pair.
    """

    dim: int
    base: float = 10000.0
    layout: Literal["halves", "pairs"] = "halves"

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2 or not self.base > 0 or self.layout not in ("halves", "pairs"):
            raise ConfigError(
                "This rotary embedding cannot be built.",
                asked=f"Rotary(dim={self.dim}, base={self.base}, layout={self.layout!r})",
                because="channels rotate in pairs with frequencies base^(-2i/dim), and lie in 'halves' or in 'pairs'",
                instead="an even dim, a positive base, and one of the two layouts",
            )

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The tables for positions `(token,)` or `(batch, token)`; float64 for float64, float32 for all others."""
        pair = torch.arange(0, self.dim, 2, dtype=torch.float64, device=positions.device)
        angle = positions.to(torch.float64)[..., None] * self.base ** (-pair / self.dim)
        angle = angle.unsqueeze(-3) if positions.ndim > 1 else angle
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Rotation(angle.cos().to(wide), angle.sin().to(wide))

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Queries or keys `(*batch, head, token, dim)` with their first `dim` channels rotated."""
        rotating, unchanged = x[..., : self.dim], x[..., self.dim :]
        cosine, sine = rotation
        if 2 * cosine.shape[-1] != self.dim:
            raise InputError(
                "The rotation is for another number of channels.",
                asked=f"a rotation of {2 * cosine.shape[-1]} channels for {self}",
                because=f"{self.dim} channels rotate in {self.dim // 2} pairs",
                instead="rotary.rotation(positions, dtype) of the same Rotary",
            )
        if self.layout == "halves":
            first, second = rotating.to(cosine.dtype).chunk(2, -1)
            rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        else:
            first, second = rotating.to(cosine.dtype).unflatten(-1, (-1, 2)).unbind(-1)
            pairs = (first * cosine - second * sine, second * cosine + first * sine)
            rotated = torch.stack(pairs, -1).flatten(-2)
        rotated = rotated.to(x.dtype)
        return torch.cat((rotated, unchanged), -1) if unchanged.shape[-1] else rotated
