"""Whether a kernel can be called directly, or must be an operator that torch dispatches.

An operator costs some ten microseconds more than the call itself, which is as much as a small attention takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_traced() -> bool:
    """True under tracing, a dispatch mode, a functorch transform or forward-mode AD: use the registered operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or bool(torch._C._len_torch_dispatch_stack())
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """True for plain tensors outside of tracing, dispatch modes, functorch transforms and forward-mode AD."""
    return not is_traced() and all(tensor is None or _is_plain(tensor) for tensor in tensors)


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the tensor's values: no subclass, and no lazy negation."""
    return (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter) and not tensor.is_neg()
