"""`generate` of a decoder of Hugging Face by our GPT, where the architecture is one that it has exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
    try:
        decoder = GPT.from_checkpoint(model.config.to_dict(), model.state_dict(), dtype=torch.float32).eval()
    except RegardError as reason:
        return None, f"our GPT has not all of this configuration: {reason.headline}"
    decoder.requires_grad_(False)
    return (decoder if weights == "float32" else decoder.quantize(weights)), ""


def generate_like_huggingface(model: Any, decoder: GPT, inputs: Tensor | None = None, **options: Any) -> Any:
    """`model.generate`: greedy tokens by our model, all other options by the model itself."""
    ids = options.get("input_ids", inputs)
    settings = model.generation_config
    plain = set(options) <= KNOWN and isinstance(ids, Tensor) and ids.dim() == 2
    sampled = options.get("do_sample", settings.do_sample)
    neutral = all(options.get(name, getattr(settings, name, None)) in values for name, values in NEUTRAL.items())
    if not plain or sampled or not neutral or options.get("max_new_tokens") is None or model.training:
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
