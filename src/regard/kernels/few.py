"""A linear layer for few rows, as an operator of torch: `regard::few_linear`.

    output_mn = bias_n + sum_k x_mk weight_nk

`x` is `(..., in)`, the weight `(out, in)`, the bias `(out,)` or `None`, all float32 or all float64. Every weight is
read from memory once, whatever the number of rows, which is what a step of decoding waits for. The bits of a row depend
on nothing but the row: not on the rows beside it, not on the number of threads. It has no gradient: who learns has many
rows, and torch's own product for them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from regard.errors import BackendError
from regard.folding import one_by_one
from regard.kernels.library import FEW, NUMBERS, last_axis_dense, native
from regard.kernels.watched import unwatched

DTYPES = (torch.float32, torch.float64)


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x weight^T + bias` for `x` of shape `(..., in)`: the kernel where nobody looks on, else its operator."""
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in (x, weight, bias)
    ):
        _no_gradient(None)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if not learns and unwatched(x, weight, bias) and all(t is None or t.is_cpu for t in (x, weight, bias)):
        return _few_linear(x, weight, bias)
    return torch.ops.regard.few_linear(x, weight, bias)


def run_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The kernel itself, for plain tensors that fit each other."""
    assert native is not None
    inside, shape = weight.shape[1], x.shape
    rows = x.numel() // inside if inside else math.prod(shape[:-1])
    # Nearly always a view, and no copy.
    x = x if x.dim() == 2 else x.reshape(rows, inside)
    x, weight = last_axis_dense(x), last_axis_dense(weight)
    bias = bias if bias is None else bias.contiguous()
    output = torch.empty((*shape[:-1], weight.shape[0]), dtype=x.dtype, device="cpu")
    native.regard_few(
        FEW.pack(
            NUMBERS[x.dtype],
            torch.get_num_threads(),
            rows,
            inside,
            weight.shape[0],
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            weight.stride(0),
            0 if bias is None else bias.data_ptr(),
            output.data_ptr(),
        )
    )
    return output


def _few_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, weight, bias)
    return run_few(x, weight, bias)


def _check(x, weight, bias) -> None:
    """Raises where the kernel would read beside a tensor or take its numbers for others."""
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    alike = x.dtype in DTYPES and all(t is None or t.dtype == x.dtype for t in (weight, bias))
    if fits and alike:
        return
    shown = [
        None if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (x, weight, bias)
    ]
    raise BackendError(
        "These tensors do not make a linear layer for few rows.",
        asked="regard::few_linear(x (..., in), weight (out, in), bias (out,) or None), all float32 or all float64",
        found=f"x {shown[0]}, weight {shown[1]}, bias {shown[2]}",
        because="the kernel reads them where they are and converts nothing",
        instead="torch.nn.functional.linear, which converts and broadcasts",
    )


_library = torch.library.Library("regard", "FRAGMENT")
_library.define("few_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("few_linear", _few_linear, "CPU")


@torch.library.register_fake("regard::few_linear", lib=_library)
def _fake(x, weight, bias):
    _check(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _no_gradient(ctx, *gradients):
    raise BackendError(
        "The linear layer for few rows has no gradient.",
        asked="a gradient of regard::few_linear",
        because="it serves decoding, where nothing learns",
        instead="torch.nn.functional.linear, or torch.no_grad() while decoding",
    )


torch.library.register_autograd("regard::few_linear", _no_gradient, lib=_library)


def _vmap(info, in_dims, x, weight, bias):
    """Mapped rows are only more rows; mapped weights are other layers, one after the other."""
    if in_dims[1] is None and in_dims[2] is None:
        return torch.ops.regard.few_linear(x.movedim(in_dims[0], 0), weight, bias), 0

    def one(*arguments):
        return (torch.ops.regard.few_linear(*arguments),)

    return one_by_one(info.batch_size, in_dims, (x, weight, bias), one)[0], 0


torch.library.register_vmap("regard::few_linear", _vmap, lib=_library)


@register_flop_formula(torch.ops.regard.few_linear, get_raw=True)
def _flops(x, weight, bias, **_) -> int:
    return 2 * math.prod(x.shape[:-1]) * weight.shape[0] * weight.shape[1]
