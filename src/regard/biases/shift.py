"""Hard attention to one relative position per head: the limit of `Quadratic`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.biases._arguments import check_grid, check_heads, format_arguments, make_error
from regard.biases._geometry import add_up, find_coordinates, select_head, zero_off_grid
from regard.biases.base import ElementwiseBias

EDGES = ("replicate", "zeros", "circular", "reflect")


class Shift(ElementwiseBias):
    r"""Each head attends to exactly one position, at a fixed offset from the query.

        score[h, i, j] = 0    where position(j) = edge(position(i) + steps[h]),    -infinity elsewhere

    with integer `steps`, one on a sequence or (row, column) on a `grid` in row-major order from position 0. `edges`
    defines what happens outside the grid:

        replicate   the nearest position inside, clamp(p, 0, n - 1): the limit of `Quadratic` as alpha grows
        zeros       no key is visible, and the output is zero
        circular    p mod n
        reflect     mirrored at the outermost positions, which are not repeated

    Without content (`scale=0`) attention is a bitwise copy, whatever the other values are; nine heads give the nine
    shifted images that a 3 x 3 convolution sums. Nothing is learned: the limit has no gradient.

    Source: Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and Convolutional Layers" (ICLR
    2020), Lemma 1; the limit alpha -> infinity in the proof of Lemma 2.

    Where we differ: the paper's limit replicates at the border, whatever the convolution's padding; here it is chosen.
    A bias is independent of the sequence length, so without a grid only "zeros" is available; `grid=(1, tokens)` is a
    sequence with ends. Pairs with a token outside the grid have score 0, as for all biases.

    Args:
        heads: number of heads.
        steps: offset of each head, `(head, axis)`, integers.
        grid: rows and columns; `None` is a sequence.
        edges: "replicate", "zeros", "circular" or "reflect"; `None` is "replicate" on a grid and "zeros" on a sequence.
        dtype: of the scores; torch's default if not given.
        device: of the buffers.

    >>> bias = Shift(2, steps=[[0, 1], [1, 0]], grid=(2, 3))
    >>> x = torch.arange(6.0).reshape(1, 1, 6, 1)
    >>> attend(torch.zeros(1, 2, 6, 1), x, x, scale=0, bias=bias).flatten(2).tolist()
    [[[1.0, 2.0, 2.0, 4.0, 5.0, 5.0], [3.0, 4.0, 5.0, 3.0, 4.0, 5.0]]]
    """

    relative = False
    steps: Tensor
    zero: Tensor

    def __init__(
        self,
        heads: int,
        steps: Tensor | Sequence[Sequence[int]],
        grid: Sequence[int] | None = None,
        edges: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = check_heads("Shift", heads)
        self.grid, self.start = check_grid("Shift", grid, 0)
        self.edges = _check_edges(edges, self.grid)
        # With zeros, a score depends on the relative position alone.
        self.relative = self.edges == "zeros"
        self._steps = _check_steps(steps, self.heads, 1 if self.grid is None else 2)
        # The constructor's arguments determine both, so they are not in the state dict; `zero` carries the dtype.
        self.register_buffer("steps", torch.tensor(self._steps, device=device), persistent=False)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self.register_buffer("zero", torch.zeros((), dtype=dtype, device=device), persistent=False)

    def reset_buffers(self) -> None:
        """Recompute the buffers, for a module that was built on the meta device."""
        self.steps = torch.tensor(self._steps, device="cpu")
        self.zero = torch.zeros((), dtype=self.zero.dtype, device="cpu")

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        steps = self.steps[select_head(self.heads, head)].unbind(dim=-1)
        if self.grid is None:
            return self._hide_others(key_position - query_position == steps[0])
        query_row, query_column, query_inside = find_coordinates(query_position, self.grid, 0)
        key_row, key_column, key_inside = find_coordinates(key_position, self.grid, 0)
        rows, columns = self.grid
        down, across = (
            self._apply_edges(query_row + steps[0], rows),
            self._apply_edges(query_column + steps[1], columns),
        )
        return zero_off_grid(self._hide_others((key_row == down) & (key_column == across)), query_inside & key_inside)

    def targets(self, queries: int, first: int = 0) -> Tensor:
        """The position that each head attends to, for `queries` queries from position `first` on: `(head, query)`.

        Negative values mean that no key is visible: with zeros, a position outside the grid is -1.

        >>> Shift(1, steps=[[2]]).targets(3).tolist(), Shift(1, [[0, -1]], (1, 3), "circular").targets(3).tolist()
        ([[2, 3, 4]], [[2, 0, 1]])
        """
        position = torch.arange(first, first + queries, device=self.steps.device)
        if self.grid is None:
            return position + self.steps
        columns = self.grid[1]
        places = torch.stack((position // columns, position % columns), dim=-1)  # (query, axis)
        found = [
            self._apply_edges(place + step[:, None], size)
            for place, step, size in zip(places.unbind(-1), self.steps.unbind(-1), self.grid, strict=True)
        ]
        inside = (
            add_up(((place >= 0) & (place < size)).int() for place, size in zip(found, self.grid, strict=True)) == 2
        )
        return torch.where(inside, found[0] * columns + found[1], -1)

    def _apply_edges(self, place: Tensor, size: int) -> Tensor:
        """Map a coordinate to an axis of `size` by `edges`; with zeros, it may stay outside."""
        if self.edges == "replicate":
            return place.clamp(0, size - 1)
        if self.edges == "circular":
            return place % size
        if self.edges == "reflect":
            around = place % max(2 * size - 2, 1)
            return torch.where(around < size, around, 2 * size - 2 - around)
        return place

    def _hide_others(self, is_target: Tensor) -> Tensor:
        return torch.where(is_target, self.zero, -torch.inf)

    def extra_repr(self) -> str:
        return format_arguments(heads=self.heads, steps=self._steps, grid=self.grid, edges=self.edges)


def _check_edges(edges: str | None, grid: tuple[int, int] | None) -> str:
    if edges is None:
        return "zeros" if grid is None else "replicate"
    if edges not in EDGES:
        raise make_error(
            "Shift",
            asked=f"edges={edges!r}",
            found=f"none of {', '.join(EDGES)}",
            because="a step may leave the grid, and `edges` defines what is there",
            instead='edges="replicate", or "zeros" for a head that sees nothing there',
        )
    if grid is None and edges != "zeros":
        raise make_error(
            "Shift",
            asked=f"edges={edges!r} and no grid",
            found="a sequence, whose length is not known",
            because="the end of a sequence follows from the number of tokens only",
            instead="grid=(1, tokens), with steps (0, step)",
        )
    return edges


def _check_steps(steps: Tensor | Sequence[Sequence[int]], heads: int, axes: int) -> list[list[int]]:
    """The steps of every head along every axis; raises unless they are integers."""
    try:
        given = torch.as_tensor(steps, device="cpu")
        exact, shape = given.to(torch.int64), tuple(given.shape)
        found = f"shape {shape}" if shape != (heads, axes) else "a step that is not an integer"
    except (TypeError, ValueError):
        given = exact = None
        found, shape = f"{steps!r}", ()
    if given is None or exact is None or shape != (heads, axes) or not bool((exact == given).all()):
        raise make_error(
            "Shift",
            asked=f"steps={steps!r}",
            found=found,
            because="every head attends to one position, an integer number of steps away along each axis",
            instead=f"steps of shape (head, axis) = ({heads}, {axes}); Quadratic for centres between places",
        )
    return exact.tolist()
