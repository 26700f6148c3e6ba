"""Regard's own models: texts with their padding and cache, both sides of a translation, and images."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter, Conventions, Variant
from regard.adapters.call_signature import parameters
from regard.adapters.example_inputs import ExampleInputs, token_ids
from regard.adapters.known_layer import MODULE_CLAIMS, TEXT_CLAIMS, conventions_of
from regard.adapters.mask_patterns import count_positions, is_padding, pattern_of_mask
from regard.adapters.model import ImageModelAdapter, ModelAdapter
from regard.adapters.regard_cache import RegardCache
from regard.adapters.rng import Rng
from regard.errors import CacheError
from regard.layers.cache import ModelCache
from regard.models import GPT, Bert, DaViT, SpatialTransformer, Transformer, ViT, davit

OTHER = 7  # tokens of the text on the other side
DECODER_CLAIMS = ("causality", "cache", "cache-algebra", *TEXT_CLAIMS)


def recognise(target: Any, name: str, options: dict[str, Any]) -> Adapter | None:
    """The adapter of one of Regard's models, or None."""
    if isinstance(target, GPT):
        relative = ("relative-position",) if target.config.position in ("rotary", "alibi", "none") else ()
        claims = (*DECODER_CLAIMS, *relative)
        adapter = GPTAdapter(
            target, name, conventions_of(options), claims=claims, max_length=target.config.context_length
        )
    elif isinstance(target, Bert):
        max_length, reserved = target.config.context_length, target.first_position
        adapter = BertAdapter(
            target, name, conventions_of(options), claims=TEXT_CLAIMS, max_length=max_length, reserved=reserved
        )
    elif isinstance(target, Transformer):
        max_length = target.config.context_length
        own = conventions_of(options, left=False)
        adapter = TransformerDecoderAdapter(target, name, own, claims=DECODER_CLAIMS, max_length=max_length)
        adapter.parts = [
            TransformerEncoderAdapter(
                target, f"{name}, its encoder", Conventions(), claims=TEXT_CLAIMS, max_length=max_length
            ),
            TransformerSourceAdapter(
                target, f"{name}, the text it reads", Conventions(), claims=TEXT_CLAIMS, max_length=max_length
            ),
        ]
    elif isinstance(target, ViT | DaViT | SpatialTransformer):
        config: Any = target.config
        rows, columns = getattr(config, "image", (37, 53))
        image = options.get("image_size") or (config.channels, rows, columns)
        adapter = RegardImageModel(target, name, conventions_of(options), image_size=image)
        adapter.claims = (*MODULE_CLAIMS, "paths")
    else:
        return None
    adapter.declared = f"Regard's {type(target).__name__}"
    return adapter


class RegardTextModel(ModelAdapter):
    """Ids in, a row for each out."""

    def __init__(
        self,
        target: Any,
        name: str,
        conventions: Conventions,
        *,
        claims: tuple[str, ...],
        max_length: int | None,
        reserved: int = 0,
    ) -> None:
        vocab_size = target.config.vocab_size
        super().__init__(target, name, conventions, vocab_size=vocab_size, max_length=max_length, reserved=reserved)
        self.max_length = max_length
        self.claims = claims

    def find_abilities(self) -> None:
        self.abilities |= {"aligned", "lengths", "gradients", "mask"}

    @property
    def channels(self) -> int:
        return max(64, self.target.config.dim)


class GPTAdapter(RegardTextModel):
    """A GPT: lengths for padding on the left, patterns and positions for any other."""

    def find_abilities(self) -> None:
        super().find_abilities()
        self.caching = GPTCache(self)
        self.abilities.add("cache")

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is not None and is_padding(mask, "left"):
            return self.target(x, lengths=mask.sum(-1), **more)
        return self._run_with_pattern(x, mask, **more)

    def _run_with_pattern(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is not None:
            more |= {"pattern": pattern_of_mask(mask[:, None], *x.shape), "positions": count_positions(mask)}
        return self.target(x, **more)

    def variants(self) -> dict[str, Variant]:
        return {"pattern and positions": self._run_with_pattern, "the last place alone": self._run_last_alone}

    def _run_last_alone(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        output = self.run(x, mask)
        if mask is None:
            output = torch.cat((output[:, :-1], self.target(x, last_only=True)), 1)
        return output


class BertAdapter(RegardTextModel):
    """A BERT: lengths for padding on the right, patterns and positions for any other."""

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        if mask is None:
            return self.target(x).hidden
        if is_padding(mask, "right"):
            return self.target(x, lengths=mask.sum(-1)).hidden
        return self._run_with_pattern(x, mask)

    def _run_with_pattern(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.target.hidden(x)
        return self.target.hidden(x, positions=count_positions(mask), pattern=pattern_of_mask(mask[:, None], *x.shape))

    def variants(self) -> dict[str, Variant]:
        return {"pattern and positions": self._run_with_pattern}


class TransformerDecoderAdapter(RegardTextModel):
    """The text that a translator writes; the one it reads is the same for every row."""

    def find_abilities(self) -> None:
        super().find_abilities()
        self.caching = TransformerCache(self)
        self.abilities.add("cache")

    def other(self, batch: int) -> Tensor:
        return Rng(0, "other").integers(0, self.vocab_size, 1, OTHER).expand(batch, OTHER)

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        source, target = self.other(x.shape[0]), self.target
        if mask is None or is_padding(mask, "right"):
            return target(source, x, target_lengths=None if mask is None else mask.sum(-1))
        pattern = pattern_of_mask(mask[:, None], *x.shape)
        return target.output(target.decode(x, target.encode(source), pattern=pattern))


class TransformerEncoderAdapter(RegardTextModel):
    """What a translator's encoder makes of the text it reads."""

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is None:
            return self.target.encode(x)
        return self.target.encode(x, pattern=pattern_of_mask(mask[:, None], *x.shape), positions=count_positions(mask))


class TransformerSourceAdapter(RegardTextModel):
    """The text that a translator reads; what it writes stays the same, and so the output has its rows."""

    def find_abilities(self) -> None:
        self.abilities |= {"lengths", "gradients", "mask"}

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        target = self.target
        written = Rng(0, "other").integers(0, self.vocab_size, 1, OTHER).expand(x.shape[0], OTHER)
        if mask is None or is_padding(mask, "right"):
            return target(x, written, source_lengths=None if mask is None else mask.sum(-1))
        pattern = pattern_of_mask(mask[:, None], *x.shape)
        context = target.encode(x, pattern=pattern, positions=count_positions(mask))
        hidden = pattern_of_mask(mask[:, None], x.shape[0], OTHER)
        return target.output(target.decode(written, context, encoder_pattern=hidden))


class RegardImageModel(ImageModelAdapter):
    """Images, in whichever order memory keeps their channels."""

    def variants(self) -> dict[str, Variant]:
        return {"channels last": lambda x, mask=None: self.run(x.contiguous(memory_format=torch.channels_last))}


class GPTCache(RegardCache):
    """The cache of a GPT."""

    def start(self, batch: int, tokens: int) -> ModelCache:
        return self.adapter.target.new_cache()

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.adapter.target(x, cache=state, **self.padding(x, mask)), state


class TransformerCache(GPTCache):
    """The cache of an encoder-decoder, which encodes the source at the first step."""

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        target = self.adapter.target
        context = target.encode(self.adapter.other(x.shape[0])) if state.length == 0 else None
        if mask is not None and not bool(mask.all()):
            raise CacheError(
                "A translator does not pad what it writes.",
                asked=f"a mask of {mask.sum(-1).tolist()} real tokens out of {mask.shape[1]}",
                because="every translation begins with its first token",
                instead="padding of the text that it reads",
            )
        return target.output(target.decode(x, context, cache=state)), state


@contextlib.contextmanager
def assume_whole_batches() -> Iterator[None]:
    """Stages of a DaViT read the whole batch at once.

    How many images they read at once depends on the sizes, and changes no product. A formula is for all sizes.
    """
    with patch.object(davit, "PIECE", sys.maxsize):
        yield


def fill_inputs(module: nn.Module, inputs: ExampleInputs) -> bool:
    """Example inputs by the names in `forward`: tokens, a source and a target, or images."""
    config, names = getattr(module, "config", None), list(parameters(module))
    if not type(module).__module__.startswith("regard.models") or config is None:
        return False
    for symbol in "NT":
        inputs.limit(getattr(config, "context_length", None), symbol)
    if names[:2] == ["source", "target"]:
        inputs.args = token_ids("T"), token_ids("N")
    elif names[:1] == ["tokens"]:
        inputs.args = (token_ids(),)
    elif names[:1] in (["image"], ["images"]):
        size, channels = getattr(config, "image", None) or 224, int(getattr(config, "channels", 3))
        inputs.args = (inputs.image(size, channels),)
        if hasattr(config, "window") and hasattr(config, "dims"):  # whole windows in every stage
            inputs.steps["R"] = inputs.steps["W"] = 2 ** (len(config.dims) + 1) * config.window
    return bool(inputs.args)


__all__ = ["assume_whole_batches", "fill_inputs", "recognise"]
