"""Kernels as torch operators, for `torch.compile`, `torch.export`, `torch.func`, autograd and the FLOP counter.

Every operator is registered by `register_operator`. Calling a kernel directly is some ten microseconds cheaper than
going through the dispatcher, as much as a small attention takes; `can_call_kernel` says where that is possible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from regard.errors import BackendError
from regard.kernels.eager import is_plain_eager

_LIBRARY = torch.library.Library("regard", "FRAGMENT")


def register_operator(
    schema: str,
    kernel: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    vmap: Callable[..., Any],
    flops: Callable[..., int],
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Register `regard::name`; the name is that of the schema.

    Args:
        schema: `"name(Tensor x, ...) -> Tensor"`.
        kernel: what runs on CPU tensors.
        fake: outputs without data, from fake tensors.
        backward: the gradients, or `refuse_gradient(...)` where there are none.
        vmap: the batching rule `(call, info, in_dims, *arguments) -> (outputs, out_dims)`; `call` is the operator.
        flops: twice the multiply-adds, from the arguments themselves.
        setup_context: what backward needs to save.
    """
    name = schema.partition("(")[0]
    qualified = f"regard::{name}"
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CPU")
    operator = getattr(torch.ops.regard, name)
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    torch.library.register_vmap(qualified, functools.partial(vmap, operator), lib=_LIBRARY)
    register_flop_formula(operator, get_raw=True)(flops)


def refuse_gradient(name: str, *, because: str, instead: str) -> Callable[..., Any]:
    """A backward that raises, for an operator that serves inference only."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise BackendError(
            f"regard::{name} has no gradient.", asked=f"a gradient of regard::{name}", because=because, instead=instead
        )

    return refuse


def refuse_second_gradient(backend: str, because: str) -> Callable[..., Any]:
    """The backward of a backward pass that cannot be differentiated again."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise BackendError(
            f"{backend!r} differentiates once, not twice.",
            asked="a gradient of a gradient",
            because=because,
            instead='backend="reference" for second derivatives',
        )

    return refuse


def save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """The `setup_context` of a function whose backward raises."""


def can_call_kernel(refuse: Callable[..., Any], *tensors: Tensor | None) -> bool:
    """Whether an inference-only kernel can be called directly, instead of its operator.

    Calls `refuse` for tensors with a forward-mode tangent, which the operator would ignore.
    """
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        refuse(None)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return False
    return is_plain_eager(*tensors) and all(t is None or t.is_cpu for t in tensors)
