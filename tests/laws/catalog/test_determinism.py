"""L12: dropout is off in eval mode, memory is written before it is read, inputs are not modified."""

from __future__ import annotations

import pytest
import torch
from third_party_attention import Layer, causal, fused, naive
from torch import nn
from torch.nn import functional as F

from regard.laws import check


class Always(Layer):
    def weights(self, query, key, mask):
        return F.dropout(super().weights(query, key, mask), 0.1)


class Configured(Layer):
    """Its dropout ignores the mode, and is zero unless the law raises it."""

    attn_drop = 0.0

    def __init__(self):
        super().__init__()
        self.attn_drop = 0.0

    def weights(self, query, key, mask):
        return F.dropout(super().weights(query, key, mask), self.attn_drop)


class Fused(Layer):
    def forward(self, x, mask=None):
        query, key, value = self.split(x)
        return self.merge(F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout.p))


def random_features(query, key, value, mask=None):
    directions = torch.randn(query.shape[-1], 13, dtype=query.dtype)
    weights = (query @ directions).exp() @ (key @ directions).exp().mT
    return weights / weights.sum(-1, keepdim=True) @ value


def in_place(query, key, value, mask=None):
    query *= 0.5
    return naive(query, key, value, mask)


def unwritten(query, key, value, mask=None):
    """Whole blocks of 16 queries are computed, the rest is whatever lies there."""
    output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    whole = query.shape[2] // 16 * 16 if query.shape[2] > 16 else query.shape[2]
    output[:, :, :whole] = naive(query[:, :, :whole], key, value, mask)
    return output


def masked_only(query, key, value, mask=None):
    output = naive(query, key, value, mask)
    return output if mask is None or query.shape[2] < 9 else F.dropout(output, 0.02)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        pytest.param(naive, "operator", marks=pytest.mark.slow),
        (causal, "operator"),
        pytest.param(fused, "operator", marks=pytest.mark.slow),
        (Layer(dropout=0.3), "layer"),
        (nn.MultiheadAttention(12, 3, dropout=0.3, batch_first=True), None),
        pytest.param(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), None, marks=pytest.mark.slow),
        (nn.TransformerEncoderLayer(12, 4, 20, batch_first=True), None),  # torch fuses even numbers of heads
    ],
    ids=["naive", "causal", "fused", "layer", "torch's attention", "torch's encoder", "torch's fused encoder"],
)
def test_correct_subjects_hold(target, kind):
    verdict = check(target, kind=kind, claims=["determinism"], seed=2, fast=True).verdicts["determinism"]
    assert verdict.outcome == "holds"
    assert verdict.refused == 0


@pytest.mark.parametrize("target", [Always(), Configured(), Fused()], ids=lambda target: type(target).__name__)
def test_dropout_that_ignores_the_mode_is_found(target):
    assert check(target, kind="layer", claims=["determinism"]).verdicts["determinism"].outcome == "broken"


@pytest.mark.parametrize("target", [random_features, in_place, masked_only], ids=lambda target: target.__name__)
def test_operators_with_two_outputs_for_one_input_are_found(target):
    assert check(target, kind="operator", claims=["determinism"]).verdicts["determinism"].outcome == "broken"


def test_reads_of_uninitialised_memory_are_found():
    # What lies there may differ from look to look.
    assert check(unwritten, kind="operator", claims=["determinism"]).verdicts["determinism"].outcome in (
        "broken",
        "flaky",
    )


def test_the_switches_of_torch_are_put_back():
    check(naive, kind="operator", claims=["determinism"], fast=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def noisy_step(query, key, value, mask=None):
    output = naive(query, key, value, mask)
    return output + torch.randn(()) if query.shape[-2] == 1 else output


def noisy_step_over_many(query, key, value, mask=None):
    return noisy_step(query, key, value, mask) if key.shape[-2] > 1 else naive(query, key, value, mask)


class NoisyStep(Layer):
    def forward(self, x, mask=None):
        output = super().forward(x, mask)
        return output + torch.randn(()) if x.shape[1] == 1 else output


def writes_the_mask(query, key, value, mask=None):
    triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(key.shape[-2] - query.shape[-2])
    if mask is not None and mask.shape[-2:] == triangle.shape:
        mask &= triangle  # a second time it changes nothing
    return naive(query, key, value, triangle if mask is None else triangle & mask)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (noisy_step, "operator"),
        (noisy_step_over_many, "operator"),
        (NoisyStep(), "layer"),
        (writes_the_mask, "operator"),
    ],
    ids=["one query", "one query over many keys", "one token", "mask"],
)
def test_a_single_query_and_the_mask_are_checked_too(target, kind):
    report = check(target, kind=kind, claims=["determinism"], fast=True)
    assert report.verdicts["determinism"].outcome == "broken"
