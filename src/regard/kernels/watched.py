"""Whether somebody looks on: then a kernel must be an operator that torch knows, otherwise a plain call is enough.

An operator costs some ten microseconds more than the call itself, which is as much as a small attention takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def unwatched(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, and nothing traces, counts, fakes or transforms what is done to them."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(tensor is None or _is_plain(tensor) for tensor in tensors)
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether the numbers are those in memory: no subclass, and no sign that torch has only noted down."""
    return (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter) and not tensor.is_neg()


def watched_closely() -> bool:
    """Whether what is done may have to be traced or differentiated in ways that only full operators know."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or bool(torch._C._len_torch_dispatch_stack())
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
