"""Whether a kernel can be called directly, or must be an operator that torch dispatches.

An operator costs some ten microseconds more than the call itself, which is as much as a small attention takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.kernels.library import missing


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


def is_plain_inference(*tensors: Tensor | None) -> bool:
    """True where an inference-only kernel can silently take the place of torch's operations on these tensors.

    They are plain and on the CPU, nothing that needs a gradient, and neither autocast nor an overridden function.
    """
    if not is_plain_eager(*tensors):  # first: a tracer must not see that anything else is asked
        return False
    needs_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return (
        not needs_grad
        and all(tensor is None or (tensor.is_cpu and tensor.layout == torch.strided) for tensor in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()
        and missing() is None
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the tensor's values: no subclass, and no lazy negation."""
    return (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter) and not tensor.is_neg()
