"""Work that grows faster than promised, and shapes that depend on what is in a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given


def features(x):
    return F.elu(x) + 1


def linear(q, k, v):
    memory = torch.einsum("bhnd,bhne->bhde", features(k), v)
    return torch.einsum("bhnd,bhde->bhne", features(q), memory) / (features(q) @ features(k).sum(2)[..., None])


def linear_in_name(q, k, v):
    """The same numbers, multiplied in the order that makes the square."""
    weights = torch.einsum("bhnd,bhmd->bhnm", features(q), features(k))
    return weights @ v / weights.sum(-1, keepdim=True)


# Shapes


class Trimmed(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)

    def trimmed(self, y, mask):
        return y

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v)
        return self.trimmed(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, :]), mask)


class TrimmedToTheLongest(Trimmed):
    """As a nested tensor does on its way back: the output is as long as the longest row."""

    def trimmed(self, y, mask):
        return y[:, : int(mask.sum(1).max())]


EXHIBITS = [
    Exhibit(
        "L19-order",
        "",
        "A linear attention makes the whole square of weights.",
        "operator",
        given(linear_in_name),
        given(linear),
        ("cost",),
        ("cost", "permutation"),
        {"growth": 1.0},
    ),
    Exhibit(
        "L23-longest",
        "",
        "The output is as long as the longest row that is not padding.",
        "layer",
        TrimmedToTheLongest,
        Trimmed,
        ("shape",),
        ("shape", "padding", "determinism"),
    ),
]
