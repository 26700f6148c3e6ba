"""How NaN and infinities propagate, and what the backends need to follow these rules.

    hidden pair                         no influence: a pair is hidden by the pattern, or by a bias of minus infinity
    query, visible key not finite       the whole row of the output is NaN
    visible bias NaN or plus infinity   the whole row of the output is NaN
    visible value not finite            its channel of the row is NaN (hard attention: only the values of winners count)
    query that sees nothing             zeros, whatever it is itself
    scale = 0                            queries and keys are not read, except by a bias that reads content
    finite score that overflows         plus infinity: the row is NaN; minus infinity: a weight of zero
    gradients                           an output that is NaN sends none back; an entry that is not finite receives zero

A product with a weight of zero does not hide a NaN: `0 * nan` is NaN. So non-finite queries, keys and values are
replaced by zero before any product, and afterwards exactly the outputs named above become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_known_finite(*tensors: Tensor) -> bool:
    """Whether all entries are known to be finite; `False` also where values cannot be read (tracing, vmap)."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if any(tensor.is_meta for tensor in tensors) or has_no_values():
        return True
    # One pass instead of five: a sum is finite only if all its terms are. A sum that overflows leaves it open.
    return all(bool(torch.isfinite(tensor.detach().sum())) for tensor in tensors)


def is_known_nonfinite(tensor: Tensor) -> bool:
    """Whether an entry is known not to be finite (or the sum overflows); `False` also where values cannot be read."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or tensor.is_meta:
        return False
    if has_no_values():
        return False
    return not torch.isfinite(tensor.detach().sum())


def has_no_values() -> bool:
    """Whether tensors are fake and nothing is built that will run on real ones: shapes are traced for finite values."""
    if torch.compiler.is_compiling():
        return False
    keys = torch._C._TorchDispatchModeKey
    mode = torch._C._get_dispatch_mode
    return mode(keys.FAKE) is not None and mode(keys.PROXY) is None


def zero_nonfinite(tensor: Tensor) -> Tensor:
    """The tensor with zeros where it was not finite; those entries get no gradient."""
    return torch.where(torch.isfinite(tensor), tensor, 0)


def zero_nan_bias(bias: Tensor) -> Tensor:
    """The bias with zeros where it is NaN or plus infinity; minus infinity stays and hides its pair."""
    return torch.where(bias < torch.inf, bias, 0)


def find_nonfinite_rows(tensor: Tensor) -> Tensor:
    """Which tokens have an entry that is not finite: `(..., token, 1)`."""
    return ~torch.isfinite(tensor).all(-1, keepdim=True)
