"""Layers and models of Regard in random sizes, each with something to read and the sizes that `cost` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from regard import (
    Alibi,
    Attention,
    Causal,
    First,
    Full,
    Neighborhood,
    Padding,
    RelativeTable,
    TransformerXL,
    Window,
    attend,
)
from regard.features import FavorPlus
from regard.layers import (
    AttentionSizes,
    ChannelAttention,
    FeedForward,
    GridAttention,
    Linear,
    MultiHeadAttention,
    PatchEmbedding,
    Rotary,
    TransformerBlock,
    WindowAttention,
)
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


@dataclass(frozen=True)
class Case:
    """A module, what it reads, and the sizes of that.

    Attributes:
        full: whether every token sees every token, so that the mathematics asks for what the reference computes.
        causal: whether attention is full or causal, which any module that is traced tells.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    sizes: dict[str, Any]
    full: bool = True
    causal: bool = True
    kwargs: dict[str, Any] = field(default_factory=dict)
    described: Attention | None = None

    @property
    def target(self) -> Any:
        """What `cost` takes: a description, where the module only runs it."""
        return self.module if self.described is None else self.described

    @property
    def any_batch(self) -> bool:
        """Whether a batch may have other rows: padding says how long each of its own is."""
        attention = self.described or getattr(self.module, "attention", None)
        return not isinstance(attention, Attention) or attention.pattern is None or attention.pattern.rows is None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what hypothesis prints
        printer.text(repr(self))

    def __repr__(self) -> str:
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else value for value in self.inputs]
        config = self.described or getattr(self.module, "config", None) or self.module
        return f"{config}\n  reads {shapes} {self.kwargs}\n  sizes {self.sizes}"


class Described(nn.Module):
    """A description as a module. Its inputs are results of other operations, and saved if needed."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.bias = attention.bias if isinstance(attention.bias, nn.Module) else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query.clone(), key.clone(), value.clone(), self.attention)


SMALL = st.integers(1, 3)
LENGTH = st.integers(1, 23)


@st.composite
def linears(draw) -> Case:
    width, out, batch, tokens = draw(LENGTH), draw(LENGTH), draw(SMALL), draw(LENGTH)
    layer = Linear(width, out, bias=draw(st.booleans()))
    return Case(layer, (torch.randn(batch, tokens, width),), {"batch": batch, "tokens": tokens})


@st.composite
def feed_forwards(draw) -> Case:
    width, hidden, batch, tokens = draw(LENGTH), draw(LENGTH), draw(SMALL), draw(LENGTH)
    activation = draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "reglu"]))
    layer = FeedForward(width, hidden, activation, bias=draw(st.booleans()))
    return Case(layer, (torch.randn(batch, tokens, width),), {"batch": batch, "tokens": tokens})


def _patterns(tokens: int) -> st.SearchStrategy:
    some = [None, None, Full(), Causal(), Causal(), Window(2, 0), Window(1, 3), First(1) | Window(1, 1)]
    padding = [Padding([tokens - 1, tokens]), Padding([tokens - 1, tokens]) & Causal()] if tokens > 1 else []
    return st.sampled_from([*some, *padding])


@st.composite
def attentions(draw) -> Case:
    """Self-attention, with any of its sizes free, by a pattern and perhaps a bias."""
    heads, group, batch, tokens = draw(SMALL), draw(SMALL), draw(SMALL), draw(LENGTH)
    width = draw(SMALL) * heads * group * 2
    sizes = AttentionSizes(
        width,
        heads * group,
        heads,
        key=draw(st.none() | st.integers(2, 5)),
        value=draw(st.none() | st.integers(1, 5)),
        output=draw(st.none() | LENGTH),
    )
    pattern = draw(_patterns(tokens))
    if pattern is not None and pattern.rows:
        batch = 2
    count = heads * group
    bias = draw(st.sampled_from([None, None, Alibi(count), RelativeTable(count, 3)]))
    rotary = Rotary(sizes.key) if sizes.key % 2 == 0 and draw(st.booleans()) else None
    layer = MultiHeadAttention(
        sizes,
        attention=Attention(pattern=pattern, bias=bias),
        bias=draw(st.sampled_from([True, False, "qo", "o", "qkv", "v"])),
        rotary=rotary,
    )
    full = pattern is None or isinstance(pattern, Full)
    plain = full or isinstance(pattern, Causal)
    given_sizes = {"batch": batch, "tokens": tokens}
    return Case(layer, (torch.randn(batch, tokens, width),), given_sizes, full=full, causal=plain)


@st.composite
def descriptions(draw) -> Case:
    """An attention without a layer: any pattern, bias, temperature or feature map."""
    group, kv_heads, batch, tokens, keys = draw(SMALL), draw(SMALL), draw(SMALL), draw(LENGTH), draw(LENGTH)
    # An einsum over one channel is no product, so that content biases would have none.
    heads, dim = group * kv_heads, draw(st.integers(2, 5))
    value_dim = draw(st.sampled_from([dim, draw(st.integers(1, 5))]))
    pattern = draw(_patterns(keys))
    if pattern is not None and pattern.rows:
        batch = 2
    kind = draw(st.sampled_from(["plain", "plain", "bias", "features", "cold", "warm", "content"]))
    scale, bias, features = None, None, None
    if kind == "bias":
        bias = draw(st.sampled_from([Alibi(heads), RelativeTable(heads, 3)]))
    elif kind == "content":
        bias = TransformerXL(heads, dim, encoding=_encoding)
    elif kind == "features":
        features = draw(st.sampled_from(["elu1", "relu", "taylor2", FavorPlus(7)]))
        scale = draw(st.sampled_from([None, None, 0.0]))
    elif kind in ("cold", "warm"):
        scale = math.inf if kind == "cold" else 0.0
    attention = Attention(pattern=pattern, scale=scale, bias=bias, feature_map=features)
    inputs = (
        torch.randn(batch, heads, tokens, dim),
        torch.randn(batch, kv_heads, keys, dim),
        torch.randn(batch, kv_heads, keys, value_dim),
    )
    given_sizes = {"batch": batch, "tokens": tokens, "keys": keys, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    given_sizes["value_dim"] = value_dim
    full = (pattern is None or isinstance(pattern, Full)) and kind in ("plain", "bias")
    return Case(Described(attention), inputs, given_sizes, full=full, causal=False, described=attention)


def _encoding(delta: Tensor) -> Tensor:
    return torch.stack([delta.double(), delta.double().square(), torch.ones_like(delta).double()], -1)


@st.composite
def crossings(draw) -> Case:
    """Attention to another text, whose tokens may have other channels."""
    heads, batch, tokens, keys = draw(SMALL), draw(SMALL), draw(LENGTH), draw(LENGTH)
    width, context = 2 * heads * draw(SMALL), draw(st.none() | LENGTH)
    layer = MultiHeadAttention(AttentionSizes(width, heads, context=context), bias=draw(st.booleans()))
    inputs = torch.randn(batch, tokens, width), torch.randn(batch, keys, context or width)
    return Case(layer, inputs, {"batch": batch, "tokens": tokens, "keys": keys})


@st.composite
def blocks(draw) -> Case:
    heads, batch, tokens = draw(SMALL), draw(SMALL), draw(LENGTH)
    width = 2 * heads * draw(SMALL)
    pattern = draw(st.sampled_from([None, Causal()]))
    norm = draw(st.sampled_from([nn.LayerNorm, nn.RMSNorm]))
    cross = MultiHeadAttention(width, heads) if draw(st.booleans()) else None
    block = TransformerBlock(
        MultiHeadAttention(width, heads, attention=Attention(pattern=pattern)),
        FeedForward(width, draw(LENGTH), draw(st.sampled_from(["gelu", "swiglu"]))),
        cross=cross,
        norm=norm,
        order=draw(st.sampled_from(["pre", "post"])),
    )
    given_sizes, kwargs = {"batch": batch, "tokens": tokens}, {}
    if cross is not None:
        given_sizes["context_tokens"] = draw(LENGTH)
        kwargs["context"] = torch.randn(batch, given_sizes["context_tokens"], width)
    return Case(block, (torch.randn(batch, tokens, width),), given_sizes, full=pattern is None, kwargs=kwargs)


@st.composite
def windows(draw) -> Case:
    heads, batch, rows, columns = draw(SMALL), draw(SMALL), draw(st.integers(1, 11)), draw(st.integers(1, 11))
    width = heads * draw(SMALL)
    layer = WindowAttention(
        width,
        heads,
        (draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        bias=draw(st.booleans()),
        sees_padding=draw(st.booleans()),
    )
    one = rows <= layer.window[0] and columns <= layer.window[1]
    return Case(
        layer, (torch.randn(batch, rows, columns, width),), {"batch": batch, "image": (rows, columns)}, full=one
    )


@st.composite
def channels(draw) -> Case:
    groups, batch, tokens = draw(st.integers(1, 10)), draw(SMALL), draw(LENGTH)
    width = groups * draw(SMALL)
    layer = ChannelAttention(width, groups, draw(st.sampled_from(["dim", "tokens"])), bias=draw(st.booleans()))
    return Case(layer, (torch.randn(batch, tokens, width),), {"batch": batch, "tokens": tokens})


@st.composite
def grids(draw) -> Case:
    heads, batch, rows, columns = draw(SMALL), draw(SMALL), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    width = 2 * heads * draw(SMALL)
    pattern = draw(st.sampled_from([None, Neighborhood((rows, columns), 1)]))
    layer = GridAttention(width, heads, attention=Attention(pattern=pattern))
    given_sizes = {"batch": batch, "image": (rows, columns)}
    full = pattern is None
    return Case(layer, (torch.randn(batch, rows, columns, width),), given_sizes, full=full, causal=full)


@st.composite
def patches(draw) -> Case:
    """With and without overlap, as a convolution and, where patches are large, as a product."""
    colours, width, batch = draw(SMALL), draw(st.integers(1, 7)), draw(SMALL)
    large = draw(st.integers(0, 3)) == 0
    patch = 16 if large else draw(st.integers(1, 5))
    stride = None if large or draw(st.booleans()) else draw(st.integers(1, 4))
    padding = 0 if stride is None else draw(st.integers(0, 2))
    layer = PatchEmbedding(colours, width, patch, stride, padding, bias=draw(st.booleans()))
    image = tuple(patch * draw(st.integers(1, 3)) for _ in range(2))
    return Case(layer, (torch.randn(batch, colours, *image),), {"batch": batch, "image": image})


# Models


def _words(draw, vocab_size: int, batch: int, tokens: int) -> Tensor:
    return torch.randint(vocab_size, (batch, tokens))


@st.composite
def berts(draw) -> Case:
    heads, batch, tokens = draw(SMALL), draw(SMALL), draw(LENGTH)
    pooler = draw(st.booleans())
    config = BertConfig(
        vocab_size=draw(LENGTH),
        context_length=23,
        segments=draw(SMALL),
        dim=2 * heads * draw(SMALL),
        layers=draw(SMALL),
        heads=heads,
        hidden_dim=draw(st.none() | LENGTH),
        activation=draw(st.sampled_from(["gelu", "relu"])),
        pooler=pooler,
        masked_tokens=draw(st.booleans()),
        next_sentence=pooler and draw(st.booleans()),
        dropout=0.0,
    )
    return Case(Bert(config), (_words(draw, config.vocab_size, batch, tokens),), {"batch": batch, "tokens": tokens})


@st.composite
def gpts(draw) -> Case:
    heads, group, batch, tokens = draw(SMALL), draw(SMALL), draw(SMALL), draw(LENGTH)
    window = draw(st.none() | st.integers(1, 5))
    config = GPTConfig(
        vocab_size=draw(LENGTH),
        context_length=23,
        dim=2 * heads * group * draw(SMALL),
        layers=draw(SMALL),
        heads=heads * group,
        kv_heads=draw(st.sampled_from([None, heads])),
        hidden_dim=draw(st.none() | LENGTH),
        norm=draw(st.sampled_from(["layer", "rms"])),
        position=draw(st.sampled_from(["learned", "rotary", "sinusoidal", "alibi", "none"])),
        feed_forward=draw(st.sampled_from(["gelu_tanh", "swiglu"])),
        bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        window=window,
    )
    given_sizes = {"batch": batch, "tokens": tokens}
    words = _words(draw, config.vocab_size, batch, tokens)
    return Case(GPT(config), (words,), given_sizes, full=False, causal=window is None)


@st.composite
def transformers(draw) -> Case:
    heads, batch, context, tokens = draw(SMALL), draw(SMALL), draw(LENGTH), draw(LENGTH)
    config = TransformerConfig(
        vocab_size=draw(LENGTH),
        dim=2 * heads * draw(SMALL),
        layers=draw(SMALL),
        heads=heads,
        hidden_dim=draw(LENGTH),
        context_length=23,
        position=draw(st.sampled_from(["sinusoidal", "learned"])),
        activation=draw(st.sampled_from(["relu", "swiglu"])),
        attention_bias=draw(st.booleans()),
        order=draw(st.sampled_from(["pre", "post"])),
        shared=draw(st.booleans()),
        dropout=0.0,
    )
    inputs = _words(draw, config.vocab_size, batch, context), _words(draw, config.vocab_size, batch, tokens)
    given_sizes = {"batch": batch, "context_tokens": context, "tokens": tokens}
    return Case(Transformer(config), inputs, given_sizes, full=False)


@st.composite
def vits(draw) -> Case:
    heads, batch, patch = draw(SMALL), draw(SMALL), draw(st.integers(1, 4))
    image = tuple(patch * draw(st.integers(1, 4)) for _ in range(2))
    config = ViTConfig(
        image=image,
        channels=draw(SMALL),
        patch=patch,
        classes=draw(st.integers(0, 5)),
        dim=2 * heads * draw(SMALL),
        layers=draw(SMALL),
        heads=heads,
        hidden_dim=draw(st.none() | LENGTH),
        qkv_bias=draw(st.booleans()),
        pool=draw(st.sampled_from(["class", "mean"])),
    )
    return Case(ViT(config), (torch.randn(batch, config.channels, *image),), {"batch": batch, "image": image})


@st.composite
def davits(draw) -> Case:
    batch, heads = draw(SMALL), tuple(draw(st.lists(SMALL, min_size=1, max_size=3)))
    config = DaViTConfig(
        channels=draw(SMALL),
        classes=draw(st.integers(0, 5)),
        dims=tuple(count * 2 * draw(SMALL) for count in heads),
        heads=heads,
        depths=tuple(draw(st.integers(0, 2)) for _ in heads),
        window=draw(st.integers(2, 5)),
        expansion=draw(st.sampled_from([1.0, 2.5, 4.0])),
        merge=draw(st.sampled_from([2, 3])),
        scale=draw(st.sampled_from(["dim", "tokens"])),
        qkv_bias=draw(st.booleans()),
    )
    image = draw(st.integers(5, 41)), draw(st.integers(5, 41))
    given_sizes = {"batch": batch, "image": image}
    return Case(DaViT(config), (torch.randn(batch, config.channels, *image),), given_sizes, full=False, causal=False)


@st.composite
def spatials(draw) -> Case:
    batch, patch = draw(SMALL), draw(SMALL)
    image = tuple(patch * draw(st.integers(1, 5)) for _ in range(2))
    layers = draw(SMALL)
    config = SpatialConfig(
        draw(st.sampled_from(["quadratic", "gaussian", "learned", "content"])),
        image=image,
        channels=draw(SMALL),
        patch=patch,
        dim=2 * draw(st.integers(1, 5)),
        layers=layers,
        heads=draw(SMALL | st.tuples(*[SMALL] * layers)),
        hidden_dim=draw(LENGTH),
        classes=draw(SMALL),
        dropout=0.0,
        attention_dropout=0.0,
    )
    model = SpatialTransformer(config)
    return Case(model, (torch.randn(batch, config.channels, *image),), {"batch": batch, "image": image})


LAYERS = {
    "description": descriptions(),
    "linear": linears(),
    "feed-forward": feed_forwards(),
    "attention": attentions(),
    "attention to another text": crossings(),
    "block": blocks(),
    "windows": windows(),
    "channels": channels(),
    "grid": grids(),
    "patches": patches(),
}
MODELS = {
    "bert": berts(),
    "gpt": gpts(),
    "transformer": transformers(),
    "vit": vits(),
    "davit": davits(),
    "spatial": spatials(),
}
EVERYTHING = LAYERS | MODELS
