"""The minimal number of heads of a convolution: its rank plus one."""

from __future__ import annotations

import torch
from torch import Tensor

# Factor by which the offset of a component exceeds the smallest one that makes it positive, so that no weight of its
# table is 0 and out of reach of training. The uniform head subtracts the offset again: more would cost precision.
LIFT = 1.25


def kernel_rank(kernel: Tensor) -> int:
    r"""The rank `r` of a kernel `(out, in, *taps)` as a matrix of taps times pairs of channels.

    No positional attention with fewer heads computes this convolution: `sum_h A_h (x) W^(h) = sum_t S_t (x) W_t` has
    rank `r`, because the shifts `S_t` are linearly independent (on an image that is large enough), and a sum over `h`
    has rank at most the number of heads. `r + 1` heads are enough, see `low_rank_heads`.

        >>> from regard.convert import kernel_rank
        >>> kernel_rank(torch.ones(5, 3, 3, 3)), kernel_rank(torch.eye(9).view(9, 1, 3, 3))
        (1, 9)
    """
    return _factor_kernel(kernel.flatten(2))[1].shape[0]


def low_rank_heads(kernel: Tensor) -> tuple[Tensor, Tensor] | None:
    r"""Tables `(head, tap)` and matrices `(out, in, head)` of a kernel `(out, in, tap)`; `None` if they save no head.

        W_t = sum_i c_i(t) B_i = sum_i (c_i(t) + l_i) B_i - (1 / T) (T sum_i l_i B_i)

    `c_i` and `B_i` are the `r` components of the kernel's singular value decomposition and `T` the number of taps. With
    `l_i` large enough, `c_i + l_i` is positive everywhere, and a row of attention weights once divided by its sum, by
    which `B_i` is multiplied. One more head with uniform attention subtracts the `l_i` again: `r + 1` heads. A
    component of one sign needs no `l_i`; if none does, `r` heads are enough.
    """
    taps = kernel.shape[2]
    coefficients, matrices = _factor_kernel(kernel)
    tables, heads, taken = [], [], torch.zeros_like(kernel[:, :, 0]).double()
    for coefficient, matrix in zip(coefficients, matrices, strict=True):
        noise = coefficient.abs().max() * taps * torch.finfo(torch.float64).eps
        coefficient = coefficient.where(coefficient.abs() > noise, 0)
        if bool((coefficient <= 0).all()):
            coefficient, matrix = -coefficient, -matrix
        lift = -LIFT * float(coefficient.min().clamp(max=0))
        total = coefficient.sum() + taps * lift
        tables.append((coefficient + lift) / total)
        heads.append(matrix * total)
        taken += matrix * taps * lift
    if bool(taken.any()):
        tables.append(torch.full_like(tables[0], 1 / taps))
        heads.append(-taken)
    if not tables or len(tables) >= int(kernel.abs().amax((0, 1)).count_nonzero()):
        return None
    return torch.stack(tables).to(kernel), torch.stack(heads, -1).to(kernel)


def _factor_kernel(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """`c (component, tap)` and `B (component, out, in)` with `kernel = sum_i B_i c_i`, as many as the rank."""
    outs, ins = kernel.shape[:2]
    matrix = kernel.detach().double().flatten(0, 1).T  # (tap, out in)
    left, scale, right = torch.linalg.svd(matrix, full_matrices=False)
    eps = torch.finfo(kernel.dtype).eps
    rank = int((scale > scale[0] * max(matrix.shape) * eps).sum()) if len(scale) else 0
    return left.T[:rank], (scale[:rank, None] * right[:rank]).view(rank, outs, ins)
