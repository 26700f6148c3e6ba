"""Regard's own backends, layers and models hold every law that they claim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from examination import find_violations

from regard import Alibi, Attention, Causal, First, Neighborhood, RelativeTable, Window, attend
from regard.laws import check
from regard.layers import (
    ChannelAttention,
    FeedForward,
    GridAttention,
    IncrementalAttention,
    MultiHeadAttention,
    Rotary,
    TransformerBlock,
    WindowAttention,
)
from regard.layers.block import BlockList
from regard.models import (
    GPT,
    Bert,
    BertConfig,
    DaViT,
    DaViTConfig,
    GPTConfig,
    SpatialConfig,
    SpatialTransformer,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)

CAUSAL = Attention(pattern=Causal())
NEAR = Attention(pattern=Window(3, 0))
DESCRIPTIONS = {
    "full": Attention(),
    "causal": CAUSAL,
    "window and first": Attention(pattern=Causal() & (Window(4, 0) | First(1))),
    "alibi": Attention(pattern=Causal(), bias=Alibi(3)),
    "sharp": Attention(scale=1.5),
    "grid": Attention(pattern=Neighborhood((3, 5), 1)),
}
BACKENDS = {
    "reference": tuple(DESCRIPTIONS),
    "native": tuple(DESCRIPTIONS),
    "blocked": ("full", "window and first", "alibi", "grid"),
    "sdpa": ("full", "causal"),
}


def attention(
    described: Attention | None = None, heads: int = 3, channels: int = 12, **more: Any
) -> MultiHeadAttention:
    return MultiHeadAttention(channels, heads, attention=described, **more)


def gpt(position: str, **more: Any) -> GPT:
    return GPT(GPTConfig(vocab_size=11, context_length=71, dim=12, layers=2, heads=3, position=position, **more))


def spatial(position: str) -> SpatialTransformer:
    sizes = {"image": (8, 12), "dim": 12, "layers": 2, "heads": 4, "hidden_dim": 16, "classes": 5}
    return SpatialTransformer(SpatialConfig(position=position, **sizes))


HOUSE: dict[str, Callable[[], Any]] = {
    f"attend, {name}, on {backend}": partial(partial, attend, attention=DESCRIPTIONS[name], backend=backend)
    for backend, names in BACKENDS.items()
    for name in names
}
HOUSE |= {
    "attend": lambda: attend,
    "attend, linear": lambda: partial(attend, feature_map="elu1", backend="linear"),
    "attend, causal and linear": lambda: partial(attend, pattern=Causal(), feature_map="elu1", backend="linear"),
    "attend, linear, with masks": lambda: partial(attend, pattern=Causal(), feature_map="relu"),
    "a description": lambda: Attention(pattern=Window(2, 2), bias=RelativeTable(1, 3)),
    "IncrementalAttention": IncrementalAttention,
    "MultiHeadAttention": attention,
    "MultiHeadAttention, window and groups": lambda: attention(NEAR, heads=4, kv_heads=2),
    "MultiHeadAttention, rotary": lambda: attention(CAUSAL, rotary=Rotary(4), dropout=0.3),
    "MultiHeadAttention, alibi": lambda: attention(DESCRIPTIONS["alibi"], bias=False),
    "MultiHeadAttention, linear": lambda: attention(Attention(pattern=Causal(), feature_map="elu1")),
    "TransformerBlock": lambda: TransformerBlock(attention(), FeedForward(12, 20)),
    "TransformerBlock, causal, norm after": lambda: TransformerBlock(
        attention(CAUSAL), FeedForward(12, 20), order="post"
    ),
    "TransformerBlock, with another text": lambda: TransformerBlock(
        attention(CAUSAL), FeedForward(12, 20), cross=attention()
    ),
    "BlockList": lambda: BlockList(
        [TransformerBlock(attention(NEAR), FeedForward(12, 20), dropout=0.2) for _ in range(2)]
    ),
    "GridAttention": lambda: GridAttention(8, 2),
    "GridAttention, neighbours": lambda: GridAttention(8, 2, attention=DESCRIPTIONS["grid"]),
    "WindowAttention": lambda: WindowAttention(8, 2, (3, 2)),
    "WindowAttention, padding hidden": lambda: WindowAttention(8, 2, (2, 3), sees_padding=False),
    "ChannelAttention": lambda: ChannelAttention(8, 2),
    "ChannelAttention, many groups": lambda: ChannelAttention(36, 9, "tokens"),
    "GPT, learned positions": lambda: gpt("learned"),
    "GPT, sinusoids": lambda: gpt("sinusoidal", dropout=0.1),
    "GPT, alibi and window": lambda: gpt("alibi", window=5),
    "GPT, no positions": lambda: gpt("none"),
    "LLaMA": lambda: GPT(
        GPTConfig.llama(
            vocab_size=11, context_length=40, dim=16, layers=2, heads=4, kv_heads=2, hidden_dim=20, window=7
        )
    ),
    "Bert": lambda: Bert(BertConfig(vocab_size=11, context_length=40, dim=12, layers=2, heads=3)),
    "Transformer": lambda: Transformer(TransformerConfig(vocab_size=11, dim=12, layers=1, heads=3, hidden_dim=16)),
    "ViT": lambda: ViT(ViTConfig(image=(8, 12), patch=4, classes=7, dim=12, layers=2, heads=3)),
    "DaViT": lambda: DaViT(DaViTConfig(classes=5, dims=(8, 16), heads=(2, 4), depths=(1, 1), window=3)),
    "SpatialTransformer, quadratic": lambda: spatial("quadratic"),
    "SpatialTransformer, gaussian": lambda: spatial("gaussian"),
    "SpatialTransformer, content": lambda: spatial("content"),
}


# One operator, of each kind of layer, and a model; the slow tests look at the others.
FAST = {
    "attend, window and first, on native",
    "attend, causal and linear",
    "MultiHeadAttention, rotary",
    "GridAttention, neighbours",
    "WindowAttention",
    "ChannelAttention",
    "LLaMA",
}
fast_and_slow = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in HOUSE]


def test_every_fast_name_is_one_of_the_house():
    assert set(HOUSE) >= FAST


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(11)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", fast_and_slow)
def test_a_piece_of_regard_obeys_the_laws_that_it_claims(name: str):
    assert find_violations(HOUSE[name]()) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", HOUSE)
def test_regard_holds_every_claimed_law(name: str):
    report = check(HOUSE[name](), seed=1, fast=True)
    assert [str(verdict) for verdict in report.verdicts if not verdict.ok] == []


def test_a_window_into_the_future_that_is_declared_causal_is_found():
    report = check(
        partial(attend, pattern=Window(4, 1)), claims=["causality", "support"], pattern=Window(4, 0), fast=True
    )
    assert {verdict.slug for verdict in report.verdicts if verdict.outcome == "broken"} == {"causality", "support"}


def test_a_gpt_whose_cache_restarts_positions_is_found():
    model = gpt("learned")
    new_cache = model.new_cache
    model.new_cache = lambda capacity=None: Forgetful(new_cache(capacity))
    report = check(model, claims=["cache"], fast=True)
    assert report.verdicts["cache"].outcome == "broken"


class Forgetful:
    """A cache that begins counting positions anew with every piece."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)

    def positions(self, count: int, lengths: Any = None) -> torch.Tensor:
        return torch.arange(count)
