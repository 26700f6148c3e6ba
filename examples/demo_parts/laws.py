"""The laws of the trained models, and a counterexample for a faulty layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard import LawViolation, assert_laws, check
from regard.laws import Report


class OffByOne(nn.Module):
    """Causal attention with a faulty mask: every token attends to the next one, too."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(diagonal=2)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def check_models(
    models: dict[str, nn.Module], report: Callable[[str], None], only: list[str] | None = None
) -> dict[str, Report]:
    """A fast check of each model: every law that it claims, or only some."""
    found = {}
    for name, model in models.items():
        report(name)
        found[name] = check(model, fast=True, name=name, only=only)
    return found


def report_off_by_one() -> str:
    """The report about a mask that is off by one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = OffByOne()
    try:
        assert_laws(layer, claims=["causality"], fast=True)
    except LawViolation as violation:
        return f"LawViolation: {violation}"
    raise AssertionError("the laws missed a mask that is off by one")
