"""Channel attention: each channel attends to the channels of its group, by inner products over all tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, InputError
from regard.kernels.eager import is_plain_inference
from regard.kernels.grid import DTYPES, channel_attention
from regard.layers.linear import Linear, can_fuse_residual, linear

# Up to so many groups they are multiplied one after the other, read where they are; more are copied together first.
# Measured with 32 channels each (two cores, AVX2): 1.1 to 1.4 times as fast for 3 and 6 groups, slower for 12 and 24.
FEW_GROUPS = 8


class ChannelAttention(nn.Module):
    """Attention with channels in the place of tokens, inside groups of channels.

        q, k, v = x Wqkv + bqkv                      (token, channel), cut into groups of C = dim / groups channels
        A = softmax(beta q^T k)                      (C, C) for each group; a row belongs to a query channel
        output = Wproj concat_g( v A^T ) + bproj     token n: output[n, c] = sum_c' A[c, c'] v[n, c']

    Queries are scaled before the product: a sum over all tokens of an image may be too large for float16, and beta
    times it is not so soon.

    It costs `2 N dim C` multiplications for N tokens: linear in the tokens, and every token takes part.

    `beta` is `1 / sqrt(C)` for `scale="dim"`, as published, although the inner product runs over the N tokens;
    `scale="tokens"` takes `1 / sqrt(N)`, which gives scores of unit variance whatever the size of the image.

    The input is `(batch, *tokens, dim)`: a sequence or a grid, in any order of tokens.

    Source: Ding et al., DaViT (2022), section 3.3, equation 4.

    Where we differ: our query, key and value are the published code's k, v and q, which only matters for loading its
    weights.

        >>> ChannelAttention(8, groups=2)(torch.randn(2, 3, 5, 8)).shape
        torch.Size([2, 3, 5, 8])

    Args:
        dim: channels of the tokens.
        groups: groups of channels that attend to each other.
        scale: `"dim"` or `"tokens"`, see above.
        bias: whether the projections of query, key and value have a bias.
    """

    def __init__(self, dim: int, groups: int, scale: Literal["dim", "tokens"] = "dim", *, bias: bool = True) -> None:
        super().__init__()
        if groups < 1 or dim % groups or scale not in ("dim", "tokens"):
            raise ConfigError(
                "This channel attention cannot be built.",
                asked=f"ChannelAttention(dim={dim}, groups={groups}, scale={scale!r})",
                because=f"{dim} channels are cut into equal groups, and scores are scaled by channels or by tokens",
                instead='a number of groups that divides dim, and scale="dim" or scale="tokens"',
            )
        self.dim, self.groups, self.scale = dim, groups, scale
        self.qkv = Linear(dim, 3 * dim, bias=bias)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return self.proj(self._mix(x)).reshape(x.shape)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, which the last product fuses where no gradient is needed."""
        if not can_fuse_residual(self, ChannelAttention, self.proj, residual, x):
            return residual + self(x)
        self._check(x)
        return linear(self._mix(x).view(x.shape), self.proj.weight, self.proj.bias, residual=residual)

    def _mix(self, x: Tensor) -> Tensor:
        """The attention between the projections, `(batch, token, dim)`."""
        tokens = x.flatten(1, -2)
        made = self.qkv(tokens)
        size = self.dim // self.groups if self.scale == "dim" else max(tokens.shape[1], 1)
        if is_plain_inference(made) and made.dtype in DTYPES:
            return channel_attention(made, self.groups, size**-0.5)
        mix = _mix_by_group if self.groups <= FEW_GROUPS else _mix_batched
        return mix(made.unflatten(-1, (3, self.groups, -1)), size**-0.5)

    def _check(self, x: Tensor) -> None:
        if x.ndim < 3 or x.shape[-1] != self.dim:
            raise InputError(
                "These are not tokens with the right channels.",
                asked=f"(batch, token, {self.dim}) or (batch, row, column, {self.dim})",
                found=f"a tensor {tuple(x.shape)}",
                because="channels come last, and they are what attends",
                instead="image.permute(0, 2, 3, 1), if channels come first",
            )

    def extra_repr(self) -> str:
        return f"{self.dim}, groups={self.groups}, scale={self.scale!r}"


def _mix_batched(parts: Tensor, beta: float) -> Tensor:
    """All groups of all images in one batch of products; `parts` is `(batch, token, 3, group, channel)`."""
    query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)  # batch, group, token, channel
    weight = ((query * beta).transpose(-1, -2) @ key).softmax(-1)
    return (value @ weight.transpose(-1, -2)).transpose(1, 2).flatten(2)


def _mix_by_group(parts: Tensor, beta: float) -> Tensor:
    """The same, group after group: each is a strided matrix that a product reads without a copy."""
    groups = parts.shape[3]
    query = (parts[:, :, 0] * beta).unbind(2)  # (batch, token, channel) each
    views = parts[:, :, 1:].flatten(2, 3).unbind(2)
    key, value = views[:groups], views[groups:]
    scores = torch.stack([torch.bmm(q.transpose(1, 2), k) for q, k in zip(query, key, strict=True)])
    weight = scores.softmax(-1).transpose(-1, -2).unbind(0)
    return torch.cat([torch.bmm(v, w) for v, w in zip(value, weight, strict=True)], -1)


__all__ = ["ChannelAttention"]
