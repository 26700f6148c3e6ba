"""L11: switches, modes, memory formats, masks and lengths select a code path and do not change the output."""

from __future__ import annotations

import pytest
import torch
from plain import slow, slow_but
from third_party_attention import Layer, causal, fused, naive
from torch import nn
from torch.nn import functional as F

from regard.adapters import adapt
from regard.laws import check
from regard.laws.catalog.paths import STRIDES, make_strided
from regard.laws.textbook import find_textbook_formula
from regard.layers import MultiHeadAttention


def whole_blocks(query, key, value, mask=None):
    """Beyond 64 keys, those after the last whole block are lost."""
    if key.shape[-2] > 64:
        keys = key.shape[-2] // 64 * 64
        mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :keys]
        return naive(query, key[..., :keys, :], value[..., :keys, :], mask)
    return naive(query, key, value, mask)


def unscaled_with_mask(query, key, value, mask=None):
    if mask is None:
        return naive(query, key, value)
    return (query @ key.mT).masked_fill(~mask, -1e30).softmax(-1) @ value


def strides_ignored(query, key, value, mask=None):
    query = torch.as_strided(query, query.shape, torch.empty(query.shape).stride(), query.storage_offset())
    return naive(query, key, value, mask)


def numbers_ignored(query, key, value, mask=None):
    return naive(query, key, value, mask if mask is None or mask.dtype == torch.bool else None)


def broadcast_ignored(query, key, value, mask=None):
    return naive(query, key, value, mask if mask is None or mask.shape[-2] == query.shape[-2] else None)


def weights_without_mask(query, key, value, mask=None, need_weights=False):
    return naive(query, key, value, None if need_weights else mask)


def one_query(query, key, value, mask=None):
    output = naive(query, key, value, mask)
    return output if query.shape[-2] > 1 or key.shape[-2] == 1 else output * 1.001


def half(query, key, value, mask=None):
    return query @ key.mT @ value if query.dtype == torch.bfloat16 else naive(query, key, value, mask)


def hidden_block(query, key, value, mask=None):
    """The maximum of a first block of keys in which nothing may be seen is no number."""
    output = naive(query, key, value, mask)
    if mask is None or key.shape[-2] <= 64:
        return output
    empty = ~mask.expand(*mask.shape[:-1], key.shape[-2])[..., :64].any(-1, keepdim=True)
    return output.masked_fill(empty, float("nan"))


class EvaluationUnmasked(Layer):
    def forward(self, x, mask=None):
        return super().forward(x, mask if self.training else None)


class GradientPath(Layer):
    def forward(self, x, mask=None):
        return super().forward(x * 1.001 if torch.is_grad_enabled() else x, mask)


class OnesPath(Layer):
    def forward(self, x, mask=None):
        return super().forward(x * 1.001 if mask is not None and mask.all() else x, mask)


class FusedUnmasked(Layer):
    fused_attn = True

    def forward(self, x, mask=None):
        query, key, value = self.split(x)
        if self.fused_attn:
            return self.merge(F.scaled_dot_product_attention(query, key, value))
        return self.merge(self.weights(query, key, mask) @ value)


class Strided(Layer):
    def forward(self, x, mask=None):
        return super().forward(x if x.is_contiguous() else x.flip(-1), mask)


class NumbersIgnored(Layer):
    def forward(self, x, mask=None):
        return super().forward(x, mask if mask is None or mask.dtype == torch.bool else None)


RIGHT = {
    "naive": (naive, "operator"),
    "causal": (causal, "operator"),
    "fused": (fused, "operator"),
    "layer": (Layer(dropout=0.2), "layer"),
    "torch's attention": (nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True), None),
    "torch's encoder": (nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), None),
    "ours": (MultiHeadAttention(12, 3), None),
}
OPERATORS = [whole_blocks, strides_ignored, weights_without_mask, half, hidden_block]
OPERATORS += slow(unscaled_with_mask, numbers_ignored, broadcast_ignored, one_query)
LAYERS = [EvaluationUnmasked, GradientPath, FusedUnmasked, *slow(OnesPath, Strided, NumbersIgnored)]


@pytest.mark.parametrize("name", slow_but(("causal", "layer"), RIGHT))
def test_correct_subjects_have_one_output(name):
    target, kind = RIGHT[name]
    assert check(target, kind=kind, claims=["paths"], seed=6, fast=True).verdicts["paths"].outcome == "holds"


@pytest.mark.parametrize("target", OPERATORS, ids=lambda target: target.__name__)
def test_operators_whose_paths_differ_are_found(target):
    assert check(target, kind="operator", claims=["paths"], fast=True).verdicts["paths"].outcome == "broken"


@pytest.mark.parametrize("target", LAYERS, ids=lambda target: target.__name__)
def test_layers_whose_paths_differ_are_found(target):
    assert check(target(), kind="layer", claims=["paths"], fast=True).verdicts["paths"].outcome == "broken"


def test_normalisation_by_the_batch_may_differ_in_training():
    class Normalised(Layer):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(12)

        def forward(self, x, mask=None):
            return super().forward(self.norm(x.mT).mT, mask)

    assert check(Normalised(), kind="layer", claims=["paths"], fast=True).ok


def test_randomness_without_a_switch_is_not_reported():
    class Noisy(Layer):
        def forward(self, x, mask=None):
            return super().forward(F.dropout(x, 0.3, self.training), mask)

    assert check(Noisy(), kind="layer", claims=["paths"], fast=True).ok


def test_the_formula_is_read_off():
    found = find_textbook_formula(adapt(causal, "operator"))
    assert found is not None
    assert (found.causal, found.align, found.masks) == (True, "end", True)
    sharper = find_textbook_formula(adapt(lambda query, key, value: naive(3 * query, key, value), "operator"))
    assert sharper is None


@pytest.mark.parametrize("name", STRIDES)
def test_strided_memory_holds_the_same_numbers(name):
    x = torch.randn(2, 3, 5)
    plain, view = make_strided(x, name)
    assert torch.equal(plain, view)
    assert plain.is_contiguous()
    assert not view.is_contiguous()
