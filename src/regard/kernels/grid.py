"""Kernels for grids of tokens, for inference on plain CPU tensors.

    channel_attention   out_n = softmax(scale sum_m q_m k_m^T) v_n             over the channels of each group
    convolve_and_norm   y = bias + 3 x 3 convolution of each channel of x, and layer_norm(y)

The bits of an image depend neither on the images beside it nor on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.kernels.library import (
    CHANNEL_ATTENTION,
    DTYPE_CODES,
    GRID_CONVOLUTION,
    NO_MEMORY,
    empty_output,
    native,
    num_threads,
)

DTYPES = (torch.float32, torch.float64)


def channel_attention(qkv: Tensor, groups: int, scale: float) -> Tensor:
    """`qkv` is `(batch, token, 3 * group * channel)`, the result `(batch, token, group * channel)`."""
    assert native is not None
    assert qkv.dim() == 3
    assert qkv.dtype in DTYPES
    batch, tokens, width = qkv.shape
    assert width % (3 * groups) == 0
    qkv = qkv.contiguous()
    output = empty_output(batch, tokens, width // 3, dtype=qkv.dtype)
    sizes = (batch, tokens, groups, width // 3 // groups)
    fields = (DTYPE_CODES[qkv.dtype], num_threads(), *sizes, scale, qkv.data_ptr(), output.data_ptr())
    if native.regard_channel_attention(CHANNEL_ATTENTION.pack(*fields)) == NO_MEMORY:
        raise MemoryError("there is no memory for the scores of channels")
    return output


def convolve_and_norm(grid: Tensor, kernel: Tensor, bias: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Both results for a grid `(batch, row, column, channel)`; `kernel` is `(channel, 1, 3, 3)`."""
    assert native is not None
    assert grid.dim() == 4
    assert grid.dtype in DTYPES
    channels = grid.shape[3]
    assert kernel.shape == (channels, 1, 3, 3)
    parameters = [kernel.permute(2, 3, 1, 0).contiguous(), bias.contiguous()]
    parameters += [None if t is None else t.contiguous() for t in (norm.weight, norm.bias)]
    assert all(t is None or (t.dtype == grid.dtype and t.shape[-1] == channels) for t in parameters)
    grid = grid.contiguous()
    made, normed = (empty_output(*grid.shape, dtype=grid.dtype) for _ in range(2))
    native.regard_grid_convolution(
        GRID_CONVOLUTION.pack(
            DTYPE_CODES[grid.dtype],
            num_threads(),
            *grid.shape,
            norm.eps,
            grid.data_ptr(),
            *(0 if t is None else t.data_ptr() for t in parameters),
            made.data_ptr(),
            normed.data_ptr(),
        )
    )
    return made, normed
