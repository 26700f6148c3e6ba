"""A linear layer for many rows and the bend behind it, as an operator of torch: `regard::many_linear`.

    output_mn = bend(bias_n + sum_k x_mk weight_nk)          bend: none, relu, gelu, gelu_tanh

`x` is `(..., in)`, the weight `(out, in)`, the bias `(out,)` or `None`, all float32 or all float64. Weights are packed
anew at each call, so that nothing is kept that could grow stale; the bend is applied while its argument is still in
registers. The bits of a row depend on nothing but the row: not on the rows beside it, not on the number of threads. It
has no gradient: who learns needs what comes before the bend too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from regard.errors import BackendError
from regard.folding import one_by_one
from regard.kernels.library import FINE, MANY, NUMBERS, fresh, last_axis_dense, native
from regard.kernels.watched import unwatched

DTYPES = (torch.float32, torch.float64)
BENDS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}


def many_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, bend: str | None = None) -> Tensor:
    """`bend(x weight^T + bias)` for `x` of shape `(..., in)`: the kernel where nobody looks on, else its operator."""
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in (x, weight, bias)
    ):
        _no_gradient(None)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if not learns and unwatched(x, weight, bias) and all(t is None or t.is_cpu for t in (x, weight, bias)):
        return _many_linear(x, weight, bias, bend)
    return torch.ops.regard.many_linear(x, weight, bias, bend)


def run_many(x: Tensor, weight: Tensor, bias: Tensor | None, bend: str | None) -> Tensor:
    """The kernel itself, for plain tensors that fit each other."""
    assert native is not None
    inside, shape = weight.shape[1], x.shape
    rows = x.numel() // inside if inside else math.prod(shape[:-1])
    # Nearly always a view, and no copy.
    x = x if x.dim() == 2 else x.reshape(rows, inside)
    x, weight = last_axis_dense(x), last_axis_dense(weight)
    bias = bias if bias is None else bias.contiguous()
    output = fresh(*shape[:-1], weight.shape[0], dtype=x.dtype)
    answer = native.regard_many(
        MANY.pack(
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
            BENDS[bend],
        )
    )
    if answer != FINE:
        raise MemoryError("there is no memory to pack the weights of a linear layer in")
    return output


def _many_linear(x: Tensor, weight: Tensor, bias: Tensor | None, bend: str | None = None) -> Tensor:
    _check(x, weight, bias, bend)
    return run_many(x, weight, bias, bend)


def _check(x, weight, bias, bend) -> None:
    """Raises where the kernel would read beside a tensor or take its numbers for others."""
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    alike = x.dtype in DTYPES and all(t is None or t.dtype == x.dtype for t in (weight, bias))
    if fits and alike and bend in BENDS:
        return
    shown = [
        None if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (x, weight, bias)
    ]
    raise BackendError(
        "These tensors do not make a linear layer for many rows.",
        asked="regard::many_linear(x (..., in), weight (out, in), bias (out,) or None, bend), in float32 or float64",
        found=f"x {shown[0]}, weight {shown[1]}, bias {shown[2]}, bend {bend!r}",
        because="the kernel reads them where they are and converts nothing; "
        f"it bends by {', '.join(filter(None, BENDS))} or not at all",
        instead="torch.nn.functional.linear, which converts and broadcasts, and any function after it",
    )


_library = torch.library.Library("regard", "FRAGMENT")
_library.define("many_linear(Tensor x, Tensor weight, Tensor? bias, str? bend=None) -> Tensor")
_library.impl("many_linear", _many_linear, "CPU")


@torch.library.register_fake("regard::many_linear", lib=_library)
def _fake(x, weight, bias, bend=None):
    _check(x, weight, bias, bend)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _no_gradient(ctx, *gradients):
    raise BackendError(
        "The linear layer for many rows has no gradient.",
        asked="a gradient of regard::many_linear",
        because="it forgets what comes before the bend",
        instead="torch.nn.functional.linear, or torch.no_grad() where nothing learns",
    )


torch.library.register_autograd("regard::many_linear", _no_gradient, lib=_library)


def _vmap(info, in_dims, x, weight, bias, bend=None):
    """Mapped rows are only more rows; mapped weights are other layers, one after the other."""
    if in_dims[1] is None and in_dims[2] is None:
        return torch.ops.regard.many_linear(x.movedim(in_dims[0], 0), weight, bias, bend), 0

    def one(*arguments):
        return (torch.ops.regard.many_linear(*arguments, bend),)

    return one_by_one(info.batch_size, in_dims[:3], (x, weight, bias), one)[0], 0


torch.library.register_vmap("regard::many_linear", _vmap, lib=_library)


@register_flop_formula(torch.ops.regard.many_linear, get_raw=True)
def _flops(x, weight, bias, bend=None, **_) -> int:
    return 2 * math.prod(x.shape[:-1]) * weight.shape[0] * weight.shape[1]
