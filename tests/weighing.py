"""Small attentions with known weights, for the laws about weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.laws import check


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return scores_of(q, k, mask).softmax(-1).nan_to_num(0.0) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
    return plain(q, k, v, past if mask is None else mask & past)


class Layer(nn.Module):
    """An operator between projections."""

    def __init__(self, core, heads: int = 3, kv_heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.core, self.heads, self.kv_heads = core, heads, kv_heads
        self.q, self.k, self.v = nn.Linear(4 * heads, 4 * heads), *(nn.Linear(4 * heads, 4 * kv_heads) for _ in "kv")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return self.core(q, k, v, None if mask is None else mask[:, None, None]).transpose(1, 2).flatten(2)


def outcome_of(law: str) -> Callable[..., str]:
    """A function that says what a fast search of one law makes of a target."""

    def outcome(target, kind: str = "operator", seed: int = 0, claims=(), **options) -> str:
        report = check(target, kind=kind, claims=[law, *claims], seed=seed, fast=True, **options)
        return report.verdicts[law].outcome

    return outcome
