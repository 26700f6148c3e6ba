"""Right outputs with wrong gradients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given, report


class Attention(torch.autograd.Function):
    """Attention with a backward of its own, as kernels have it."""

    @staticmethod
    def forward(ctx, q, k, v):
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        dv = weights.mT @ grad
        dp = grad @ v.mT
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, dv


class TransposedTwice(Attention):
    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        # k and v come back in another layout, and are turned once more than they should be
        k, v = (x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (k, v))
        dv = weights.mT @ grad
        dp = grad @ v.mT
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, dv


class WithoutScale(Attention):
    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        dp = grad @ v.mT
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, weights.mT @ grad


class DiagonalOnly(Attention):
    """The derivative of the exponential without that of its sum."""

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        ds = weights * (grad @ v.mT) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, weights.mT @ grad


def with_right_backward(q, k, v):
    return Attention.apply(q, k, v)


def with_turned_backward(q, k, v):
    return TransposedTwice.apply(q, k, v)


def with_unscaled_backward(q, k, v):
    return WithoutScale.apply(q, k, v)


def with_diagonal_backward(q, k, v):
    return DiagonalOnly.apply(q, k, v)


# GR2: a bias that learns alone


class Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = (scores if bias is None else scores + bias).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.shape = None if bias is None else bias.shape
        return weights @ v

    @staticmethod
    def parts(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        dp = grad @ v.mT
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True))
        scale = q.shape[-1] ** -0.5
        return ds @ k * scale, ds.mT @ q * scale, weights.mT @ grad, ds

    @staticmethod
    def backward(ctx, grad):
        *rest, ds = Biased.parts(ctx, grad)
        return *rest, None if ctx.shape is None else ds.sum_to_size(ctx.shape)


class BiasedWithoutItsOwn(Biased):
    @staticmethod
    def backward(ctx, grad):
        *rest, ds = Biased.parts(ctx, grad)
        if ctx.shape is None:
            return *rest, None
        # what the gradient of the bias needs was saved for queries only
        return *rest, ds.sum_to_size(ctx.shape) if ctx.needs_input_grad[0] else ds.new_zeros(ctx.shape)


def _as_bias(mask, like):
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill(~mask, -torch.inf)


def learned_bias(q, k, v, mask=None):
    return Biased.apply(q, k, v, _as_bias(mask, q))


def learned_bias_without_gradient(q, k, v, mask=None):
    return BiasedWithoutItsOwn.apply(q, k, v, _as_bias(mask, q))


# GR4, NA7, and our own: what does not fill a block


class Chunk(torch.autograd.Function):
    """Keeps the gradient of whole chunks."""

    @staticmethod
    def forward(ctx, gate, size):
        ctx.size = size
        return gate.cumsum(1)

    @staticmethod
    def backward(ctx, grad):
        whole = grad.shape[1] // ctx.size * ctx.size if grad.shape[1] > ctx.size else grad.shape[1]
        grad = torch.cat([grad[:, :whole], torch.zeros_like(grad[:, whole:])], 1)
        return grad.flip(1).cumsum(1).flip(1), None


class LogDecay(nn.Module):
    """Linear attention in which a gate decides how fast the past fades."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv, self.gate = nn.Linear(dim, 3 * dim), nn.Linear(dim, 1)

    def summed(self, gate):
        return gate.cumsum(1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        total = self.summed(F.logsigmoid(self.gate(x)))[..., 0]
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        fade = (total[:, :, None] - total[:, None, :]).masked_fill(future, -torch.inf).exp()
        return ((q @ k.mT / math.sqrt(self.dim)) * fade) @ v


class LogDecayWithoutTail(LogDecay):
    def summed(self, gate):
        return Chunk.apply(gate, 16)


def _in_whole_blocks(q, k, v, fill, block=16):
    """Queries are padded to whole blocks; rows that were added see nothing."""
    n, extra = q.shape[2], -q.shape[2] % block
    q = F.pad(q, (0, 0, 0, extra))
    real = torch.arange(n + extra)[:, None] < n
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~real, fill)
    return (scores.softmax(-1) @ v)[:, :, :n]


def whole_blocks(q, k, v):
    return _in_whole_blocks(q, k, v, 0.0)


def whole_blocks_of_nothing(q, k, v):
    return _in_whole_blocks(q, k, v, -torch.inf)


def constant_sum(q, k, v):
    """The sum that weights are divided by is taken for a constant."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return weights / weights.sum(-1, keepdim=True).detach() @ v


def constant_maximum(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


CLAIMS = ("gradients", "permutation")

EXHIBITS = [
    Exhibit(
        "GR1",
        report("huggingface/diffusers/issues/14338"),
        "Keys and values are transposed once too often in backward.",
        "operator",
        given(with_turned_backward),
        given(with_right_backward),
        ("gradients",),
        CLAIMS,
    ),
    Exhibit(
        "L13-scale",
        "",
        "Backward omits the scale.",
        "operator",
        given(with_unscaled_backward),
        given(with_right_backward),
        ("gradients",),
        ("gradients", "jacobian"),
    ),
    Exhibit(
        "L21-diagonal",
        "",
        "The derivative of the softmax is its diagonal alone.",
        "operator",
        given(with_diagonal_backward),
        given(with_right_backward),
        ("jacobian",),
        ("gradients", "jacobian"),
    ),
    Exhibit(
        "L21-sum",
        "",
        "The sum of the softmax is detached.",
        "operator",
        given(constant_sum),
        given(constant_maximum),
        ("jacobian", "gradients"),
        ("gradients", "jacobian"),
    ),
    Exhibit(
        "GR2",
        report("pytorch/pytorch/issues/148476"),
        "A bias that is the only one to learn gets no gradient.",
        "operator",
        given(learned_bias_without_gradient),
        given(learned_bias),
        ("gradients",),
        ("gradients", "paths"),
    ),
    Exhibit(
        "GR4",
        report("fla-org/flash-linear-attention/issues/1142"),
        "Gates in the last chunk get no gradient unless they fill it.",
        "layer",
        LogDecayWithoutTail,
        LogDecay,
        ("gradients",),
        ("gradients", "causality"),
    ),
    Exhibit(
        "NA7",
        report("pytorch/pytorch/issues/153799"),
        "Rows that fill up the last block see nothing, and their gradient is no number.",
        "operator",
        given(whole_blocks_of_nothing),
        given(whole_blocks),
        ("gradients",),
        CLAIMS,
    ),
]
