"""Constructor arguments of layers of torch and Regard, from which they are built again at other sizes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from regard.layers import (
    AttentionSizes,
    ChannelAttention,
    FeedForward,
    GridAttention,
    GridPositions,
    LearnedPositions,
    MultiHeadAttention,
    PatchEmbedding,
    SinusoidalPositions,
    TransformerBlock,
    WindowAttention,
)
from regard.layers.linear import Linear
from regard.layers.projections import Projections
from regard.layers.rotary import Rotary

Values = Mapping[str, int]


@dataclass
class Configuration:
    """The sizes a module was built with, by their symbols, and how to build it with others.

    Attributes:
        sizes: what the module has; `L` is the number of repeated layers.
        build: a module of other sizes, built on the meta device.
        multiples: a size that is a multiple of others: `{"D": (("H",), 2)}` means that D is a multiple of 2 H.
        at_least: a size that is no smaller than another: as many positions as tokens.
    """

    sizes: dict[str, int]
    build: Callable[[Values], nn.Module]
    multiples: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    at_least: dict[str, str] = field(default_factory=dict)


def find_layer_configuration(module: nn.Module, image: tuple[int, int] | None) -> Configuration | None:
    """How to build a layer again, or None."""
    if type(module) is GridPositions and image not in (None, module.grid):  # resized: R and W are no sizes of the table
        build = lambda s: GridPositions(module.grid, s["D"], first=module.first)  # noqa: E731
        return Configuration({"D": module.weight.shape[1]}, build)
    for kind, find in LAYERS.items():
        if type(module) is kind:
            return find(module)
    return None


def _has_bias(module: Any) -> bool:
    return module.bias is not None


def _describe_linear(module: Any) -> Configuration:
    sizes = {"D": module.in_features, "O": module.out_features}
    return Configuration(sizes, lambda s: type(module)(s["D"], s["O"], bias=_has_bias(module)))


def _describe_norm(module: Any) -> Configuration | None:
    if len(module.normalized_shape) != 1:
        return None
    more: dict[str, Any] = {"eps": module.eps, "elementwise_affine": module.elementwise_affine}
    if isinstance(module, nn.LayerNorm):
        more["bias"] = _has_bias(module)
    return Configuration({"D": module.normalized_shape[0]}, lambda s: type(module)(s["D"], **more))


def _describe_embedding(module: nn.Embedding) -> Configuration:
    sizes = {"V": module.num_embeddings, "D": module.embedding_dim}
    return Configuration(sizes, lambda s: nn.Embedding(s["V"], s["D"]))


def _learned_positions(module: LearnedPositions) -> Configuration:
    sizes = {"S": module.weight.shape[0], "D": module.weight.shape[1]}
    return Configuration(sizes, lambda s: LearnedPositions(s["S"], s["D"]), at_least={"S": "N"})


def _sinusoidal_positions(module: SinusoidalPositions) -> Configuration:
    return Configuration({"D": module.dim}, lambda s: SinusoidalPositions(s["D"], base=module.base), {"D": ((), 2)})


def _grid_positions(module: GridPositions) -> Configuration:
    sizes = {"R": module.grid[0], "W": module.grid[1], "D": module.weight.shape[1]}
    return Configuration(sizes, lambda s: GridPositions((s["R"], s["W"]), s["D"], first=module.first))


def _feed_forward(module: FeedForward) -> Configuration:
    more: dict[str, Any] = {"bias": _has_bias(module.inner), "dropout": _dropout_of(module)}
    sizes = {"D": module.inner.in_features, "F": module.outer.in_features}
    return Configuration(sizes, lambda s: FeedForward(s["D"], s["F"], module.activation, **more))


def _dropout_of(module: Any) -> float:
    dropout = getattr(module, "dropout", 0.0)
    return float(getattr(dropout, "p", dropout))


def _multi_head(module: MultiHeadAttention) -> Configuration | None:
    found = _projection_sizes(module.sizes)
    if found is None:
        return None
    sizes, multiples, resize = found
    if module.rotary is not None:
        if "d" in sizes:
            multiples["d"] = ((), 2)
        else:
            multiples["D"] = (("H",), 2)

    def build(values: Values) -> nn.Module:
        wanted = resize(values)
        rotary = module.rotary
        if rotary is not None and rotary.dim == module.sizes.key:
            rotary = Rotary(wanted.key, **_rotary_options(rotary))
        return MultiHeadAttention(
            wanted, attention=module.attention, bias=module.letters, dropout=module.dropout, rotary=rotary
        )

    if _is_bound_to_heads(module):
        heads = sizes.pop("H")
        sizes.pop("G", None)
        if "D" in multiples and multiples["D"][0]:
            multiples["D"] = ((), heads * multiples["D"][1])
    return Configuration(sizes, _with_defaults(build, module.sizes), multiples)


def _rotary_options(rotary: Rotary) -> dict[str, Any]:
    return {name: getattr(rotary, name) for name in ("base", "layout") if hasattr(rotary, name)}


def _is_bound_to_heads(module: MultiHeadAttention) -> bool:
    bias, pattern = module.attention.bias, module.attention.pattern
    return bias is not None or (pattern is not None and pattern.heads is not None)


def _with_defaults(build: Callable[[Values], nn.Module], sizes: AttentionSizes) -> Callable[[Values], nn.Module]:
    return lambda values: build({"H": sizes.heads, "G": sizes.kv_heads, **values} if "H" not in values else values)


def _projection_sizes(
    sizes: AttentionSizes,
) -> tuple[dict[str, int], dict[str, tuple[tuple[str, ...], int]], Callable[[Values], AttentionSizes]] | None:
    """Symbols of the sizes of a multi-head attention; one that follows from others, as in most layers, has none."""
    found = {"D": sizes.input, "H": sizes.heads}
    multiples: dict[str, tuple[tuple[str, ...], int]] = {}
    if sizes.kv_heads != sizes.heads:
        found["G"] = sizes.kv_heads
        multiples["H"] = (("G",), 1)
    follows = sizes.key * sizes.heads == sizes.input
    if follows:
        multiples["D"] = (("H",), 2 if sizes.key % 2 == 0 else 1)
    else:
        found["d"] = sizes.key
    for symbol, size, same in (
        ("e", sizes.value, sizes.key),
        ("X", sizes.context, sizes.input),
        ("Y", sizes.values, sizes.context),
        ("O", sizes.output, sizes.input),
    ):
        if size != same:
            found[symbol] = size

    def resize(values: Values) -> AttentionSizes:
        key = values["D"] // values["H"] if follows else values["d"]
        context = values.get("X", values["D"])
        return AttentionSizes(
            values["D"],
            values["H"],
            values.get("G", values["H"]),
            key=key,
            value=values.get("e", key),
            context=context,
            values=values.get("Y", context),
            output=values.get("O", values["D"]),
        )

    return found, multiples, resize


def _describe_projections(module: Projections) -> Configuration | None:
    found = _projection_sizes(module.sizes)
    if found is None:
        return None
    sizes, multiples, resize = found
    return Configuration(sizes, lambda s: Projections(resize(s), module.letters), multiples)


def _grid_attention(module: GridAttention) -> Configuration | None:
    inner = _multi_head(module.attention)
    if inner is None:
        return None

    def build(values: Values) -> nn.Module:
        made = copy.copy(module)
        made._modules = {"attention": inner.build(values)}
        return made

    return dataclasses.replace(inner, build=build)


def _describe_block(module: TransformerBlock) -> Configuration | None:
    """Layers of a block share their symbols; a cross-attention of the same sizes has no symbols of its own."""
    attention = _multi_head(module.attention)
    cross = None if module.cross is None else _multi_head(module.cross)
    if attention is None or (module.cross is not None and cross is None):
        return None
    if cross is not None and (cross.sizes != attention.sizes or "O" in cross.sizes):
        return None
    sizes = {**attention.sizes, "F": module.feed_forward.outer.in_features}

    def build(values: Values) -> nn.Module:
        width = values.get("O", values["D"])
        forward = module.feed_forward
        more: dict[str, Any] = {"bias": _has_bias(forward.inner), "dropout": _dropout_of(forward)}
        return TransformerBlock(
            attention.build(values),  # type: ignore[arg-type]
            FeedForward(width, values["F"], forward.activation, **more),
            cross=None if cross is None else cross.build(values),  # type: ignore[arg-type]
            norm=type(module.attention_norm),
            eps=float(module.attention_norm.eps),  # type: ignore[arg-type]
            order=module.order,
            dropout=_dropout_of(module),
            shortcut="same" if module.shortcut is None else "project",
        )

    return Configuration(sizes, build, attention.multiples)


def _window_attention(module: WindowAttention) -> Configuration:
    more: dict[str, Any] = {"bias": _has_bias(module.qkv), "sees_padding": module.sees_padding}
    build = lambda s: WindowAttention(s["D"], s["H"], module.window, **more)  # noqa: E731
    return Configuration({"D": module.dim, "H": module.heads}, build, {"D": (("H",), 1)})


def _channel_attention(module: ChannelAttention) -> Configuration:
    build = lambda s: ChannelAttention(s["D"], s["H"], module.scale, bias=_has_bias(module.qkv))  # type: ignore[arg-type] # noqa: E731
    return Configuration({"D": module.dim, "H": module.groups}, build, {"D": (("H",), 1)})


def _patch_embedding(module: PatchEmbedding) -> Configuration:
    bias = any(name.endswith("bias") for name, _ in module.named_parameters())
    tiles = module.stride == module.patch and module.padding == 0
    sizes = {"C": module.channels, "D": module.dim}
    multiples: dict[str, tuple[tuple[str, ...], int]] = {}
    if tiles:
        sizes["p"] = module.patch
        multiples = {"R": (("p",), 1), "W": (("p",), 1)}

    def build(s: Values) -> nn.Module:
        patch, stride = (s["p"], s["p"]) if tiles else (module.patch, module.stride)
        return PatchEmbedding(s["C"], s["D"], patch, stride, module.padding, bias=bias)

    return Configuration(sizes, build, multiples)


# Layers of torch


def _torch_attention(module: nn.MultiheadAttention) -> Configuration | None:
    if not module._qkv_same_embed_dim:
        return None
    more: dict[str, Any] = {"dropout": module.dropout, "bias": module.in_proj_bias is not None}
    more |= {"add_zero_attn": module.add_zero_attn, "batch_first": module.batch_first}
    build = lambda s: nn.MultiheadAttention(s["D"], s["H"], **more)  # noqa: E731
    return Configuration({"D": module.embed_dim, "H": module.num_heads}, build, {"D": (("H",), 1)})


def _torch_layer(module: Any) -> Configuration:
    attention = module.self_attn
    more: dict[str, Any] = {
        "dropout": _dropout_of(module),
        "activation": module.activation if hasattr(module, "activation") else "relu",
    }
    more |= {"batch_first": attention.batch_first, "norm_first": module.norm_first}
    more |= {"layer_norm_eps": module.norm1.eps, "bias": module.linear1.bias is not None}
    sizes = {"D": attention.embed_dim, "H": attention.num_heads, "F": module.linear1.out_features}
    build = lambda s: type(module)(s["D"], s["H"], s["F"], **more)  # noqa: E731
    return Configuration(sizes, build, {"D": (("H",), 1)})


def _torch_stack(module: Any) -> Configuration | None:
    if module.norm is not None and not isinstance(module.norm, nn.LayerNorm):
        return None
    layer = _torch_layer(module.layers[0])
    more: dict[str, Any] = (
        {"enable_nested_tensor": module.enable_nested_tensor} if isinstance(module, nn.TransformerEncoder) else {}
    )

    def build(sizes: Values) -> nn.Module:
        norm = None if module.norm is None else nn.LayerNorm(sizes["D"], eps=module.norm.eps)  # type: ignore[arg-type]
        return type(module)(layer.build(sizes), sizes["L"], norm, **more)  # type: ignore[arg-type]

    return Configuration({**layer.sizes, "L": len(module.layers)}, build, layer.multiples)


def _torch_transformer(module: nn.Transformer) -> Configuration | None:
    encoder, decoder = module.encoder, module.decoder
    if not hasattr(encoder, "layers") or len(encoder.layers) != len(decoder.layers):  # type: ignore[arg-type]
        return None
    first: Any = encoder.layers[0]  # type: ignore[index]
    layer = _torch_layer(first)

    def build(sizes: Values) -> nn.Module:
        return nn.Transformer(
            sizes["D"],
            sizes["H"],
            sizes["L"],
            sizes["L"],
            sizes["F"],
            dropout=_dropout_of(first),
            activation=first.activation,
            batch_first=module.batch_first,
            norm_first=first.norm_first,
            layer_norm_eps=first.norm1.eps,
            bias=first.linear1.bias is not None,
        )

    return Configuration({**layer.sizes, "L": len(encoder.layers)}, build, layer.multiples)  # type: ignore[arg-type]


def _describe_recurrent(module: Any) -> Configuration | None:
    if module.num_layers != 1 or module.proj_size:
        return None
    more: dict[str, Any] = {"bias": module.bias, "batch_first": module.batch_first}
    more |= {"bidirectional": module.bidirectional}
    sizes = {"D": module.input_size, "F": module.hidden_size}
    return Configuration(sizes, lambda s: type(module)(s["D"], s["F"], **more))


def _list_layers() -> dict[type, Callable[[Any], Configuration | None]]:
    return {
        **dict.fromkeys((nn.Linear, Linear), _describe_linear),
        **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _describe_norm),
        nn.Embedding: _describe_embedding,
        LearnedPositions: _learned_positions,
        SinusoidalPositions: _sinusoidal_positions,
        GridPositions: _grid_positions,
        FeedForward: _feed_forward,
        MultiHeadAttention: _multi_head,
        Projections: _describe_projections,
        GridAttention: _grid_attention,
        TransformerBlock: _describe_block,
        WindowAttention: _window_attention,
        ChannelAttention: _channel_attention,
        PatchEmbedding: _patch_embedding,
        nn.MultiheadAttention: _torch_attention,
        **dict.fromkeys((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), _torch_layer),
        **dict.fromkeys((nn.TransformerEncoder, nn.TransformerDecoder), _torch_stack),
        nn.Transformer: _torch_transformer,
        **dict.fromkeys((nn.LSTM, nn.GRU), _describe_recurrent),
    }


LAYERS = _list_layers()

__all__ = ["Configuration", "Values", "find_layer_configuration"]
