"""A linear layer, as two torch operators: `regard::gemv` for few rows and `regard::gemm` for many.

    gemv   output_mn = bias_n + sum_k x_mk weight_nk
    gemm   output_mn = activation(bias_n + sum_k x_mk weight_nk)          none, relu, gelu, gelu_tanh

`x` is `(..., in)`, the weight `(out, in)`, the bias `(out,)` or `None`, all float32 or all float64. `gemv` streams the
weights from memory once, whatever the number of rows: decoding is bound by memory bandwidth. `gemm` packs the weights
at each call, so that no packed copy can go stale, and applies the activation while its argument is in registers.

The bits of a row depend on nothing but the row: not on the rows beside it, not on the number of threads. Both serve
inference only: the pre-activation that backward needs is not saved.
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
from regard.kernels.registration import can_call_kernel, refuse_gradient, register_operator

DTYPES = (torch.float32, torch.float64)
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x weight^T + bias`, fastest for few rows: the kernel itself for plain eager tensors, else its operator."""
    if can_call_kernel(_refuse_gemv_gradient, x, weight, bias):
        return _checked_gemv(x, weight, bias)
    return torch.ops.regard.gemv(x, weight, bias)


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """`activation(x weight^T + bias)`, fastest for many rows: the kernel for plain eager tensors, else its operator."""
    if can_call_kernel(_refuse_gemm_gradient, x, weight, bias):
        return _checked_gemm(x, weight, bias, activation)
    return torch.ops.regard.gemm(x, weight, bias, activation)


def run_gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The kernel itself, for plain tensors whose shapes and dtypes were checked."""
    assert native is not None
    return _run(native.regard_gemv, GEMV, x, weight, bias)


def run_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The kernel itself, for plain tensors whose shapes and dtypes were checked."""
    assert native is not None
    return _run(native.regard_gemm, GEMM, x, weight, bias, ACTIVATIONS[activation])


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


def _check_operands(operator: str, x, weight, bias, activation=None) -> None:
    """Raises where the kernel would read out of bounds, or misread the dtype."""
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    alike = x.dtype in DTYPES and all(t is None or t.dtype == x.dtype for t in (weight, bias))
    if fits and alike and activation in ACTIVATIONS:
        return
    x, weight, bias = (
        None if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (x, weight, bias)
    )
    raise BackendError(
        "These tensors do not make a linear layer.",
        asked=f"regard::{operator}(x (..., in), weight (out, in), bias (out,) or None), all float32 or all float64",
        found=f"x {x}, weight {weight}, bias {bias}" + (f", activation {activation!r}" if activation else ""),
        because="the kernel converts and broadcasts nothing; "
        f"gemm's activations are {', '.join(filter(None, ACTIVATIONS))}",
        instead="torch.nn.functional.linear, which converts and broadcasts, and any activation after it",
    )


# Operators


def _checked_gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check_operands("gemv", x, weight, bias)
    return run_gemv(x, weight, bias)


def _checked_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    _check_operands("gemm", x, weight, bias, activation)
    return run_gemm(x, weight, bias, activation)


def _make_fake(operator: str, x, weight, bias, *activation):
    _check_operands(operator, x, weight, bias, *activation)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _batch(call, info, in_dims, x, weight, bias, *activation):
    """Mapped rows are only more rows; mapped weights are other layers, one after the other."""
    if in_dims[1] is None and in_dims[2] is None:
        return call(x.movedim(in_dims[0], 0), weight, bias, *activation), 0
    one = functools.partial(_call_as_tuple, call, activation)
    return map_one_by_one(info.batch_size, in_dims[:3], (x, weight, bias), one)[0], 0


def _call_as_tuple(call, activation, *operands):
    return (call(*operands, *activation),)


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
    "gemm(Tensor x, Tensor weight, Tensor? bias, str? activation=None) -> Tensor",
    _checked_gemm,
    fake=functools.partial(_make_fake, "gemm"),
    backward=_refuse_gemm_gradient,
    vmap=_batch,
    flops=_count_flops,
)
