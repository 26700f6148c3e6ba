"""Linear attention where not every query sees every key: saved bytes, and what chunks multiply."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from cost_model.cases import Described
from cost_model.counting import Counter, measure_saved_bytes
from plain import long, slow

from regard import Attention, Causal, Full, Padding, Window, attend
from regard.backends import linear_attention as linear_backend
from regard.cost_model import cost
from regard.features import FavorPlus
from regard.layers import AttentionSizes, MultiHeadAttention, Rotary
from regard.patterns import Pattern

PATTERNS = {
    "padded": Padding([3, 5]),
    "padded in front": Padding([3, 5], side="left"),
    "padded at both ends": Padding([3, 5]) & Padding([5, 4], side="left"),
    "causal": Causal(),
    "causal and padded": Full() & (Padding([4, 6]) & Causal()),
}
MAPS = ("elu1", "relu", "taylor2", FavorPlus(7))
LENGTHS = {"as many": (7, 7), "more keys": (5, 7), "one query": (1, 7), "more queries": (11, 7)}


def tensors(tokens: int, keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = (2, 6, tokens, 3), (2, 3, keys, 3), (2, 3, keys, 5)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def sizes(tokens: int, keys: int) -> dict[str, int]:
    return {"batch": 2, "heads": 6, "kv_heads": 3, "tokens": tokens, "keys": keys, "dim": 3, "value_dim": 5}


@pytest.mark.parametrize("scale", [None, 0.0])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_marks_of_padding_and_queries_without_keys_are_saved_to_the_byte(
    lengths: tuple[int, int], pattern: Pattern, scale: float | None
) -> None:
    for features in MAPS:
        attention = Attention(pattern=pattern, feature_map=features, scale=scale)
        saved = measure_saved_bytes(Described(attention), *tensors(*lengths))
        assert cost(attention, **sizes(*lengths)).activation_bytes == saved, features


@pytest.mark.parametrize("lengths", [(11, 7), (5, 7), (200, 70), (70, 200)])
def test_chunks_are_those_of_queries_that_see_a_key(lengths: tuple[int, int]) -> None:
    attention, counter = Attention(pattern=Causal(), feature_map="relu"), Counter(only=torch.float64)
    with torch.no_grad(), counter, patch.object(linear_backend, "is_supported", lambda *_: False):
        attend(*tensors(*lengths, dtype=torch.float64), attention, backend="linear")
    assert cost(attention, backend="blocked", **sizes(*lengths)).macs == counter.macs


def test_queries_before_the_first_key_read_nothing() -> None:
    attention = Attention(pattern=Causal(), feature_map="elu1")
    many, few = (cost(attention, tokens=tokens, keys=7, dim=3) for tokens in (11, 7))
    assert many.macs == few.macs == 2 * 7 * 3 * (3 + 1)
    # Without a number for the queries both cases stay in the formula.
    assert cost(attention, keys=7, dim=3).macs.at({next(s for s in many.values if str(s) == "N"): 11}) == many.macs


@pytest.mark.parametrize("backend", ["reference", "native", "blocked"])
@pytest.mark.parametrize("pattern", [None, Causal()])
def test_whoever_is_counted_keeps_what_a_mean_keeps(pattern: Pattern | None, backend: str) -> None:
    mean = Attention(pattern=pattern, feature_map="elu1", scale=0.0)
    assert cost(mean, backend=backend, **sizes(7, 7)).activation_bytes == measure_saved_bytes(
        Described(mean), *tensors(7, 7)
    )


LAYERS = {
    "heads": (AttentionSizes(12, 3), True),
    "shared heads": (AttentionSizes(12, 6, 3), "qo"),
    "one head": (AttentionSizes(12, 1), False),
}


@pytest.mark.parametrize("turned", [False, *long(True)])
@pytest.mark.parametrize("scale", [None, 0.0, math.inf])
@pytest.mark.parametrize("pattern", [Causal(), *slow(None, Padding([3, 5]), Padding([3, 5]) & Causal(), Window(2, 1))])
def test_a_layer_saves_what_its_formula_says(pattern: Pattern | None, scale: float | None, turned: bool) -> None:
    for features in (None,) if scale == math.inf else (None, *MAPS):
        attention = Attention(pattern=pattern, feature_map=features, scale=scale)
        for sizes, bias in LAYERS.values():
            rotary = Rotary(sizes.key) if turned else None
            layer = MultiHeadAttention(sizes, attention=attention, bias=bias, rotary=rotary)
            saved = measure_saved_bytes(layer, torch.randn(2, 7, 12))
            assert cost(layer, batch=2, tokens=7).activation_bytes == saved, (features, sizes)


def test_bytes_and_depth_of_sums_by_hand() -> None:
    """Seven keys of three features and five values make a state of 3 by 6 numbers, which seven queries read."""
    linear = Attention(feature_map="elu1")
    parts = cost(linear, tokens=7, dim=3, value_dim=5).by_part()
    assert parts["state"].bytes == 4 * (7 * (3 + 5) + 18)
    assert parts["readout"].bytes == 4 * (7 * 3 + 18 + 7 * 5)
    assert (parts["state"].depth, parts["readout"].depth) == (1 + 3, 1 + 2 + 1)
    assert cost(linear, step="decode", tokens=7, dim=3, value_dim=5).by_part()["state"].depth == 2
