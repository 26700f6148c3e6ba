"""What is saved for backward, to the byte: what saved-tensor hooks see in a run in float32, without dropout."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cost_model.counting import measure_saved_bytes
from plain import slow
from torch import nn

from regard.attention import Attention
from regard.biases import Alibi, RelativeTable
from regard.cost_model import cost
from regard.layers import (
    AttentionSizes,
    FeedForward,
    LearnedPositions,
    Linear,
    MultiHeadAttention,
    Rotary,
    TransformerBlock,
)
from regard.models import GPT, Bert, BertConfig, GPTConfig, Transformer, TransformerConfig
from regard.patterns import Causal, Window

SMALL = {"vocab_size": 11, "dim": 12, "layers": 2, "heads": 6, "dropout": 0.0}


def words(batch: int, count: int) -> torch.Tensor:
    return torch.randint(0, 11, (batch, count))


def assert_saved_bytes(module: nn.Module, *inputs, sizes: dict | None = None, **kwargs) -> None:
    sizes = {"batch": inputs[0].shape[0], "tokens": inputs[0].shape[1]} if sizes is None else sizes
    assert cost(module, **sizes).activation_bytes == measure_saved_bytes(module, *inputs, **kwargs)


@pytest.mark.parametrize(
    ("layer", "numbers"),
    [
        # The input is not theirs: what is left are statistics of each of ten rows, and activations.
        (Linear(7, 3), 0),
        (nn.LayerNorm(7), 20),
        (nn.LayerNorm(7, elementwise_affine=False), 20),
        (nn.RMSNorm(7), 10 + 70),
        (nn.RMSNorm(7, elementwise_affine=False), 10),
        (FeedForward(7, 11, "relu"), 110),
        (FeedForward(7, 11, "gelu"), 220),
        (FeedForward(7, 11, "silu", bias=False), 220),
        (FeedForward(7, 11, "swiglu"), 440),
        (FeedForward(7, 11, "reglu"), 440),
    ],
    ids=repr,
)
def test_what_a_layer_keeps(layer, numbers):
    x = torch.randn(2, 5, 7)
    assert measure_saved_bytes(layer, x) == 4 * numbers
    assert_saved_bytes(layer, x)


def test_positions_that_are_given_are_not_saved():
    layer = LearnedPositions(7, 3)
    assert cost(layer, tokens=5).activation_bytes == measure_saved_bytes(layer, torch.arange(5)) == 0


def some_attention(chance: random.Random, attention: Attention) -> tuple[MultiHeadAttention, list[torch.Tensor], dict]:
    kv_heads, group = chance.randint(1, 3), chance.randint(1, 2)
    heads, key = kv_heads * group, chance.choice([1, 2, 3, 4])
    width = heads * chance.randint(1, 2)
    rotary = Rotary(2) if key >= 2 and chance.random() < 0.3 else None
    other = rotary is None and chance.random() < 0.3
    sizes = AttentionSizes(
        width,
        heads,
        kv_heads,
        key=key,
        value=chance.choice([None, 1, 5]),
        context=7 if chance.random() < 0.5 and other else None,
    )
    layer = MultiHeadAttention(sizes, attention=attention, bias=chance.choice([True, False, "k", "qo"]), rotary=rotary)
    batch, count, keys = chance.randint(1, 3), chance.choice([1, 2, 5]), chance.choice([6, 7])
    texts = [torch.randn(batch, count, width)]
    lengths = {"batch": batch, "tokens": count}
    if other:
        texts.append(torch.randn(batch, keys, sizes.context))
        lengths["keys"] = keys
    return layer, texts, lengths


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4, 5)])
def test_what_attention_keeps(seed):
    """One tensor of queries, keys and values; the output and a number for each softmax."""
    chance = random.Random(seed)
    pattern = chance.choice([None, Causal(), Window(1, 1), Window(2, 0)])
    layer, texts, given_sizes = some_attention(chance, Attention(pattern=pattern))
    assert_saved_bytes(layer, *texts, sizes=given_sizes)


@pytest.mark.parametrize(
    "attention",
    [
        Attention(feature_map="relu"),
        Attention(feature_map="elu1", pattern=Causal()),
        Attention(scale=0.0, pattern=Causal()),
        *slow(*(Attention(feature_map=name) for name in ("elu1", "taylor2", "favor+"))),
        *slow(*(Attention(feature_map=name, pattern=Causal()) for name in ("relu", "taylor2"))),
        *slow(Attention(scale=0.0), Attention(scale=math.inf)),
    ],
    ids=str,
)
def test_what_other_attentions_keep(attention):
    for seed in range(2):
        layer, texts, given_sizes = some_attention(random.Random(seed), attention)
        assert_saved_bytes(layer, *texts, sizes=given_sizes)


@pytest.mark.parametrize("bias", [Alibi(6), RelativeTable(6, 3), nn.Parameter(torch.zeros(6, 5, 5))], ids=repr)
def test_what_a_bias_keeps(bias):
    assert_saved_bytes(MultiHeadAttention(12, 6, attention=Attention(bias=bias)), torch.randn(2, 5, 12))


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("out", [12, 5])
@pytest.mark.parametrize("other", [True, False])
def test_what_a_block_keeps(order, norm, out, other):
    block = TransformerBlock(
        MultiHeadAttention(AttentionSizes(12, 3, output=out), rotary=Rotary(2)),
        FeedForward(out, 7),
        cross=MultiHeadAttention(AttentionSizes(out, 2, key=3, context=9)) if other else None,
        norm=norm,
        order=order,
        shortcut="same" if out == 12 else "project",
    )
    context = {"context": torch.randn(2, 7, 9)} if other else {}
    sizes = {"batch": 2, "tokens": 5} | ({"context_tokens": 7} if other else {})
    assert_saved_bytes(block, torch.randn(2, 5, 12), sizes=sizes, **context)


@pytest.mark.parametrize("position", ["rotary", "alibi", *slow("learned", "sinusoidal", "none")])
@pytest.mark.parametrize("llama", [True, *slow(False)])
def test_what_a_gpt_keeps(position, llama):
    choices = (
        {"norm": "rms", "feed_forward": "swiglu", "bias": False, "kv_heads": 2, "tie_embeddings": False}
        if llama
        else {}
    )
    model = GPT(GPTConfig(**SMALL, context_length=16, position=position, **choices))
    assert_saved_bytes(model, words(2, 5))
    assert_saved_bytes(model, words(1, 1))


@pytest.mark.parametrize(
    "heads",
    [
        {},
        {"masked_tokens": True, "next_sentence": True, "activation": "silu"},
        *slow({"pooler": False}, {"next_sentence": True}, {"masked_tokens": True}),
        *slow({"masked_tokens": True, "pooler": False, "activation": "relu"}),
    ],
    ids=str,
)
def test_what_a_bert_keeps(heads):
    assert_saved_bytes(Bert(BertConfig(**SMALL, context_length=7, **heads)), words(3, 7))


@pytest.mark.parametrize(
    "choices",
    [
        {},
        *slow({"order": "pre"}, {"order": "pre", "final_norm": False}),
        {"final_norm": True, "position": "learned", "context_length": 9, "activation": "geglu", "shared": False},
    ],
    ids=str,
)
def test_what_a_transformer_keeps(choices):
    model = Transformer(TransformerConfig(**SMALL, hidden_dim=7, **choices))
    assert_saved_bytes(model, words(2, 7), words(2, 5), sizes={"batch": 2, "tokens": 5, "context_tokens": 7})


def test_formulas_of_saved_bytes_hold_at_other_sizes():
    model = GPT(GPTConfig.llama(**SMALL, context_length=32, kv_heads=3))
    found = cost(model, batch=2, tokens=5)
    assert found.at(batch=3, tokens=17).activation_bytes == measure_saved_bytes(model, words(3, 17))
    values = found.activation_bytes.values
    other = {letter: {"B": 3, "N": 17}.get(str(letter), number) for letter, number in values.items()}
    assert found.activation_bytes.at(other) == measure_saved_bytes(model, words(3, 17))
