"""torch's modules are recognised, called as documented, and hold their claims, with one exception."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from examination import find_violations
from plain import slow_but
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from regard.adapters import adapt
from regard.adapters.rng import Rng
from regard.laws import check
from regard.patterns import Causal


def encoder_layer(**more) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(12, 4, 20, **{"batch_first": True, **more})


MODULES = {
    "attention": lambda: nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True),
    "attention, tokens first": lambda: nn.MultiheadAttention(12, 3),
    "attention, more keys": lambda: nn.MultiheadAttention(
        12, 3, add_bias_kv=True, add_zero_attn=True, batch_first=True
    ),
    "encoder layer": lambda: encoder_layer(norm_first=True),
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 2),
    "encoder, not nested": lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
    "decoder layer, tokens first": lambda: nn.TransformerDecoderLayer(12, 4, 20),
    "fused": lambda: scaled_dot_product_attention,
    "fused, causal": lambda: partial(scaled_dot_product_attention, is_causal=True),
    "fused, groups": lambda: partial(scaled_dot_product_attention, enable_gqa=True),
}


FAST = ("attention", "fused, causal")


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(FAST, MODULES))
def test_torch_holds_to_what_it_documents(name: str):
    assert find_violations(MODULES[name](), 7) == []


@pytest.mark.parametrize("first", [True, False])
def test_attention_reads_itself_whichever_axis_comes_first(first: bool):
    module = nn.MultiheadAttention(12, 3, batch_first=first).eval()
    subject = adapt(module)
    x = subject.draw(2, 5, Rng(0))
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])
    tokens = x if first else x.transpose(0, 1)
    wanted, weights = module(tokens, tokens, tokens, key_padding_mask=~mask, average_attn_weights=False)
    torch.testing.assert_close(subject.run(x, mask), wanted if first else wanted.transpose(0, 1))
    torch.testing.assert_close(subject.weights(x, mask)[0], weights)


def test_every_variant_of_an_attention_is_the_same_with_padding():
    subject = adapt(nn.MultiheadAttention(12, 3, batch_first=True))
    x, mask = subject.draw(2, 5, Rng(0)), torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    variants = subject.variants()
    assert {"additive mask", "need_weights=False", "attn_mask", "fast path off"} <= set(variants)
    for way in variants.values():
        torch.testing.assert_close(way(x, mask), subject.run(x, mask))


def test_the_fused_operator_sits_at_the_start_when_it_is_causal():
    subject = adapt(partial(scaled_dot_product_attention, is_causal=True))
    assert subject.conventions.align == "start"
    assert subject.conventions.pattern == Causal()
    assert "mask" not in subject.abilities
    assert "mask" in adapt(scaled_dot_product_attention).abilities


@pytest.mark.slow
def test_a_decoder_padded_on_the_left_is_broken_without_gradients():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 4, 20, batch_first=True), 2)
    report = check(decoder, claims=["causality", "padding"], fast=True)
    assert report.verdicts["causality"].outcome == "holds"
    counterexample = report.verdicts["padding"].counterexample
    assert counterexample is not None
    assert counterexample.case["side"] == "left"


def test_an_attention_that_loses_its_padding_is_found():
    class Loses(nn.MultiheadAttention):
        def forward(self, query, key, value, key_padding_mask=None, **more):
            return super().forward(query, key, value, **more)

    report = check(Loses(12, 3, batch_first=True), claims=["padding", "determinism"], fast=True)
    assert report.verdicts["padding"].outcome == "broken"
    assert report.verdicts["determinism"].outcome == "holds"


def test_a_subclass_with_another_signature_is_not_recognised_as_torch():
    class Other(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    assert type(adapt(Other(12, 3, batch_first=True), kind="layer")).__name__ == "LayerAdapter"
