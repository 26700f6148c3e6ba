"""`torch.nn.Linear` by our own kernels, and huge pages for its weights."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.modules import module as modules

from regard.kernels import training
from regard.kernels.bandwidth import HUGE_PAGE, allocate_on_huge_pages
from regard.kernels.eager import is_plain_eager
from regard.kernels.library import missing
from regard.kernels.linear import DTYPES, run_gemm, run_gemv
from regard.kernels.quantized import QuantizedTensor, quantized_linear

# Measured on two cores with AVX2 against torch's own product: the kernels are faster, gemv up to this many rows and
# gemm beyond, ...
GEMV_ROWS = 32
# ... unless the weights are so few that they stay in the CPU caches, where torch is as fast; ...
MIN_WEIGHTS = 1 << 17
# ... but for this many multiply-adds gemm is faster with any weights.
MIN_PRODUCTS = 1 << 25


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# The activations that gemm can fuse.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}


class Linear(nn.Linear):
    """`torch.nn.Linear`, by our own kernels.

        output_n = bias_n + sum_k input_k weight_nk

    `input` is `(..., in_features)`, the weight `(out_features, in_features)`. A step of decoding has one row or a few,
    so it is bound by the bandwidth of reading each weight once: `regard::gemv` reads those of GPT-2 in 20 ms where
    torch's product takes 47. An encoder has hundreds of rows and is bound by arithmetic: `regard::gemm` is a little
    faster than torch (134 to 148 GF/s against 125 to 140 of 181 for most shapes, slower for some), and fuses the
    activation. In both, the bits of a row depend neither on the rows beside it nor on the number of threads.

    Parameters, state dict, initialisation and errors are those of `torch.nn.Linear`, results the same up to rounding.
    With gradients the products of `regard.kernels.training` run, forward and backward, if there are enough of them;
    their bits do not depend on the number of threads either. torch.compile, torch.export, torch.func, autocast and
    dispatch modes get torch's product, as do small layers, other dtypes and other devices.

        >>> from regard.layers.linear import Linear
        >>> layer = Linear(768, 512).requires_grad_(False)
        >>> layer(torch.ones(1, 768)).shape
        torch.Size([1, 512])
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():  # torch.jit.script compiles only the branch it takes
            return F.linear(input, self.weight, self.bias)
        else:
            return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """`activation(x weight^T + bias)`, by a kernel where possible; `activation` is relu, gelu, gelu_tanh or None."""
    if isinstance(weight, QuantizedTensor):
        made = quantized_linear(x, weight, bias)
    elif _can_use_kernel(x, weight, bias):
        if x.numel() > GEMV_ROWS * weight.shape[1]:
            return run_gemm(x, weight, bias, activation)
        made = run_gemv(x, weight, bias)
    elif training.can_train(x, weight, bias):
        made = training.linear(x, weight, bias)
    else:
        made = F.linear(x, weight, bias)
    return made if activation is None else ACTIVATIONS[activation](made)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether `linear` can be called in place of this module: no subclass, no hooks, no patched forward."""
    return type(module) is Linear and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or modules._has_any_global_hook()
    )


def _can_use_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # First: a tracer must not see that shapes are compared.
    if not is_plain_eager(x, weight, bias) or not fits_kernel(x, weight, bias):
        return False
    needs_grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    return (
        not needs_grad
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()
        and missing() is None
    )


def fits_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a kernel takes these dtypes and shapes, and is faster for them than torch."""
    dtype = x.dtype
    if dtype not in DTYPES or weight.dtype != dtype or weight.dim() != 2:
        return False
    out, inside = weight.shape
    if x.dim() == 0 or x.shape[-1] != inside or not _is_faster(x.numel(), inside, out, dtype):
        return False
    if bias is not None and (bias.dtype != dtype or bias.shape != (out,) or not bias.is_cpu):
        return False
    return x.is_cpu and weight.is_cpu and x.layout == weight.layout == torch.strided


def _is_faster(numbers: int, inside: int, out: int, dtype: torch.dtype) -> bool:
    """Whether a kernel is faster for `numbers / inside` rows."""
    if numbers <= GEMV_ROWS * inside:
        return inside * out >= MIN_WEIGHTS
    return dtype == torch.float32 and (inside * out >= MIN_WEIGHTS or numbers * out >= MIN_PRODUCTS)


def use_huge_pages(module: nn.Module) -> int:
    """Move large weight matrices to huge pages; returns how many bytes were moved.

    A TLB holds some thousands of pages. A model of 500 MB has 120,000 pages of 4 KB, so that a decode step, which
    reads each weight once, misses the TLB at every page; it has 250 of 2 MB. The pages are requested before the
    weights are copied there: later the system would move them in its own time, or never.

    Values keep every bit, parameters stay the same objects (an optimizer keeps them, tied layers and embeddings stay
    tied), and what has been moved stays where it is. Left alone are small weights, other devices, other kinds of
    tensors, and weights of which a part belongs to another parameter or buffer. Without huge pages, nothing happens.

        >>> from regard.layers.linear import Linear, use_huge_pages
        >>> layer = Linear(1024, 1024)
        >>> moved = use_huge_pages(layer)
        >>> use_huge_pages(layer)
        0
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    tensors = [t for t in (*module.parameters(), *module.buffers()) if _has_plain_storage(t)]
    weights = {parameter for parameter in module.parameters() if parameter.dim() == 2}
    movable: dict[tuple, Tensor] = {}
    for weight in weights:
        if _has_plain_storage(weight) and _can_move(weight, tensors):
            movable.setdefault(_identify(weight), weight)
    moved = 0
    for place, weight in movable.items():
        copy = _copy_to_huge_pages(weight)
        moved += weight.nbytes
        # Other parameters may share the same memory.
        for other in tensors:
            if _identify(other) == place:
                other.data = copy
    return moved


def _has_plain_storage(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout == torch.strided
    return plain and tensor.numel() > 0


def _can_move(weight: Tensor, tensors: list[Tensor]) -> bool:
    first = weight.data_ptr()
    if weight.nbytes < HUGE_PAGE or first % HUGE_PAGE == 0 or not weight.is_contiguous() or weight.is_inference():
        return False
    if not weight.is_floating_point():
        return False
    for other in tensors:
        begin, end = _find_extent(other)
        if begin < first + weight.nbytes and end > first and _identify(other) != _identify(weight):
            return False
    return True


def _identify(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _find_extent(tensor: Tensor) -> tuple[int, int]:
    """First address and the one after the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _copy_to_huge_pages(tensor: Tensor) -> Tensor:
    copy = allocate_on_huge_pages(tensor.numel(), tensor.dtype).reshape(tensor.shape)
    return copy.copy_(tensor.detach())
