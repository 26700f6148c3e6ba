"""Sinusoidal positional encoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.calculus._arguments import read_number, read_tensor, read_whole_number
from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Float

Positions = float | Sequence[float] | Tensor


def sinusoidal(
    positions: Positions, dim: int, *, base: float = 10000.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "*position dim"]:
    """The sinusoidal encoding of positions: `dim / 2` pairs of sine and cosine, of decreasing frequency.

        PE(p)_{2i} = sin(w_i p),     PE(p)_{2i+1} = cos(w_i p),     w_i = base^(-2i / dim)

    p: position, any real number; w_i: frequency of pair i. `PE(p) . PE(q) = sum_i cos(w_i (p - q))`
    depends on the distance only, and `PE(p) . PE(p) = dim / 2`.

    Source: Vaswani et al., Attention Is All You Need, section 3.5.

    Where we differ: angles and table are computed in float64 and cast last; a table computed in half
    precision is wrong in the first digit at position 1000. `dtype` is torch's default dtype unless given.

    >>> sinusoidal([0, 1], 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    angle = _compute_angles("sinusoidal", "positions", positions, dim, base)
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)
    return table.to(torch.get_default_dtype() if dtype is None else dtype)


def sinusoidal_rotation(
    shift: Positions, dim: int, *, base: float = 10000.0, dtype: torch.dtype | None = None
) -> Float[Tensor, "*shift dim dim"]:
    """The matrix that maps every sinusoidal encoding to that of the shifted position.

        PE(p + k) = R_k PE(p) for all p,     R_k = diag_i [[cos w_i k, sin w_i k], [-sin w_i k, cos w_i k]]

    k: `shift`; w_i: as in `sinusoidal`. R_k is orthogonal, `R_j R_k = R_{j + k}`, and `R_k^T = R_{-k}`. For a
    table whose rows are positions, write `table @ R_k.mT`.

    Source: Vaswani et al., section 3.5, which states that R_k exists; the blocks are the angle-sum formulas.

    Where we differ: nowhere.

    >>> sinusoidal_rotation(0, 2)
    tensor([[1., 0.],
            [-0., 1.]])
    """
    angle = _compute_angles("sinusoidal_rotation", "shift", shift, dim, base)
    cosine, sine = angle.cos(), angle.sin()
    matrix = angle.new_zeros(*angle.shape[:-1], dim, dim)
    even = torch.arange(0, dim, 2, device=angle.device)
    matrix[..., even, even] = cosine
    matrix[..., even, even + 1] = sine
    matrix[..., even + 1, even] = -sine
    matrix[..., even + 1, even + 1] = cosine
    return matrix.to(torch.get_default_dtype() if dtype is None else dtype)


def _compute_angles(function: str, name: str, positions: Positions, dim: int, base: float) -> Tensor:
    dim = read_whole_number(function, "dim", dim)
    if dim < 2 or dim % 2:
        raise CalculusError(
            "Sinusoidal positions come in pairs.",
            asked=f"dim = {dim}",
            because="each speed uses one sine and one cosine",
            instead="an even dim of 2 or more",
        )
    if not 0 < read_number(function, "base", base) < math.inf:
        raise CalculusError(
            "The base of sinusoidal positions must be positive.",
            asked=f"base = {base}",
            because="the speeds are its powers -2i/dim, which are real for positive numbers only",
            instead="base = 10000, or a larger one for longer texts",
        )
    if isinstance(positions, Tensor) and not positions.is_complex() and positions.dtype != torch.bool:
        position = positions.to(torch.float64)  # integers too
    else:
        position = read_tensor(function, name, positions, torch.zeros((), dtype=torch.float64))
    pair = torch.arange(0, dim, 2, dtype=torch.float64, device=position.device)
    return position[..., None] * base ** (-pair / dim)
