"""Isotropic Gaussian attention by relative position."""

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
    make_error,
    read_numbers,
    to_default_dtype,
)
from regard.biases._geometry import add_up, find_deltas, select_head, zero_off_grid
from regard.biases.base import ElementwiseBias


class Quadratic(ElementwiseBias):
    r"""The logarithm of an isotropic Gaussian per head: a centre, relative to the query, and a steepness `alpha`.

        score[h, i, j] = -alpha[h] * |delta - centre[h]|^2,   delta = position(j) - position(i)

    with `i` the query, `j` the key, and `delta` one number on a sequence, or (row, column) on a `grid` in
    row-major order from position `start`. Pairs with a token outside the grid have score 0. Without content the
    weights are a discrete normal distribution around the centre, with standard deviation
    `1 / sqrt(2 alpha)` per axis while `alpha` is at most about 1/2. As `alpha` grows, a head with an integer
    centre inside the image attends to one pixel, and nine such heads compute a 3 x 3 convolution.

    `alpha` must not become negative and is learned as

        alpha[h] = reference[h] * spread[h]^2

    with a parameter `spread` and a fixed `reference`. By default `reference = 1/2`, which makes `spread` the
    spread of the authors' code. An `alpha` given to the constructor becomes the reference, with spread 1, so
    that the score has exactly this `alpha`, without the rounding of a square root. A step of 1 % in the spread
    is one of 2 % in `alpha`, whatever its size. At `alpha = 0` the spread has no gradient, and with a large
    `alpha` the gradient of the centre vanishes: train near 1/2.

    Source: Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and Convolutional
    Layers" (ICLR 2020), equation (9) and section 4.2. As there, `centre` starts as N(0, 2^2) and `spread` as
    1 + N(0, 0.01^2).

    Where we differ: the paper's equation (9) omits `-alpha |centre|^2`, which softmax ignores. We keep
    the completed square, whose largest score is 0, so that large terms do not cancel in float32.

    Args:
        heads: number of heads.
        grid: rows and columns; `None` is a sequence.
        centre: initial centres, `(head, axis)`; random if not given.
        alpha: initial steepness, one number or `(head,)`; about 1/2 if not given.
        start: position of the grid's first token, 1 after a class token.
        generator: random generator of the initial centres and spreads.
        dtype, device: of the parameters; torch's defaults if not given.

    >>> bias = Quadratic(1, grid=(5, 7), centre=[[0, 1]], alpha=104.0)
    >>> bias.scores(torch.tensor(16), torch.tensor([16, 17, 18, 24]))[0].tolist()
    [-104.0, -0.0, -104.0, -104.0]
    """

    relative = True
    heads_first = True
    reference: Tensor

    def __init__(
        self,
        heads: int,
        grid: Sequence[int] | None = None,
        centre: Numbers | None = None,
        alpha: Numbers | None = None,
        start: int = 0,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = check_heads("Quadratic", heads)
        self.grid, self.start = check_grid("Quadratic", grid, start)
        shape = (self.heads, 1 if self.grid is None else 2)
        self._centre = None if centre is None else read_numbers("Quadratic", "centre", centre, shape, "head, axis")
        self._alpha = None if alpha is None else steepness(alpha, self.heads)
        centres = draw_normal(shape, std=2.0, generator=generator) if self._centre is None else self._centre
        if self._alpha is None:
            reference = torch.full((self.heads,), 0.5, dtype=torch.float64, device="cpu")
            spread = draw_normal((self.heads,), mean=1.0, std=0.01, generator=generator)
        else:
            reference = self._alpha
            spread = torch.ones_like(reference)
        self.centre = nn.Parameter(to_default_dtype(centres, dtype, device).clone())
        self.spread = nn.Parameter(to_default_dtype(spread, dtype, device))
        self.register_buffer("reference", to_default_dtype(reference, dtype, device).clone())

    @property
    def alpha(self) -> Tensor:
        """The steepness of every head, `(head,)`."""
        return self.reference * self.spread.square()

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        head = select_head(self.heads, head)
        along, inside = find_deltas(query_position, key_position, self.grid, self.start)
        centres = self.centre.unbind(dim=1)
        squares = ((delta - centre[head]).square() for delta, centre in zip(along, centres, strict=True))
        return zero_off_grid(-self.alpha[head] * add_up(squares), inside)

    def extra_repr(self) -> str:
        return format_arguments(
            heads=self.heads,
            grid=self.grid,
            centre=self._centre,
            alpha=self._alpha,
            start=self.start or None,
        )


def steepness(alpha: Numbers, heads: int) -> Tensor:
    """The given `alpha`, one number or one per head, as `(head,)`."""
    if isinstance(alpha, (int, float)):
        alpha = [alpha] * heads
    checked = read_numbers("Quadratic", "alpha", alpha, (heads,), "head")
    if bool((checked < 0).any()):
        raise make_error(
            "Quadratic",
            asked=f"alpha={checked.tolist()}",
            found="a negative steepness",
            because="the head would attend least to its centre and most to the farthest corner",
            instead="alpha >= 0; alpha=0 attends uniformly",
        )
    return checked
