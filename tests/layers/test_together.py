"""Incompatible arguments are refused: each of these once gave wrong numbers silently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard import Alibi, Attention, Blocks, Causal, First, GridWindow, RowColumn, Window
from regard.errors import CacheError, InputError
from regard.layers import AttentionSizes, CrossCache, KVCache, MultiHeadAttention, Rotary, StateCache


def layer(**words):
    torch.manual_seed(0)
    made = MultiHeadAttention(12, 4, **words).double().requires_grad_(False)
    for parameter in made.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.4)
    return made


def tokens(*shape):
    return torch.randn(*shape, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [(2, 1), (1, 2), (2, 2)])
def test_a_cache_of_the_text_itself_takes_no_context(rows):
    causal = layer(attention=Attention(pattern=Causal()))
    with pytest.raises(CacheError, match="CrossCache"):
        causal(tokens(rows[0], 1), tokens(rows[1], 5), cache=KVCache())
    linear = layer(attention=Attention(pattern=Causal(), feature_map="elu1"))
    with pytest.raises(CacheError, match="CrossCache"):
        linear(tokens(1, 1), tokens(1, 5), cache=StateCache())


@pytest.mark.parametrize(
    "described",
    [
        Attention(pattern=Causal() & Blocks(3)),
        Attention(pattern=Causal() & GridWindow((4, 3), 2)),
        Attention(pattern=Causal() & (First(1) | Window(1, 0))),
        Attention(pattern=Causal(), bias=RowColumn(4, (4, 3))),
    ],
    ids=str,
)
def test_unequal_rows_need_distances_also_for_a_single_step(described):
    counting = layer(attention=described)
    cache = KVCache()
    counting(tokens(2, 7), cache=cache)
    cache.crop([7, 5])
    with pytest.raises(CacheError, match="depends on distances only"):
        counting(tokens(2, 1), cache=cache)


def test_a_filled_cross_cache_belongs_to_its_context():
    cross, cache = layer(), CrossCache()
    context, other = tokens(2, 5), tokens(2, 6)
    first = cross(tokens(2, 1), context, cache=cache)
    assert torch.equal(cross(tokens(2, 1), context, cache=cache), first)
    assert torch.equal(cross(tokens(2, 1), cache=cache), first)
    with pytest.raises(CacheError, match="another context"):
        cross(tokens(2, 1), other, cache=cache)
    with pytest.raises(CacheError, match="2 rows, and these are 1"):
        cross(tokens(1, 1), cache=cache)
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cross(tokens(3, 1), cache=cache).shape == (3, 1, 12)


def test_lengths_are_those_of_the_queries():
    cross = layer()
    with pytest.raises(CacheError, match="belongs into pattern="):
        cross(tokens(2, 3), tokens(2, 5), lengths=[3, 2])
    with pytest.raises(CacheError, match="belongs into pattern="):
        cross(tokens(2, 3), tokens(2, 5), cache=CrossCache(), lengths=[3, 2])


def test_a_rotation_turns_as_many_channels_as_the_rotary():
    turning = layer(rotary=Rotary(2))
    wide = Rotary(6).rotation(torch.arange(5), torch.float64)
    with pytest.raises(InputError, match="another number of channels"):
        turning(tokens(1, 5), rotation=wide)


def test_a_gradient_of_the_query_alone_is_not_lost():
    made = MultiHeadAttention(AttentionSizes(12, 4), attention=Attention(pattern=Causal()))
    made.requires_grad_(False)
    x = torch.randn(1, 1, 12, requires_grad=True)
    with pytest.raises(CacheError, match="gradient"):
        made(x, cache=KVCache())


def test_a_parameter_as_bias_is_trained_and_saved_with_the_layer():
    bias = nn.Parameter(torch.zeros(4, 5, 5))
    made = MultiHeadAttention(12, 4, attention=Attention(bias=bias))
    assert any(parameter is bias for parameter in made.parameters())
    assert "score_bias" in made.state_dict()
    made(torch.randn(2, 5, 12)).square().sum().backward()
    assert bias.grad is not None
    made.double()
    assert made(torch.randn(2, 5, 12).double()).dtype == torch.float64


def test_slopes_are_never_rounded_twice():
    bias = Alibi(12)
    exact = Alibi(12, dtype=torch.float64).slopes
    assert torch.equal(bias.bfloat16().float().double().slopes, exact)
    assert torch.equal(Alibi(12).bfloat16().float().slopes, exact.float())


def test_rewriting_keeps_a_layer_frozen():
    frozen = layer()
    assert not any(p.requires_grad for made in (frozen.fold_biases(), frozen.split(2)) for p in made.parameters())


def test_a_cache_filled_in_inference_mode_goes_on_outside():
    causal = layer(attention=Attention(pattern=Causal()))
    cache = causal.new_cache()
    with torch.inference_mode():
        causal(tokens(1, 3), cache=cache)
    causal(tokens(1, 1), cache=cache)
    assert cache.length == 4


@pytest.mark.parametrize("index", [[0], torch.tensor([0.0]), torch.tensor([True]), torch.tensor([[0]])], ids=repr)
def test_rows_are_named_by_whole_numbers(index):
    cache = KVCache()
    cache.append(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3))
    with pytest.raises(CacheError, match="whole numbers"):
        cache.reorder(index)


def test_a_number_of_any_kind_crops():
    cache = KVCache()
    cache.append(torch.zeros(2, 1, 5, 3), torch.zeros(2, 1, 5, 3))
    cache.crop(torch.tensor(4))
    cache.crop(torch.tensor([3, 3]).numpy()[0])
    assert cache.length == 3
    with pytest.raises(CacheError, match="holds tokens"):
        KVCache(2.5)
