"""Descriptions of attention in decoders and batches: causal, cached, padded and packed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from described import build, even
from torch import nn

from regard import (
    Alibi,
    Attention,
    Blocks,
    Causal,
    First,
    Full,
    Gaussian,
    Pattern,
    Random,
    RelativeTable,
    RowColumn,
    Strided,
    TransformerXL,
    Where,
    Window,
)
from regard.errors import CacheError
from regard.features import FavorPlus

# The future stays hidden, and decoding is recomputation

SEES_THE_FUTURE = (Full(), Window(2, 3), Strided(2), First(2), ~Causal(), Blocks(4), Random(3, seed=2), Where(even))


@pytest.mark.parametrize("pattern", SEES_THE_FUTURE, ids=str)
def test_no_description_lets_a_token_see_a_later_one(pattern: Pattern):
    tokens = torch.arange(1, 8)[None]
    other = tokens.clone()
    other[0, -1] = 23
    gpt, translator = build("gpt", Attention(pattern=pattern)), build("decoder", Attention(pattern=pattern))
    with torch.no_grad():
        assert torch.equal(gpt(tokens)[:, :-1], gpt(other)[:, :-1])
        assert torch.equal(translator(tokens, tokens)[:, :-1], translator(tokens, other)[:, :-1])


DECODED: dict[str, Any] = {
    "window": Attention(pattern=Window(2, 0)),
    "dilated": Attention(pattern=Window(2, 0, step=2)),
    "strided": Attention(pattern=Strided(2)),
    "sinks": Attention(pattern=First(1) | Window(2, 0)),
    "blocks": Attention(pattern=Blocks(4)),
    "alibi": Attention(bias=Alibi(3)),
    "alibi window": Attention(pattern=Window(3, 0), bias=Alibi(3)),
    "table": Attention(bias=RelativeTable(3, distance=3)),
    "gaussian": Attention(bias=Gaussian(3)),
    "transformer-xl": Attention(bias=TransformerXL(3, dim=4)),
    "hard": Attention(scale=math.inf),
    "mean": Attention(scale=0.0),
    "linear": Attention(feature_map="elu1"),
    "favor": Attention(feature_map=FavorPlus(features=7), pattern=Causal()),
    "per layer": (Attention(pattern=Window(2, 0)), Attention(feature_map="elu1")),
}


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("kind", ["gpt", "decoder"])
def test_decoding_from_a_cache_is_recomputation(kind: str, name: str):
    model = build(kind, DECODED[name]).double()
    tokens = torch.randint(0, 31, (2, 13), generator=torch.Generator().manual_seed(5))
    cache = model.new_cache()
    with torch.no_grad():
        if kind == "gpt":
            whole = model(tokens)
            parts = [model(chunk, cache=cache) for chunk in tokens.split([5, 1, 1, 2, 1, 1, 1, 1], 1)]
        else:
            context = model.encode(tokens[:, :7])
            whole = model.decode(tokens, context)
            parts = [model.decode(chunk, context, cache=cache) for chunk in tokens.split([5, 1, 1, 2, 1, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-11)


def test_caches_fit_the_descriptions():
    from regard.layers.cache import KVCache, StateCache

    cache = build("gpt", (Attention(pattern=Window(2, 0)), Attention(feature_map="elu1"))).new_cache()
    rolling, sums = cache.layers
    assert isinstance(rolling, KVCache)
    assert rolling.window == 2
    assert isinstance(sums, StateCache)


@pytest.mark.parametrize("name", DECODED)
def test_generation_continues_as_recomputation_would(name: str):
    model = build("gpt", DECODED[name])
    prompt = [3, 1, 4, 1, 5]
    written = model.generate([prompt], max_new_tokens=6).tokens[0]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert list(written) == tokens[5:]


def test_padding_by_lengths_is_each_text_alone():
    for name in ("window", "strided", "alibi", "table", "linear", "transformer-xl"):
        model = build("gpt", DECODED[name]).double()
        tokens = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            padded, alone = model(tokens, lengths=[4, 7]), model(tokens[:1, 3:])
        torch.testing.assert_close(padded[:1, 3:], alone, rtol=1e-11, atol=1e-11)
    with pytest.raises(CacheError, match="depends on distances only"):
        build("gpt", DECODED["blocks"])(torch.ones(2, 7, dtype=torch.long), lengths=[4, 7])


@pytest.mark.parametrize(
    "described", [*DECODED.values(), Attention(pattern=First(1)), Attention(bias=RowColumn(3, (4, 5)))], ids=str
)
def test_embeddings_of_packed_texts_are_those_of_each_alone(described: Any):
    model = build("bert", described).double()
    texts = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9], [7]]
    together = model.embed(texts)
    for text, found in zip(texts, together, strict=True):
        torch.testing.assert_close(found[None], model.embed([text]), rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        means = torch.stack([model(torch.tensor([text])).hidden[0].mean(0) for text in texts])
    torch.testing.assert_close(together, nn.functional.normalize(means, dim=-1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "described", [Attention(pattern=First(1)), Attention(pattern=Blocks(3)), Attention(pattern=Window(1, 1))], ids=str
)
def test_translations_of_a_batch_are_those_of_each_text_alone(described: Attention):
    model = build("encoder", described).double()
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    together = model.generate(prompts, max_new_tokens=5).tokens
    padded = torch.tensor([[0] * (5 - len(prompt)) + prompt for prompt in prompts])
    with torch.no_grad():
        logits, _ = model.prefill(padded, torch.tensor([5, 2, 3]))
        for prompt, tokens, found in zip(prompts, together, logits, strict=True):
            alone, _ = model.prefill(torch.tensor([prompt]))
            torch.testing.assert_close(found, alone[0], rtol=1e-11, atol=1e-11)
            assert list(tokens) == list(model.generate([prompt], max_new_tokens=5).tokens[0])
