"""A linear layer, as two torch operators: `regard::gemv` for few rows and `regard::gemm` for many.

    gemv   output_mn = bias_n + sum_k x_mk weight_nk
    gemm   output_mn = residual_mn + activation(bias_n + sum_k x_mk weight_nk)          none, relu, gelu, gelu_tanh

`x` is `(..., in)`, the weight `(out, in)`, the bias `(out,)` or `None`, the residual `(..., out)` or `None`, all
float32 or all float64. `gemv` streams the weights from memory once, whatever the number of rows: decoding is bound by
memory bandwidth. `gemm` packs the weights at each call, unless `regard.kernels.packed` keeps them packed, and applies
activation and residual while the sums are in registers.

The bits of a row depend on nothing but the row: not on the rows beside it, not on the number of threads, not on when
the weights were packed. Both serve inference only: the pre-activation that backward needs is not saved.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from regard.batching import map_one_by_one
from regard.errors import BackendError
from regard.kernels.library import DTYPE_CODES, GEMM, GEMV, OK, empty_output, last_axis_dense, native, num_threads
from regard.kernels.packed import find_packed
from regard.kernels.registration import can_call_kernel, refuse_gradient, register_operator

DTYPES = (torch.float32, torch.float64)
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x weight^T + bias`, fastest for few rows: the kernel itself for plain eager tensors, else its operator."""
    if can_call_kernel(_refuse_gemv_gradient, x, weight, bias):
        return _checked_gemv(x, weight, bias)
    return torch.ops.regard.gemv(x, weight, bias)


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`residual + activation(x weight^T + bias)`, fastest for many rows: the kernel for plain eager tensors, else its
    operator."""
    if can_call_kernel(_refuse_gemm_gradient, x, weight, bias, residual):
        return _checked_gemm(x, weight, bias, activation, residual)
    return torch.ops.regard.gemm(x, weight, bias, activation, residual)


def run_gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The kernel itself, for plain tensors whose shapes and dtypes were checked."""
    assert native is not None
    return _run(native.regard_gemv, GEMV, x, weight, bias)


def run_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None = None
) -> Tensor:
    """The kernel itself, for plain tensors whose shapes and dtypes were checked."""
    assert native is not None
    packed = find_packed(weight)
    if residual is not None:
        residual = last_axis_dense(
            residual.reshape(-1, weight.shape[0]) if weight.shape[0] else residual.flatten(0, -2)
        )
    more = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    panels = 0 if packed is None else packed.panels.data_ptr()
    return _run(native.regard_gemm, GEMM, x, weight, bias, ACTIVATIONS[activation], *more, panels)


def _run(kernel: Callable, fields: struct.Struct, x: Tensor, weight: Tensor, bias: Tensor | None, *more: int) -> Tensor:
    in_features, shape = weight.shape[1], x.shape
    rows = x.numel() // in_features if in_features else math.prod(shape[:-1])
    # Nearly always a view, and no copy.
    x = x if x.dim() == 2 else x.reshape(rows, in_features)
    x, weight = last_axis_dense(x), last_axis_dense(weight)
    bias = bias if bias is None else bias.contiguous()
    output = empty_output(*shape[:-1], weight.shape[0], dtype=x.dtype)
    status = kernel(
        fields.pack(
            DTYPE_CODES[x.dtype],
            num_threads(),
            rows,
            in_features,
            weight.shape[0],
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            weight.stride(0),
            0 if bias is None else bias.data_ptr(),
            output.data_ptr(),
            *more,
        )
    )
    if status != OK:
        raise MemoryError("there is no memory to pack the weights of a linear layer in")
    return output


def _check_operands(operator: str, x, weight, bias, activation=None, residual=None) -> None:
    """Raises where the kernel would read out of bounds, or misread the dtype."""
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    fits = fits and (residual is None or residual.shape == (*x.shape[:-1], weight.shape[0]))
    alike = x.dtype in DTYPES and all(t is None or t.dtype == x.dtype for t in (weight, bias, residual))
    if fits and alike and activation in ACTIVATIONS:
        return
    x, weight, bias, residual = (
        None if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for t in (x, weight, bias, residual)
    )
    more = ", residual (..., out) or None" if operator == "gemm" else ""
    raise BackendError(
        "These tensors do not make a linear layer.",
        asked=f"regard::{operator}(x (..., in), weight (out, in), bias (out,) or None{more}), "
        "all float32 or all float64",
        found=f"x {x}, weight {weight}, bias {bias}"
        + (f", activation {activation!r}" if activation else "")
        + (f", residual {residual}" if residual else ""),
        because="the kernel converts and broadcasts nothing; "
        f"gemm's activations are {', '.join(filter(None, ACTIVATIONS))}",
        instead="torch.nn.functional.linear, which converts and broadcasts, and any activation after it",
    )


# Operators


def _checked_gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check_operands("gemv", x, weight, bias)
    return run_gemv(x, weight, bias)


def _checked_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    _check_operands("gemm", x, weight, bias, activation, residual)
    return run_gemm(x, weight, bias, activation, residual)


def _make_fake(operator: str, x, weight, bias, *more):
    _check_operands(operator, x, weight, bias, *more)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _batch(call, info, in_dims, x, weight, bias, activation=None, residual=None):
    """Mapped rows are only more rows; mapped weights are other layers, one after the other."""
    dims = (*in_dims[:3], in_dims[4] if len(in_dims) > 4 else None)
    more = () if activation is None and residual is None else (activation, residual)
    if dims[1] is None and dims[2] is None:
        rows = _map_first(x, dims[0], info.batch_size)
        if residual is not None:
            more = (activation, _map_first(residual, dims[3], info.batch_size))
        return call(rows, weight, bias, *more), 0

    def one(x, weight, bias, residual):
        return (call(x, weight, bias, *((activation, residual) if more else ())),)

    return map_one_by_one(info.batch_size, dims, (x, weight, bias, residual), one)[0], 0


def _map_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """With the mapped axis in front; the same for all where it is not mapped."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _count_flops(x, weight, bias, *activation, **_) -> int:
    return 2 * math.prod(x.shape[:-1]) * weight.shape[0] * weight.shape[1]


_refuse_gemv_gradient, _refuse_gemm_gradient = (
    refuse_gradient(
        name,
        because="it serves inference: the pre-activation that backward needs is not saved",
        instead="torch.nn.functional.linear, or torch.no_grad() for inference",
    )
    for name in ("gemv", "gemm")
)
register_operator(
    "gemv(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _checked_gemv,
    fake=functools.partial(_make_fake, "gemv"),
    backward=_refuse_gemv_gradient,
    vmap=_batch,
    flops=_count_flops,
)
register_operator(
    "gemm(Tensor x, Tensor weight, Tensor? bias, str? activation=None, Tensor? residual=None) -> Tensor",
    _checked_gemm,
    fake=functools.partial(_make_fake, "gemm"),
    backward=_refuse_gemm_gradient,
    vmap=_batch,
    flops=_count_flops,
)
