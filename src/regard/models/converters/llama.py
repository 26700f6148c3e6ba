"""LLaMA as Hugging Face has it, which GGUF and llama2.c files are read as, too; Mistral and Qwen2 differ in few parts.

Queries, keys and values lie in one matrix here, in three there; so do the gate and the upper half of the feed-forward
part, in two there. Rotary positions are halves in both.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch

from regard.models.converters.rules import Converter, State, agree, lacks, need

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
    """`LlamaForCausalLM`, or `LlamaModel` alone, which has no logits unless they are tied.

    Where we differ: our dropout, none in the published models, is on residuals as well as on attention weights.
    """

    name = "LLaMA"
    model_types = ("llama",)
    architecture = "Llama"

    def __init__(self, config: Any) -> None:
        self.config = config

    def add_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        """A bare model has names without `model.`; one with a head lacks a tensor if its matrix is not there."""
        bare = "embed_tokens.weight" in state and "lm_head.weight" not in state
        return config | {"_logits": not bare or bool(config.get("tie_word_embeddings", self.tied_by_default))}

    # Reading a configuration

    tied_by_default = False

    def read_config(self, config: dict[str, Any]) -> Any:
        dim, heads = need(self.name, config, "hidden_size"), need(self.name, config, "num_attention_heads")
        rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
        found = {
            "rope_type": rotary.get("rope_type", rotary.get("type", "default")),
            "partial_rotary_factor": rotary.get("partial_rotary_factor", 1.0),
        }
        allowed = {
            "rope_type": ("default",),
            "hidden_act": tuple(ACTIVATIONS),
            "partial_rotary_factor": (1.0,),
        }
        agree(self.name, found | config, allowed | self.only)
        head_dim = config.get("head_dim")
        fields = {
            "vocab_size": need(self.name, config, "vocab_size"),
            "context_length": config.get("max_position_embeddings", 2048),
            "dim": dim,
            "layers": need(self.name, config, "num_hidden_layers"),
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads"),
            "hidden_dim": need(self.name, config, "intermediate_size"),
            "norm": "rms",
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "position": "rotary",
            "rotary_base": float(rotary.get("rope_theta", config.get("rope_theta", 10000.0))),
            "feed_forward": ACTIVATIONS[config.get("hidden_act", "silu")],
            "tie_embeddings": config.get("tie_word_embeddings", self.tied_by_default),
            "dropout": config.get("attention_dropout", 0.0),
            "head_dim": None if head_dim is None or head_dim * heads == dim else head_dim,
            "logits": config.get("_logits", True),
        }
        return self.config.from_dict(fields | self.read_biases(config) | self.read_windows(config))

    # What must have one of these values.
    only: ClassVar[dict[str, tuple[Any, ...]]] = {"sliding_window": (None,)}

    def read_biases(self, config: dict[str, Any]) -> dict[str, Any]:
        inner, attention = config.get("mlp_bias", False), config.get("attention_bias", False)
        return {"bias": inner, "attention_bias": None if attention == inner else attention}

    def read_windows(self, config: dict[str, Any]) -> dict[str, Any]:
        return {}

    # Writing a configuration

    def refuses(self, config: Any) -> str:
        wrong = {
            f"norm={config.norm!r}": config.norm != "rms",
            f"position={config.position!r}": config.position != "rotary",
            f"feed_forward={config.feed_forward!r}": config.feed_forward not in ACTIVATIONS.values(),
        }
        return lacks(self.name, wrong | self.wrong_parts(config))

    def wrong_parts(self, config: Any) -> dict[str, bool]:
        """Of those parts in which the families differ, the settings that this one does not have."""
        return {
            f"attention_bias={config.attention_bias!r}": config.projection_biases not in ("", "qkvo"),
            f"window={config.window}": config.window is not None,
        }

    def write_config(self, config: Any) -> dict[str, Any]:
        activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.feed_forward)
        return {
            "model_type": self.model_types[0],
            "architectures": [f"{self.architecture}{'ForCausalLM' if config.logits else 'Model'}"],
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.context_length,
            "hidden_size": config.dim,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.heads if config.kv_heads is None else config.kv_heads,
            "head_dim": config.head_size,
            "intermediate_size": 4 * config.dim if config.hidden_dim is None else config.hidden_dim,
            "rms_norm_eps": config.norm_eps,
            # older versions read the first, newer ones the second
            "rope_theta": config.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
            "hidden_act": activation,
            "tie_word_embeddings": config.tie_embeddings,
            "attention_dropout": config.dropout,
            # theirs has ids of its own vocabulary as defaults, which need not exist in another
            "bos_token_id": None,
            "eos_token_id": None,
            **self.write_parts(config),
        }

    def write_parts(self, config: Any) -> dict[str, Any]:
        """The keys in which the families differ."""
        return {"attention_bias": config.projection_biases == "qkvo", "mlp_bias": config.bias}

    # Tensors

    def read_state(self, state: State, config: Any) -> State:
        where = {part: (whole, place) for whole, parts in JOINED.items() for place, part in enumerate(parts)}
        joined: dict[str, dict[int, str]] = {}
        ours: State = {}
        bare = "embed_tokens.weight" in state
        for own, tensor in state.items():
            name = f"model.{own}" if bare and own != "lm_head.weight" else own
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
                joined.setdefault(f"blocks.{layer[1]}.{whole}.{kind}", {})[place] = own
            else:
                ours[own] = tensor
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
        wide, narrow = config.heads * config.head_size, kv_heads * config.head_size
        start = "model." if config.logits else ""
        theirs: State = {}
        for name, tensor in state.items():
            stem, _, kind = name.rpartition(".")
            if stem in outside:
                place = outside[stem] if config.logits else outside[stem].removeprefix("model.")
                theirs[f"{place}.{kind}"] = tensor
                continue
            _, layer, part = stem.split(".", 2)
            if part in inside:
                theirs[f"{start}layers.{layer}.{inside[part]}.{kind}"] = tensor
                continue
            parts = JOINED[part]
            widths = [wide, narrow, narrow] if len(parts) == 3 else [tensor.shape[0] // 2] * 2
            for theirs_part, rows in zip(parts, tensor.split(widths), strict=True):
                theirs[f"{start}layers.{layer}.{theirs_part}.{kind}"] = rows
        return theirs
