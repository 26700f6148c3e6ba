"""x-transformers: wrappers of ids and images, stacks of layers, single attentions, and its encoder-decoder.

Ragged texts are padded on the right with `mask`, on the left with `seq_start_pos`, as its own generation does.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter, Conventions, Variant, first_tensor
from regard.adapters.deepcopy import deepcopy
from regard.adapters.known_layer import (
    MODULE_CLAIMS,
    TEXT_CLAIMS,
    KnownLayer,
    comes_from,
    conventions_of,
    named,
    other_sequence,
)
from regard.adapters.mask_patterns import is_padding
from regard.adapters.model import ImageModelAdapter, ModelAdapter
from regard.adapters.rng import Rng

LIBRARY = "x_transformers"
OTHER = 7  # tokens of the text on the other side


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Adapter | None:
    """The adapter of a module of x-transformers, or None."""
    if not isinstance(target, nn.Module) or not comes_from(target, LIBRARY):
        return None
    return _adapt_by_class(target, kind, name, options)


def _adapt_by_class(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Adapter | None:
    if named(target, "AutoregressiveWrapper"):
        return recognise(target.net, kind, name, options)
    if named(target, "TransformerWrapper"):
        return _adapt_wrapper(target, name, options)
    if named(target, "XTransformer"):
        return _adapt_encoder_decoder(target, name, options)
    if named(target, "ViTransformerWrapper"):
        adapter = XTransformersImageModel(
            target, name, conventions_of(options), image_size=options.get("image_size") or _find_image_size(target)
        )
        adapter.claims = (*MODULE_CLAIMS, "paths")
    elif named(target, "AttentionLayers"):
        claims = _list_layer_claims(target)
        adapter = AttentionLayersAdapter(
            target,
            name,
            conventions_of(options, **_find_padding_conventions(target)),
            channels=target.dim,
            claims=claims,
        )
    elif named(target, "Attention"):
        claims = ["causality"] if target.causal else ["permutation"]
        channels = target.to_q.in_features
        own = conventions_of(options)
        adapter = AttentionAdapter(target, name, own, channels=channels, claims=[*claims, *TEXT_CLAIMS])
    else:
        return None
    adapter.declared = f"x-transformers' {type(target).__name__}"
    return adapter


def _knows_positions(layers: Any) -> bool:
    """Whether a stack of layers uses positions."""
    known = (layers.rel_pos, layers.rotary_pos_emb, getattr(layers, "polar_pos_emb", None))
    return any(each is not None for each in known) or _shifts_tokens(layers)


def _shifts_tokens(layers: Any) -> bool:
    return any(type(part).__name__ == "ShiftTokens" for part in layers.modules())


def _list_layer_claims(layers: Any) -> list[str]:
    claims = ["causality"] if layers.causal else []
    if not layers.causal and not _knows_positions(layers):
        claims.append("permutation")
    return [*claims, *TEXT_CLAIMS]


def _find_padding_conventions(layers: Any) -> dict[str, Any]:
    # Tokens that are shifted along the text come from where the padding is.
    return {"left": False} if _shifts_tokens(layers) else {}


class Float64Softmax:
    """Its softmax is always taken in float32; in float64 the largest negative number would become infinite there."""

    def _rebind(self, original: Adapter) -> None:
        super()._rebind(original)  # type: ignore[misc]
        if self.dtype == torch.float64:  # type: ignore[attr-defined]
            for part in self.target.modules():  # type: ignore[attr-defined]
                own = getattr(part, "attn_fn", None)
                if isinstance(own, functools.partial) and own.keywords.get("dtype") == torch.float32:
                    part.attn_fn = functools.partial(own, dtype=torch.float64)

    def variants(self) -> dict[str, Variant]:
        return _find_unfused_variant(self)


# The other implementation: a fused kernel, where the options allow one.


def _find_unfused_variant(adapter: Any) -> dict[str, Variant]:
    """Fused attention can be switched off; whether it can be switched on depends on the options."""
    parts = [part for part in adapter.target.modules() if getattr(part, "flash", None) is True]
    if not parts:
        return {}
    other = copy.copy(adapter)
    other.target = deepcopy(adapter.target)
    for part in other.target.modules():
        if getattr(part, "flash", None) is True:
            part.flash = False
    return {"without flash": other.run}


def _mask_arguments(x: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """A mask as its generation gives it: where texts begin, or which tokens are real."""
    if mask is not None and is_padding(mask, "left") and not is_padding(mask, "right"):
        return {"seq_start_pos": x.shape[1] - mask.sum(-1)}
    return {"mask": mask}


# Layers


class AttentionAdapter(Float64Softmax, KnownLayer):
    """One attention."""

    can = ("aligned", "float", "lengths", "gradients", "mask")

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        return self.target(x, mask=mask, **more)


class AttentionLayersAdapter(AttentionAdapter):
    """An encoder or a decoder without its embedding; what it attends across to is the same for every row."""

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        if self.target.cross_attend:
            more["context"] = other_sequence(self, x.shape[0], OTHER, self.channels)
        return self.target(x, **(_mask_arguments(x, mask) if self.target.causal else {"mask": mask}), **more)


# Models


class XTransformersImageModel(Float64Softmax, ImageModelAdapter):
    """Images, cut into patches."""


class XTransformersTextModel(Float64Softmax, ModelAdapter):
    """Ids in, logits out."""

    def __init__(self, target: Any, name: str, conventions: Conventions, *, claims: tuple[str, ...]) -> None:
        super().__init__(target, name, conventions, vocab_size=target.num_tokens, max_length=target.max_seq_len)
        self.claims = claims

    def find_abilities(self) -> None:
        self.abilities |= {"aligned", "lengths", "gradients", "mask"}

    @property
    def channels(self) -> int:
        return max(64, self.target.emb_dim)

    @property
    def layers(self) -> Any:
        return self.target.attn_layers

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        if self.layers.cross_attend:
            more["context"] = other_sequence(self, x.shape[0], OTHER, self.layers.dim)
        return self.target(x, **(_mask_arguments(x, mask) if self.layers.causal else {"mask": mask}), **more)

    def variants(self) -> dict[str, Variant]:
        return _find_unfused_variant(self) | {"return_intermediates=True": self._run_with_intermediates}

    def _run_with_intermediates(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return first_tensor(self.call(x, mask, return_intermediates=True))


class IntermediatesCache:
    """Its cache: what the layers returned last, and all tokens so far; `cache_age` is the number of new ones."""

    def __init__(self, adapter: XTransformersTextModel) -> None:
        self.adapter = adapter

    def bound_to(self, adapter: XTransformersTextModel) -> IntermediatesCache:
        return IntermediatesCache(adapter)

    def start(self, batch: int, tokens: int) -> Any:
        return None, None

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        ids, cache = state
        ids = x if ids is None else torch.cat((ids, x), 1)
        more: dict[str, Any] = {"return_intermediates": True}
        if cache is not None:
            more |= {"cache": cache, "cache_age": x.shape[1]}
        if mask is not None and bool(mask.all()):
            mask = None
        output, cache = self.adapter.call(ids, mask, **more)
        return output, (ids, cache)

    def reorder(self, state: Any, index: Tensor) -> Any | None:
        return None

    def crop(self, state: Any, tokens: int) -> Any | None:
        return None


def _adapt_wrapper(target: Any, name: str, options: dict[str, Any]) -> Adapter | None:
    layers = target.attn_layers
    if layers.need_condition or getattr(target, "recycling", False) or getattr(target, "looped", False):
        return None  # it needs more inputs than ids
    claims = [*(["causality"] if layers.causal else []), *TEXT_CLAIMS]
    caches = layers.causal and target.can_cache_kv
    claims += ["cache"] if caches else []
    own: dict[str, Any] = {} if layers.causal else {"left": False}
    adapter = XTransformersTextModel(
        target, name, conventions_of(options, **{**own, **_find_padding_conventions(layers)}), claims=tuple(claims)
    )
    if caches:
        adapter.caching = IntermediatesCache(adapter)
        adapter.abilities.add("cache")
    adapter.declared = f"x-transformers' {type(layers).__name__.lower()} of ids"
    return adapter


class XTransformersEncoderDecoder(Float64Softmax, ModelAdapter):
    """One side of an `XTransformer`; the other is the same for every row."""

    def __init__(self, target: Any, name: str, conventions: Conventions, *, claims: tuple[str, ...]) -> None:
        side = self.side(target)
        super().__init__(target, name, conventions, vocab_size=side.num_tokens, max_length=side.max_seq_len)
        self.claims = claims

    @staticmethod
    def side(target: Any) -> Any:
        return target.encoder

    def other(self, batch: int, vocab_size: int) -> Tensor:
        return Rng(0, "other").integers(0, vocab_size, 1, OTHER).expand(batch, OTHER)

    def decoded(self, written: Tensor, source: Tensor, source_mask: Tensor | None, **more: Any) -> Tensor:
        encoded = self.target.encoder(source, mask=source_mask, return_embeddings=True)
        return self.target.decoder.net(written, context=encoded, context_mask=source_mask, **more)


class XTransformersEncoder(XTransformersEncoderDecoder):
    """The text that is read; the output has the rows of the one that is written."""

    def find_abilities(self) -> None:
        self.abilities |= {"lengths", "gradients", "mask"}

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        return self.decoded(self.other(x.shape[0], self.target.decoder.net.num_tokens), x, mask)


class XTransformersDecoder(XTransformersEncoderDecoder):
    """The text that is written."""

    def find_abilities(self) -> None:
        self.abilities |= {"aligned", "lengths", "gradients", "mask"}

    @staticmethod
    def side(target: Any) -> Any:
        return target.decoder.net

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        source = self.other(x.shape[0], self.target.encoder.num_tokens)
        return self.decoded(x, source, None, **_mask_arguments(x, mask))


def _adapt_encoder_decoder(target: Any, name: str, options: dict[str, Any]) -> Adapter:
    adapter = XTransformersDecoder(target, name, conventions_of(options), claims=("causality", *TEXT_CLAIMS))
    read = XTransformersEncoder(target, f"{name}, the text it reads", Conventions(left=False), claims=TEXT_CLAIMS)
    adapter.parts = [read]
    adapter.declared = "x-transformers' encoder and decoder"
    return adapter


def _find_image_size(target: Any) -> tuple[int, int, int]:
    side = target.image_size if hasattr(target, "image_size") else None
    patch = target.patch_size
    channels = target.patch_to_embedding[-2 if isinstance(target.patch_to_embedding[-1], nn.LayerNorm) else -1]
    channels = getattr(channels, "in_features", 3 * patch**2) // patch**2
    if side is None:
        side = patch * round((target.pos_embedding.shape[1]) ** 0.5)
    return channels, side, side


__all__ = ["recognise"]
