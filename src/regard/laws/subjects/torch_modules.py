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

from regard.laws.subjects.base import Conventions, Subject, Way
from regard.laws.subjects.calling import MaskForm, additive, parameters
from regard.laws.subjects.known import READERS, SOBER, KnownLayer, companion, conventions_of
from regard.laws.subjects.operator import Operator
from regard.patterns import Causal

MEMORY = 5  # tokens of the other text


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Subject | None:
    """The subject of a module of torch, or None."""
    function, settings = _unwrapped(target)
    if function is functional.scaled_dot_product_attention and kind in (None, "operator"):
        return _operator(target, settings, name, options)
    if not isinstance(target, nn.Module) or kind not in (None, "layer", "model"):
        return None
    takes = parameters(target)  # a class of somebody else's may inherit from torch's and be called in another way
    if isinstance(target, nn.MultiheadAttention) and "key_padding_mask" in takes:
        return _attention(target, name, options)
    if isinstance(target, nn.TransformerEncoderLayer | nn.TransformerEncoder) and "src_key_padding_mask" in takes:
        return _encoder(target, name, options)
    if isinstance(target, nn.TransformerDecoderLayer | nn.TransformerDecoder) and "tgt_mask" in takes:
        return _pair(Decoder, Read, target, name, conventions_of(options, left=False))
    if isinstance(target, nn.Transformer) and "tgt_mask" in takes:
        return _pair(Written, Source, target, name, conventions_of(options, left=False))
    return None


# The operator


class Fused(Operator):
    """`scaled_dot_product_attention`, whose arguments Python cannot read off."""

    causal = False

    def ways(self) -> dict[str, Way]:
        ways: dict[str, Way] = {"torch's plain kernel": self._plain}
        if self.form is not None:
            ways["additive mask"] = self._additive
        return ways

    def _plain(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.run(x, mask)

    def _additive(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.run(x)
        query, key, value = self.parted(x)
        return self.rows(self.target(query, key, value, attn_mask=additive(mask[:, None, None, :], x.dtype)))


def _operator(target: Any, settings: dict[str, Any], name: str, options: dict[str, Any]) -> Subject:
    causal, groups = bool(settings.get("is_causal")), bool(settings.get("enable_gqa"))
    own: dict[str, Any] = {"beta": settings.get("scale")}
    if causal:
        own |= {"align": "start", "pattern": Causal()}
    sizes = ("heads", "kv_heads", "dim", "value_dim")
    given = {key: options[key] for key in sizes if key in options}
    subject = Fused(target, name, conventions_of(options, **own), **given)
    if not causal and "attn_mask" not in settings:
        subject.form = MaskForm("attn_mask")
        subject.abilities.add("mask")
    claims = [*SOBER, "paths", "row-stochasticity", "scale", "range", "jacobian"]
    claims += ["causality", "support"] if causal else ["padding", "permutation", "alignment"]
    claims += ["head-groups"] if groups else []
    subject.claims = tuple(claims)
    subject.declared = "torch's fused attention" + (", causal from the start" if causal else "")
    return subject


def _unwrapped(target: Any) -> tuple[Any, dict[str, Any]]:
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
        first = _batch_first(self.target)
        output = self.invoke(x if first else x.transpose(0, 1), x, **more)
        if isinstance(output, tuple):
            return (output[0] if first else output[0].transpose(0, 1), *output[1:])
        return output if first else output.transpose(0, 1)

    def invoke(self, x: Tensor, rows: Tensor, **more: Any) -> Any:
        """Call the module with `x` as it wants it; `rows` is the same, batch first."""
        return self.target(x, **more)

    def ways(self) -> dict[str, Way]:
        return {
            "additive mask": lambda x, mask=None: self._first(self.call(x, mask, add=True)),
            "fast path off": self._slow,
            "without gradients": torch.no_grad()(self.run),
            "with gradients": torch.enable_grad()(self.run),
        }

    def _slow(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return self.run(x, mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    @staticmethod
    def _first(output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else output


class SelfAttention(TorchLayer):
    """`nn.MultiheadAttention` of tokens over themselves."""

    padding = ("key_padding_mask",)

    def invoke(self, x: Tensor, rows: Tensor, **more: Any) -> Any:
        return self.target(x, x, x, **more)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        if self.target.bias_k is not None or self.target.add_zero_attn:
            return []  # there are keys that no token stands for
        return [self.call(x, mask, average_attn_weights=False)[1]]

    def ways(self) -> dict[str, Way]:
        ways = super().ways()
        for settings in ({"need_weights": False}, {"average_attn_weights": False}):
            text = ", ".join(f"{key}={value}" for key, value in settings.items())
            ways[text] = self._with(settings)
        ways["attn_mask"] = self._by_pairs
        return ways

    def _with(self, settings: dict[str, bool]) -> Way:
        return lambda x, mask=None: self._first(self.call(x, mask, **settings))

    def _by_pairs(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.run(x)
        batch, tokens = mask.shape
        hidden = (~mask)[:, None, None, :].expand(batch, self.target.num_heads, tokens, tokens)
        return self._first(self.call(x, None, attn_mask=hidden.reshape(-1, tokens, tokens)))


class Encoder(TorchLayer):
    padding = ("src_key_padding_mask",)

    def ways(self) -> dict[str, Way]:
        ways = super().ways()
        if isinstance(self.target, nn.TransformerEncoder):
            other = copy.copy(self)
            other.target = copy.deepcopy(self.target)
            other.target.enable_nested_tensor = not self.target.enable_nested_tensor
            other.target.use_nested_tensor = not self.target.use_nested_tensor
            ways["enable_nested_tensor turned over"] = other.run
        return ways


class Decoder(TorchLayer):
    """The text that is written, over another one that stays the same; the causal mask is given here."""

    padding = ("tgt_key_padding_mask",)

    def invoke(self, x: Tensor, rows: Tensor, **more: Any) -> Any:
        memory = companion(self, rows.shape[0], MEMORY, self.channels)
        memory = memory if _batch_first(self.target) else memory.transpose(0, 1)
        more.setdefault("tgt_mask", _causal(rows.shape[1]))
        return self.read(memory, x, **more)

    def read(self, memory: Tensor, x: Tensor, **more: Any) -> Tensor:
        return self.target(x, memory, **more)

    def call(self, x: Tensor, mask: Tensor | None = None, *, add: bool = False, **more: Any) -> Any:
        if add:  # torch wants both masks of one kind
            more.setdefault("tgt_mask", additive(~_causal(x.shape[1]), x.dtype))
        return super().call(x, mask, add=add, **more)

    def ways(self) -> dict[str, Way]:
        ways = super().ways()
        ways["tgt_is_causal=True"] = lambda x, mask=None: self.call(x, mask, tgt_is_causal=True)
        return ways


class Read(TorchLayer):
    """The text that a decoder reads; the one it writes stays the same, and so the output has its rows."""

    can = ("float", "lengths", "gradients", "mask")
    padding = ("memory_key_padding_mask",)

    def invoke(self, x: Tensor, rows: Tensor, **more: Any) -> Any:
        written = companion(self, rows.shape[0], MEMORY, self.channels)
        written = written if _batch_first(self.target) else written.transpose(0, 1)
        return self.read(x, written, **more)

    def read(self, x: Tensor, written: Tensor, **more: Any) -> Tensor:
        return self.target(written, x, **more)


class Written(Decoder):
    """The target of `nn.Transformer`."""

    def read(self, memory: Tensor, x: Tensor, **more: Any) -> Tensor:
        return self.target(memory, x, **more)


class Source(Read):
    """The source of `nn.Transformer`."""

    padding = ("src_key_padding_mask", "memory_key_padding_mask")

    def read(self, x: Tensor, written: Tensor, **more: Any) -> Tensor:
        return self.target(x, written, **more)


def _attention(target: nn.MultiheadAttention, name: str, options: dict[str, Any]) -> Subject | None:
    if target.kdim != target.embed_dim or target.vdim != target.embed_dim:
        return None  # it cannot read itself
    claims = [*READERS, "permutation"]
    if target.bias_k is None and not target.add_zero_attn:
        claims.append("row-stochasticity")  # else a part of the weight goes to keys that no token stands for
    subject = SelfAttention(target, name, conventions_of(options), channels=target.embed_dim, claims=claims)
    subject.declared = "torch's multi-head attention of tokens over themselves"
    return subject


def _encoder(target: Any, name: str, options: dict[str, Any]) -> Subject:
    subject = Encoder(target, name, conventions_of(options), channels=_width(target), claims=[*READERS, "permutation"])
    subject.declared = "torch's encoder"
    return subject


def _pair(main: type[TorchLayer], part: type[TorchLayer], target: Any, name: str, conventions: Conventions) -> Subject:
    width = _width(target)
    subject = main(target, name, conventions, channels=width, claims=["causality", *READERS])
    read = part(target, f"{name}, the text it reads", Conventions(), channels=width, claims=READERS)
    subject.parts = [read]
    subject.declared = "torch's decoder, with a causal mask"
    return subject


def _causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def _layers(target: Any) -> Any:
    """The first module inside that knows sizes."""
    attentions = (part for part in target.modules() if isinstance(part, nn.MultiheadAttention))
    return next(attentions)


def _width(target: Any) -> int:
    return _layers(target).embed_dim


def _batch_first(target: Any) -> bool:
    return _layers(target).batch_first


__all__ = ["recognise"]
