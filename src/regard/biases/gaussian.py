"""Gaussian attention by relative position, with a full covariance per head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.biases._arguments import (
    Numbers,
    check_grid,
    check_heads,
    draw_normal,
    format_arguments,
    read_numbers,
    to_default_dtype,
)
from regard.biases._geometry import add_up, find_deltas, select_head, zero_off_grid
from regard.biases.base import ElementwiseBias


class Gaussian(ElementwiseBias):
    r"""The logarithm of a normal density per head, with a centre and a full covariance.

        score[h, i, j] = -1/2 (delta - mu[h])^T Sigma[h]^-1 (delta - mu[h]),   Sigma[h]^-1 = S[h] S[h]^T

    with `delta = position(j) - position(i)`, key minus query: one number on a sequence, or (row, column) on a
    `grid` in row-major order from position `start`. `mu` is the parameter `centre`, `(head, axis)`, and `S` the
    parameter `root`, `(head, axis, axis)`, which may be any matrix: `S S^T` never has a negative eigenvalue.
    Pairs with a token outside the grid have score 0. `S = s I` is `Quadratic` with `alpha = s^2 / 2`.

    Source: Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and Convolutional
    Layers" (ICLR 2020), the appendix on the generalised quadratic encoding.

    Where we differ: the score is computed as `-1/2 |S^T (delta - mu)|^2`, which cannot become positive by
    rounding, instead of by five products with (1, delta, delta^2, ...). `centre` starts as N(0, 2^2) and
    `root` as the identity plus N(0, 0.01^2).

    Args:
        heads: number of heads.
        grid: rows and columns; `None` is a sequence.
        centre: initial centres, `(head, axis)`; random if not given.
        root: initial `S`, `(head, axis, axis)`; nearly the identity if not given.
        start: position of the grid's first token, 1 after a class token.
        generator: random generator of the initial centres and roots.
        dtype, device: of the parameters; torch's defaults if not given.

    >>> bias = Gaussian(1, grid=(5, 7), centre=[[0, 1]], root=[[[2, 0], [0, 1]]])
    >>> bias.scores(torch.tensor(16), torch.tensor([16, 17, 18, 24]))[0].tolist()
    [-0.5, -0.0, -0.5, -2.0]
    """

    relative = True
    heads_first = True

    def __init__(
        self,
        heads: int,
        grid: Sequence[int] | None = None,
        centre: Numbers | None = None,
        root: Numbers | None = None,
        start: int = 0,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = check_heads("Gaussian", heads)
        self.grid, self.start = check_grid("Gaussian", grid, start)
        axes = 1 if self.grid is None else 2
        shape = (self.heads, axes)
        square = (*shape, axes)
        self._centre = None if centre is None else read_numbers("Gaussian", "centre", centre, shape, "head, axis")
        self._root = None if root is None else read_numbers("Gaussian", "root", root, square, "head, axis, axis")
        centres = draw_normal(shape, std=2.0, generator=generator) if self._centre is None else self._centre
        if self._root is None:
            noise = draw_normal(square, std=0.01, generator=generator)
            roots = noise + torch.eye(axes, dtype=torch.float64, device=noise.device)
        else:
            roots = self._root
        self.centre = nn.Parameter(to_default_dtype(centres, dtype, device).clone())
        self.root = nn.Parameter(to_default_dtype(roots, dtype, device).clone())

    @property
    def precision(self) -> Tensor:
        """The inverse covariance `S S^T` of every head, `(head, axis, axis)`."""
        return self.root @ self.root.mT

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        head = select_head(self.heads, head)
        along, inside = find_deltas(query_position, key_position, self.grid, self.start)
        centres = self.centre.unbind(dim=1)
        offsets = [delta - centre[head] for delta, centre in zip(along, centres, strict=True)]
        squares = []
        for column in self.root.unbind(dim=2):  # column b of S gives entry b of S^T (delta - mu)
            entries = zip(column.unbind(dim=1), offsets, strict=True)
            squares.append(add_up(entry[head] * offset for entry, offset in entries).square())
        return zero_off_grid(-0.5 * add_up(squares), inside)

    def extra_repr(self) -> str:
        return format_arguments(
            heads=self.heads,
            grid=self.grid,
            centre=self._centre,
            root=self._root,
            start=self.start or None,
        )
