"""The decode fast path gives the bits of `attend`, and returns `None` where it does not apply."""

from __future__ import annotations

import math

import catalog
import pytest
import torch

from regard import (
    Alibi,
    Attention,
    Blocks,
    Causal,
    First,
    Padding,
    RelativeTable,
    Strided,
    TransformerXL,
    Window,
    attend,
)
from regard.attention.decode_step import STEPS_AT_ONCE, decode_step
from regard.kernels import library
from regard.kernels.decode import MAX_QUERIES
from regard.layers import KVCache, MultiHeadAttention, multihead

needs_kernels = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


def tensors(queries, keys, *, rows=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries + 10 * keys)
    shapes = [(rows, 6, queries, 5), (rows, 2, keys, 5), (rows, 2, keys, 7)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "pattern",
    [Causal(), Window(3, 0), Window(0, 0), Window(40, 0), Causal() & Window(2, 9), Blocks(3), Causal() & First(2)],
    ids=repr,
)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 17), (3, 17), (MAX_QUERIES, 5)])
@pytest.mark.parametrize("real", [None, (1, 5, 3)])
def test_a_step_has_the_bits_of_attend(pattern, queries, keys, real, dtype):
    if real is not None and max(real) > keys:
        real = tuple(min(length, keys) for length in real)
    query, key, value = tensors(queries, keys, dtype=dtype)
    described = Attention(pattern=pattern, scale=0.7)
    whole = pattern if real is None else pattern & Padding(real, side="left")
    stepped = decode_step(query, key, value, described, real)
    assert torch.equal(stepped, attend(query, key, value, described, pattern=whole, backend="native"))


@needs_kernels
@pytest.mark.parametrize("pattern", [Causal(), Window(9, 0), Causal() & Window(20, 3), Causal() & Blocks(5)], ids=repr)
def test_every_length_has_the_bits_of_attend(pattern):
    for keys in range(1, 2 * STEPS_AT_ONCE + 3):
        query, key, value = tensors(1, keys)
        stepped = decode_step(query, key, value, Attention(pattern=pattern))
        assert torch.equal(stepped, attend(query, key, value, pattern=pattern, backend="native")), keys


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("real", [None, (9, 5, 3)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "described",
    [
        Attention(pattern=Causal() & Strided(2)),
        Attention(pattern=Window(3, 0, step=2), scale=-0.4),
        Attention(pattern=Causal(), bias=Alibi(6)),
        Attention(pattern=Window(4, 0), bias=RelativeTable(1, distance=3)),
    ],
    ids=str,
)
def test_few_scores_are_those_of_attend(described, queries, real, dtype):
    query, key, value = tensors(queries, 9, dtype=dtype)
    whole = described.pattern if real is None else described.pattern & Padding(real, side="left")
    with torch.no_grad():
        stepped = decode_step(query, key, value, described, real)
        expected = attend(*(t.double() for t in (query, key, value)), described, pattern=whole, backend="reference")
    bound = catalog.bounds(query, key, value, described.scale, dtype)["output"]
    if stepped is None:  # a query that sees nothing has no softmax
        assert not whole.matrix(queries, 9).any(-1).all()
    else:
        assert float((stepped.double() - expected).abs().max()) <= bound


@needs_kernels
def test_what_is_no_interval_of_a_plain_tensor_is_left_to_attend():
    query, key, value = tensors(1, 9)
    for described in (
        Attention(pattern=Causal() & Strided(2) & Padding([9, 9, 4])),
        Attention(pattern=Causal() & Padding([9, 4])),
        Attention(pattern=Causal(), bias=torch.zeros(1, 9)),
        Attention(pattern=Causal(), bias=TransformerXL(6, 5)),
        Attention(pattern=Causal(), feature_map="elu1"),
        Attention(pattern=Causal(), scale=0.0),
        Attention(pattern=Causal(), scale=math.inf),
        Attention(),
    ):
        assert decode_step(query, key, value, described) is None
    causal = Attention(pattern=Causal())
    assert decode_step(*tensors(MAX_QUERIES + 1, 9), causal) is None
    assert decode_step(query.half(), key.half(), value.half(), causal) is None
    value[0, 0, 3] = math.nan
    assert decode_step(query, key, value, causal) is None
    assert decode_step(*tensors(1, 9), causal) is not None


@pytest.mark.parametrize("described", [Attention(pattern=Causal()), Attention(pattern=Window(4, 0), scale=0.3)])
def test_layers_take_the_fast_path_and_agree_with_attend(described, monkeypatch):
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 6, kv_heads=2, attention=described).requires_grad_(False)
    x = torch.randn(3, 20, 12)

    def decoded():
        cache = layer.new_cache()
        first = layer(x[:, :7], cache=cache, lengths=[7, 2, 5])
        return torch.cat([first, *(layer(piece, cache=cache) for piece in x[:, 7:].split(1, 1))], 1)

    taken = []

    def recorded(*arguments):
        taken.append(decode_step(*arguments))
        return taken[-1]

    monkeypatch.setattr(multihead, "decode_step", recorded)
    fast = decoded()
    assert library.missing() is not None or sum(made is not None for made in taken) == 13
    monkeypatch.setattr(multihead, "decode_step", lambda *arguments: None)
    assert torch.equal(fast, decoded())


def test_a_cache_is_checked_for_each_attention():
    layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Window(4, 0))).requires_grad_(False)
    other = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal())).requires_grad_(False)
    cache = layer.new_cache()
    layer(torch.randn(1, 3, 12), cache=cache)
    with pytest.raises(ValueError, match="cannot be continued from this cache"):
        other(torch.randn(1, 1, 12), cache=cache)
    assert isinstance(cache, KVCache)
    assert cache.length == 3
