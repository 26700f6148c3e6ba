"""A linear layer that is quick for few rows and for many, and the memory its weights like best."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.modules import module as modules

from regard.kernels.few import DTYPES, run_few
from regard.kernels.library import missing
from regard.kernels.many import run_many
from regard.kernels.watched import unwatched

# Measured on two cores with AVX2 against torch's own product: the kernels are faster, up to this many rows the one for
# few, beyond them the one for many, ...
MOST_ROWS = 32
# ... unless there are so few weights that they stay in the caches and torch finishes as soon; ...
FEWEST_WEIGHTS = 1 << 17
# ... but for this many products the kernel for many is faster with any weights.
FEWEST_PRODUCTS = 1 << 25
LARGE_PAGE = 1 << 21


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# What can follow the sums while they are still at hand.
BENDS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}


class Linear(nn.Linear):
    """`torch.nn.Linear`, by kernels of our own where nobody asks for a gradient.

        output_n = bias_n + sum_k input_k weight_nk

    `input` is `(..., in_features)`, the weight `(out_features, in_features)`. A step of decoding has one row or a few,
    so it waits for the weights, each of which is needed once: the kernel `regard::few_linear` reads those of GPT-2 in
    20 ms where torch's product takes 47. An encoder has hundreds of rows and waits for the multiplications:
    `regard::many_linear` does them a little faster than torch (134 to 148 GF/s against 125 to 140 of 181 for most
    shapes, slower for some), and bends in the same pass. In both, the bits of a row depend neither on the rows beside
    it nor on the number of threads.

    Parameters, names in the state, initial numbers and errors are those of `torch.nn.Linear`, results the same up to
    rounding. Who asks for a gradient, compiles, exports, maps, casts or counts gets torch's product, as do small
    layers, other dtypes and other devices.

        >>> from regard.layers.linear import Linear
        >>> layer = Linear(768, 512).requires_grad_(False)
        >>> layer(torch.ones(1, 768)).shape
        torch.Size([1, 512])
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():  # such a compiler reads only the branch it takes
            return F.linear(input, self.weight, self.bias)
        else:
            return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, bend: str | None = None) -> Tensor:
    """`bend(x weight^T + bias)`, by a kernel where that can be; `bend` is relu, gelu, gelu_tanh or None."""
    if _is_for_a_kernel(x, weight, bias):
        if x.numel() > MOST_ROWS * weight.shape[1]:
            return run_many(x, weight, bias, bend)
        made = run_few(x, weight, bias)
    else:
        made = F.linear(x, weight, bias)
    return made if bend is None else BENDS[bend](made)


def is_bare(module: nn.Module) -> bool:
    """Whether nobody notices that `linear` is called in place of this layer: it is no other class and has no hooks."""
    return type(module) is Linear and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or modules._has_any_global_hook()
    )


def _is_for_a_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # Asked first: who traces must not see that shapes are compared.
    if not unwatched(x, weight, bias) or not _fits(x, weight, bias):
        return False
    learns = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    return (
        not learns
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()
        and missing() is None
    )


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a kernel knows such numbers, and their shapes are those of a linear layer that it is faster for."""
    dtype = x.dtype
    if dtype not in DTYPES or weight.dtype != dtype or weight.dim() != 2:
        return False
    out, inside = weight.shape
    if x.dim() == 0 or x.shape[-1] != inside or not _pays(x.numel(), inside, out, dtype):
        return False
    if bias is not None and (bias.dtype != dtype or bias.shape != (out,) or not bias.is_cpu):
        return False
    return x.is_cpu and weight.is_cpu and x.layout == weight.layout == torch.strided


def _pays(numbers: int, inside: int, out: int, dtype: torch.dtype) -> bool:
    """Whether a kernel is faster for `numbers / inside` rows."""
    if numbers <= MOST_ROWS * inside:
        return inside * out >= FEWEST_WEIGHTS
    return dtype == torch.float32 and (inside * out >= FEWEST_WEIGHTS or numbers * out >= FEWEST_PRODUCTS)


def settle(module: nn.Module) -> int:
    """Move large matrices to memory on large pages, and tell how many bytes moved.

    The processor translates addresses page by page and remembers some thousands of pages. A model of 500 MB has
    120,000 pages of 4 KB, so that a step of decoding, which reads each weight once, waits for a translation at
    every page; it has 250 of 2 MB. The pages are asked for before the weights are copied there: later the system would
    move them in its own time, or never.

    Values keep every bit, parameters stay the same objects (an optimizer keeps them, tied layers and embeddings stay
    tied), and what is settled stays where it is. Left alone are small weights, other devices, other kinds of tensors,
    and weights of which a part belongs to another parameter or buffer. Where the system has no such pages, nothing
    happens.

        >>> from regard.layers.linear import Linear, settle
        >>> layer = Linear(1024, 1024)
        >>> moved = settle(layer)
        >>> settle(layer)
        0
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    everything = [t for t in (*module.parameters(), *module.buffers()) if _is_memory(t)]
    weights = {parameter for parameter in module.parameters() if parameter.dim() == 2}
    settled: dict[tuple, Tensor] = {}
    for weight in weights:
        if _is_memory(weight) and _may_move(weight, everything):
            settled.setdefault(_place(weight), weight)
    moved = 0
    for place, weight in settled.items():
        copy = _on_large_pages(weight)
        moved += weight.nbytes
        # Other parameters may be other names for the same numbers.
        for other in everything:
            if _place(other) == place:
                other.data = copy
    return moved


def _is_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout == torch.strided
    return plain and tensor.numel() > 0


def _may_move(weight: Tensor, everything: list[Tensor]) -> bool:
    first = weight.data_ptr()
    if weight.nbytes < LARGE_PAGE or first % LARGE_PAGE == 0 or not weight.is_contiguous() or weight.is_inference():
        return False
    if not weight.is_floating_point():
        return False
    for other in everything:
        begin, end = _extent(other)
        if begin < first + weight.nbytes and end > first and _place(other) != _place(weight):
            return False
    return True


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First address and the one after the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _on_large_pages(tensor: Tensor) -> Tensor:
    """A copy that begins with a large page. Its storage is as long as itself, so that a saved file is not longer."""
    memory = mmap.mmap(-1, tensor.nbytes + 2 * LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    # The last page is a large one if more than half of it is needed.
    length = (tensor.nbytes + LARGE_PAGE // 2) // LARGE_PAGE * LARGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, length)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).reshape(tensor.shape)
    return copy.copy_(tensor.detach())
