"""`generate` of a decoder of Hugging Face by our GPT, where the architecture is one that it has exactly."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.override import find_override
from regard.errors import RegardError
from regard.models import GPT

CLASSES = ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
KNOWN = {"inputs", "input_ids", "attention_mask", "max_new_tokens", "do_sample", "pad_token_id", "eos_token_id"}
KNOWN |= {"use_cache", "num_beams"}
# Options of a generation configuration that change tokens, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1, None),
    "repetition_penalty": (1.0, None),
    "no_repeat_ngram_size": (0, None),
    "min_length": (0, None),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "num_return_sequences": (1, None),
    "assistant_model": (None,),
    "return_dict_in_generate": (False, None),
    "stop_strings": (None,),
    "penalty_alpha": (None, 0.0),
    "guidance_scale": (None, 1.0),
}


def convert_decoder(model: Any, weights: str) -> tuple[GPT | None, str]:
    """Our model with the weights of a decoder, or `None` and the reason."""
    name = type(model).__name__
    if name not in CLASSES:
        return None, ""
    if any(find_override(module) is not None for module in model.modules()):
        return None, "regard.use changed its layers"
    try:
        decoder = GPT.from_checkpoint(model.config.to_dict(), model.state_dict(), dtype=torch.float32).eval()
    except RegardError as reason:
        return None, f"our GPT has not all of this configuration: {reason.headline}"
    decoder.requires_grad_(False)
    return (decoder if weights == "float32" else decoder.quantize(weights)), ""


class WeightVersions:
    """The parameters of a model at one moment, and whether it still has these, unchanged.

    Copies and pickles of a model have tensors with versions of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._versions = [parameter._version for parameter in self._parameters]

    def are_those_of(self, model: nn.Module) -> bool:
        now = list(model.parameters())
        return len(now) == len(self._parameters) and all(
            parameter is before and parameter._version == version
            for parameter, before, version in zip(now, self._parameters, self._versions, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        intact = all(p._version == v for p, v in zip(self._parameters, self._versions, strict=True))
        return {"parameters": self._parameters, "intact": intact}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._parameters = state["parameters"]
        self._versions = [parameter._version if state["intact"] else -1 for parameter in self._parameters]


def generate_like_huggingface(
    model: Any, decoder: GPT, versions: WeightVersions, inputs: Tensor | None = None, **options: Any
) -> Any:
    """`model.generate`: greedy tokens by our model, all other options by the model itself."""
    ids = options.get("input_ids", inputs)
    settings = model.generation_config
    if not _is_plain(model, decoder, ids, options) or not _is_unchanged(model, versions):
        given = options if inputs is None else {"inputs": inputs, **options}
        return type(model).generate(model, **given)
    assert isinstance(ids, Tensor)
    stop = options.get("eos_token_id", settings.eos_token_id)
    stop = () if stop is None else tuple(stop) if isinstance(stop, list | tuple) else (int(stop),)
    pad = options.get("pad_token_id", settings.pad_token_id)
    pad = (stop[0] if stop else 0) if pad is None else int(pad)
    made = decoder.generate(
        ids, max_new_tokens=options["max_new_tokens"], stop_tokens=stop, attention_mask=options.get("attention_mask")
    )
    rows = [torch.tensor(row, dtype=ids.dtype) for row in made.tokens]
    return torch.cat([ids, nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)], 1)


def _is_plain(model: Any, decoder: GPT, ids: Any, options: dict[str, Any]) -> bool:
    """Whether these are options with which our model writes the same tokens."""
    settings = model.generation_config
    if not (set(options) <= KNOWN and isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel() > 0):
        return False
    neutral = all(options.get(name, getattr(settings, name, None)) in values for name, values in NEUTRAL.items())
    new, mask = options.get("max_new_tokens"), options.get("attention_mask")
    sampled = options.get("do_sample", settings.do_sample)
    if sampled or not neutral or new is None or model.training:
        return False
    fits = new > 0 and ids.shape[1] + new <= decoder.config.context_length
    return fits and (mask is None or _is_left_padded(mask, ids))


def _is_left_padded(mask: Any, ids: Tensor) -> bool:
    """Whether every row has padding before its tokens alone, and at least one token."""
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return False
    visible = mask.bool()
    return bool(visible[:, -1].all()) and not bool((visible[:, :-1] & ~visible[:, 1:]).any())


def _is_unchanged(model: nn.Module, versions: WeightVersions) -> bool:
    """Whether our copy of the weights is the model's, and no layer has another pattern."""
    if any(find_override(module) is not None for module in model.modules()):
        return False
    if versions.are_those_of(model):
        return True
    warnings.warn(
        "The weights of this model changed after regard.accelerate; generate is the model's own. Call restore() of its "
        "report and regard.accelerate(model) again.",
        stacklevel=3,
    )
    return False
