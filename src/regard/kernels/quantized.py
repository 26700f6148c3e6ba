"""A matrix of quantised weights that takes the place of a float32 one, and its product, `regard::quantized_linear`.

    output_mn = bias_n + sum_k x_mk weight_nk

A `QuantizedTensor` has the shape of the matrix and the blocks of its rows; `regard.kernels.blocks` has the formats.
Linear layers and embeddings read it without a float copy; any other operation gets one. Inference only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.batching import map_one_by_one
from regard.errors import BackendError
from regard.kernels.blocks import BLOCK_FORMATS, dequantize_rows, quantize_rows, row_bytes
from regard.kernels.library import missing
from regard.kernels.registration import can_call_kernel, refuse_gradient, register_operator
from regard.kernels.weights import PackedMatrix, weight_products

# bfloat16 beyond this many rows is widened to float32, so many outputs at a time, and multiplied by torch.
FEW_ROWS, WIDENED_ROWS = 32, 1024
aten = torch.ops.aten


class BlockRows(NamedTuple):
    """Neighbouring rows of one format: bytes `(rows, row_bytes)`."""

    format: str
    data: Tensor


class QuantizedTensor(Tensor):
    """A float32 matrix `(rows, cols)` to everything around it, stored as rows of blocks.

    Attributes:
        parts: the rows, in runs of one format; files of llama.cpp mix formats in what is one matrix here.

    >>> weight = QuantizedTensor.quantize(torch.linspace(-1, 1, 96).reshape(2, 48), "q8_0")
    >>> weight.shape, weight.parts[0].data.shape
    (torch.Size([2, 48]), torch.Size([2, 68]))
    >>> weight[:1].dequantize()[0, :2]
    tensor([-0.9999, -0.9763])
    """

    parts: tuple[BlockRows, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[BlockRows], cols: int) -> QuantizedTensor:
        assert all(part.data.dtype == torch.uint8 and part.data.dim() == 2 for part in parts)
        assert all(part.data.shape[1] == row_bytes(part.format, cols) for part in parts)
        rows = sum(len(part.data) for part in parts)
        made = Tensor._make_wrapper_subclass(cls, (rows, cols), dtype=torch.float32, device=parts[0].data.device)
        made.parts = tuple(BlockRows(*part) for part in parts)
        return made

    def __init__(self, parts: Sequence[BlockRows], cols: int) -> None:
        pass

    @classmethod
    def quantize(cls, weight: Tensor, format: str) -> QuantizedTensor:
        """The nearest blocks of a format (`QUANTIZERS`) to finite weights."""
        return cls([BlockRows(format, quantize_rows(weight, format))], weight.shape[1])

    def dequantize(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The weights in float32."""
        parts = [dequantize_rows(part.data, part.format, self.shape[1]) for part in self.parts]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def rows_at(self, index: Tensor) -> Tensor:
        """Some rows in float32, `(*index, cols)`."""
        flat = index.reshape(-1)
        if len(self.parts) == 1:
            found = dequantize_rows(self.parts[0].data[flat], self.parts[0].format, self.shape[1])
        else:
            found = torch.empty(len(flat), self.shape[1])
            start = 0
            for format, data in self.parts:
                here = (flat >= start) & (flat < start + len(data))
                found[here] = dequantize_rows(data[flat[here] - start], format, self.shape[1])
                start += len(data)
        return found.reshape(*index.shape, self.shape[1])

    def packed(self) -> list[PackedMatrix]:
        """The matrix as kernels read it: one below the other, a matrix for each run of rows of one format."""
        return [
            PackedMatrix(
                "bfloat16" if part.format == "bf16" else part.format,
                len(part.data),
                self.shape[1],
                part.data,
                part.data.stride(0),
            )
            for part in self.parts
        ]

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(part.format for part in self.parts)

    @property
    def stored_bytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)

    def data_ptr(self) -> int:
        return self.parts[0].data.data_ptr()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"QuantizedTensor({tuple(self.shape)}, {'+'.join(self.formats)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        memo[id(self)] = made = _clone(self)
        if getattr(self, "_is_param", False):
            made._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[1], QuantizedTensor):
            return quantized_linear(*args, **kwargs)
        if func is F.embedding and isinstance(args[1], QuantizedTensor) and _is_plain_lookup(*args[2:], **kwargs):
            return args[1].rows_at(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (rule := _RULES.get(func)) is not None and (made := rule(*args, **kwargs)) is not NotImplemented:
            return made
        if func._schema.is_mutable and any(isinstance(arg, QuantizedTensor) for arg in args):
            raise _change_error(str(func))
        if func._opname.startswith("new_"):
            return func(torch.empty(0, device=args[0].device), *args[1:], **kwargs)
        plain_args, plain_kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


def _is_plain_lookup(padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False) -> bool:
    """Whether `F.embedding` with these arguments changes no weight; the others concern gradients."""
    return max_norm is None


# What stays quantised


def _rebuild(weight: QuantizedTensor, change: Any) -> QuantizedTensor:
    return QuantizedTensor([BlockRows(part.format, change(part.data)) for part in weight.parts], weight.shape[1])


def _detach(weight: QuantizedTensor) -> QuantizedTensor:
    return _rebuild(weight, lambda data: data)


def _clone(weight: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return _rebuild(weight, torch.clone)


def _to_copy(weight: QuantizedTensor, **options: Any) -> QuantizedTensor:
    device, dtype = options.get("device"), options.get("dtype")
    if dtype not in (None, torch.float32) or torch.device(device or "cpu").type not in ("cpu", "meta"):
        raise BackendError(
            "Quantised weights have no other dtype and no other device.",
            asked=f"to({', '.join(str(each) for each in (device, dtype) if each is not None)})",
            found=repr(weight),
            because="they are blocks of bytes, which the kernels of the CPU multiply with float32",
            instead="model.dequantize() first",
        )
    return _rebuild(weight, lambda data: data.to(device, copy=True))


def _slice(weight: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim not in (0, -2) or step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(weight.shape[0])
    parts, begin = [], 0
    for format, data in weight.parts:
        rows = data[max(first - begin, 0) : max(last - begin, 0)]
        parts += [BlockRows(format, rows)] if len(rows) else []
        begin += len(data)
    return QuantizedTensor(parts or [BlockRows(weight.parts[0].format, weight.parts[0].data[:0])], weight.shape[1])


def _split(weight: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> Any:
    if dim not in (0, -2):
        return NotImplemented
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [_slice(weight, 0, start, end) for start, end in itertools.pairwise(ends)]


def _cat(weights: Sequence[Tensor], dim: int = 0) -> Any:
    if dim not in (0, -2) or not all(isinstance(each, QuantizedTensor) for each in weights):
        return NotImplemented
    if len({each.shape[1] for each in weights}) != 1:
        return NotImplemented
    runs: list[tuple[str, list[Tensor]]] = []
    for format, data in (part for each in weights for part in each.parts):  # pyright: ignore[reportAttributeAccessIssue]
        if runs and runs[-1][0] == format:
            runs[-1][1].append(data)
        else:
            runs.append((format, [data]))
    return QuantizedTensor([BlockRows(format, torch.cat(data)) for format, data in runs], weights[0].shape[1])


_RULES = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.slice.Tensor: _slice,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
}


def _change_error(what: str) -> BackendError:
    return BackendError(
        "Quantised weights cannot be changed.",
        asked=what,
        because="a step of training is far smaller than the steps that blocks can hold",
        instead="model.dequantize() for float32 weights, which can be trained and quantised again",
    )


# The product


def quantized_linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """`x weight^T + bias`, in float32 inside, in the dtype of `x` outside."""
    assert isinstance(weight, QuantizedTensor)
    if x.shape[-1:] != weight.shape[1:]:
        raise BackendError(
            "These tensors do not make a linear layer.",
            asked=f"x {tuple(x.shape)}, weight {weight!r}",
            because="the last axis of x is multiplied with the rows of the weight",
            instead=f"x (..., {weight.shape[1]})",
        )
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        _refuse_gradient(None)
    made, start = [], 0
    for format, data in weight.parts:
        one = None if bias is None else bias[start : start + len(data)]
        if can_call_kernel(_refuse_gradient, x, data, one):
            made.append(_run_part(x, data, one, format))
        else:
            made.append(torch.ops.regard.quantized_linear(x, data, one, format))
        start += len(data)
    return made[0] if len(made) == 1 else torch.cat(made, -1)


def _run_part(x: Tensor, data: Tensor, bias: Tensor | None, format: str) -> Tensor:
    cols, dtype = x.shape[-1], x.dtype
    if format not in BLOCK_FORMATS or data.dtype != torch.uint8 or data.shape[1] != row_bytes(format, cols):
        raise BackendError(
            "These tensors do not make a quantised linear layer.",
            asked=f"x {tuple(x.shape)}, blocks {tuple(data.shape)} {data.dtype}, format {format!r}",
            because="a row of blocks has a fixed number of bytes for each width and format",
            instead="QuantizedTensor.quantize(weight, format)",
        )
    x, bias = x.float(), None if bias is None else bias.float()
    many = x.numel() > FEW_ROWS * cols
    if missing() is not None or (format == "bf16" and many):
        pieces = range(0, max(len(data), 1), WIDENED_ROWS)
        widened = (dequantize_rows(data[at : at + WIDENED_ROWS], format, cols) for at in pieces)
        made = torch.cat([F.linear(x, each) for each in widened], -1)
        return (made if bias is None else made + bias).to(dtype)
    name = "bfloat16" if format == "bf16" else format
    data = data if data.stride(1) == 1 else data.contiguous()
    return weight_products(x, PackedMatrix(name, len(data), cols, data, data.stride(0)), bias).to(dtype)


def _make_fake(x, data, bias, format):
    return x.new_empty((*x.shape[:-1], data.shape[0]))


def _batch(call, info, in_dims, x, data, bias, format):
    if in_dims[1] is None and in_dims[2] is None:
        return call(x.movedim(in_dims[0], 0), data, bias, format), 0
    one = functools.partial(_call_as_tuple, call, format)
    return map_one_by_one(info.batch_size, in_dims[:3], (x, data, bias), one)[0], 0


def _call_as_tuple(call, format, *operands):
    return (call(*operands, format),)


def _count_flops(x, data, bias, format, **_) -> int:
    return 2 * math.prod(x.shape) * data.shape[0]


_refuse_gradient = refuse_gradient(
    "quantized_linear",
    because="quantised weights serve inference: activations are rounded to 8 bits, which has no gradient",
    instead="torch.no_grad() for inference, or model.dequantize() to train",
)
register_operator(
    "quantized_linear(Tensor x, Tensor data, Tensor? bias, str format) -> Tensor",
    _run_part,
    fake=_make_fake,
    backward=_refuse_gradient,
    vmap=_batch,
    flops=_count_flops,
)
