"""GGUF, the one-file format of llama.cpp: configuration, tensors and tokenizer of a LLaMA.

Quantised tensors stay as they are stored, or are dequantised to float32 (by the package `gguf` where the format is none
of ours); names become those of Hugging Face, and the rows of queries and keys, which llama.cpp keeps in pairs, are put
back into halves (see `rotary_rows`).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.kernels.blocks import BLOCK_FORMATS, row_bytes
from regard.kernels.quantized import BlockRows, QuantizedTensor
from regard.models.io import atomic
from regard.models.io.gguf_header import Header, TensorInfo, read_header
from regard.models.io.rotary_rows import halves_from_pairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Config = dict[str, Any]

# Names outside and inside the layers. Each is followed by .weight or .bias.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The numbers of the formats that are used as they are stored.
FLOAT32 = 0
BLOCK_KINDS = {2: "q4_0", 3: "q4_1", 8: "q8_0", 12: "q4_k", 14: "q6_k", 30: "bf16"}
# Kinds of tokens that are never cut up and never come from ordinary text.
CONTROL, CUSTOM = 3, 4


def read_gguf(path: str | os.PathLike[str], *, quantized: bool = False) -> tuple[Config, dict[str, Tensor]]:
    """The configuration as Hugging Face's `config.json` would have it, and tensors under its names.

    quantized: matrices in formats of `regard.kernels.blocks` are read as blocks (`QuantizedTensor`), one after the
    other, so that nothing is in memory twice; all else is float32.
    """
    path = Path(path)
    header = _read_header(path)
    config = _make_config(path, header)
    content = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    names = {entry.name: _rename_tensor(path, entry.name) for entry in header.tensors}
    state: dict[str, Tensor] = {}
    for entry in header.tensors:
        blocks = _read_blocks(path, content, entry) if quantized else None
        state[names[entry.name]] = _dequantize(path, content, entry) if blocks is None else blocks
    config["tie_word_embeddings"] = "lm_head.weight" not in state
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, tensor in state.items():
        if ".q_proj." in name or ".k_proj." in name:
            count = heads if ".q_proj." in name else kv_heads
            if isinstance(tensor, QuantizedTensor):
                ((kind, data),) = tensor.parts
                state[name] = QuantizedTensor([BlockRows(kind, halves_from_pairs(data, count))], tensor.shape[1])
            else:
                state[name] = halves_from_pairs(tensor, count)
    return config, state


def _read_header(path: Path) -> Header:
    atomic.check_file(path)
    try:
        return read_header(path)
    except (ValueError, OSError, struct.error, OverflowError, MemoryError) as failure:
        raise atomic.damage_error(path, failure) from failure


def _find_value(path: Path, header: Header, key: str, default: Any = None) -> Any:
    value = header.values.get(key, default)
    if value is None:
        raise CheckpointError(
            f"{path.name} does not say {key}.",
            asked=str(path),
            because="the model cannot be used without it",
            instead="get a complete file",
        )
    return value


def _make_config(path: Path, header: Header) -> Config:
    def get(key: str, default: Any = None) -> Any:
        return _find_value(path, header, key, default)

    architecture = get("general.architecture")
    if architecture != "llama":
        raise _unsupported_error(path, f"architecture {architecture!r}", "only LLaMA's is known here")

    def count(key: str, default: Any = None) -> int:
        value = get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise atomic.damage_error(path, f"{key} is {_truncate(value)}, and not a count")
        return value

    def real(key: str, default: float) -> float:
        value = get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise atomic.damage_error(path, f"{key} is {_truncate(value)}, and not a positive number")
        return _round_to_float32(value)

    heads = get("llama.attention.head_count")
    kv_heads = get("llama.attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        found = f"head counts {_truncate(heads)} and {_truncate(kv_heads)}"
        raise _unsupported_error(path, found, "every layer must have the same number of heads")
    heads, width = count("llama.attention.head_count"), count("llama.embedding_length")
    kv_heads = count("llama.attention.head_count_kv", heads)
    head_dim = count("llama.attention.key_length", width // heads)
    if get("llama.rope.dimension_count", head_dim) != head_dim:
        raise _unsupported_error(path, "rotary embedding of some channels only", "all channels of a head turn here")
    scaled = any(entry.name == "rope_freqs.weight" for entry in header.tensors)
    if scaled or get("llama.rope.scaling.type", "none") != "none":
        raise _unsupported_error(path, "scaled rotary frequencies", "frequencies follow the base alone here")
    if experts := get("llama.expert_count", 0):
        raise _unsupported_error(path, f"{experts} experts", "a layer has one feed-forward network here")
    tokens = header.values.get("tokenizer.ggml.tokens")
    known = len(tokens) if isinstance(tokens, list) else None
    config: Config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": count("llama.vocab_size", known),
        "hidden_size": width,
        "intermediate_size": count("llama.feed_forward_length"),
        "num_hidden_layers": count("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": count("llama.context_length"),
        "rms_norm_eps": real("llama.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": real("llama.rope.freq_base", 10000.0),
        "hidden_act": "silu",
    }
    for ours, theirs in {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}.items():
        number = header.values.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(number, int):
            config[ours] = number
    return config


def _truncate(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _round_to_float32(value: float) -> float:
    """The shortest decimal number that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rename_tensor(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    head, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if head == "blk" and layer.isdigit() and part in INSIDE:
        return f"model.layers.{layer}.{INSIDE[part]}.{kind}"
    raise _unsupported_error(path, f"the tensor {name!r}", "a LLaMA has none of that name")


def _read_blocks(path: Path, content: Any, entry: TensorInfo) -> QuantizedTensor | None:
    """A matrix as it is stored, in memory of its own; `None` for other formats and shapes."""
    format = BLOCK_KINDS.get(entry.kind)
    if format is None or len(entry.shape) != 2 or entry.shape[1] % BLOCK_FORMATS[format].numbers:
        return None
    rows, cols = entry.shape
    size = rows * row_bytes(format, cols)
    if not 0 < size <= len(content) - entry.start:
        raise atomic.damage_error(path, f"{entry.name} {entry.shape}: it ends before this tensor does")
    with path.open("rb") as file:  # read, not mapped: pages of a mapped file count as memory until it is closed
        data = np.fromfile(file, dtype=np.uint8, count=size, offset=entry.start)
    return QuantizedTensor([BlockRows(format, torch.from_numpy(data).view(rows, -1))], cols)


def _dequantize(path: Path, content: Any, entry: TensorInfo) -> Tensor:
    """One tensor in float32, dequantised by the package gguf unless it is float32."""
    if entry.kind == FLOAT32 and 0 <= entry.start <= len(content) - 4 * math.prod(entry.shape):
        numbers = content[entry.start : entry.start + 4 * math.prod(entry.shape)]
        return torch.from_numpy(numbers.view(np.float32).reshape(entry.shape).copy())
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize  # an extra: most never open such a file
    except ImportError as failure:
        raise CheckpointError(
            f"{path.name} needs the package gguf.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="GGUF holds quantised numbers, and that package dequantises their formats",
            instead="pip install 'regard[gguf]'",
        ) from failure
    try:
        kind = GGMLQuantizationType(entry.kind)
        numbers, size = GGML_QUANT_SIZES[kind]  # a block of so many numbers has so many bytes
        *rows, columns = entry.shape
        shape = (*rows, columns // numbers * size)
        data = content[entry.start : entry.start + math.prod(shape)].reshape(shape)
        values = np.asarray(dequantize(data, kind), dtype=np.float32).reshape(entry.shape)
    except (ValueError, KeyError, NotImplementedError, TypeError, OverflowError, IndexError, MemoryError) as failure:
        raise atomic.damage_error(path, f"{entry.name} {entry.shape}: {failure}") from failure
    # what was not quantised is still a view of the file, which may not be written to
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _unsupported_error(path: Path, found: str, because: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} holds a model that is not built here.",
        asked=str(path),
        found=found,
        because=because,
        instead="a GGUF file of a plain LLaMA",
    )


# The tokenizer


def read_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer inside the file (byte-level BPE: a vocabulary and an ordered list of merges)."""
    path = Path(path)
    header = _read_header(path)
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models
    except ImportError as failure:
        raise CheckpointError(
            f"The tokenizer in {path.name} needs the package tokenizers.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="it cuts text the way the model was trained on",
            instead="pip install 'regard[text]'",
        ) from failure
    kind = _find_value(path, header, "tokenizer.ggml.model")
    before = _find_value(path, header, "tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or not isinstance(before, str) or before not in PRE_TOKENIZERS:
        raise _unsupported_error(
            path,
            f"a tokenizer of kind {kind!r}, cutting as {before!r}",
            f"known: 'gpt2' cutting as {', '.join(PRE_TOKENIZERS)}",
        )
    tokens = _find_list(path, header, "tokenizer.ggml.tokens", str)
    vocab_size = {token: index for index, token in enumerate(tokens)}
    merges = [_parse_merge(path, pair, vocab_size) for pair in _find_list(path, header, "tokenizer.ggml.merges", str)]
    kinds = _find_list(path, header, "tokenizer.ggml.token_type", int, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise atomic.damage_error(path, f"{len(tokens)} tokens, and kinds for {len(kinds)}")
    whole_words = before == "llama-bpe"  # LLaMA 3 takes a word that is in the vocabulary as it is
    tokenizer = Tokenizer(models.BPE(vocab=vocab_size, merges=merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[before]()
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, sort in zip(tokens, kinds, strict=True) if sort == CONTROL]
    custom = [token for token, sort in zip(tokens, kinds, strict=True) if sort == CUSTOM]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in custom])
    return tokenizer


def _find_list(path: Path, header: Header, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    values = _find_value(path, header, key, default)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise atomic.damage_error(path, f"{key} is {_truncate(values)}, and not a list of {kind.__name__}")
    return values


def _parse_merge(path: Path, pair: str, vocab_size: dict[str, int]) -> tuple[str, str]:
    """Two tokens whose union is a token; the package does not survive others."""
    first, space, second = pair.partition(" ")
    if not space or not {first, second, first + second} <= vocab_size.keys():
        raise atomic.damage_error(path, f"the merge {_truncate(pair)} is not of tokens of the vocabulary")
    return first, second


def _make_gpt2_pre_tokenizer() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=True)


def _make_digit_pre_tokenizer() -> Any:
    from tokenizers.pre_tokenizers import Digits, Sequence

    return Sequence([Digits(individual_digits=True), _make_gpt2_pre_tokenizer()])


def _make_llama3_pre_tokenizer() -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    # contractions; letters with one sign before them; up to three digits; signs; line ends; spaces
    pieces = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
    return Sequence([Split(Regex("|".join(pieces)), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


# How text is cut before merging, by the name the file gives it.
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _make_gpt2_pre_tokenizer,
    "default": _make_gpt2_pre_tokenizer,
    "smollm": _make_digit_pre_tokenizer,
    "llama-bpe": _make_llama3_pre_tokenizer,
}
