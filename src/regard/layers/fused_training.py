"""Parts of a block that train in fewer passes over memory: norms, feed-forward layers and residual connections.

Each function computes what the modules would, by `regard.kernels.training`, where nothing could tell the difference but
time: plain CPU tensors in float32 or float64, outside of tracing, transforms and autocast; modules of exactly these
classes, without hooks. Elsewhere the modules run one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.kernels import library, matmul, training
from regard.kernels.eager import is_plain_eager
from regard.kernels.training import FeedForwardKind, NormKind
from regard.layers.feedforward import FeedForward
from regard.layers.linear import is_plain_linear, is_plain_module

MIN_NUMBERS = 1 << 13  # of a norm: below, a function in Python costs more than it saves


def find_norm_kind(norm: nn.Module, dtype: torch.dtype) -> NormKind | None:
    """What the kernels have to know of a norm over channels, or `None` if they cannot compute it."""
    if is_plain_module(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1:  # pyright: ignore[reportArgumentType]
        return NormKind(norm.eps, True)  # pyright: ignore[reportArgumentType]
    if is_plain_module(norm, nn.RMSNorm) and len(norm.normalized_shape) == 1:  # pyright: ignore[reportArgumentType]
        return NormKind(torch.finfo(dtype).eps if norm.eps is None else norm.eps, False)  # pyright: ignore[reportArgumentType]
    return None


def norm_with_residual(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """`norm(x)` and `x` for the residual connection."""
    kind = _find_trainable_norm(norm, x)
    if kind is None:
        return norm(x), x
    return training.norm_with_residual(x, norm.weight, getattr(norm, "bias", None), kind)  # pyright: ignore[reportArgumentType]


def _find_trainable_norm(norm: nn.Module, x: Tensor) -> NormKind | None:
    if not torch.is_grad_enabled() or not is_plain_eager(x) or library.missing() is not None:
        return None
    if x.dtype not in matmul.DTYPES or not x.is_cpu or x.numel() < MIN_NUMBERS or torch.is_autocast_enabled("cpu"):
        return None
    kind = find_norm_kind(norm, x.dtype)
    if kind is None or torch._C._len_torch_function_stack() or x.shape[-1] != norm.normalized_shape[0]:  # pyright: ignore[reportIndexIssue]
        return None
    parameters = list(norm.parameters(recurse=False))
    alike = all(p.dtype == x.dtype and p.is_cpu and is_plain_eager(p) and p.is_contiguous() for p in parameters)
    return kind if alike and (x.requires_grad or any(p.requires_grad for p in parameters)) else None


def feed_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)`, as one function where that can be."""
    made = _run_feed_forward(layer, x, None, residual=False)
    return layer(x) if made is None else made


def feed_forward_with_residual(layer: nn.Module, x: Tensor, norm: nn.Module | None) -> Tensor | None:
    """`x + layer(norm(x))`, or `None` where that cannot be one function."""
    return _run_feed_forward(layer, x, norm, residual=True)


def _run_feed_forward(layer: nn.Module, x: Tensor, norm: nn.Module | None, residual: bool) -> Tensor | None:
    if not is_plain_module(layer, FeedForward) or not isinstance(layer, FeedForward) or layer.gated:
        return None
    inner, outer, dropout = layer.inner, layer.outer, layer.dropout
    if not (is_plain_linear(inner) and is_plain_linear(outer) and is_plain_module(dropout, nn.Dropout)):
        return None
    if layer.training and dropout.training and dropout.p > 0:
        return None
    if layer.activation_fn is not type(layer).find_activation(layer.activation):
        return None
    if not training.can_train(x, inner.weight, inner.bias, outer.weight, outer.bias):
        return None
    if outer.weight.shape != inner.weight.shape[::-1] or outer.weight.stride(1) != 1:
        return None
    kind = None if norm is None else _find_trainable_norm(norm, x)
    if norm is not None and kind is None:
        return None
    parameters = (None, None) if norm is None else (norm.weight, getattr(norm, "bias", None))
    described = FeedForwardKind(layer.activation, kind, residual)
    return training.feed_forward(x, (inner.weight, inner.bias), (outer.weight, outer.bias), described, parameters)  # pyright: ignore[reportArgumentType]
