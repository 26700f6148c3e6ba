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
from regard.kernels.eager import is_plain_eager, is_plain_inference
from regard.kernels.library import lanes, missing
from regard.kernels.linear import DTYPES, run_gemm, run_gemv
from regard.kernels.packed import forget_packed, keep_packed
from regard.kernels.quantized import QuantizedTensor, quantized_linear

# Measured on two cores with AVX2 against torch's own product: the kernels are faster, gemv up to this many rows and
# gemm beyond, ...
GEMV_ROWS = 32
# ... (with AVX-512, whose vectors make gemm's sums but not gemv's twice as fast, up to this many)
WIDE_GEMV_ROWS = 10
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


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`residual + activation(x weight^T + bias)`, by a kernel where possible; `activation` is relu, gelu, gelu_tanh or
    None."""
    if isinstance(weight, QuantizedTensor):
        made = quantized_linear(x, weight, bias)
    elif _can_use_kernel(x, weight, bias):
        if x.numel() > max_gemv_rows(x.dtype) * weight.shape[1]:
            fused = residual if residual is not None and _can_fuse(residual, x, weight) else None
            made = run_gemm(x, weight, bias, activation, fused)
            return made if residual is None or fused is not None else residual + made
        made = run_gemv(x, weight, bias)
    elif training.can_train(x, weight, bias):
        fits = residual is not None and activation is None and residual.shape == (*x.shape[:-1], weight.shape[0])
        fused = residual if fits and training.can_train(x, weight, bias, residual) else None
        made = training.linear(x, weight, bias, fused)
        residual = None if fused is not None else residual
    else:
        made = F.linear(x, weight, bias)
    made = made if activation is None else ACTIVATIONS[activation](made)
    return made if residual is None else residual + made


def max_gemv_rows(dtype: torch.dtype = torch.float32) -> int:
    """Rows up to which `linear` takes gemv with the kernels in use; in float64 it never takes gemm."""
    return WIDE_GEMV_ROWS if dtype == torch.float32 and lanes(dtype) >= 16 else GEMV_ROWS


def _can_fuse(residual: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether gemm can add this residual; others are broadcast or converted by torch."""
    fits = residual.dtype == x.dtype and residual.shape == (*x.shape[:-1], weight.shape[0])
    return is_plain_inference(residual) and fits


def is_plain_linear(module: nn.Module) -> bool:
    """Whether `linear` can be called in place of this module: no subclass, no hooks, no patched forward."""
    return is_plain_module(module, Linear)


def is_plain_module(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether this module does what its class says: no subclass, no hooks, no patched forward."""
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or modules._has_any_global_hook()
    )


def can_fuse_residual(part: nn.Module, kind: type[nn.Module], last: nn.Module, *tensors: Tensor) -> bool:
    """Whether `linear` can add the residual in place of the last layer of this part; tracers and hooks see the part."""
    return is_plain_eager(*tensors) and is_plain_module(part, kind) and is_plain_linear(last)


def _can_use_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # In this order: a tracer must not see that shapes are compared.
    return is_plain_inference(x, weight, bias) and fits_kernel(x, weight, bias)


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
    if numbers <= max_gemv_rows(dtype) * inside:
        return inside * out >= MIN_WEIGHTS
    return dtype == torch.float32 and (inside * out >= MIN_WEIGHTS or numbers * out >= MIN_PRODUCTS)


def pack_weights(module: nn.Module) -> int:
    """Keep the weights of linear layers packed for products with many rows; returns the bytes of the packed copies.

    Without it `regard::gemm` packs at each call. That costs an eighth of a product with 48 rows, a twentieth with 128
    and nothing that can be measured from 512 on (768 x 768, one core, AVX-512); a packed copy takes as much memory
    as the weights. So this is for a model that reads many short texts, one at a time.

    A weight may change afterwards: in place, by an optimizer, by `load_state_dict` or by assignment to `.data`. The
    copy is then made anew at the next call. What torch cannot see, a single number written through `numpy()`, needs
    `forget_weights(module)`.

        >>> from regard.layers.linear import Linear, pack_weights
        >>> layer = Linear(768, 512).requires_grad_(False)
        >>> pack_weights(layer) >= 4 * 768 * 512
        True
    """
    if missing() is not None:
        return 0
    return sum(keep_packed(weight).panels.nbytes for weight in _find_packable(module))


def forget_weights(module: nn.Module) -> None:
    """Give back what `pack_weights` has packed."""
    for weight in module.parameters():
        forget_packed(weight)


def _find_packable(module: nn.Module) -> list[Tensor]:
    """Weights that `linear` multiplies by a kernel."""
    kinds = (weight for weight in module.parameters() if weight.dim() == 2 and weight.dtype in DTYPES)
    return [
        weight
        for weight in kinds
        if _has_plain_storage(weight) and not weight.is_inference() and weight.numel() >= MIN_WEIGHTS
    ]


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
