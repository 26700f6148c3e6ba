"""torch's own: `nn.MultiheadAttention`, the encoder and decoder layers, `nn.Transformer`, and the fused operator.

What torch documents is claimed. That a query without any key has a value is not documented, so nothing here claims it,
and a decoder, whose first queries see nothing when a row is padded on the left, is padded on the right only.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.adapters.base import Adapter, Conventions, Variant
from regard.adapters.call_signature import MaskForm, additive, parameters
from regard.adapters.deepcopy import deepcopy
from regard.adapters.example_inputs import ExampleInputs, activations
from regard.adapters.known_layer import MODULE_CLAIMS, TEXT_CLAIMS, KnownLayer, conventions_of, other_sequence
from regard.adapters.operator import OperatorAdapter
from regard.patterns import Causal

MEMORY = 5  # tokens of the other text


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Adapter | None:
    """The adapter of a module of torch, or None."""
    function, settings = _unwrap_partial(target)
    if function is functional.scaled_dot_product_attention and kind in (None, "operator"):
        return _adapt_operator(target, settings, name, options)
    if not isinstance(target, nn.Module) or kind not in (None, "layer", "model"):
        return None
    takes = parameters(target)  # a third-party subclass may have another signature
    if isinstance(target, nn.MultiheadAttention) and "key_padding_mask" in takes:
        return _adapt_attention(target, name, options)
    if isinstance(target, nn.TransformerEncoderLayer | nn.TransformerEncoder) and "src_key_padding_mask" in takes:
        return _adapt_encoder(target, name, options)
    if isinstance(target, nn.TransformerDecoderLayer | nn.TransformerDecoder) and "tgt_mask" in takes:
        return _adapt_encoder_decoder(
            TorchDecoder, TorchDecoderMemory, target, name, conventions_of(options, left=False)
        )
    if isinstance(target, nn.Transformer) and "tgt_mask" in takes:
        return _adapt_encoder_decoder(
            TorchTransformerTarget, TorchTransformerSource, target, name, conventions_of(options, left=False)
        )
    return None


# The operator


class FusedAttention(OperatorAdapter):
    """`scaled_dot_product_attention`, whose arguments Python cannot read off."""

    causal = False

    def variants(self) -> dict[str, Variant]:
        variants: dict[str, Variant] = {"torch's plain kernel": self._run_math_kernel}
        if self.form is not None:
            variants["additive mask"] = self._run_with_additive_mask
        return variants

    def _run_math_kernel(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.run(x, mask)

    def _run_with_additive_mask(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.run(x)
        query, key, value = self.parted(x)
        return self.rows(self.target(query, key, value, attn_mask=additive(mask[:, None, None, :], x.dtype)))


def _adapt_operator(target: Any, settings: dict[str, Any], name: str, options: dict[str, Any]) -> Adapter:
    causal, groups = bool(settings.get("is_causal")), bool(settings.get("enable_gqa"))
    own: dict[str, Any] = {"scale": settings.get("scale")}
    if causal:
        own |= {"align": "start", "pattern": Causal()}
    sizes = ("heads", "kv_heads", "dim", "value_dim")
    given = {key: options[key] for key in sizes if key in options}
    adapter = FusedAttention(target, name, conventions_of(options, **own), **given)
    if not causal and "attn_mask" not in settings:
        adapter.form = MaskForm("attn_mask")
        adapter.abilities.add("mask")
    claims = [*MODULE_CLAIMS, "paths", "row-stochasticity", "scale", "range", "jacobian"]
    claims += ["causality", "support"] if causal else ["padding", "permutation", "alignment"]
    claims += ["head-groups"] if groups else []
    adapter.claims = tuple(claims)
    adapter.declared = "torch's fused attention" + (", causal from the start" if causal else "")
    return adapter


def _unwrap_partial(target: Any) -> tuple[Any, dict[str, Any]]:
    settings: dict[str, Any] = {}
    while isinstance(target, functools.partial):
        settings = {**target.keywords, **settings}
        target = target.func
    return target, settings


# Modules


class TorchLayer(KnownLayer):
    """A module of torch as a layer of one input, whichever axis it keeps its tokens on.

    Attributes:
        padding: the names of the arguments that hide tokens; True hides.
    """

    can = ("aligned", "float", "lengths", "gradients", "mask")
    padding: tuple[str, ...] = ()

    def call(self, x: Tensor, mask: Tensor | None = None, *, add: bool = False, **more: Any) -> Any:
        if mask is not None:
            hidden = additive(mask, x.dtype) if add else ~mask
            more |= dict.fromkeys(self.padding, hidden)
        first = _is_batch_first(self.target)
        output = self.invoke(x if first else x.transpose(0, 1), x, **more)
        if isinstance(output, tuple):
            return (output[0] if first else output[0].transpose(0, 1), *output[1:])
        return output if first else output.transpose(0, 1)

    def invoke(self, x: Tensor, rows: Tensor, **more: Any) -> Any:
        """Call the module with `x` in its own layout; `rows` is the same, batch first."""
        return self.target(x, **more)

    def variants(self) -> dict[str, Variant]:
        return {
            "additive mask": lambda x, mask=None: self._take_first(self.call(x, mask, add=True)),
            "fast path off": self._run_without_fast_path,
            "without gradients": torch.no_grad()(self.run),
            "with gradients": torch.enable_grad()(self.run),
        }

    def _run_without_fast_path(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return self.run(x, mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    @staticmethod
    def _take_first(output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else output


class TorchSelfAttention(TorchLayer):
    """`nn.MultiheadAttention` of tokens over themselves."""

    padding = ("key_padding_mask",)

    def invoke(self, x: Tensor, rows: Tensor, **more: Any) -> Any:
        return self.target(x, x, x, **more)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        if self.target.bias_k is not None or self.target.add_zero_attn:
            return []  # there are keys that belong to no token
        return [self.call(x, mask, average_attn_weights=False)[1]]

    def variants(self) -> dict[str, Variant]:
        variants = super().variants()
        for settings in ({"need_weights": False}, {"average_attn_weights": False}):
            text = ", ".join(f"{key}={value}" for key, value in settings.items())
            variants[text] = self._run_with_settings(settings)
        variants["attn_mask"] = self._run_with_pair_mask
        return variants

    def _run_with_settings(self, settings: dict[str, bool]) -> Variant:
        return lambda x, mask=None: self._take_first(self.call(x, mask, **settings))

    def _run_with_pair_mask(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.run(x)
        batch, tokens = mask.shape
        hidden = (~mask)[:, None, None, :].expand(batch, self.target.num_heads, tokens, tokens)
        return self._take_first(self.call(x, None, attn_mask=hidden.reshape(-1, tokens, tokens)))


class TorchEncoder(TorchLayer):
    padding = ("src_key_padding_mask",)

    def variants(self) -> dict[str, Variant]:
        variants = super().variants()
        if isinstance(self.target, nn.TransformerEncoder):
            other = copy.copy(self)
            other.target = deepcopy(self.target)
            other.target.enable_nested_tensor = not self.target.enable_nested_tensor
            other.target.use_nested_tensor = not self.target.use_nested_tensor
            variants["enable_nested_tensor turned over"] = other.run
        return variants


class TorchDecoder(TorchLayer):
    """The text that is written, over another one that stays the same; the causal mask is given here."""

    padding = ("tgt_key_padding_mask",)

    def invoke(self, x: Tensor, rows: Tensor, **more: Any) -> Any:
        memory = other_sequence(self, rows.shape[0], MEMORY, self.channels)
        memory = memory if _is_batch_first(self.target) else memory.transpose(0, 1)
        more.setdefault("tgt_mask", _make_causal_mask(rows.shape[1]))
        return self.read(memory, x, **more)

    def read(self, memory: Tensor, x: Tensor, **more: Any) -> Tensor:
        return self.target(x, memory, **more)

    def call(self, x: Tensor, mask: Tensor | None = None, *, add: bool = False, **more: Any) -> Any:
        if add:  # torch requires both masks to have one dtype
            more.setdefault("tgt_mask", additive(~_make_causal_mask(x.shape[1]), x.dtype))
        return super().call(x, mask, add=add, **more)

    def variants(self) -> dict[str, Variant]:
        variants = super().variants()
        variants["tgt_is_causal=True"] = lambda x, mask=None: self.call(x, mask, tgt_is_causal=True)
        return variants


class TorchDecoderMemory(TorchLayer):
    """The text that a decoder reads; the one it writes stays the same, and so the output has its rows."""

    can = ("float", "lengths", "gradients", "mask")
    padding = ("memory_key_padding_mask",)

    def invoke(self, x: Tensor, rows: Tensor, **more: Any) -> Any:
        written = other_sequence(self, rows.shape[0], MEMORY, self.channels)
        written = written if _is_batch_first(self.target) else written.transpose(0, 1)
        return self.read(x, written, **more)

    def read(self, x: Tensor, written: Tensor, **more: Any) -> Tensor:
        return self.target(written, x, **more)


class TorchTransformerTarget(TorchDecoder):
    """The target of `nn.Transformer`."""

    def read(self, memory: Tensor, x: Tensor, **more: Any) -> Tensor:
        return self.target(memory, x, **more)


class TorchTransformerSource(TorchDecoderMemory):
    """The source of `nn.Transformer`."""

    padding = ("src_key_padding_mask", "memory_key_padding_mask")

    def read(self, x: Tensor, written: Tensor, **more: Any) -> Tensor:
        return self.target(x, written, **more)


def _adapt_attention(target: nn.MultiheadAttention, name: str, options: dict[str, Any]) -> Adapter | None:
    if target.kdim != target.embed_dim or target.vdim != target.embed_dim:
        return None  # it cannot read itself
    claims = [*TEXT_CLAIMS, "permutation"]
    if target.bias_k is None and not target.add_zero_attn:
        claims.append("row-stochasticity")  # else some weight goes to keys that belong to no token
    adapter = TorchSelfAttention(target, name, conventions_of(options), channels=target.embed_dim, claims=claims)
    adapter.declared = "torch's multi-head attention of tokens over themselves"
    return adapter


def _adapt_encoder(target: Any, name: str, options: dict[str, Any]) -> Adapter:
    adapter = TorchEncoder(
        target, name, conventions_of(options), channels=_find_width(target), claims=[*TEXT_CLAIMS, "permutation"]
    )
    adapter.declared = "torch's encoder"
    return adapter


def _adapt_encoder_decoder(
    main: type[TorchLayer], part: type[TorchLayer], target: Any, name: str, conventions: Conventions
) -> Adapter:
    width = _find_width(target)
    adapter = main(target, name, conventions, channels=width, claims=["causality", *TEXT_CLAIMS])
    read = part(target, f"{name}, the text it reads", Conventions(), channels=width, claims=TEXT_CLAIMS)
    adapter.parts = [read]
    adapter.declared = "torch's decoder, with a causal mask"
    return adapter


def _make_causal_mask(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def _list_layers(target: Any) -> Any:
    """The first submodule that has sizes."""
    attentions = (part for part in target.modules() if isinstance(part, nn.MultiheadAttention))
    return next(attentions)


def _find_width(target: Any) -> int:
    return _list_layers(target).embed_dim


def _is_batch_first(target: Any) -> bool:
    return _list_layers(target).batch_first


# Example inputs


def fill_inputs(module: nn.Module, inputs: ExampleInputs) -> bool:
    """Example inputs of attentions, encoders, decoders and recurrent layers."""
    if isinstance(module, nn.MultiheadAttention):
        x = activations(module.embed_dim, module.batch_first)
        inputs.args = x, x, x
        if "M" in inputs.known or not module._qkv_same_embed_dim:
            widths = (module.kdim or module.embed_dim, module.vdim or module.embed_dim)
            inputs.args = x, *(activations(width, module.batch_first, "M") for width in widths)
    elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
        inputs.args = (activations(_find_width(module), _is_batch_first(module)),)
    elif isinstance(module, nn.TransformerDecoderLayer | nn.TransformerDecoder):
        inputs.args = tuple(activations(_find_width(module), _is_batch_first(module), symbol) for symbol in "NT")
    elif isinstance(module, nn.Transformer):
        inputs.args = tuple(activations(module.d_model, module.batch_first, symbol) for symbol in "TN")
    elif isinstance(module, nn.RNNBase):
        inputs.args = (activations(module.input_size, module.batch_first),)
    return bool(inputs.args)


__all__ = ["fill_inputs", "recognise"]
