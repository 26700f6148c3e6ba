"""Biases on a grid that are separable: a score along rows plus one along columns."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.biases.base import Bias
from regard.biases.gaussian import Gaussian
from regard.biases.quadratic import Quadratic
from regard.biases.row_column import RowColumn


def axis_scores(bias: Bias) -> tuple[Tensor, Tensor] | None:
    """A bias on a grid as scores along rows `(head, R, R)` and along columns `(head, C, C)`, query before key.

        score[h, (r, c), (k, l)] = rows[h, r, k] + columns[h, c, l]

    `None` for a bias that is not separable: one that depends on content, one on a sequence, a rotated `Gaussian`. An
    axis-aligned `Gaussian` is separable, but its gradient by the off-diagonal entries of `root` is not: while `root`
    requires grad, the result is `None`.

        >>> from regard.biases import axis_scores
        >>> rows, columns = axis_scores(Quadratic(1, grid=(2, 3), centre=[[0, 1]], alpha=1.0))
        >>> rows.tolist(), columns[0, 0].tolist()
        ([[[-0.0, -1.0], [-1.0, -0.0]]], [-1.0, -0.0, -1.0])
    """
    if not is_separable(bias):
        return None
    if isinstance(bias, RowColumn):
        return table_scores(bias.row), table_scores(bias.column)
    assert isinstance(bias, (Quadratic, Gaussian))
    assert bias.grid is not None
    if isinstance(bias, Quadratic):
        return _gaussian_axis_scores(bias.grid, bias.centre, torch.stack((bias.alpha, bias.alpha), dim=1))
    return _gaussian_axis_scores(bias.grid, bias.centre, 0.5 * bias.precision.diagonal(dim1=1, dim2=2))


def is_separable(bias: Bias) -> bool:
    """True if `axis_scores` returns scores for this bias; computes none."""
    if not bias.relative or getattr(bias, "grid", None) is None:  # or a subclass that overrides `scores`
        return False
    return isinstance(bias, (RowColumn, Quadratic)) or (isinstance(bias, Gaussian) and not _may_be_rotated(bias))


def _may_be_rotated(bias: Gaussian) -> bool:
    """True if the precision has off-diagonal entries, or may learn them."""
    if torch.is_grad_enabled() and bias.root.requires_grad:
        return True
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True  # control flow must not depend on tensor values there
    return bias.root.is_meta or bool(bias.precision[:, 0, 1].any())


def _gaussian_axis_scores(grid: tuple[int, int], centre: Tensor, steepness: Tensor) -> tuple[Tensor, Tensor]:
    """`-steepness (delta - centre)^2` along each axis, for centres and steepnesses `(head, axis)`."""
    down, across = (
        -alpha[:, None, None] * (distances(size, place.device) - place[:, None, None]).square()
        for size, place, alpha in zip(grid, centre.unbind(dim=1), steepness.unbind(dim=1), strict=True)
    )
    return down, across


def table_scores(table: Tensor) -> Tensor:
    """Expand a table of relative positions, `(head, 2 size - 1)`, to `(head, size, size)`: entry `k - q + size - 1`.

    >>> from regard.biases import table_scores
    >>> table_scores(torch.tensor([[-1.0, 0.0, 1.0]]))[0].tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    size = (table.shape[-1] + 1) // 2
    return table[:, distances(size, table.device) + size - 1]


def distances(size: int, device: torch.device | str | None = None) -> Tensor:
    """Key minus query along one axis, `(size, size)`.

    >>> from regard.biases import distances
    >>> distances(3)[1].tolist()
    [-1, 0, 1]
    """
    place = torch.arange(size, device=device)
    return place - place[:, None]
