"""LLaMA as Hugging Face has it, which GGUF and llama2.c files are read as, too.

Queries, keys and values lie in one matrix here, in three there; so do the gate and the upper half of the feed-forward
part, in two there. Rotary positions are halves in both.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from regard.models.foreign.rules import Converter, State, agree, lacks, need

OUTSIDE = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.down_proj": "feed_forward.outer",
}
# What lies in one matrix here, in this order.
JOINED = {
    "attention.projections": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "feed_forward.inner": ("mlp.gate_proj", "mlp.up_proj"),
}
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
# Frequencies that old versions kept among the weights.
NO_WEIGHTS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class Llama(Converter):
    """`LlamaForCausalLM`.

    Where we differ: our dropout, none in the published models, is on residuals as well as on attention weights.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "llama"

    def read_config(self, config: dict[str, Any]) -> Any:
        dim, heads = need("LLaMA", config, "hidden_size"), need("LLaMA", config, "num_attention_heads")
        bias = config.get("attention_bias", False)
        rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
        found = {
            "attention_bias and mlp_bias": (bias, config.get("mlp_bias", False)),
            "rope_type": rotary.get("rope_type", rotary.get("type", "default")),
            "partial_rotary_factor": rotary.get("partial_rotary_factor", 1.0),
        }
        allowed = {
            "rope_type": ("default",),
            "hidden_act": tuple(ACTIVATIONS),
            "head_dim": (dim // heads, None),
            "attention_bias and mlp_bias": ((False, False), (True, True)),
            "sliding_window": (None,),
            "partial_rotary_factor": (1.0,),
        }
        agree("LLaMA", found | config, allowed)
        return self.config.from_dict(
            {
                "vocabulary": need("LLaMA", config, "vocab_size"),
                "context": config.get("max_position_embeddings", 2048),
                "dim": dim,
                "layers": need("LLaMA", config, "num_hidden_layers"),
                "heads": heads,
                "kv_heads": config.get("num_key_value_heads"),
                "hidden": need("LLaMA", config, "intermediate_size"),
                "norm": "rms",
                "norm_eps": config.get("rms_norm_eps", 1e-6),
                "position": "rotary",
                "rotary_base": float(rotary.get("rope_theta", config.get("rope_theta", 10000.0))),
                "feed_forward": ACTIVATIONS[config.get("hidden_act", "silu")],
                "bias": bias,
                "tied": config.get("tie_word_embeddings", False),
                "dropout": config.get("attention_dropout", 0.0),
            }
        )

    def refuses(self, config: Any) -> str:
        wrong = {
            f"norm={config.norm!r}": config.norm != "rms",
            f"position={config.position!r}": config.position != "rotary",
            f"feed_forward={config.feed_forward!r}": config.feed_forward not in ACTIVATIONS.values(),
            f"window={config.window}": config.window is not None,
        }
        return lacks("LLaMA", wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.feed_forward)
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": config.vocabulary,
            "max_position_embeddings": config.context,
            "hidden_size": config.dim,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.heads if config.kv_heads is None else config.kv_heads,
            "head_dim": config.dim // config.heads,
            "intermediate_size": 4 * config.dim if config.hidden is None else config.hidden,
            "rms_norm_eps": config.norm_eps,
            # older versions read the first, newer ones the second
            "rope_theta": config.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
            "hidden_act": activation,
            "attention_bias": config.bias,
            "mlp_bias": config.bias,
            "tie_word_embeddings": config.tied,
            "attention_dropout": config.dropout,
            # theirs has ids of its own vocabulary as defaults, which need not exist in another
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def read_state(self, state: State, config: Any) -> State:
        where = {part: (whole, place) for whole, parts in JOINED.items() for place, part in enumerate(parts)}
        joined: dict[str, dict[int, str]] = {}
        ours: State = {}
        for name, tensor in state.items():
            stem, _, kind = name.rpartition(".")
            layer = LAYER.fullmatch(stem)
            if NO_WEIGHTS.fullmatch(name):
                continue
            if stem in OUTSIDE:
                ours[f"{OUTSIDE[stem]}.{kind}"] = tensor
            elif layer is not None and layer[2] in INSIDE:
                ours[f"blocks.{layer[1]}.{INSIDE[layer[2]]}.{kind}"] = tensor
            elif layer is not None and layer[2] in where:
                whole, place = where[layer[2]]
                joined.setdefault(f"blocks.{layer[1]}.{whole}.{kind}", {})[place] = name
            else:
                ours[name] = tensor
        for name, parts in joined.items():
            whole = next(whole for whole in JOINED if f".{whole}." in name)
            tensors = [state[parts[place]] for place in sorted(parts)]
            if len(parts) == len(JOINED[whole]) and len({tensor.shape[1:] for tensor in tensors}) == 1:
                ours[name] = torch.cat(tensors)
            else:  # what cannot be joined keeps its names, by which it is then refused
                ours |= {parts[place]: state[parts[place]] for place in parts}
        return ours

    def write_state(self, state: State, config: Any) -> State:
        outside = {ours: theirs for theirs, ours in OUTSIDE.items()}
        inside = {ours: theirs for theirs, ours in INSIDE.items()}
        kv_heads = config.heads if config.kv_heads is None else config.kv_heads
        narrow = kv_heads * (config.dim // config.heads)
        theirs: State = {}
        for name, tensor in state.items():
            stem, _, kind = name.rpartition(".")
            if stem in outside:
                theirs[f"{outside[stem]}.{kind}"] = tensor
                continue
            _, layer, part = stem.split(".", 2)
            if part in inside:
                theirs[f"model.layers.{layer}.{inside[part]}.{kind}"] = tensor
                continue
            parts = JOINED[part]
            widths = [config.dim, narrow, narrow] if len(parts) == 3 else [tensor.shape[0] // 2] * 2
            for theirs_part, rows in zip(parts, tensor.split(widths), strict=True):
                theirs[f"model.layers.{layer}.{theirs_part}.{kind}"] = rows
        return theirs
