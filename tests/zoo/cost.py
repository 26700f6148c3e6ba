"""Cost that grows faster than declared, and shapes that depend on the content of a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given, report


def features(x):
    return F.elu(x) + 1


def linear(q, k, v):
    memory = torch.einsum("bhnd,bhne->bhde", features(k), v)
    return torch.einsum("bhnd,bhde->bhne", features(q), memory) / (features(q) @ features(k).sum(2)[..., None])


def linear_in_name(q, k, v):
    """The same numbers, multiplied in the order that makes the square."""
    weights = torch.einsum("bhnd,bhmd->bhnm", features(q), features(k))
    return weights @ v / weights.sum(-1, keepdim=True)


# CO1, CO2: layers that say what they cost


class Counted(nn.Module):
    """Attention that declares its operations, a multiply-add as two."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def kernel(self, batch, tokens):
        return 4 * batch * tokens**2 * self.dim

    def flops(self, batch, tokens):
        return 8 * batch * tokens * self.dim**2 + self.kernel(batch, tokens)


class CountedWithoutTheKernel(Counted):
    """The kernel of this machine is not in the table of those that are counted."""

    table = {"flash_cuda": 4, "efficient_cuda": 4}  # noqa: RUF012

    def kernel(self, batch, tokens):
        return self.table.get("flash_cpu", 0) * batch * tokens**2 * self.dim


class CountedByModules(nn.Module):
    """Multiply-adds, gathered from the modules inside and from the products between them."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        weights = (torch.bmm(self.q(x), self.k(x).mT) / self.dim**0.5).softmax(-1)
        return torch.bmm(weights, self.v(x))

    def between(self, tokens):
        return 2 * tokens**2 * self.dim

    def macs(self, tokens):
        return sum(tokens * part.weight.numel() for part in self.children()) + self.between(tokens)


class CountedByModulesAlone(CountedByModules):
    def between(self, tokens):
        return 0


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
    """As converting back from a nested tensor does: the output is as long as the longest row."""

    def trimmed(self, y, mask):
        return y[:, : int(mask.sum(1).max())]


EXHIBITS = [
    Exhibit(
        "CO1",
        report("pytorch/pytorch/issues/195460"),
        "The kernel that runs here is missing in the table of counts, and counts as nothing.",
        "layer",
        CountedWithoutTheKernel,
        Counted,
        ("cost",),
        ("cost", "permutation"),
    ),
    Exhibit(
        "CO2",
        report("MrYxJ/calculate-flops.pytorch/issues/48"),
        "Modules are counted and the products between them are not, so the count is a straight line.",
        "layer",
        CountedByModulesAlone,
        CountedByModules,
        ("cost",),
        ("cost", "permutation"),
    ),
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
