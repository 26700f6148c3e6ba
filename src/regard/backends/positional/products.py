"""Convolutions of values with a kernel of relative positions: in a band, by matrices, or by the Fourier transform.

All compute `y[q] = sum_k kernel[q - k] x[k]` and its gradients with respect to `x` and the kernel. Values are planes
`(plane, row, column)`, one for each channel of each batch row; kernels are `(head, *table)` in float64 (see
`RelativeLayout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad
from torch.nn.grad import conv2d_weight

from regard.backends.positional.relative_layout import RelativeLayout
from regard.caching import lazy_property

TableBox = tuple[int, int, int, int]  # first and last row, first and last column of a table


class Band:
    """Few differences matter: a direct sum over them, by the convolution of torch, one output channel for each head."""

    def __init__(self, kernel: Tensor, layout: RelativeLayout, box: TableBox, dtype: torch.dtype) -> None:
        top, bottom, left, right = self.box = box
        self.layout = layout
        self.kernel = kernel[:, top : bottom + 1, left : right + 1].to(dtype)
        self.grad = torch.zeros_like(kernel)

    def apply(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        y = conv2d(self._around(x), self.kernel.flip(1, 2)[:, None])
        yield from enumerate(y.unbind(1))

    def backward(self, x: Tensor, grad_output: Callable[[int], Tensor], to_kernel: bool) -> Tensor:
        u = torch.stack([grad_output(head) for head in range(len(self.kernel))], dim=1)
        if to_kernel:
            around = self._around(x)
            shape = (len(self.kernel), 1, *self.kernel.shape[1:])
            found = conv2d_weight(around, list(shape), u)[:, 0].flip(1, 2)
            top, bottom, left, right = self.box
            self.grad[:, top : bottom + 1, left : right + 1] += found.to(self.grad.dtype)
        edges = [
            edge
            for queries, keys, first, last in self._axes()
            for edge in (keys - 1 - first, last - (queries - 1))  # minus the first difference, and behind the last key
        ]
        return conv2d(pad(u, (*edges[2:], *edges[:2])), self.kernel[None])[:, 0]

    def _around(self, x: Tensor) -> Tensor:
        """The planes as images of one channel, padded or cropped to what the queries see within the band."""
        edges = [
            edge
            for queries, keys, first, last in self._axes()
            for edge in (last - (keys - 1), queries - 1 - first)  # the last difference, and behind the last key
        ]
        return pad(x[:, None], (*edges[2:], *edges[:2]))

    def _axes(self) -> list[tuple[int, int, int, int]]:
        rows, columns = zip(self.layout.queries, self.layout.keys, (self.box[:2], self.box[2:]), strict=True)
        return [(*rows[:2], *rows[2]), (*columns[:2], *columns[2])]


class Slabs:
    """All differences matter, of few tokens: every row of queries is one product of the values with a matrix.

        y[q] = sum over key rows and columns k of x[k] S[k, q],    S[k, q] = kernel[q - k]

    Rows of queries share their matrices: that of one row is the next one's, moved by a row of keys. So they all are
    slabs of one tall matrix, which is as much smaller than the square of all pairs as there are rows; and it is made
    from kernels, without an exponential for each pair.
    """

    def __init__(self, kernel: Tensor, layout: RelativeLayout, dtype: torch.dtype) -> None:
        self.layout, self.heads, self.table = layout, len(kernel), kernel.shape[1:]
        (_, columns), (_, across) = layout.queries, layout.keys
        at = torch.arange(columns, device=kernel.device) - torch.arange(across, device=kernel.device)[:, None]
        self.difference = at + across - 1  # (key column, query column)
        # Flipped, since the difference decreases as the row of keys increases.
        matrix = kernel.to(dtype).flip(1)[:, :, self.difference]  # (head, table row, key column, query column)
        self.matrix = matrix.permute(1, 2, 0, 3).flatten(2).flatten(0, 1).contiguous()

    @lazy_property
    def _matrix_grad(self) -> Tensor:
        """The gradient of the matrix, allocated by backward."""
        return torch.zeros_like(self.matrix)

    @property
    def grad(self) -> Tensor:
        """The gradient of the kernel, in float64: pairs of columns with the same difference are added up."""
        (rows, wide), (across, columns) = self.table, self.difference.shape
        found = self._matrix_grad.double().view(rows, across, self.heads, columns).permute(2, 0, 1, 3).flatten(2)
        whole = found.new_zeros(self.heads, rows, wide)
        return whole.index_add_(2, self.difference.flatten(), found).flip(1)

    def apply(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        (rows, columns), flat = self.layout.queries, x.flatten(1)
        y = x.new_empty(rows, len(x), self.heads * columns)
        for row in range(rows):
            torch.mm(flat, self._slab(self.matrix, row), out=y[row])
        for head, part in enumerate(y.unflatten(2, (self.heads, columns)).unbind(2)):
            yield head, part.transpose(0, 1)

    def backward(self, x: Tensor, grad_output: Callable[[int], Tensor], to_kernel: bool) -> Tensor:
        rows, flat = self.layout.queries[0], x.flatten(1)
        u = (
            torch.stack([grad_output(head) for head in range(self.heads)], dim=2).transpose(0, 1).flatten(2)
        )  # a row first
        found = torch.zeros_like(flat)
        for row, part in zip(range(rows), u.contiguous(), strict=True):
            found.addmm_(part, self._slab(self.matrix, row).T)
            if to_kernel:
                self._slab(self._matrix_grad, row).addmm_(flat.T, part)
        return found.view_as(x)

    def _slab(self, matrix: Tensor, row: int) -> Tensor:
        """What a row of queries sees: as many rows of the table as there are rows of keys."""
        rows, across = self.layout.keys
        first = (self.layout.queries[0] - 1 - row) * across
        return matrix[first : first + rows * across]


class Spectrum:
    """All differences matter: the transform of values once, and one product and one inverse transform for each head."""

    def __init__(self, kernel: Tensor, layout: RelativeLayout, dtypes: list[torch.dtype | None]) -> None:
        self.layout, self.dtypes = layout, dtypes  # the precision of each head; None for a head that needs nothing
        rows, columns = self.size = transform_size(layout)
        self.kernel = {
            head: torch.fft.rfft2(kernel[head].to(dtype), s=self.size)
            for head, dtype in enumerate(dtypes)
            if dtype is not None
        }
        self.grads = {head: torch.zeros_like(found) for head, found in self.kernel.items()}
        self.shape = (len(kernel), rows, columns)

    @property
    def grad(self) -> Tensor:
        """The gradient of the kernel, in float64."""
        some = next(iter(self.grads.values()))
        whole = torch.zeros(self.shape, dtype=torch.float64, device=some.device)
        for head, found in self.grads.items():
            whole[head] = torch.fft.irfft2(found, s=self.size)
        return whole[:, : self.layout.table[0], : self.layout.table[1]]

    def apply(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        (first, across), (rows, columns) = (key - 1 for key in self.layout.keys), self.layout.queries
        spectra = self._spectra(x)
        for head, kernel in self.kernel.items():
            y = torch.fft.irfft2(spectra[self.dtypes[head]] * kernel, s=self.size)
            yield head, y[:, first : first + rows, across : across + columns]

    def backward(self, x: Tensor, grad_output: Callable[[int], Tensor], to_kernel: bool) -> Tensor:
        (rows, columns), (row, column) = self.layout.keys, (key - 1 for key in self.layout.keys)
        spectra = self._spectra(x) if to_kernel else {}
        sums: dict[torch.dtype | None, Tensor] = {}
        for head, kernel in self.kernel.items():
            dtype = self.dtypes[head]
            # A query is at the end of its window.
            u = torch.fft.rfft2(pad(grad_output(head).to(dtype), (column, 0, row, 0)), s=self.size)
            if to_kernel:
                self.grads[head] += (spectra[dtype].conj() * u).sum(0)
            part = kernel.conj() * u
            sums[dtype] = sums[dtype].add_(part) if dtype in sums else part
        found = [torch.fft.irfft2(total, s=self.size)[:, :rows, :columns] for total in sums.values()]
        return sum(part.to(x.dtype) for part in found)  # type: ignore[return-value]

    def _spectra(self, x: Tensor) -> dict[torch.dtype | None, Tensor]:
        needed = {dtype for dtype in self.dtypes if dtype is not None}
        return {dtype: torch.fft.rfft2(x.to(dtype), s=self.size) for dtype in needed}


def transform_size(layout: RelativeLayout) -> tuple[int, int]:
    """Sizes that hold the table, so that nothing wraps around, and that transform fast."""
    rows, columns = (_round_to_fast_size(size) for size in layout.table)
    return rows, columns


def _round_to_fast_size(size: int) -> int:
    """The next size of factors 2, 3, 5 and 7 that is a multiple of 8: 63 took 2.4 times as long as 64."""
    if size < 8:
        return size
    size += -size % 8
    while True:
        rest = size
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 8
