"""Layers and models: costs against an independent count of what runs, and the symbols of their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cost_model.counting import count, measure_saved_bytes
from plain import slow, slow_but
from torch import nn

from regard.adapters.rebuild import find_configuration
from regard.attention import Attention
from regard.biases import Alibi, RelativeTable, TransformerXL
from regard.cost_model import cost
from regard.cost_model.symbols import size_symbols
from regard.errors import CostError
from regard.layers import (
    AttentionSizes,
    ChannelAttention,
    FeedForward,
    GridAttention,
    GridPositions,
    KVCache,
    LearnedPositions,
    Linear,
    MultiHeadAttention,
    PatchEmbedding,
    Rotary,
    SinusoidalPositions,
    TransformerBlock,
    WindowAttention,
)
from regard.models import GPT, Bert, BertConfig, GPTConfig, SpatialConfig, SpatialTransformer, ViT, ViTConfig
from regard.patterns import Causal, Neighborhood, Window

TEXT = {"batch": 2, "tokens": 5}


def x(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape)


LAYERS: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "linear": (nn.Linear(7, 3), (x(5, 7),), TEXT),
    "layer norm": (nn.LayerNorm(7), (x(5, 7),), TEXT),
    "rms norm": (nn.RMSNorm(7), (x(5, 7),), TEXT),
    "feed-forward": (FeedForward(7, 11, "swiglu"), (x(5, 7),), TEXT),
    "attention": (MultiHeadAttention(AttentionSizes(12, 6, 2, value=5, output=7)), (x(5, 12),), TEXT),
    "cross-attention": (
        MultiHeadAttention(AttentionSizes(12, 3, context=7, values=9)),
        (x(5, 12), x(4, 7), x(4, 9)),
        {**TEXT, "keys": 4},
    ),
    "windows": (WindowAttention(6, 3, (2, 3)), (x(4, 5, 6),), {"batch": 2, "image": (4, 5)}),
    "channels": (ChannelAttention(6, 3), (x(5, 6),), TEXT),
    "grid": (
        GridAttention(6, 3, attention=Attention(pattern=Neighborhood((3, 4), 1))),
        (x(3, 4, 6),),
        {"batch": 2, "image": (3, 4)},
    ),
    "patches": (PatchEmbedding(3, 5, 4), (x(3, 8, 12),), {"batch": 2, "image": (8, 12)}),
    "spatial": (
        SpatialTransformer(
            SpatialConfig("content", (4, 6), dim=6, layers=2, heads=2, hidden_dim=7, attention_dropout=0.0)
        ),
        (x(3, 4, 6),),
        {"batch": 2},
    ),
}


@pytest.mark.parametrize("name", slow_but([name for name in LAYERS if name not in ("spatial", "grid")], LAYERS))
def test_costs_are_those_of_a_run(name: str) -> None:
    module, inputs, sizes = LAYERS[name]
    forward = cost(module, backend="reference", **sizes)
    assert forward.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert forward.macs == count(module, *inputs).macs
    assert forward.activation_bytes == measure_saved_bytes(module, *inputs)
    backward = cost(module, backend="reference", step="backward", **sizes)
    assert backward.macs == count(module, *inputs, backward=True).macs


@pytest.mark.parametrize(
    "attention",
    [
        Attention(feature_map="favor+", pattern=Causal()),
        Attention(bias=RelativeTable(6, 3), pattern=Causal()),
        Attention(bias=TransformerXL(6, 2)),
        *slow(Attention(scale=0.0), Attention(scale=math.inf)),
    ],
    ids=lambda attention: f"{attention.feature_map} {type(attention.bias).__name__} {attention.scale}",
)
def test_multi_head_attention_of_any_description(attention: Attention) -> None:
    layer = MultiHeadAttention(12, 6, kv_heads=2, attention=attention)
    forward, backward = (cost(layer, backend="reference", step=step, **TEXT) for step in ("forward", "backward"))
    assert forward.macs == count(layer, x(5, 12)).macs
    assert backward.macs == count(layer, x(5, 12), backward=True).macs


@pytest.mark.parametrize(
    ("layer", "parameters"),
    [
        (nn.Embedding(11, 7), 77),
        (LearnedPositions(13, 7), 91),
        (SinusoidalPositions(8), 0),
        (GridPositions((3, 5), 7, first=1), 112),
    ],
    ids=repr,
)
def test_tables_have_no_products(layer: nn.Module, parameters: int) -> None:
    found = cost(layer) if isinstance(layer, GridPositions) else cost(layer, tokens=5)
    assert (found.parameters.value, found.macs.value) == (parameters, 0)


# Symbols


def test_sizes_that_follow_from_others_have_no_symbol() -> None:
    batch, tokens, width, heads = size_symbols("B N D H")
    found = cost(MultiHeadAttention(12, 3))
    assert (found.macs.formula - (4 * batch * tokens * width**2 + 2 * batch * tokens**2 * width)).expand() == 0
    assert found.parameters.formula.free_symbols == {width}
    assert found.pairs.formula == batch * heads * tokens**2
    free = cost(MultiHeadAttention(AttentionSizes(12, 4, 2, key=5, value=7, context=3, values=9, output=11)))
    names = {str(symbol) for symbol in free.macs.formula.free_symbols | free.parameters.formula.free_symbols}
    assert names == set("BNMDHGdeXYO")


def test_formulas_hold_at_other_sizes() -> None:
    """Every symbol of a model, with the numbers of another model: its cost."""
    small = cost(
        GPT(GPTConfig.llama(vocab_size=11, context_length=32, dim=12, layers=2, heads=3, hidden_dim=7)),
        batch=2,
        tokens=5,
    )
    large = cost(
        GPT(GPTConfig.llama(vocab_size=23, context_length=64, dim=40, layers=3, heads=5, hidden_dim=29)),
        batch=3,
        tokens=17,
    )
    for name in ("parameters", "macs", "activation_bytes", "pairs"):
        formula, values = small.quantity(name).formula, large.quantity(name).values
        assert formula.subs(values) == large.quantity(name).value, name


@pytest.mark.slow
@pytest.mark.parametrize("position", ["quadratic", "gaussian", "content"])
def test_formulas_of_rows_and_columns_hold_at_other_sizes(position: str) -> None:
    """Rows and columns have the same operations, so one layer more must not take one for the other."""
    common = {"position": position, "channels": 3, "patch": 2, "hidden_dim": 7, "classes": 2}
    small = cost(SpatialTransformer(SpatialConfig(image=(8, 6), dim=10, layers=2, heads=3, **common)), image=(8, 6))
    large = cost(SpatialTransformer(SpatialConfig(image=(10, 14), dim=6, layers=4, heads=2, **common)), image=(10, 14))
    for name in ("parameters", "macs", "pairs"):
        formula, values = small.quantity(name).formula, large.quantity(name).values
        assert formula.subs(values) == large.quantity(name).value, name


def test_what_was_changed_after_it_was_built_is_not_rebuilt() -> None:
    model = Bert(BertConfig(vocab_size=11, context_length=16, dim=12, layers=2, heads=3))
    assert find_configuration(model) is not None
    model.blocks[0].feed_forward = FeedForward(12, 5)  # type: ignore[index]
    assert find_configuration(model) is None
    found = cost(model, tokens=5)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {str(symbol) for symbol in found.macs.formula.free_symbols} <= {"B", "N"}


@pytest.mark.slow
def test_layers_with_another_description_are_not_multiplied() -> None:
    """The second layer was given a window after it was built, which no configuration shows."""
    model = GPT(GPTConfig(vocab_size=11, context_length=16, dim=12, layers=2, heads=3))
    model.blocks[1].attention.attention = Attention(pattern=Window(1, 0))  # type: ignore[index]
    assert cost(model, tokens=5).pairs == 3 * (15 + 9)


def test_a_vision_transformer_has_the_symbols_of_its_image() -> None:
    found = cost(ViT(ViTConfig(image=(32, 48), patch=16, dim=12, layers=2, heads=3, classes=5)))
    batch, heads, layers, rows, columns, side = size_symbols("B H L R W p")
    assert (found.pairs.formula - batch * heads * layers * (rows * columns / side**2 + 1) ** 2).expand() == 0


def test_nothing_has_a_number_without_sizes() -> None:
    found = cost(MultiHeadAttention(12, 3))
    with pytest.raises(CostError, match="how large N is"):
        found.macs.value  # noqa: B018
    assert found.parameters == 4 * 12 * 13


# Steps


@pytest.mark.parametrize("pattern", [Causal(), Window(3, 0)])
def test_a_decode_step(pattern: Any) -> None:
    layer = MultiHeadAttention(12, 6, kv_heads=2, attention=Attention(pattern=pattern), rotary=Rotary(2)).double()
    cache = layer.new_cache()
    assert isinstance(cache, KVCache)
    with torch.no_grad():
        layer(x(7, 12).double(), cache=cache)
    found = cost(layer, step="decode", backend="reference", batch=2, tokens=7)
    assert found.macs == count(layer, x(1, 12), cache=cache).macs
    assert found.activation_bytes == 0


def test_parts_add_up() -> None:
    block = TransformerBlock(MultiHeadAttention(6, 3, rotary=Rotary(2)), FeedForward(6, 11))
    found = cost(block, step="training", **TEXT)
    parts = found.by_part().values()
    for name in ("parameters", "macs", "bytes", "activation_bytes", "depth", "pairs", "exponentials"):
        assert sum(part.quantity(name).value for part in parts) == found.quantity(name)


def test_a_recurrent_layer_is_as_deep_as_its_sequence_is_long() -> None:
    found = cost(nn.LSTM(5, 7, batch_first=True), batch=2, tokens=9)
    assert found.depth == 9 * (1 + 3 + 6)  # an inner product of 7 and six steps for each token
    assert "N" in {str(symbol) for symbol in found.depth.formula.free_symbols}


def test_a_bias_for_each_head_leaves_the_heads_a_number() -> None:
    found = cost(MultiHeadAttention(12, 6, attention=Attention(bias=Alibi(6))), **TEXT)
    assert {str(symbol) for symbol in found.macs.formula.free_symbols} == {"B", "N", "D"}


def test_what_is_neither_a_description_nor_a_module_is_refused() -> None:
    with pytest.raises(CostError, match="neither an Attention nor a module"):
        cost(3)  # type: ignore[arg-type]


def test_linear_layers_of_both_kinds_cost_the_same() -> None:
    ours, theirs = (cost(kind(7, 3), **TEXT) for kind in (Linear, nn.Linear))
    assert ours.macs.formula == theirs.macs.formula
    assert ours.bytes == theirs.bytes == 4 * (10 * 7 + 7 * 3 + 3 + 10 * 3)
    assert ours.depth == 1 + 3 + 1  # products, a tree over 7, the bias
