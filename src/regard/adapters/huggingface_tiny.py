"""A tiny random model of any class of Hugging Face transformers, by the name of the class."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.errors import InputError

# Sizes for the fields that configurations have in common; a field that a configuration lacks is left out.
LAYERS, HEADS, WIDTH, INNER, LONGEST, WORDS = 2, 4, 32, 44, 140, 89
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), WORDS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS // 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "query_pre_attn_scalar", "kv_channels"), WIDTH // HEADS),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "d_inner", "dff"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), LONGEST),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), LONGEST),
    "num_experts": 4,
    "num_local_experts": 4,
    "sliding_window": 5,
    "window_size": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "decoder_start_token_id": 2,
    "image_size": 24,
    "patch_size": 4,
    "num_labels": 7,
}
# Classes that need more, by the beginning of their names; a None leaves a field as it is.
MORE: dict[str, dict[str, Any]] = {
    "Albert": {"embedding_size": 16},
    "BigBird": {"block_size": 4, "num_random_blocks": 1, "attention_type": "original_full"},
    "Electra": {"embedding_size": 16},
    "GPTJ": {"rotary_dim": 4},
    "GPTNeoX": {"rotary_pct": 0.5},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "CodeGen": {"rotary_dim": 4},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "Deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "Gemma": {"num_key_value_heads": 2},
    "Longformer": {"attention_window": [8, 8]},
    "LED": {"attention_window": [8, 8]},
    "Mamba": {"state_size": 4, "num_heads": None, "head_dim": None, "intermediate_size": None},
    "Pegasus": {"decoder_start_token_id": 0},
    "Qwen2": {"use_sliding_window": False},
    "Qwen3": {"use_sliding_window": False},
    "Reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [10, 14],
        "axial_pos_embds_dim": [8, 24],
        "attention_head_size": 8,
        "feed_forward_size": INNER,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "is_decoder": True,
        "hash_seed": 0,
    },
    "Swinv2": {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 3,
        "pretrained_window_sizes": [0, 0],
    },
    "Swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 3},
    "T5": {"num_heads": HEADS, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    "XLNet": {"d_head": 8},
}
DECODING = ("ForCausalLM", "LMHeadModel")


def tiny(class_name: str, seed: int = 0, attention: str | None = None, **fields: Any) -> nn.Module:
    """A model of this class of transformers with two layers of width 32 and random weights.

    Weights are large enough for attention to matter: with the usual 0.02 attention weights are nearly uniform.
    `attention` is the implementation ("eager", "sdpa"), `fields` are fields of the configuration.
    """
    library = _import_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names are imported on first use, with the warnings of what they need
        kind: Any = getattr(library, class_name, None)
    if getattr(kind, "config_class", None) is None:
        raise InputError(
            f"transformers has no model {class_name!r}.",
            asked=f"transformers:{class_name}",
            because=f"transformers {library.__version__} has no such class of models",
            instead="a class with a configuration, such as GPT2LMHeadModel or BertModel",
        )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = _make_configuration(kind, class_name, fields)
        more = {} if attention is None else {"attn_implementation": attention}
        model = kind._from_config(config, **more)
        _randomize(model)
    return model.eval()


def _make_configuration(kind: Any, class_name: str, fields: dict[str, Any]) -> Any:
    default = _make_default(kind.config_class)
    known = set(inspect.signature(kind.config_class.__init__).parameters) | set(default)
    known -= {name for name, value in default.items() if isinstance(value, list | tuple)}  # one for each stage
    named = MORE.get(max((start for start in MORE if class_name.startswith(start)), key=len, default=""), {})
    sizes = {name: value for name, value in SIZES.items() if name in known} | named
    if class_name.endswith(DECODING) and "is_decoder" in known:
        sizes.setdefault("is_decoder", True)
    sizes = {name: value for name, value in sizes.items() if value is not None}
    return kind.config_class(**(sizes | fields))


def _make_default(config_class: Any) -> dict[str, Any]:
    try:
        default = config_class()
    except Exception:  # a configuration may need arguments; then its signature has to do
        return {}
    names = dict(getattr(config_class, "attribute_map", {}))
    return {name: value for name, value in default.to_dict().items() if name not in names}


def _randomize(model: nn.Module) -> None:
    """Weights of unit gain, biases and scales that are not trivial: every part shows in the output."""
    with torch.no_grad():
        for part in model.modules():
            weight = getattr(part, "weight", None)
            if isinstance(part, nn.Embedding) and not is_table(part):
                part.weight.normal_(0.0, 1.0)
            elif isinstance(part, nn.Linear):
                part.weight.normal_(0.0, part.in_features**-0.5)
            elif type(part).__name__ == "Conv1D" and isinstance(weight, torch.Tensor):
                weight.normal_(0.0, weight.shape[0] ** -0.5)
            bias = getattr(part, "bias", None)
            if isinstance(part, nn.Linear | nn.LayerNorm) and isinstance(bias, torch.Tensor):
                bias.normal_(0.0, 0.1)


def is_table(part: nn.Module) -> bool:
    """Whether this is a sinusoidal position table: computed, not learned, even if it requires a gradient."""
    return "Sinusoidal" in type(part).__name__


def _import_library() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no network access
    try:
        return importlib.import_module("transformers")
    except ImportError as failure:
        raise InputError(
            "transformers is not installed.",
            found=f"{type(failure).__name__}: {failure}",
            because="a tiny random model is built from its classes",
            instead="pip install transformers",
        ) from failure


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logging of transformers, which is not meant for readers of a report."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
