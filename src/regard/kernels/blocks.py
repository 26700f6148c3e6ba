"""Quantised weights as rows of blocks, in GGUF's formats: quantisers, and the definition of every block in torch.

    format   numbers  bytes  weight k of a block
    bf16     1        2      the upper half of a float32
    q8_0     32       34     d q_k                       d float16, q 8 bits with a sign
    q4_0     32       18     d (q_k - 8)                 q 4 bits
    q4_1     32       20     d q_k + m                   d, m float16
    q4_k     256      144    d s_j q_k - e m_j           d, e float16; s, m 6 bits for each 32 numbers j
    q6_k     256      210    d s_j (q_k - 32)            s 8 bits with a sign for each 16 numbers j; q 6 bits

A row of `cols` weights is `ceil(cols / numbers)` blocks; what the last block has beyond `cols` is zero or not read.

Quantising rounds each weight to the nearest that its block can hold, and the scales were float16 before anything is
rounded by them, so that

    |weight - rounded| <= d / 2                for q8_0 and q4_1, plus for q4_1 the rounding of m, at most 2^-11 |m|

Sources: ggml-common.h and ggml-quants.c of llama.cpp (layouts); where we differ: llama.cpp divides by the scale before
it is rounded to float16, which can be off by another 2^-11 of the largest weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BlockFormat(NamedTuple):
    """How many numbers a block has, and its bytes."""

    numbers: int
    bytes: int


BLOCK_FORMATS = {
    "bf16": BlockFormat(1, 2),
    "q8_0": BlockFormat(32, 34),
    "q4_0": BlockFormat(32, 18),
    "q4_1": BlockFormat(32, 20),
    "q4_k": BlockFormat(256, 144),
    "q6_k": BlockFormat(256, 210),
}
# Those that weights can be rounded to here.
QUANTIZERS = ("bf16", "q8_0", "q4_0", "q4_1")


def row_bytes(format: str, cols: int) -> int:
    """Bytes of a row of `cols` weights.

    >>> row_bytes("q4_1", 576), row_bytes("q8_0", 33)
    (360, 68)
    """
    numbers, size = BLOCK_FORMATS[format]
    return -(-cols // numbers) * size


# Blocks to numbers


def dequantize_rows(data: Tensor, format: str, cols: int) -> Tensor:
    """Float32 `(..., cols)` of rows of blocks, bytes `(..., row_bytes)`."""
    numbers, size = BLOCK_FORMATS[format]
    blocks = data.contiguous().reshape(-1, size)
    values = _DEQUANTIZERS[format](blocks)
    rows = data.shape[-1] // size * numbers
    return values.reshape(*data.shape[:-1], rows)[..., :cols]


def _floats(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as float32 `(block, 1)`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The lower halves of the bytes, then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).float()


def _dequantize_bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


def _dequantize_q8_0(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _dequantize_q4_0(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _dequantize_q4_1(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * _nibbles(blocks[:, 4:]) + _floats(blocks, 2)


def _dequantize_q4_k(blocks: Tensor) -> Tensor:
    six = blocks[:, 4:16]
    low, mid, high = six[:, 0:4], six[:, 4:8], six[:, 8:12]
    factor = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1).float()
    least = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), dim=1).float()
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    q = torch.stack((packed & 15, packed >> 4), dim=2).reshape(-1, 8, 32).float()
    scale, minimum = (_floats(blocks, 0) * factor)[..., None], (_floats(blocks, 2) * least)[..., None]
    return (scale * q - minimum).flatten(1)


def _dequantize_q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(-1, 2, 4, 32)
    high = torch.cat([high >> 2 * quarter & 3 for quarter in range(4)], dim=2)
    q = (low | high << 4).reshape(-1, 16, 16).float() - 32
    steps = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_floats(blocks, 208) * steps)[..., None] * q).flatten(1)


_DEQUANTIZERS = {
    "bf16": _dequantize_bf16,
    "q8_0": _dequantize_q8_0,
    "q4_0": _dequantize_q4_0,
    "q4_1": _dequantize_q4_1,
    "q4_k": _dequantize_q4_k,
    "q6_k": _dequantize_q6_k,
}


# Numbers to blocks


def quantize_rows(weight: Tensor, format: str) -> Tensor:
    """Rows of blocks, bytes `(rows, row_bytes)`, nearest to the finite float weights `(rows, cols)`."""
    numbers, _ = BLOCK_FORMATS[format]
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.detach().float(), (0, -cols % numbers))
    blocks = _QUANTIZERS[format](padded.reshape(-1, numbers))
    return blocks.reshape(rows, row_bytes(format, cols))


def _round_scale(x: Tensor) -> Tensor:
    """The nearest float16, as float32; upwards where it is so small that 127 of it would not reach the largest."""
    rounded = x.half()
    short = (rounded.float() < x) & (x < 2**-17)
    return torch.where(short, torch.nextafter(rounded, rounded.new_tensor(torch.inf)), rounded).float()


def _bytes_of_float16(x: Tensor) -> Tensor:
    return x.half().view(torch.uint8)


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, x / scale, torch.zeros_like(x))


def _pack_nibbles(q: Tensor) -> Tensor:
    low, high = q.to(torch.uint8).chunk(2, dim=1)
    return low | high << 4


def _quantize_bf16(blocks: Tensor) -> Tensor:
    return blocks.bfloat16().view(torch.uint8)


def _quantize_q8_0(blocks: Tensor) -> Tensor:
    scale = _round_scale(blocks.abs().amax(1, keepdim=True) / 127)
    q = _divide(blocks, scale).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((_bytes_of_float16(scale), q.view(torch.uint8)), dim=1)


def _quantize_q4_0(blocks: Tensor) -> Tensor:
    # The largest weight, with its sign, is -8 scale, as llama.cpp has it: 7 is the largest on the other side.
    place = blocks.abs().argmax(1, keepdim=True)
    scale = (blocks.gather(1, place) / -8).half().float()
    inverse = torch.where(scale != 0, 1 / scale, torch.zeros_like(scale))
    q = (blocks * inverse).round().clamp(-8, 7) + 8
    return torch.cat((_bytes_of_float16(scale), _pack_nibbles(q)), dim=1)


def _quantize_q4_1(blocks: Tensor) -> Tensor:
    minimum = blocks.amin(1, keepdim=True).half().float()
    scale = _round_scale((blocks.amax(1, keepdim=True) - minimum) / 15)
    q = _divide(blocks - minimum, scale).round().clamp(0, 15)
    return torch.cat((_bytes_of_float16(scale), _bytes_of_float16(minimum), _pack_nibbles(q)), dim=1)


_QUANTIZERS = {"bf16": _quantize_bf16, "q8_0": _quantize_q8_0, "q4_0": _quantize_q4_0, "q4_1": _quantize_q4_1}
