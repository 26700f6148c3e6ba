"""Weights respond to their logits as a softmax does."""

from __future__ import annotations

import pytest
import torch
from plain import slow
from torch import Tensor

from regard.laws import check


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return _scores(q, k, mask).softmax(-1).nan_to_num(0.0) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
    return plain(q, k, v, past if mask is None else mask & past)


def outcome(target, kind: str = "operator", seed: int = 0, claims=(), **options) -> str:
    report = check(target, kind=kind, claims=["jacobian", *claims], seed=seed, fast=True, **options)
    return report.verdicts["jacobian"].outcome


class Careless(torch.autograd.Function):
    @staticmethod
    def forward(context, scores):
        weights = scores.softmax(-1)
        context.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(context, gradient):
        (weights,) = context.saved_tensors
        return weights * (1 - weights) * gradient


def careless(q, k, v, mask=None):
    return Careless.apply(_scores(q, k, mask)).nan_to_num(0.0) @ v


def detached(q, k, v, mask=None):
    raised = _scores(q, k, mask).exp()
    return raised @ v / raised.sum(-1, keepdim=True).detach()


def twice(q, k, v, mask=None):
    return _scores(q, k, mask).softmax(-1).softmax(-1) @ v


def sharp(q, k, v, mask=None):
    return _scores(q, k, mask, 1.7).softmax(-1).nan_to_num(0.0) @ v


def linear(q, k, v, mask=None):
    weights = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    weights = weights if mask is None else weights * mask
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("seed", [0, *slow(1)])
@pytest.mark.parametrize("core", [plain, causal, sharp, linear], ids=lambda core: core.__name__)
def test_a_softmax_of_any_beta_holds(core, seed: int) -> None:
    assert outcome(core, seed=seed) == "holds"


@pytest.mark.parametrize("core", [careless, detached, twice], ids=lambda core: core.__name__)
def test_another_derivative_is_broken(core) -> None:
    assert outcome(core) == "broken"


SOMETIMES = {
    "many keys": lambda q, k, mask: k.shape[-2] > 32,
    "many keys and a mask": lambda q, k, mask: k.shape[-2] > 32 and mask is not None and not bool(mask.all()),
    "few queries": lambda q, k, mask: q.shape[-2] < k.shape[-2],
}


@pytest.mark.parametrize("when", SOMETIMES)
def test_another_derivative_at_some_sizes_is_broken(when: str) -> None:
    def doubled(q, k, v, mask=None):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if SOMETIMES[when](q, k, mask):
            scores = 2 * scores - scores.detach()
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v

    assert outcome(doubled) == "broken"


def test_weights_that_fade_into_nothing_hold() -> None:
    def steep(q, k, v, mask=None):
        distance = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - torch.arange(k.shape[-2])
        return (_scores(q, k, mask) - 2.3 * distance.abs()).softmax(-1).nan_to_num(0.0) @ v

    assert outcome(steep) == "holds"
