"""Layers: their formulas against what they have and do, counted by somebody who does not know the formulas."""

from __future__ import annotations

import random

import pytest
import torch
from cost_model.counting import count
from torch import nn

from regard.attention import Attention
from regard.biases import Alibi, RelativeTable, TransformerXL
from regard.cost_model import cost
from regard.cost_model.depth import inner, norm, softmax
from regard.cost_model.letters import letters
from regard.cost_model.rules import rule_for
from regard.errors import CostError
from regard.layers import (
    AttentionSizes,
    FeedForward,
    GridPositions,
    KVCache,
    LearnedPositions,
    Linear,
    MultiHeadAttention,
    Rotary,
    SinusoidalPositions,
    TransformerBlock,
)
from regard.layers.projections import Projections
from regard.patterns import Causal, First, Full, Window

SIZES = {"batch": 2, "tokens": 5}


def tokens(width: int, batch: int = 2, count: int = 5) -> torch.Tensor:
    return torch.randn(batch, count, width)


def assert_counted(module: nn.Module, *inputs, sizes: dict | None = None, **kwargs) -> None:
    """Parameters and multiply-adds, forward and backward, are those of the module and of its run."""
    sizes = SIZES if sizes is None else sizes
    found = cost(module, trace=False, backend="reference", **sizes)
    back = cost(module, trace=False, backend="reference", step="backward", **sizes)
    assert found.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert found.macs == count(module, *inputs, **kwargs).macs
    assert back.macs == count(module, *inputs, backward=True, **kwargs).macs


def assert_adds_up(found) -> None:
    """What the parts cost is what the whole costs."""
    parts = found.by_part().values()
    for name in ("parameters", "macs", "bytes", "activation_bytes", "depth", "pairs", "exponentials"):
        assert sum(part.quantity(name).value for part in parts) == found.quantity(name)


# One matrix, one norm, one table


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(7, 3),
        Linear(7, 11, bias=False),
        nn.LayerNorm(7),
        nn.LayerNorm(7, elementwise_affine=False),
        nn.LayerNorm(7, bias=False),
        nn.RMSNorm(7),
        nn.RMSNorm(7, elementwise_affine=False),
    ],
    ids=repr,
)
def test_one_matrix_or_one_norm(layer):
    assert_counted(layer, tokens(7))


def test_a_linear_layer_by_hand():
    found = cost(nn.Linear(7, 3), **SIZES)
    assert (found.macs.value, found.parameters.value) == (2 * 5 * 7 * 3, 7 * 3 + 3)
    assert found.bytes == 4 * (10 * 7 + 7 * 3 + 3 + 10 * 3)
    assert found.depth == 1 + 3 + 1  # products, a tree over 7, the bias
    rows, columns, width, out = letters("B N D O")
    assert cost(nn.Linear(7, 3)).macs.formula == rows * columns * width * out


def test_a_norm_counts_what_it_reads_and_no_products():
    found = cost(nn.LayerNorm(7), **SIZES)
    assert (found.normalised.value, found.macs.value) == (2 * 5 * 7, 0)


@pytest.mark.parametrize(
    ("layer", "parameters"),
    [
        (nn.Embedding(11, 7), 77),
        (LearnedPositions(13, 7), 91),
        (SinusoidalPositions(8), 0),
        (GridPositions((3, 5), 7, first=1), 112),
        (Rotary(8), 0),
    ],
    ids=repr,
)
def test_tables_have_no_products(layer, parameters):
    found = cost(layer, trace=False, tokens=5)
    assert (found.parameters.value, found.macs.value) == (parameters, 0)
    if isinstance(layer, nn.Module):
        assert parameters == sum(each.numel() for each in layer.parameters())


def test_a_grid_that_was_not_learned_is_read_and_mixed():
    layer = GridPositions((3, 5), 7)
    assert cost(layer).bytes == 0
    assert cost(layer, image=(4, 7)).bytes == 4 * 7 * (15 + 28)


# Feed-forward


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "reglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward(activation, bias):
    assert_counted(FeedForward(7, 11, activation, bias=bias), tokens(7))


# Multi-head attention


def some_attention(chance: random.Random) -> tuple[MultiHeadAttention, tuple[torch.Tensor, ...], dict]:
    """A layer of any sizes with something to read, and how its cost is asked for."""
    kv_heads, group = chance.randint(1, 3), chance.randint(1, 3)
    heads, key = kv_heads * group, chance.choice([None, 1, 2, 3, 4])
    width = heads * chance.randint(1, 3)
    rotary = Rotary(2) if (key or width // heads) >= 2 and chance.random() < 0.4 else None
    other = rotary is None and chance.random() < 0.4
    sizes = AttentionSizes(
        width,
        heads,
        kv_heads,
        key=key,
        value=chance.choice([None, 1, 2, 5]),
        context=chance.choice([None, 7]) if other else None,
        values=chance.choice([None, 5]) if other else None,
        output=chance.choice([None, 3]),
    )
    batch, count, keys = chance.randint(1, 3), chance.choice([1, 2, 5, 11]), chance.choice([1, 3, 13])
    pattern = chance.choice([None, Full(), Causal(), Window(2, 1), Causal() | First(1)])
    bias = chance.choice([True, False, "q", "kv", "vo"])
    layer = MultiHeadAttention(sizes, attention=Attention(pattern=pattern), bias=bias, rotary=rotary)
    asked = {"batch": batch, "tokens": count}
    if not other:
        return layer, (tokens(width, batch, count),), asked
    texts = [tokens(width, batch, count), tokens(sizes.context, batch, keys)]
    if sizes.values != sizes.context:
        texts.append(tokens(sizes.values, batch, keys))
    return layer, tuple(texts), asked | {"keys": keys}


@pytest.mark.parametrize("seed", range(20))
def test_multi_head_attention_of_any_sizes(seed):
    layer, texts, asked = some_attention(random.Random(seed))
    assert_counted(layer, *texts, sizes=asked)
    counted = count(layer, *texts).macs
    whole = layer.attention.pattern is None or isinstance(layer.attention.pattern, Full)
    asks = cost(layer, **asked).macs
    assert asks == counted if whole else asks <= counted


@pytest.mark.parametrize(
    "attention",
    [
        Attention(feature_map="elu1"),
        Attention(feature_map="favor+", pattern=Causal()),
        Attention(bias=Alibi(6)),
        Attention(bias=RelativeTable(6, 3), pattern=Causal()),
        Attention(bias=TransformerXL(6, 2)),
        Attention(bias=nn.Parameter(torch.zeros(6, 5, 5))),
        Attention(scale=0.0),
        Attention(scale=float("inf")),
    ],
    ids=lambda attention: f"{attention.feature_map} {type(attention.bias).__name__} {attention.scale}",
)
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_multi_head_attention_of_any_description(attention, kv_heads):
    assert_counted(MultiHeadAttention(12, 6, kv_heads=kv_heads, attention=attention), tokens(12))


def test_sizes_that_follow_from_others_have_no_letter():
    batch, count, width, heads = letters("B N D H")
    found = cost(MultiHeadAttention(12, 3))
    assert (found.macs.formula - (4 * batch * count * width**2 + 2 * batch * count**2 * width)).expand() == 0
    assert found.parameters.formula.free_symbols == {width}
    assert found.pairs.formula == batch * heads * count**2
    free = cost(MultiHeadAttention(AttentionSizes(12, 4, 2, key=5, value=7, context=3, values=9, output=11)))
    names = {str(letter) for letter in free.macs.formula.free_symbols | free.parameters.formula.free_symbols}
    assert names == set("BNMDHGdeXYO")


def test_nothing_has_a_number_without_sizes():
    found = cost(MultiHeadAttention(12, 3))
    with pytest.raises(CostError, match="how large N is"):
        found.macs.value  # noqa: B018
    assert found.parameters == 4 * 12 * 13


def test_queries_keys_and_values_are_made_at_once():
    """Depth: projection, scores, softmax, sum over values, projection; three projections take as long as one."""
    width, count, heads = 96, 17, 3
    steps = inner(width) + inner(width // heads) + softmax(count) + inner(count) + inner(width)
    assert cost(MultiHeadAttention(width, heads, bias=False), tokens=count).depth == steps
    # The longest of three different ones decides.
    sizes = AttentionSizes(6, 3, context=1000, values=2)
    wide = cost(MultiHeadAttention(sizes, bias=False), tokens=count, keys=5)
    assert wide.by_part()["projections"].depth == inner(1000)


def test_exponentials_and_pairs_are_those_of_the_pattern():
    causal = cost(MultiHeadAttention(12, 3, attention=Attention(pattern=Causal())), **SIZES)
    assert causal.pairs == causal.exponentials == 2 * 3 * 15
    window = cost(MultiHeadAttention(12, 3, attention=Attention(pattern=Window(1, 0))), **SIZES)
    assert window.pairs == 2 * 3 * 9


@pytest.mark.parametrize("pattern", [Causal(), Window(3, 0)])
@pytest.mark.parametrize("past", [1, 2, 7])
def test_a_decoding_step(pattern, past):
    layer = MultiHeadAttention(12, 6, kv_heads=2, attention=Attention(pattern=pattern), rotary=Rotary(2)).double()
    cache = layer.new_cache()
    assert isinstance(cache, KVCache)
    with torch.no_grad():
        layer(tokens(12, 2, past).double(), cache=cache)
    found = cost(layer, step="decode", backend="reference", batch=2, tokens=past)
    assert found.macs == count(layer, tokens(12, 2, 1), cache=cache).macs
    assert found.activation_bytes == 0
    # One query sees all that is held, so that the mathematics asks for no less.
    assert cost(layer, step="decode", batch=2, tokens=past).macs == found.macs


def test_one_more_token_costs_what_the_textbook_says():
    """Prince, problem 12.7: 3 D^2 for query, key and value, and 2 (N + 1) D for scores and values."""
    layer = MultiHeadAttention(512, 8, bias=False, attention=Attention(pattern=Causal()))
    found = cost(layer, step="decode", tokens=255).by_part()
    assert sum(found[name].macs.value for name in ("projections", "scores", "values")) == 1_048_576


def test_the_context_of_a_step_is_projected_once():
    sizes = AttentionSizes(12, 3, context=7)
    step = cost(MultiHeadAttention(sizes), step="decode", keys=5, tokens=9)
    assert step.by_part()["projections"].macs == 12 * 12
    assert step.parameters == cost(MultiHeadAttention(sizes)).parameters


def test_projections_alone():
    layer = Projections(AttentionSizes(12, 6, 2, key=5, value=3), "qv")
    found = cost(layer, trace=False, **SIZES)
    assert found.parameters == sum(parameter.numel() for parameter in layer.parameters())
    assert found.macs == 10 * 12 * (30 + 10 + 6)


# Blocks


def some_block(chance: random.Random) -> tuple[TransformerBlock, torch.Tensor, dict, dict]:
    heads = chance.randint(1, 3)
    width = heads * 2 * chance.randint(1, 2)
    out = chance.choice([width, width, 5])
    attention = MultiHeadAttention(
        AttentionSizes(width, heads, output=out),
        attention=Attention(pattern=chance.choice([None, Causal()])),
        rotary=chance.choice([None, Rotary(2)]),
    )
    other = chance.random() < 0.5
    cross = MultiHeadAttention(AttentionSizes(out, chance.choice([1, 2]), key=3, context=7)) if other else None
    block = TransformerBlock(
        attention,
        FeedForward(out, chance.randint(1, 11), chance.choice(["relu", "gelu", "swiglu"])),
        cross=cross,
        norm=chance.choice([nn.LayerNorm, nn.RMSNorm]),
        order=chance.choice(["pre", "post"]),
        shortcut="project" if out != width else "same",
    )
    batch, count, keys = chance.randint(1, 3), chance.choice([1, 5]), chance.choice([1, 3])
    asked = {"batch": batch, "tokens": count} | ({"context_tokens": keys} if other else {})
    return block, tokens(width, batch, count), asked, {"context": tokens(7, batch, keys)} if other else {}


@pytest.mark.parametrize("seed", range(10))
def test_blocks(seed):
    block, x, asked, context = some_block(random.Random(seed))
    assert_counted(block, x, sizes=asked, **context)


@pytest.mark.parametrize("step", ["training", "decode"])
def test_parts_add_up(step):
    cross = MultiHeadAttention(AttentionSizes(6, 2, context=7))
    block = TransformerBlock(MultiHeadAttention(6, 3, rotary=Rotary(2)), FeedForward(6, 11), cross=cross)
    assert_adds_up(cost(block, step=step, context_tokens=3, **SIZES))


def test_a_block_runs_its_parts_one_after_the_other():
    width, hidden, count = 64, 96, 17
    block = TransformerBlock(MultiHeadAttention(width, 4), FeedForward(width, hidden))
    attention = cost(block.attention, tokens=count).depth.value
    forward = cost(block.feed_forward, tokens=count).depth.value
    assert cost(block, tokens=count).depth == attention + forward + 2 * (norm(width) + 1)


class Other(nn.LayerNorm):
    """Somebody's own norm, which may do anything."""


class Whole(nn.Module):
    """A module around another."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_what_has_strange_parts_has_no_rule():
    assert rule_for(TransformerBlock(MultiHeadAttention(6, 3), FeedForward(6, 4))) is not None
    assert rule_for(TransformerBlock(MultiHeadAttention(6, 3), FeedForward(6, 4), norm=Other)) is None
    assert rule_for(Whole(nn.Linear(3, 4))) is None
