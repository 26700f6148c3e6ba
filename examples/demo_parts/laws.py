"""The trained models before the laws, and a mistake that the laws find."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard import LawViolation, assert_laws, check
from regard.laws import Report


class OffByOne(nn.Module):
    """Causal attention that was written late at night: its mask lets every token see the next one."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(diagonal=2)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def judge(
    models: dict[str, nn.Module], tell: Callable[[str], None], only: list[str] | None = None
) -> dict[str, Report]:
    """A fast check of each: every law that it claims, or only some."""
    found = {}
    for name, model in models.items():
        tell(name)
        found[name] = check(model, fast=True, name=name, only=only)
    return found


def mistake() -> str:
    """What the laws say about a mask that is off by one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = OffByOne()
    try:
        assert_laws(layer, claims=["causality"], fast=True)
    except LawViolation as violation:
        return f"LawViolation: {violation}"
    raise AssertionError("the laws missed a mask that is off by one")
