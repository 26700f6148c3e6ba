"""Weights in the format they are stored in, times few rows of float32 activations.

    output_mn = bias_n + sum_k x_mk weight_nk            1 to about 16 rows m

Weights are read from memory once, whatever the number of rows. The bits of a row depend on nothing but the row.
Inference only. `csrc/weights.h` has the formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.library import NO_FORMAT, OK, PACKED_MATRIX, WEIGHT_PRODUCTS, native, num_threads

# Numbers of the formats in csrc/weights.h.
FORMATS = {
    "float32": 0,
    "bfloat16": 1,
    "int8": 2,
    "int4": 3,
    "q8_0": 4,
    "q4_0": 5,
    "q4_1": 6,
    "q4_k": 7,
    "q6_k": 8,
}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix `(rows, cols)` of weights, one row after the other, `stride` bytes apart.

    Attributes:
        format: a key of `FORMATS`.
        rows, cols: outputs and channels.
        data: the numbers, or the blocks, in any dtype.
        stride: bytes from one row of `data` to the next.
        scales, offsets: of the groups of each row, where the format has them.
        group: channels that share a scale; 0 where the format says it.
    """

    format: str
    rows: int
    cols: int
    data: Tensor
    stride: int
    scales: Tensor | None = None
    offsets: Tensor | None = None
    group: int = 0

    @classmethod
    def from_tensor(cls, weight: Tensor) -> PackedMatrix:
        """A float32 or bfloat16 tensor `(out, in)` itself, not a copy."""
        assert weight.dim() == 2
        assert weight.stride(1) == 1 or weight.shape[1] <= 1
        name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[weight.dtype]
        rows, cols = weight.shape
        return cls(name, rows, cols, weight, weight.stride(0) * weight.element_size())

    @property
    def bytes(self) -> int:
        """Bytes that one product reads."""
        return self.rows * self.stride + sum(t.nbytes for t in (self.scales, self.offsets) if t is not None)

    def fields(self) -> tuple[int, ...]:
        """The fields of the C struct `PackedMatrix`; valid while this object and its tensors are."""
        scales, offsets = (0 if t is None else t.data_ptr() for t in (self.scales, self.offsets))
        size = (FORMATS[self.format], self.rows, self.cols)
        return (*size, self.data.data_ptr(), self.stride, scales, offsets, self.group)

    def pack(self) -> bytes:
        return PACKED_MATRIX.pack(*self.fields())


def weight_products(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """`x weight^T + bias` of plain float32 CPU tensors: `x` is `(..., cols)`, few rows of it are fastest."""
    assert native is not None
    assert x.dtype == torch.float32
    assert x.shape[-1] == weight.cols
    assert bias is None or (bias.dtype == torch.float32 and bias.shape == (weight.rows,))
    rows = x.reshape(-1, weight.cols) if weight.cols else x.reshape(x.shape[:-1].numel(), 0)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    bias = None if bias is None else bias.contiguous()
    output = torch.empty(*x.shape[:-1], weight.rows, dtype=torch.float32)
    status = native.regard_weight_products(
        WEIGHT_PRODUCTS.pack(
            num_threads(),
            len(rows),
            rows.data_ptr(),
            rows.stride(0),
            *weight.fields(),
            0 if bias is None else bias.data_ptr(),
            output.data_ptr(),
            weight.rows,
        )
    )
    if status == NO_FORMAT:
        raise ValueError(f"these kernels do not read weights of format {weight.format!r}")
    if status != OK:
        raise MemoryError("there is no memory to prepare the rows of a product in")
    return output
