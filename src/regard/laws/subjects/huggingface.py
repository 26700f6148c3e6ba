"""Models of Hugging Face transformers: decoders, encoders, encoder-decoders and models of pictures.

The library is never imported here: whoever brings one of its models has done that already.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from regard.laws.law import Dice
from regard.laws.subjects.base import Conventions, Subject, Way, first_tensor
from regard.laws.subjects.calling import MaskForm, parameters
from regard.laws.subjects.huggingface_cache import HuggingFaceCache, static_way
from regard.laws.subjects.huggingface_tiny import is_table, quiet, tiny
from regard.laws.subjects.known import UNIVERSAL
from regard.laws.subjects.model import Images, Model
from regard.laws.subjects.widening import widened
from regard.patterns import Window

OF_DECODERS = ("causality", "cache", "cache-algebra")
OF_PICTURES = ("batch-independence", "paths", "determinism", "gradients", "statelessness", "shape")
IMPLEMENTATIONS = ("eager", "sdpa")
# Their distances are counted between the real tokens or do not depend on where a row begins.
PLACELESS = ("bloom", "mpt", "t5", "mt5", "umt5", "roformer", "deberta", "deberta-v2", "opt", "xlnet", "biogpt")
# Some rows of their weights sum to less than one: a sink takes the rest.
WITH_SINKS = ("gpt_oss",)
# Their gradients are estimates by design.
ESTIMATING = ("yoso",)
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_decoder_position_embeddings")
ENDLESS = 4096


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Subject | None:
    """The subject of a model of transformers; None for everything else, and for models of sounds and of pairs."""
    if kind not in (None, "model") or not _is_pretrained(target):
        return None
    said: dict[str, Any] = {key: value for key, value in options.items() if key in Conventions.__dataclass_fields__}
    said.setdefault("empty", "finite")
    conventions = Conventions(**said)
    name = type(target).__name__ if name.startswith(f"{type(target).__name__}(") else name
    first = next(iter(parameters(target)), "")
    if first == "pixel_values":
        return Pictures(target, name, conventions, image=options.get("image") or _picture(target.config))
    if first != "input_ids":
        return None
    for part in target.modules():
        if is_table(part):
            part.requires_grad_(False)
    sizes = {key: options[key] for key in ("vocabulary", "longest") if key in options}
    if target.config.is_encoder_decoder and "decoder_input_ids" in parameters(target):
        subject: Words = Target(target, name, conventions, **sizes)
        subject.parts = [Source(target, f"{name}, source", conventions, **sizes)]
        return subject
    return Words(target, name, conventions, **sizes)


def _is_pretrained(target: Any) -> bool:
    return isinstance(target, nn.Module) and any(
        each.__name__ == "PreTrainedModel" and each.__module__.startswith("transformers.")
        for each in type(target).__mro__
    )


def decodes(target: Any) -> bool:
    """Whether a model of words sees the past only.

    The families that also fill in masked words see both sides unless their configuration says `is_decoder`; so does
    XLNet, which hides by permutations.
    """
    module = vars(sys.modules[type(target).__module__])
    if getattr(target.config, "model_type", "") in ("xlnet", "xlm", "flaubert", "cpm"):
        return False
    if any(name.endswith("ForMaskedLM") for name in module):
        return bool(getattr(target.config, "is_decoder", False))
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in module)


class Words(Model):
    """A decoder or an encoder: ids in, logits or features out.

    Attributes:
        causal: whether it sees the past only.
    """

    ids, mask_argument = "input_ids", "attention_mask"

    def __init__(self, target: Any, name: str, conventions: Conventions | None = None, **sizes: Any) -> None:
        config = target.config
        self.causal = self._decodes(target)
        special = [getattr(config, f"{word}_token_id", None) for word in ("pad", "bos", "eos", "sep", "cls", "mask")]
        self.special = {
            each for entry in special for each in (entry if isinstance(entry, list) else [entry]) if each is not None
        }
        self.type = getattr(config, "model_type", "")
        self._variants: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._ways: tuple[Any, dict[str, Way]] | None = None
        super().__init__(target, name, conventions, **({"longest": _longest(config)} | sizes))
        if self.conventions.left is None:
            self.with_conventions(left=self.takes_positions or self.type in PLACELESS)
        self._declare()

    def _decodes(self, target: Any) -> bool:
        return decodes(target)

    def _declare(self) -> None:
        claims = [*UNIVERSAL]
        if self.causal:
            claims += OF_DECODERS if self.caching is not None else ("causality",)
        if self.type in WITH_SINKS:
            claims.remove("row-stochasticity")
        if self.type in ESTIMATING:
            claims.remove("gradients")
        if self.causal and self.conventions.pattern is None and (back := _reach(self.target.config)):
            self.with_conventions(pattern=Window(back, 0))
        if self.conventions.pattern is not None:
            claims.append("support")
        if self.turns:
            claims.append("relative-position")
        self.claims = tuple(claims)
        kind = "decoder" if self.causal else "encoder"
        self.declared = (
            f"transformers {self.type}, {kind}, {getattr(self.target.config, '_attn_implementation', 'eager')}"
        )

    # Calling

    def draw(self, batch: int, tokens: int, dice: Dice) -> Tensor:
        ordinary = torch.tensor([word for word in range(self.vocabulary) if word not in self.special])
        return ordinary[dice.integers(0, len(ordinary), batch, tokens)]

    def call(self, x: Tensor, mask: Tensor | None = None, model: Any = None, **more: Any) -> Any:
        model = self.target if model is None else model
        if mask is not None:
            more[self.mask_argument] = mask.long()
            if self.takes_positions and "position_ids" not in more:
                more["position_ids"] = positions(mask)[:, -x.shape[1] :]
        with widened(self.dtype):
            return model(**{self.ids: x}, **more)

    def shifted(self, x: Tensor, shift: int) -> Tensor:
        """The output with every position `shift` further on."""
        places = torch.arange(shift, shift + x.shape[1]).expand(x.shape[0], -1)
        return first_tensor(self.call(x, position_ids=places))

    @functools.cached_property
    def takes_positions(self) -> bool:
        """Whether positions can be given, counted from zero; some tables begin behind the entry for padding."""
        if "position_ids" not in parameters(self.target):
            return False
        x = self.draw(1, self.lengths(5)[0], Dice(0, "positions"))
        try:
            with torch.no_grad():
                plain, given = first_tensor(self.call(x)), self.shifted(x, 0)
        except Exception:  # it has positions of its own kind
            return False
        return torch.allclose(plain, given, rtol=1e-3, atol=1e-3)

    @property
    def turns(self) -> bool:
        """Whether positions come in by rotations only, so that nothing but distances matters."""
        config = self.target.config
        rotates = (
            getattr(config, "rope_parameters", None) is not None or getattr(config, "rotary_dim", None) is not None
        )
        return rotates and self.takes_positions and self.causal

    # Weights, and other ways to the same

    def variant(self, implementation: str) -> Any | None:
        """The same weights with another implementation of attention; None if there is none."""
        key = (id(self.target), implementation)
        if key not in self._variants:
            with quiet(), torch.random.fork_rng(devices=[]):
                self._variants[key] = (self.target, _with_attention(self.target, implementation))
        return self._variants[key][1]

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        model = self.variant("eager")
        if model is None:
            return []
        output = self.call(x, mask, model=model, output_attentions=True)
        found = getattr(output, self._attentions, None) or ()
        square = (x.shape[0], x.shape[1], x.shape[1])
        return [each for each in found if isinstance(each, Tensor) and each.ndim == 4 and _sizes(each) == square]

    _attentions = "attentions"

    def ways(self) -> dict[str, Way]:
        if self._ways is None or self._ways[0] is not self.target:
            with quiet():
                self._ways = (self.target, self._find_ways())
        return self._ways[1]

    def _find_ways(self) -> dict[str, Way]:
        ways: dict[str, Way] = {}
        own = getattr(self.target.config, "_attn_implementation", None)
        for implementation in IMPLEMENTATIONS:
            if implementation != own and (model := self.variant(implementation)) is not None:
                ways[f"attn_implementation={implementation!r}"] = self._through(model)
        if self.weights(self.draw(1, self.lengths(3)[0], Dice(0, "ways"))):
            ways["output_attentions=True"] = self._through(self.target, output_attentions=True)
        if self.caching is not None and "use_cache" in parameters(self.target):
            for value in (True, False):
                ways[f"use_cache={value}"] = self._through(self.target, use_cache=value)
            if (way := static_way(self)) is not None:
                ways["static cache"] = way
        return ways

    def _through(self, model: Any, **more: Any) -> Way:
        return lambda x, mask=None: first_tensor(self.call(x, mask, model=model, **more))

    def _rebind(self, original: Subject) -> None:
        super()._rebind(original)
        if self.dtype == torch.float64 and callable(choose := getattr(self.target, "set_experts_implementation", None)):
            try:
                choose("eager")  # the fast one has no float64
            except Exception:  # a model without experts may say so
                return

    # Finding out

    def find_abilities(self) -> None:
        self.caching = None
        if self.mask_argument in parameters(self.target):
            self.form = MaskForm(self.mask_argument, False, torch.int64)
        super().find_abilities()
        self.caching = HuggingFaceCache.found(self) if self.causal else None
        self.abilities.discard("cache")
        if self.caching is not None:
            self.abilities.add("cache")


class Target(Words):
    """The decoder of an encoder-decoder, with a source that is the same in every row."""

    ids, mask_argument, _attentions = "decoder_input_ids", "decoder_attention_mask", "decoder_attentions"
    source_tokens = 5

    def _decodes(self, target: Any) -> bool:
        return True

    @functools.cached_property
    def takes_positions(self) -> bool:
        return False

    @property
    def turns(self) -> bool:
        return False

    def call(self, x: Tensor, mask: Tensor | None = None, model: Any = None, **more: Any) -> Any:
        source = super().draw(1, self.source_tokens, Dice(0, "source")).expand(x.shape[0], -1)
        return super().call(x, mask, model, input_ids=source, **more)


class Source(Words):
    """The source of an encoder-decoder, seen through a target that stays as it is: rows out are those of the target."""

    _attentions = "encoder_attentions"

    def _decodes(self, target: Any) -> bool:
        return False

    @functools.cached_property
    def takes_positions(self) -> bool:
        return False

    def call(self, x: Tensor, mask: Tensor | None = None, model: Any = None, **more: Any) -> Any:
        given = self.draw(1, 3, Dice(0, "target")).expand(x.shape[0], -1)
        return super().call(x, mask, model, decoder_input_ids=given, **more)

    def find_abilities(self) -> None:
        super().find_abilities()
        self.abilities.discard("aligned")  # three rows come out, whatever goes in


class Pictures(Images):
    """A model of pictures."""

    def __init__(self, target: Any, name: str, conventions: Conventions | None = None, **sizes: Any) -> None:
        self._ways: tuple[Any, dict[str, Way]] | None = None
        super().__init__(target, name, conventions, **sizes)
        self.claims = OF_PICTURES
        self.declared = f"transformers {target.config.model_type}, pictures"

    def call(self, x: Tensor, mask: Tensor | None = None, model: Any = None, **more: Any) -> Any:
        with widened(self.dtype):
            return (self.target if model is None else model)(pixel_values=x, **more)

    def ways(self) -> dict[str, Way]:
        if self._ways is None or self._ways[0] is not self.target:
            with quiet():
                self._ways = (self.target, self._find_ways())
        return self._ways[1]

    def _find_ways(self) -> dict[str, Way]:
        ways: dict[str, Way] = {"output_attentions=True": self._through(self.target, output_attentions=True)}
        own = getattr(self.target.config, "_attn_implementation", None)
        for implementation in IMPLEMENTATIONS:
            if implementation != own and (model := _with_attention(self.target, implementation)) is not None:
                ways[f"attn_implementation={implementation!r}"] = self._through(model)
        return ways

    def _through(self, model: Any, **more: Any) -> Way:
        return lambda x, mask=None: first_tensor(self.call(x, None, model=model, **more))


def positions(mask: Tensor) -> Tensor:
    """The place of each real token among the real tokens."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _sizes(weights: Tensor) -> tuple[int, int, int]:
    return weights.shape[0], weights.shape[2], weights.shape[3]


def _longest(config: Any) -> int:
    text = config.get_text_config(decoder=True)
    sizes = [size for name in LENGTHS if isinstance(size := getattr(text, name, None), int) and size > 0]
    # Some tables begin behind the entry for padding.
    return min(sizes) - 2 - (getattr(text, "pad_token_id", None) or 0) if sizes else ENDLESS


def _reach(config: Any) -> int | None:
    """How far back the whole stack sees; None if as far as there is. Windows of transformers count the token itself."""
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * (layers or 0)
    if not isinstance(window, int) or not layers or any(kind != "sliding_attention" for kind in kinds):
        return None
    return layers * (window - 1)


def _picture(config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", 32)
    rows, columns = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return getattr(config, "num_channels", 3), rows, columns


def _with_attention(target: Any, implementation: str) -> Any | None:
    if getattr(target.config, "_attn_implementation", None) == implementation:
        return target
    try:
        config = copy.deepcopy(target.config)
        model = type(target)._from_config(config, attn_implementation=implementation)
        model.load_state_dict(target.state_dict())
        model = model.to(next(target.parameters()).dtype).eval()
    except Exception:  # not every class has every implementation
        return None
    return model if model.config._attn_implementation == implementation else None


__all__ = ["decodes", "recognise", "tiny"]
