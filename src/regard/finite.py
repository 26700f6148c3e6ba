"""Keeping what is hidden hidden, even when it is NaN or infinite.

A product with a weight of zero does not hide a NaN: `0 * nan` is NaN. So non-finite keys and values are replaced by
zero before any product, and afterwards exactly those outputs that were allowed to see one become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def known_finite(*tensors: Tensor) -> bool:
    """Whether all entries are known to be finite; `False` also when that cannot be asked (tracing, vmap)."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if any(tensor.is_meta for tensor in tensors):
        return True  # a tensor without numbers has none that are broken
    # One pass instead of five: a sum is finite only if all its terms are. One that overflows is merely not known.
    return all(bool(torch.isfinite(tensor.detach().sum())) for tensor in tensors)


def cleaned(tensor: Tensor) -> Tensor:
    """The tensor with zeros where it was not finite; those places get no gradient."""
    return torch.where(torch.isfinite(tensor), tensor, 0)
