"""AttentionSizes: parameters, operations, and sizes that do not fit."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from regard import (
    Attention,
    Causal,
    RegardError,
)
from regard.errors import ConfigError, ShapeError
from regard.layers import AttentionSizes, MultiHeadAttention, Rotary
from regard.layers.grid import GridAttention


def assert_four_parts(error):
    assert isinstance(error, RegardError)
    assert error.headline.endswith(".")
    assert error.asked
    assert error.because
    assert error.instead


# Counts


@pytest.mark.parametrize(
    ("heads", "channels", "hidden", "value", "output", "count"),
    [
        (8, 512, 64, 64, 512, 1_049_088),
        (12, 768, 64, 64, 768, 2_360_064),
        (16, 1024, 64, 64, 1024, 4_195_328),
        (9, 400, 400, 400, 400, 5_760_400),
        (4, 10, 3, 5, 7, 587),
    ],
)
@pytest.mark.parametrize("kind", [MultiHeadAttention, GridAttention])
def test_parameters_of_cordonniers_layer(kind, heads, channels, hidden, value, output, count):
    with torch.device("meta"):
        layer = kind(AttentionSizes(channels, heads, key=hidden, value=value, output=output), bias="o")
    counted = sum(parameter.numel() for parameter in layer.parameters())
    assert counted == count == heads * channels * (2 * hidden + value) + heads * value * output + output


@pytest.mark.parametrize(
    ("tokens", "channels", "matrices", "biases", "scores"),
    [
        (3, 4, 48, 12, 9),
        (256, 512, 786_432, 1_536, 65_536),
        (197, 768, 1_769_472, 2_304, 38_809),
        (1024, 512, 786_432, 1_536, 1_048_576),
    ],
)
def test_parameters_of_query_key_and_value(tokens, channels, matrices, biases, scores):
    layer = MultiHeadAttention(channels, 1)
    assert sum(weight.numel() for weight in layer.projections.weights()) == matrices
    assert layer.projections.bias.numel() == biases
    with torch.no_grad():
        assert layer.weights(torch.zeros(tokens, channels)).numel() == scores


def test_parameters_of_the_transformers_layer():
    layer = MultiHeadAttention(512, 8)
    assert sum(p.numel() for p in layer.parameters()) == 1_050_624
    assert sum(p.numel() for p in nn.MultiheadAttention(512, 8).parameters()) == 1_050_624


def executed(layer, *arguments, **words):
    """Multiply-adds that torch sees being done, in all and by operator."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(*arguments, **words)
    counts = {str(name): count // 2 for name, count in counter.get_flop_counts()["Global"].items()}
    return sum(counts.values()), counts


@pytest.mark.parametrize(("channels", "tokens", "incremental"), [(512, 256, 1_048_576), (768, 1024, 3_342_336)])
def test_a_cached_step_executes_the_operations_of_one_token(channels, tokens, incremental):
    layer = MultiHeadAttention(channels, 8, attention=Attention(pattern=Causal()), bias=False).eval()
    cache = layer.new_cache(tokens)
    key = torch.zeros(1, 8, tokens - 1, channels // 8)
    cache.append(key, key)
    total, _ = executed(layer, torch.randn(1, 1, channels), cache=cache)
    assert incremental == 3 * channels**2 + 2 * tokens * channels
    assert total == incremental + channels**2  # and the output matrix, which the problem leaves out


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_splitting_the_channels_keeps_the_work_whatever_the_number_of_heads(heads):
    tokens, channels = 256, 512
    layer = MultiHeadAttention(channels, heads, bias=False).eval()
    total, counts = executed(layer, torch.randn(1, tokens, channels))
    projections = 201_326_592
    assert sum(weight.numel() for weight in layer.projections.weights()) == 786_432
    assert counts["aten.mm"] == projections + tokens * channels**2
    assert total - counts["aten.mm"] == 2 * 33_554_432  # scores, and as much for the values
    with torch.device("meta"):
        whole = MultiHeadAttention(AttentionSizes(channels, heads, key=channels), bias=False)
    assert sum(weight.numel() for weight in whole.projections.weights()) == 786_432 * heads
    assert layer.weights(torch.randn(1, 3, channels)).numel() == 9 * heads


def test_heads_of_all_channels_cost_as_many_times_more():
    layer = MultiHeadAttention(AttentionSizes(512, 2, key=512), bias=False).eval()
    total, counts = executed(layer, torch.randn(1, 256, 512))
    assert total - counts["aten.mm"] == 2 * 2 * 33_554_432


# Errors


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MultiHeadAttention(13, 3), "13 channels cannot be shared evenly by 3 heads"),
        (lambda: MultiHeadAttention(12, 3, kv_heads=2), "3 query heads cannot share 2 key heads evenly"),
        (lambda: MultiHeadAttention(12, 0), "at least 1"),
        (lambda: MultiHeadAttention(AttentionSizes(12, 3, value=-1)), "at least 1"),
        (lambda: AttentionSizes(12.0, 3), "whole number"),
        (lambda: MultiHeadAttention(AttentionSizes(12, 3), 3), "given twice"),
        (lambda: MultiHeadAttention(12, 3, bias="qx"), "query, key, value, output"),
        (lambda: MultiHeadAttention(12, 3, bias=3), "query, key, value, output"),
        (lambda: MultiHeadAttention(12, 3, dropout=1.5), "probability"),
        (lambda: MultiHeadAttention(12, 3, rotary=Rotary(8)), "turn 8 channels of a head, and a key has 4"),
    ],
)
def test_sizes_that_do_not_belong_together_are_refused_with_a_reason(build, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build()
    assert_four_parts(caught.value)


def test_tokens_of_another_width_are_refused_with_a_reason():
    layer = MultiHeadAttention(AttentionSizes(13, 3, key=4, context=7, values=11))
    x, context, values = torch.randn(2, 5, 13), torch.randn(2, 9, 7), torch.randn(2, 9, 11)
    cases = [
        (("the tokens", 13), (torch.randn(2, 5, 12), context, values)),
        (("the context", 7), (x, x, values)),
        (("the tokens of the values", 11), (x, context, context)),
        (("the tokens", 13), (torch.randn(13), context, values)),
    ]
    for (name, width), tensors in cases:
        with pytest.raises(ShapeError, match=f"cannot read {name}") as caught:
            layer(*tensors)
        assert_four_parts(caught.value)
        assert f"token, {width})" in caught.value.found
    with pytest.raises(ShapeError, match="cannot read the context"):
        layer(x)
