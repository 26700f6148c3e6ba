"""Weights laid out for `gemm` once, and found again for as long as they have not changed.

A panel of `2 lanes` outputs lies channel by channel, as the kernel reads it; without a packed copy each call makes one.
A copy is used only while the weight has the same memory, the same version (which every in-place operation of torch
raises: optimizers, `load_state_dict`, `copy_`) and the same numbers at `SAMPLES` places: `weight.data.mul_(2)` raises
no version. What else changed is packed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.kernels.bandwidth import allocate_on_huge_pages
from regard.kernels.library import DTYPE_CODES, PACK_WEIGHT, lanes, last_axis_dense, name, native, num_threads

SAMPLES = 256


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """The panels of a weight, and what they were made of.

    Attributes:
        panels: the numbers, `(panel, in, 2 lanes)`.
        source: the memory that was packed; it stays alive, so that no other weight has its address.
        version, samples, kernels: the weight's version, some of its numbers, and the kernels that read these panels.
    """

    panels: Tensor
    source: Tensor
    version: int
    samples: Tensor
    kernels: str

    def fits(self, weight: Tensor) -> bool:
        """Whether these are the panels of the weight as it is now."""
        source = self.source
        return (
            self.version == weight._version
            and source.data_ptr() == weight.data_ptr()
            and source.dtype == weight.dtype
            and source.shape == weight.shape
            and source.stride() == weight.stride()
            and self.kernels == name()
            and torch.equal(self.samples, _sample(weight))
        )


_packed = WeakIdKeyDictionary()


def keep_packed(weight: Tensor) -> PackedWeight:
    """Pack a weight, and again whenever it has changed; returns the panels of now."""
    found = _packed.get(weight)
    if found is None or not found.fits(weight):
        _packed[weight] = found = pack(weight)
    return found


def find_packed(weight: Tensor) -> PackedWeight | None:
    """The panels of a weight that is kept packed, else `None`."""
    return keep_packed(weight) if weight in _packed else None


def forget_packed(weight: Tensor) -> None:
    """Give the memory of a packed copy back."""
    _packed.pop(weight, None)


def pack(weight: Tensor) -> PackedWeight:
    """The panels of a float32 or float64 weight `(out, in)`, on huge pages where there are any."""
    assert native is not None
    source = weight.detach()
    dense = last_axis_dense(source)
    out, inside = dense.shape
    width = 2 * lanes(dense.dtype)
    count = -(-out // width)
    panels = allocate_on_huge_pages(count * inside * width, dense.dtype).view(count, inside, width)
    task = (DTYPE_CODES[dense.dtype], num_threads(), inside, out, dense.data_ptr(), dense.stride(0), panels.data_ptr())
    native.regard_pack_weight(PACK_WEIGHT.pack(*task))
    return PackedWeight(panels, source, weight._version, _sample(weight).clone(), name())


def _sample(weight: Tensor) -> Tensor:
    """Numbers from all over the weight, in the order of memory where that is dense."""
    flat = weight.detach()
    if not flat.is_contiguous():
        return flat[:: max(1, len(flat) // SAMPLES), 0]
    step = max(1, flat.numel() // SAMPLES) | 1
    return flat.view(-1)[::step]
