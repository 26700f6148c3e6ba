"""The format of llama2.c: seven integers, then every float32 of a LLaMA in one known order.

A `.data` file of the emscripten build holds `model.bin` and `tokenizer.bin` one after the other; both are read from
it. Queries and keys come in pairs and leave in halves (see `rotary_rows`), under Hugging Face's names.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.models.io import atomic
from regard.models.io.rotary_rows import halves_from_pairs
from regard.models.io.sentencepiece_tokenizer import SentencePieceTokenizer

HEADER = struct.Struct("<7i")
FLOAT = 4


class Header(NamedTuple):
    """The header. A negative vocabulary says that the classifier has weights of its own, at the end."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    context: int

    @property
    def ties_embeddings(self) -> bool:
        return self.vocab_size > 0

    def tensor_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every tensor of the file in order, layers stacked; "{}" stands for the layer."""
        dim, hidden, layers, heads, kv_heads, vocab_size, context = self
        vocab_size, head_dim = abs(vocab_size), dim // heads
        tensor_shapes: list[tuple[str, tuple[int, ...]]] = [
            ("model.embed_tokens.weight", (vocab_size, dim)),
            ("model.layers.{}.input_layernorm.weight", (layers, dim)),
            ("model.layers.{}.self_attn.q_proj.weight", (layers, heads * head_dim, dim)),
            ("model.layers.{}.self_attn.k_proj.weight", (layers, kv_heads * head_dim, dim)),
            ("model.layers.{}.self_attn.v_proj.weight", (layers, kv_heads * head_dim, dim)),
            ("model.layers.{}.self_attn.o_proj.weight", (layers, dim, heads * head_dim)),
            ("model.layers.{}.post_attention_layernorm.weight", (layers, dim)),
            ("model.layers.{}.mlp.gate_proj.weight", (layers, hidden, dim)),
            ("model.layers.{}.mlp.down_proj.weight", (layers, dim, hidden)),
            ("model.layers.{}.mlp.up_proj.weight", (layers, hidden, dim)),
            ("model.norm.weight", (dim,)),
            ("", (context, head_dim)),  # cosines and sines of the rotary embedding: computed here, not read
        ]
        return tensor_shapes if self.ties_embeddings else [*tensor_shapes, ("lm_head.weight", (vocab_size, dim))]

    @property
    def bytes(self) -> int:
        return HEADER.size + FLOAT * sum(int(torch.Size(shape).numel()) for _, shape in self.tensor_shapes())


def is_llama2c(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins with a header that fits its size."""
    path = Path(path)
    try:
        return path.is_file() and _read_header(path).bytes <= path.stat().st_size
    except CheckpointError:
        return False


def read_llama2c(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration as Hugging Face's `config.json` would have it, and the tensors under its names."""
    path = Path(path)
    header = _read_header(path)
    if path.stat().st_size < header.bytes:
        raise _damage_error(path, f"{path.stat().st_size:,} bytes", f"its header asks for {header.bytes:,}")
    count = (header.bytes - HEADER.size) // FLOAT
    # mapped, so that what is not needed is never read; the copy made by the model's own tensors is the only one
    everything = torch.from_file(str(path), size=count + HEADER.size // FLOAT, dtype=torch.float32)
    state: dict[str, Tensor] = {}
    at = HEADER.size // FLOAT
    for name, shape in header.tensor_shapes():
        length = torch.Size(shape).numel()
        stacked = everything[at : at + length].view(shape)
        at += length
        if "{}" in name:
            state |= {name.format(layer): stacked[layer] for layer in range(header.layers)}
        elif name:
            state[name] = stacked
    for name, weight in state.items():
        if "q_proj" in name or "k_proj" in name:
            state[name] = halves_from_pairs(weight, header.heads if "q_proj" in name else header.kv_heads)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": abs(header.vocab_size),
        "hidden_size": header.dim,
        "intermediate_size": header.hidden,
        "num_hidden_layers": header.layers,
        "num_attention_heads": header.heads,
        "num_key_value_heads": header.kv_heads,
        "head_dim": header.dim // header.heads,
        "max_position_embeddings": header.context,
        "rms_norm_eps": 1e-5,  # these three are constants in llama2.c's source
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": header.ties_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config, state


def read_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None) -> SentencePieceTokenizer:
    """The tokenizer of a `.data` file, or of a `tokenizer.bin` alone, where the number of tokens may be told."""
    path = Path(path)
    atomic.check_file(path)
    start = 0
    if is_llama2c(path):
        header = _read_header(path)
        start, vocab_size = header.bytes, abs(header.vocab_size)
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    if not content:
        raise _damage_error(path, "a model and nothing after it", "the tokenizer of llama2.c is a file of its own")
    tokens: list[bytes] = []
    scores: list[float] = []
    at = 4  # the length of the longest token, which is of no use here
    try:
        while at < len(content) and (vocab_size is None or len(tokens) < vocab_size):
            score, length = struct.unpack_from("<fi", content, at)
            if length < 0 or at + 8 + length > len(content):
                raise struct.error(f"a token of {length} bytes at {at}")
            tokens.append(content[at + 8 : at + 8 + length])
            scores.append(score)
            at += 8 + length
    except struct.error as failure:
        raise _damage_error(path, str(failure), "its tokens do not fit its length") from failure
    if vocab_size is not None and len(tokens) < vocab_size:
        raise _damage_error(path, f"{len(tokens)} tokens", f"the model has {vocab_size}")
    return SentencePieceTokenizer(tokens, scores)


def _read_header(path: Path) -> Header:
    atomic.check_file(path)
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise _damage_error(path, f"{len(header)} bytes", "the header alone has 28")
    header = Header(*HEADER.unpack(header))
    sane = all(0 < size < 1 << 24 for size in (*header[:5], abs(header.vocab_size), header.context))
    if not sane or header.dim % (2 * header.heads) or header.heads % header.kv_heads:
        raise _damage_error(path, f"a header of {tuple(header)}", "these are no sizes of a LLaMA")
    return header


def _damage_error(path: Path, found: str, because: str) -> CheckpointError:
    return atomic.damage_error(path, found, f"read as a file of llama2.c, {because}")
