"""Models of Hugging Face transformers: decoders, encoders, encoder-decoders and models of pictures.

The library is never imported here: a model of it has imported it already.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter, Conventions, Variant, first_tensor
from regard.adapters.call_signature import MaskForm, parameters
from regard.adapters.example_inputs import ExampleInputs, InputSpec, token_ids
from regard.adapters.float64 import float64_casts
from regard.adapters.huggingface_cache import HuggingFaceCache, static_cache_variant
from regard.adapters.huggingface_tiny import is_table, quiet, tiny
from regard.adapters.known_layer import ATTENTION_CLAIMS
from regard.adapters.mask_patterns import count_positions
from regard.adapters.model import ImageModelAdapter, ModelAdapter
from regard.adapters.rng import Rng
from regard.caching import lazy_property
from regard.patterns import Window

DECODER_CLAIMS = ("causality", "cache", "cache-algebra")
IMAGE_CLAIMS = ("batch-independence", "paths", "determinism", "gradients", "statelessness", "shape")
IMPLEMENTATIONS = ("eager", "sdpa")
# Their distances are counted between the real tokens or do not depend on where a row begins.
WITHOUT_ABSOLUTE_POSITIONS = (
    "bloom",
    "mpt",
    "t5",
    "mt5",
    "umt5",
    "roformer",
    "deberta",
    "deberta-v2",
    "opt",
    "xlnet",
    "biogpt",
)
# Some rows of their weights sum to less than one: a sink takes the rest.
WITH_SINKS = ("gpt_oss",)
# Their gradients are estimates by design.
ESTIMATING = ("yoso",)
# Rotations that depend on the length of the text by design.
SWITCHING = {"longrope", "su", "dynamic", "dynamic_ntk"}
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_decoder_position_embeddings")
UNLIMITED = 4096


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Adapter | None:
    """The adapter of a model of transformers; None for everything else, and for audio and multimodal models."""
    if kind not in (None, "model") or not _is_pretrained(target):
        return None
    given: dict[str, Any] = {key: value for key, value in options.items() if key in Conventions.__dataclass_fields__}
    given.setdefault("empty", "finite")
    conventions = Conventions(**given)
    name = type(target).__name__ if name.startswith(f"{type(target).__name__}(") else name
    first = next(iter(parameters(target)), "")
    if first == "pixel_values":
        return HuggingFaceImageModel(
            target, name, conventions, image_size=options.get("image_size") or _find_image_size(target.config)
        )
    if first != "input_ids":
        return None
    for part in target.modules():
        if is_table(part):
            part.requires_grad_(False)
    sizes = {key: options[key] for key in ("vocab_size", "max_length") if key in options}
    if target.config.is_encoder_decoder and "decoder_input_ids" in parameters(target):
        adapter: HuggingFaceTextModel = HuggingFaceDecoder(target, name, conventions, **sizes)
        adapter.parts = [HuggingFaceEncoder(target, f"{name}, source", conventions, **sizes)]
        return adapter
    return HuggingFaceTextModel(target, name, conventions, **sizes)


def _is_pretrained(target: Any) -> bool:
    return isinstance(target, nn.Module) and any(
        each.__name__ == "PreTrainedModel" and each.__module__.startswith("transformers.")
        for each in type(target).__mro__
    )


def is_decoder(target: Any) -> bool:
    """Whether a model of words sees the past only.

    The families that also fill in masked words attend in both directions unless their configuration sets
    `is_decoder`; so does XLNet, which hides by permutations.
    """
    module = vars(sys.modules[type(target).__module__])
    if getattr(target.config, "model_type", "") in ("xlnet", "xlm", "flaubert", "cpm"):
        return False
    if any(name.endswith("ForMaskedLM") for name in module):
        return bool(getattr(target.config, "is_decoder", False))
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in module)


class HuggingFaceTextModel(ModelAdapter):
    """A decoder or an encoder: ids in, logits or features out.

    Attributes:
        causal: whether it sees the past only.
    """

    ids, mask_argument = "input_ids", "attention_mask"

    def __init__(self, target: Any, name: str, conventions: Conventions | None = None, **sizes: Any) -> None:
        config = target.config
        self.causal = self._is_decoder(target)
        special = [getattr(config, f"{word}_token_id", None) for word in ("pad", "bos", "eos", "sep", "cls", "mask")]
        self.special = {
            each for entry in special for each in (entry if isinstance(entry, list) else [entry]) if each is not None
        }
        self.type = getattr(config, "model_type", "")
        self._implementations: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._variants_found: tuple[Any, dict[str, Variant]] | None = None
        super().__init__(target, name, conventions, **({"max_length": _find_max_length(config)} | sizes))
        if self.conventions.left is None:
            self.with_conventions(left=self.takes_positions or self.type in WITHOUT_ABSOLUTE_POSITIONS)
        self._set_claims()

    def _is_decoder(self, target: Any) -> bool:
        return is_decoder(target)

    def _set_claims(self) -> None:
        claims = [*ATTENTION_CLAIMS]
        if self.causal:
            claims += DECODER_CLAIMS if self.caching is not None else ("causality",)
        if self.type in WITH_SINKS:
            claims.remove("row-stochasticity")
        if self.type in ESTIMATING:
            claims.remove("gradients")
        if self.causal and self.conventions.pattern is None and (back := _find_receptive_field(self.target.config)):
            self.with_conventions(pattern=Window(back, 0))
        if self.conventions.pattern is not None:
            claims.append("support")
        if self.is_rotary:
            claims.append("relative-position")
        self.claims = tuple(claims)
        kind = "decoder" if self.causal else "encoder"
        self.declared = (
            f"transformers {self.type}, {kind}, {getattr(self.target.config, '_attn_implementation', 'eager')}"
        )

    # Calling

    def draw(self, batch: int, tokens: int, rng: Rng) -> Tensor:
        ordinary = torch.tensor([word for word in range(self.vocab_size) if word not in self.special])
        return ordinary[rng.integers(0, len(ordinary), batch, tokens)]

    def call(self, x: Tensor, mask: Tensor | None = None, model: Any = None, **more: Any) -> Any:
        model = self.target if model is None else model
        if mask is not None:
            more[self.mask_argument] = mask.long()
            if self.takes_positions and "position_ids" not in more:
                more["position_ids"] = count_positions(mask)[:, -x.shape[1] :]
        with float64_casts(self.dtype):
            return model(**{self.ids: x}, **more)

    def shifted(self, x: Tensor, shift: int) -> Tensor:
        """The output with every position `shift` further on."""
        places = torch.arange(shift, shift + x.shape[1]).expand(x.shape[0], -1)
        return first_tensor(self.call(x, position_ids=places))

    @lazy_property
    def takes_positions(self) -> bool:
        """Whether positions can be given, counted from zero; some tables begin behind the entry for padding."""
        if "position_ids" not in parameters(self.target):
            return False
        x = self.draw(1, self.lengths(5)[0], Rng(0, "positions"))
        try:
            with torch.no_grad():
                plain, given = first_tensor(self.call(x)), self.shifted(x, 0)
        except Exception:  # it has positions of its own kind
            return False
        return torch.allclose(plain, given, rtol=1e-3, atol=1e-3)

    @property
    def is_rotary(self) -> bool:
        """Whether positions come in by rotations only, so that nothing but distances matters."""
        config = self.target.config
        rotates = (
            getattr(config, "rope_parameters", None) is not None or getattr(config, "rotary_dim", None) is not None
        )
        return rotates and not _has_length_dependent_rotary(config) and self.takes_positions and self.causal

    # Weights and variants

    def with_implementation(self, implementation: str) -> Any | None:
        """The same weights with another implementation of attention; None if there is none."""
        key = (id(self.target), implementation)
        if key not in self._implementations:
            with quiet(), torch.random.fork_rng(devices=[]):
                self._implementations[key] = (self.target, _with_attention(self.target, implementation))
        return self._implementations[key][1]

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        model = self.with_implementation("eager")
        if model is None:
            return []
        output = self.call(x, mask, model=model, output_attentions=True)
        found = getattr(output, self._attentions, None) or ()
        square = (x.shape[0], x.shape[1], x.shape[1])
        return [each for each in found if isinstance(each, Tensor) and each.ndim == 4 and _square_sizes(each) == square]

    _attentions = "attentions"

    def variants(self) -> dict[str, Variant]:
        if self._variants_found is None or self._variants_found[0] is not self.target:
            with quiet():
                self._variants_found = (self.target, self._find_variants())
        return self._variants_found[1]

    def _find_variants(self) -> dict[str, Variant]:
        variants: dict[str, Variant] = {}
        own = getattr(self.target.config, "_attn_implementation", None)
        for implementation in IMPLEMENTATIONS:
            if implementation != own and (model := self.with_implementation(implementation)) is not None:
                variants[f"attn_implementation={implementation!r}"] = self._variant_of(model)
        if self.weights(self.draw(1, self.lengths(3)[0], Rng(0, "ways"))):
            variants["output_attentions=True"] = self._variant_of(self.target, output_attentions=True)
        if self.caching is not None and "use_cache" in parameters(self.target):
            for value in (True, False):
                variants[f"use_cache={value}"] = self._variant_of(self.target, use_cache=value)
            if (variant := static_cache_variant(self)) is not None:
                variants["static cache"] = variant
        return variants

    def _variant_of(self, model: Any, **more: Any) -> Variant:
        return lambda x, mask=None: first_tensor(self.call(x, mask, model=model, **more))

    def _rebind(self, original: Adapter) -> None:
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


class HuggingFaceDecoder(HuggingFaceTextModel):
    """The decoder of an encoder-decoder, with a source that is the same in every row."""

    ids, mask_argument, _attentions = "decoder_input_ids", "decoder_attention_mask", "decoder_attentions"
    source_tokens = 5

    def _is_decoder(self, target: Any) -> bool:
        return True

    @lazy_property
    def takes_positions(self) -> bool:
        return False

    @property
    def is_rotary(self) -> bool:
        return False

    def call(self, x: Tensor, mask: Tensor | None = None, model: Any = None, **more: Any) -> Any:
        source = super().draw(1, self.source_tokens, Rng(0, "source")).expand(x.shape[0], -1)
        return super().call(x, mask, model, input_ids=source, **more)


class HuggingFaceEncoder(HuggingFaceTextModel):
    """The source of an encoder-decoder, seen through a target that stays as it is: rows out are those of the target."""

    _attentions = "encoder_attentions"

    def _is_decoder(self, target: Any) -> bool:
        return False

    @lazy_property
    def takes_positions(self) -> bool:
        return False

    def call(self, x: Tensor, mask: Tensor | None = None, model: Any = None, **more: Any) -> Any:
        given = self.draw(1, 3, Rng(0, "target")).expand(x.shape[0], -1)
        return super().call(x, mask, model, decoder_input_ids=given, **more)

    def find_abilities(self) -> None:
        super().find_abilities()
        self.abilities.discard("aligned")  # three rows come out, whatever goes in


class HuggingFaceImageModel(ImageModelAdapter):
    """A model of pictures."""

    def __init__(self, target: Any, name: str, conventions: Conventions | None = None, **sizes: Any) -> None:
        self._variants_found: tuple[Any, dict[str, Variant]] | None = None
        super().__init__(target, name, conventions, **sizes)
        self.claims = IMAGE_CLAIMS
        self.declared = f"transformers {target.config.model_type}, pictures"

    def call(self, x: Tensor, mask: Tensor | None = None, model: Any = None, **more: Any) -> Any:
        with float64_casts(self.dtype):
            return (self.target if model is None else model)(pixel_values=x, **more)

    def variants(self) -> dict[str, Variant]:
        if self._variants_found is None or self._variants_found[0] is not self.target:
            with quiet():
                self._variants_found = (self.target, self._find_variants())
        return self._variants_found[1]

    def _find_variants(self) -> dict[str, Variant]:
        variants: dict[str, Variant] = {"output_attentions=True": self._variant_of(self.target, output_attentions=True)}
        own = getattr(self.target.config, "_attn_implementation", None)
        for implementation in IMPLEMENTATIONS:
            if implementation != own and (model := _with_attention(self.target, implementation)) is not None:
                variants[f"attn_implementation={implementation!r}"] = self._variant_of(model)
        return variants

    def _variant_of(self, model: Any, **more: Any) -> Variant:
        return lambda x, mask=None: first_tensor(self.call(x, None, model=model, **more))


def _square_sizes(weights: Tensor) -> tuple[int, int, int]:
    return weights.shape[0], weights.shape[2], weights.shape[3]


def _find_max_length(config: Any) -> int:
    text = config.get_text_config(decoder=True)
    sizes = [size for name in LENGTHS if isinstance(size := getattr(text, name, None), int) and size > 0]
    # Some tables begin behind the entry for padding.
    return min(sizes) - 2 - (getattr(text, "pad_token_id", None) or 0) if sizes else UNLIMITED


def _find_receptive_field(config: Any) -> int | None:
    """How far back the whole stack sees; None if as far as there is. Windows of transformers count the token itself."""
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * (layers or 0)
    if not isinstance(window, int) or not layers or any(kind != "sliding_attention" for kind in kinds):
        return None
    return layers * (window - 1)


def _has_length_dependent_rotary(config: Any) -> bool:
    """Whether rotations change with the length of the text, as those of LongRoPE and of dynamic NTK scaling do."""
    found: list[Any] = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while found:
        entry = found.pop()
        if isinstance(entry, dict):
            if {entry.get("rope_type"), entry.get("type")} & SWITCHING:
                return True
            found += [value for value in entry.values() if isinstance(value, dict)]  # one for each kind of layer
    return False


def _find_image_size(config: Any) -> tuple[int, int, int]:
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


# Example inputs, and tracing


def fill_inputs(module: nn.Module, inputs: ExampleInputs) -> bool:
    """Example inputs by the name of the main input, which every model of transformers has."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "model_type"):
        return False
    main, accepted, kwargs = getattr(module, "main_input_name", "input_ids"), parameters(module), inputs.kwargs
    if "use_cache" in accepted:
        kwargs["use_cache"] = False
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    inputs.limit(limit)
    decodes_a_source = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted
    if main == "pixel_values":
        kwargs["pixel_values"] = _image_input(config, inputs)
    elif main == "input_features":
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * int(getattr(config, "max_source_positions", 1500))
        kwargs["input_features"] = InputSpec(("B", bins, frames))
    elif main == "input_values":
        inputs.sizes["N"] = inputs.sizes["N"] if "N" in inputs.known else 16000
        kwargs["input_values"] = InputSpec(("B", "N"))
    elif decodes_a_source:
        inputs.limit(limit, "T")
        kwargs["input_ids"] = token_ids("T")
    else:
        kwargs["input_ids"] = token_ids()
        if "pixel_values" in accepted and hasattr(config, "vision_config"):
            kwargs["pixel_values"] = _image_input(config.vision_config, inputs)
    if decodes_a_source:
        kwargs["decoder_input_ids"] = token_ids()
    return True


def _image_input(config: Any, inputs: ExampleInputs) -> InputSpec:
    return inputs.image(getattr(config, "image_size", None) or 224, int(getattr(config, "num_channels", 3)))


@contextmanager
def assume_unpacked() -> Iterator[None]:
    """Rows hold one sequence each.

    Without a mask, models of transformers read the values of their positions to find out whether sequences are packed.
    Fake tensors have no values; the models then build a mask to be safe, and attention no longer counts as causal.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None):
        yield


__all__ = ["assume_unpacked", "fill_inputs", "is_decoder", "recognise", "tiny"]
