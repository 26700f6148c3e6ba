"""Layers with gradients by the kernels of `matmul.py`: linear layers, feed-forward layers, joint projections, norms.

    linear           activation-free product, with bias and residual
    feed_forward     residual + act(norm(x) W1^T + b1) W2^T + b2, with everything between the products fused into them
    project_heads    queries, keys and values as views of one product; their gradients come back as views of one matrix
    norm_with_residual   norm(x), and x itself: backward adds the gradient of the residual to that of the norm

Each is one autograd function, so that a step of a small model is not spent on dispatching. They save what torch's
layers save. A second derivative is that of the same layer in plain torch. For plain CPU tensors outside of tracing,
transforms and autocast; `can_train` says where that is so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import library, matmul
from regard.kernels.eager import is_plain_eager

# Below so many multiply-adds a function in Python costs more than the product.
MIN_PRODUCTS = 1 << 19


def can_train(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether a layer of this weight `(out, in)` and tensors of its dtype can run here, with gradients."""
    if not torch.is_grad_enabled() or not is_plain_eager(x, weight, *others) or x.dtype not in matmul.DTYPES:
        return False
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1] or x.numel() * len(weight) < MIN_PRODUCTS:
        return False
    if not all(_fits(each, x.dtype) for each in (x, weight, *others)):
        return False
    return (
        not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()
        and library.missing() is None
        and weight.stride(1) == 1
        and any(each is not None and each.requires_grad for each in (x, weight, *others))
    )


def _fits(tensor: Tensor | None, dtype: torch.dtype) -> bool:
    if tensor is None:
        return True
    dense = tensor.dim() > 1 or tensor.is_contiguous()
    return tensor.dtype == dtype and tensor.is_cpu and tensor.layout == torch.strided and dense


def _rows(x: Tensor) -> Tensor:
    """A matrix with a row for each token, whose rows are contiguous."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _dense(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _differentiate_plainly(
    ctx: Any, plain: Callable, inputs: Sequence[Tensor | None], grads: Any
) -> list[Tensor | None]:
    """Gradients that can be differentiated again: those of the layer in plain torch."""
    with torch.enable_grad():
        outputs = plain(*inputs)
        needs = zip(inputs, ctx.needs_input_grad, strict=False)
        asked = {number: each for number, (each, needed) in enumerate(needs) if needed and each is not None}
        found = torch.autograd.grad(outputs, list(asked.values()), grads, create_graph=True, allow_unused=True)
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for number, grad in zip(asked, found, strict=True):
        result[number] = grad
    return result


# A linear layer


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual):
        rows = _rows(x)
        added = None if residual is None else _rows(residual)
        ctx.save_for_backward(x, weight, bias)
        return matmul.linear_forward(rows, weight, bias, residual=added).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (x, weight, bias) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = _differentiate_plainly(ctx, F.linear, (x, weight, bias), grad)
            return *plain[:3], grad if ctx.needs_input_grad[3] else None
        rows, needs = _rows(grad), ctx.needs_input_grad
        x_grad = matmul.linear_input_grad(rows, weight).view(x.shape) if needs[0] else None
        weight_grad, bias_grad = _find_weight_grads(rows, x, needs[1], needs[2])
        return x_grad, weight_grad, bias_grad, grad if needs[3] else None


def _find_weight_grads(rows: Tensor, x: Tensor, learns_weight: bool, learns_bias: bool) -> tuple:
    if learns_weight:
        return matmul.linear_weight_grad(rows, _rows(x), learns_bias)
    return None, matmul.sum_rows(rows) if learns_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """`x weight^T + bias + residual`."""
    return _Linear.apply(x, weight, bias, residual)  # pyright: ignore[reportReturnType]


# A norm


class NormKind(NamedTuple):
    """A layer norm, or an RMS norm, which subtracts no mean and has no bias."""

    eps: float
    subtracts_mean: bool


def _plain_norm(kind: NormKind, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if kind.subtracts_mean:
        return F.layer_norm(x, x.shape[-1:], weight, bias, kind.eps)
    return F.rms_norm(x, x.shape[-1:], weight, kind.eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kind):
        output, statistics = matmul.norm_forward(_dense(x), weight, bias, *kind)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        return output.view(x.shape), x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        (grad, residual), (x, weight, bias, statistics) = grads, ctx.saved_tensors
        needs = ctx.needs_input_grad
        if grad is None:
            return residual, None, None, None
        if torch.is_grad_enabled():
            made = _differentiate_plainly(ctx, functools.partial(_plain_norm, ctx.kind), (x, weight, bias), grad)
            if residual is not None and needs[0]:
                made[0] = residual if made[0] is None else made[0] + residual
            return tuple(made)
        added = None if residual is None else _dense(residual)
        x_grad, weight_grad, bias_grad = matmul.norm_backward(
            _dense(grad), _dense(x), weight, statistics, ctx.kind.subtracts_mean, needs[2], added
        )
        return x_grad.view(x.shape) if needs[0] else None, weight_grad if needs[1] else None, bias_grad, None


def norm_with_residual(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind) -> tuple[Tensor, Tensor]:
    """`norm(x)` and `x`: whose gradient is added to that of the norm while it is written."""
    return _Norm.apply(x, weight, bias, kind)  # pyright: ignore[reportReturnType]


# A feed-forward layer

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class FeedForwardKind(NamedTuple):
    """What `feed_forward` computes beside its products. `norm` comes first; `residual` adds x to the output."""

    activation: str
    norm: NormKind | None = None
    residual: bool = False


def _plain_feed_forward(kind: FeedForwardKind) -> Callable:
    def run(x, inner, inner_bias, outer, outer_bias, weight, bias):
        read = x if kind.norm is None else _plain_norm(kind.norm, x, weight, bias)
        made = F.linear(PLAIN[kind.activation](F.linear(read, inner, inner_bias)), outer, outer_bias)
        return x + made if kind.residual else made

    return run


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, inner, inner_bias, outer, outer_bias, weight, bias, kind):
        rows, statistics = _dense(x), None
        read = rows
        if kind.norm is not None:
            read, statistics = matmul.norm_forward(rows, weight, bias, *kind.norm)
        before = library.empty_output(len(rows), len(inner), dtype=x.dtype)
        hidden = matmul.linear_forward(read, inner, inner_bias, kind.activation, saved=before)
        output = matmul.linear_forward(hidden, outer, outer_bias, residual=rows if kind.residual else None)
        normed = None if kind.norm is None else read
        ctx.save_for_backward(x, inner, inner_bias, outer, outer_bias, weight, bias, statistics, normed, before, hidden)
        ctx.kind = kind
        return output.view(*x.shape[:-1], len(outer))

    @staticmethod
    def backward(ctx, *grads):
        x, inner, inner_bias, outer, outer_bias, weight, bias, statistics, read, before, hidden = ctx.saved_tensors
        kind, needs = ctx.kind, ctx.needs_input_grad
        if torch.is_grad_enabled():
            inputs = (x, inner, inner_bias, outer, outer_bias, weight, bias)
            return tuple(_differentiate_plainly(ctx, _plain_feed_forward(kind), inputs, grads[0]))
        grad = _dense(grads[0])
        outer_grad, outer_bias_grad = _find_weight_grads(grad, hidden, needs[3], needs[4])
        hidden_grad = matmul.linear_input_grad(grad, outer, activation=kind.activation, factor=before)
        rows = _dense(x)
        inner_grad, inner_bias_grad = _find_weight_grads(
            hidden_grad, rows if read is None else read, needs[1], needs[2]
        )
        weights = (inner_grad, inner_bias_grad, outer_grad, outer_bias_grad)
        del hidden, before
        if kind.norm is None:
            added = grad if kind.residual else None
            x_grad = matmul.linear_input_grad(hidden_grad, inner, residual=added) if needs[0] else None
            return x_grad if x_grad is None else x_grad.view(x.shape), *weights, None, None, None
        if not (needs[0] or needs[5] or needs[6]):
            return None, *weights, None, None, None
        read_grad = matmul.linear_input_grad(hidden_grad, inner)
        del hidden_grad
        x_grad, weight_grad, bias_grad = matmul.norm_backward(
            read_grad, rows, weight, statistics, kind.norm.subtracts_mean, needs[6], grad if kind.residual else None
        )
        x_grad = x_grad.view(x.shape) if needs[0] else None
        return x_grad, *weights, weight_grad if needs[5] else None, bias_grad, None


def feed_forward(
    x: Tensor,
    inner: tuple[Tensor, Tensor | None],
    outer: tuple[Tensor, Tensor | None],
    kind: FeedForwardKind,
    norm: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """`x + act(norm(x) W1^T + b1) W2^T + b2`, without the norm and the residual unless `kind` has them."""
    return _FeedForward.apply(x, *inner, *outer, *norm, kind)  # pyright: ignore[reportReturnType]


# Queries, keys and values


def split_heads(joint: Tensor, widths: Sequence[int], heads: Sequence[int]) -> tuple[Tensor, ...]:
    """Views `(*batch, head, token, channel)` of a matrix that holds the channels of all heads side by side."""
    parts = joint.split(list(widths), dim=-1)
    return tuple(part.unflatten(-1, (count, -1)).transpose(-2, -3) for part, count in zip(parts, heads, strict=True))


class _ProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, widths, heads):
        joint = matmul.linear_forward(_rows(x), weight, bias).view(*x.shape[:-1], len(weight))
        ctx.save_for_backward(x, weight, bias)
        ctx.widths, ctx.heads = widths, heads
        ctx.set_materialize_grads(False)
        return split_heads(joint, widths, heads)

    @staticmethod
    def backward(ctx, *grads):
        x, weight, bias = ctx.saved_tensors
        shape = (*x.shape[:-1], len(weight))
        if torch.is_grad_enabled():
            grad = join_heads(grads, shape, ctx.widths, x)
            return tuple(_differentiate_plainly(ctx, F.linear, (x, weight, bias), grad))
        needs = ctx.needs_input_grad
        rows = _rows(find_joint(grads, shape, ctx.widths, x))
        x_grad = matmul.linear_input_grad(rows, weight).view(x.shape) if needs[0] else None
        return x_grad, *_find_weight_grads(rows, x, needs[1], needs[2]), None, None


def find_joint(grads: Sequence[Tensor | None], shape: tuple[int, ...], widths: Sequence[int], like: Tensor) -> Tensor:
    """The matrix that gradients of heads are views of, if they are side by side in one; else a copy of them."""
    strides, place, first = [1] * len(shape), 0, grads[0]
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    for grad, width in zip(grads, widths, strict=True):
        if grad is None or first is None:
            break
        side_by_side = (*strides[:-2], grad.shape[-1], strides[-2], 1)
        address = first.data_ptr() + place * grad.element_size()
        same = grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or grad.data_ptr() != address or grad.stride() != side_by_side:
            break
        place += width
    else:
        assert first is not None
        return first.as_strided(shape, strides)
    return join_heads(grads, shape, widths, like)


def join_heads(grads: Sequence[Tensor | None], shape: tuple[int, ...], widths: Sequence[int], like: Tensor) -> Tensor:
    parts = [
        like.new_zeros(*shape[:-1], width) if grad is None else grad.transpose(-2, -3).flatten(-2)
        for grad, width in zip(grads, widths, strict=True)
    ]
    return torch.cat(parts, -1)


def project_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], heads: Sequence[int]
) -> tuple[Tensor, ...]:
    """Views of `x weight^T + bias`, each `(*batch, head, token, channel)`; `widths` are their channels."""
    return _ProjectHeads.apply(x, weight, bias, tuple(widths), tuple(heads))  # pyright: ignore[reportReturnType]
