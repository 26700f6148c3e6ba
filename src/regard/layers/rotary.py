"""Rotary positions: queries and keys turn with their position, so that a score sees only how far they are apart."""

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
    """Turn each pair of channels by an angle that grows with the position.

        (a, b) -> (a cos(w_i p) - b sin(w_i p),  b cos(w_i p) + a sin(w_i p)),     w_i = base^(-2i / dim)

    p: position; i: the pair. Turned queries and keys meet in `q_p . k_s = q^T R(s - p) k`: only the distance counts.

    Source: Su et al., RoFormer (2021), equation 34.

    Where we differ: `layout="halves"` pairs channel `i` with `i + dim / 2`, as LLaMA's checkpoints at Hugging Face do;
    `"pairs"` takes neighbours, as the paper does. Angles are computed in float64 and kept in float32 or better: in
    bfloat16 position 300 would be rounded to 300 ± 1, and neighbours would become one.

        >>> from regard.layers import Rotary
        >>> x = torch.randn(1, 2, 5, 8)
        >>> rotary = Rotary(8)
        >>> rotary(x, rotary.rotation(torch.arange(5), x.dtype)).shape
        torch.Size([1, 2, 5, 8])
    """

    dim: int
    base: float = 10000.0
    layout: Literal["halves", "pairs"] = "halves"

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2 or not self.base > 0 or self.layout not in ("halves", "pairs"):
            raise ConfigError(
                "These rotary positions cannot turn.",
                asked=f"Rotary(dim={self.dim}, base={self.base}, layout={self.layout!r})",
                because="channels turn in pairs with speeds base^(-2i/dim), and lie in 'halves' or in 'pairs'",
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
        """Queries or keys `(*batch, head, token, dim)`, turned; the first `dim` channels turn, further ones stay."""
        turning, resting = x[..., : self.dim], x[..., self.dim :]
        cosine, sine = rotation
        if 2 * cosine.shape[-1] != self.dim:
            raise InputError(
                "This rotation turns another number of channels.",
                asked=f"a rotation of {2 * cosine.shape[-1]} channels for {self}",
                because=f"{self.dim} channels turn in {self.dim // 2} pairs",
                instead="rotary.rotation(positions, dtype) of the same Rotary",
            )
        if self.layout == "halves":
            first, second = turning.to(cosine.dtype).chunk(2, -1)
            turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        else:
            first, second = turning.to(cosine.dtype).unflatten(-1, (-1, 2)).unbind(-1)
            pairs = (first * cosine - second * sine, second * cosine + first * sine)
            turned = torch.stack(pairs, -1).flatten(-2)
        turned = turned.to(x.dtype)
        return torch.cat((turned, resting), -1) if resting.shape[-1] else turned
