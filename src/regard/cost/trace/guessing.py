"""What to feed a module, guessed from what it says of itself: its configuration, its class, its first layer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regard.cost.asked import Asked
from regard.cost.trace.inputs import PIXELS, STRIDE, Fed, Shape, asked_sizes, sizes_of
from regard.cost.trace.subject import Subject


def guessed(subject: Subject, asked: Asked) -> Fed | None:
    module = subject.module
    if module is None or subject.target is not module:
        return None
    sizes, known = sizes_of(asked), {"B", *asked_sizes(asked)}
    config = getattr(module, "config", None)
    if hasattr(config, "model_type"):
        return _hugging_face(module, config, Fed((), {}, sizes, known), subject)
    for describe in (_configured, _for_images, _torch_module, _by_first_layer):
        fed = describe(module, Fed((), {}, sizes, known))
        if fed is not None:
            return fed
    return None


def _limited(fed: Fed, limit: Any, letter: str = "N") -> None:
    """A text that is no longer than the positions there are, where nobody says how long it is."""
    if isinstance(limit, int) and limit > 0:
        fed.limits[letter] = limit
        if letter not in fed.known:
            fed.sizes[letter] = min(fed.sizes[letter], limit)


def _hugging_face(module: nn.Module, config: Any, fed: Fed, subject: Subject) -> Fed:
    """By the name of the main input, which every model of transformers has."""
    main = getattr(module, "main_input_name", "input_ids")
    accepted = subject.accepts
    if "use_cache" in accepted:
        fed.kwargs["use_cache"] = False
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    _limited(fed, limit)
    ids = Shape(("B", "N"), torch.int64)
    if main == "pixel_values":
        _image(fed, getattr(config, "image_size", None) or 224, int(getattr(config, "num_channels", 3)))
        fed.kwargs["pixel_values"] = fed.args[0]
        fed.args = ()
    elif main == "input_features":
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * int(getattr(config, "max_source_positions", 1500))
        fed.kwargs["input_features"] = Shape(("B", bins, frames))
    elif main == "input_values":
        fed.sizes["N"] = fed.sizes["N"] if "N" in fed.known else 16000
        fed.kwargs["input_values"] = Shape(("B", "N"))
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        _limited(fed, limit, "T")
        fed.kwargs["input_ids"] = Shape(("B", "T"), torch.int64)
    else:
        fed.kwargs["input_ids"] = ids
        if "pixel_values" in accepted and hasattr(config, "vision_config"):
            seen = config.vision_config
            _image(fed, getattr(seen, "image_size", 224), int(getattr(seen, "num_channels", 3)))
            fed.kwargs["pixel_values"], fed.args = fed.args[0], ()
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        fed.kwargs["decoder_input_ids"] = ids
    return fed


def _image(fed: Fed, size: Any, channels: int, channels_last: bool = False) -> Fed:
    """An image of the size asked for, or of the size that the module is for."""
    rows, columns = (size, size) if isinstance(size, int) else tuple(size)[:2]
    for letter, number in (("R", rows), ("W", columns)):
        if letter not in fed.known:
            fed.sizes[letter] = int(number)
        fed.known.add(letter)
        fed.steps[letter] = STRIDE
    axes = ("B", "R", "W", channels) if channels_last else ("B", channels, "R", "W")
    fed.args = (Shape(axes, learns=channels_last),)
    return fed


def _configured(module: nn.Module, fed: Fed) -> Fed | None:
    """Models of Regard: their forward names tokens, a source and a target, or images."""
    config, names = getattr(module, "config", None), _parameters(module)
    if not type(module).__module__.startswith("regard.models") or config is None:
        return None
    _limited(fed, getattr(config, "context", None))
    _limited(fed, getattr(config, "context", None), "T")
    if names[:2] == ["source", "target"]:
        fed.args = Shape(("B", "T"), torch.int64), Shape(("B", "N"), torch.int64)
    elif names[:1] == ["tokens"]:
        fed.args = (Shape(("B", "N"), torch.int64),)
    elif names[:1] in (["image"], ["images"]):
        return _image(fed, getattr(config, "image", None) or 224, int(getattr(config, "channels", 3)))
    else:
        return None
    return fed


def _for_images(module: nn.Module, fed: Fed) -> Fed | None:
    """timm says what a model is for; torchvision's models begin with a convolution."""
    says = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    if isinstance(says, Mapping) and len(says.get("input_size") or ()) == 3:
        channels, *size = says["input_size"]
        own = getattr(getattr(module, "patch_embed", None), "img_size", None)  # built for another size than pretrained
        first = next((each for each in module.modules() if isinstance(each, nn.Conv2d)), None)
        return _image(fed, own or size, channels if first is None else first.in_channels)
    return None


def _torch_module(module: nn.Module, fed: Fed) -> Fed | None:
    """Layers of torch and of Regard."""
    if isinstance(module, nn.MultiheadAttention):
        x = _tokens(module.embed_dim, module.batch_first)
        if "M" in fed.known or not module._qkv_same_embed_dim:
            key = _tokens(module.kdim or module.embed_dim, module.batch_first, "M")
            value = _tokens(module.vdim or module.embed_dim, module.batch_first, "M")
            fed.args = x, key, value
        else:
            fed.args = x, x, x
    elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
        attention = _first(module, nn.MultiheadAttention)
        fed.args = (_tokens(attention.embed_dim, attention.batch_first),)
    elif isinstance(module, nn.TransformerDecoderLayer | nn.TransformerDecoder):
        attention = _first(module, nn.MultiheadAttention)
        fed.args = tuple(_tokens(attention.embed_dim, attention.batch_first, letter) for letter in "NT")
    elif isinstance(module, nn.Transformer):
        fed.args = tuple(_tokens(module.d_model, module.batch_first, letter) for letter in "TN")
    elif isinstance(module, nn.RNNBase):
        fed.args = (_tokens(module.input_size, module.batch_first),)
    elif type(module).__name__ in ("GridAttention", "WindowAttention") and type(module).__module__.startswith("regard"):
        inner: Any = getattr(getattr(module, "attention", None), "sizes", None)
        dim = inner.input if inner is not None else int(module.dim)  # type: ignore[arg-type]
        _image(fed, PIXELS, dim, channels_last=True)
        fed.steps["R"], fed.steps["W"] = getattr(module, "window", (1, 1))  # type: ignore[misc]
    elif type(module).__name__ == "MultiHeadAttention" and hasattr(module, "sizes"):
        sizes: Any = module.sizes
        fed.args = (_tokens(sizes.input),)
        if "M" in fed.known or "T" in fed.known or sizes.context != sizes.input:
            letter = "T" if "T" in fed.known else "M"
            fed.args += (_tokens(sizes.context, letter=letter),)
            if sizes.values != sizes.context:
                fed.args += (_tokens(sizes.values, letter=letter),)
    elif type(module).__name__ == "Block" and hasattr(module, "attention_norm"):
        fed.args = (_tokens(module.attention.sizes.input),)  # type: ignore[union-attr]
        if getattr(module, "cross", None) is not None:
            fed.kwargs["context"] = _tokens(module.cross.sizes.context, letter="T")  # type: ignore[union-attr]
    elif type(module).__name__ == "ChannelAttention" and hasattr(module, "dim"):
        fed.args = (_tokens(int(module.dim)),)  # type: ignore[arg-type]
    else:
        return None
    return fed


def _by_first_layer(module: nn.Module, fed: Fed) -> Fed | None:
    """A module that takes one input is fed what its first layer reads."""
    required = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1:
        return None
    if isinstance(module, nn.Sequential):
        for child in module:
            nested = _torch_module(child, fed) if any(True for _ in child.parameters()) else None
            if nested is not None:
                return nested
            if any(True for _ in child.parameters()):
                break
    for layer in module.modules():
        fed_layer = _layer(layer, fed)
        if fed_layer is not None:
            return fed_layer
    return None


def _layer(layer: nn.Module, fed: Fed) -> Fed | None:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        fed.args = (Shape(("B", "N"), torch.int64),)
    elif isinstance(layer, nn.Linear):
        fed.args = (_tokens(layer.in_features),)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        fed.args = (Shape(("B", "N", *layer.normalized_shape), learns=True),)
    elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        return _image(fed, 224, layer.in_channels)
    elif isinstance(layer, nn.Conv1d | nn.ConvTranspose1d):
        fed.args = (Shape(("B", layer.in_channels, "N"), learns=True),)
    elif isinstance(layer, nn.BatchNorm2d):
        return _image(fed, 224, layer.num_features)
    elif isinstance(layer, nn.BatchNorm1d):
        fed.args = (Shape(("B", layer.num_features, "N"), learns=True),)
    elif isinstance(layer, nn.GroupNorm):
        return _image(fed, 224, layer.num_channels)
    else:
        return None
    return fed


def _tokens(channels: int, batch_first: bool = True, letter: str = "N") -> Shape:
    axes = ("B", letter, channels) if batch_first else (letter, "B", channels)
    return Shape(axes, learns=True)


def _first(module: nn.Module, kind: type) -> Any:
    return next(each for each in module.modules() if isinstance(each, kind))


def _parameters(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []
