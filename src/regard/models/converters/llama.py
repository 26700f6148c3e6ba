"""LLaMA as Hugging Face has it, which GGUF and llama2.c files are read as, too; Mistral and Qwen2 differ in few parts.

Queries, keys and values lie in one matrix here, in three there; so do the gate and the upper half of the feed-forward
part, in two there. Rotary positions are halves in both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from regard.models.converters.base import NO_SPECIAL_TOKENS, Converter, State, check_values, list_unsupported


class Llama(Converter):
    """`LlamaForCausalLM`, or `LlamaModel` alone, which has no logits unless they are tied.

    Where we differ: our dropout, none in the published models, is on residuals as well as on attention weights.
    """

    name = "LLaMA"
    model_types = ("llama",)
    architecture = "Llama"
    fields: ClassVar = {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context_length",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "hidden_dim",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
        "attention_dropout": "dropout",
    }
    required = ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", "intermediate_size")
    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    activations: ClassVar = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
    # What must have one of these values.
    only: ClassVar[dict[str, tuple[Any, ...]]] = {"sliding_window": (None,)}
    names: ClassVar = {
        "embedding": "embed_tokens",
        "norm": "norm",
        "output": "lm_head",
        "blocks.{}.attention_norm": "layers.{}.input_layernorm",
        "blocks.{}.attention.projections": tuple(f"layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
        "blocks.{}.attention.output": "layers.{}.self_attn.o_proj",
        "blocks.{}.feed_forward_norm": "layers.{}.post_attention_layernorm",
        "blocks.{}.feed_forward.inner": ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"),
        "blocks.{}.feed_forward.outer": "layers.{}.mlp.down_proj",
    }
    prefix = "model."
    heads = ("output",)
    # Frequencies that old versions kept among the weights.
    ignored = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

    def infer_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        """A bare model has names without `model.`; one with a head lacks a tensor if its matrix is not there."""
        bare = "embed_tokens.weight" in state and "lm_head.weight" not in state
        tied = config.get("tie_word_embeddings", self.defaults["tie_word_embeddings"])
        return config | {"_logits": not bare or bool(tied)}

    def read_config(self, config: dict[str, Any]) -> Any:
        rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
        found = {
            "rope_type": rotary.get("rope_type", rotary.get("type", "default")),
            "partial_rotary_factor": rotary.get("partial_rotary_factor", 1.0),
        }
        allowed = {
            "rope_type": ("default",),
            "hidden_act": tuple(self.activations),
            "partial_rotary_factor": (1.0,),
        }
        fields = self.read_fields(config)
        check_values(self.name, found | config, allowed | self.only)
        head_dim = config.get("head_dim")
        fields |= {
            "norm": "rms",
            "position": "rotary",
            "rotary_base": float(rotary.get("rope_theta", config.get("rope_theta", 10000.0))),
            "feed_forward": self.activations[config.get("hidden_act", "silu")],
            "head_dim": None if head_dim is None or head_dim * fields["heads"] == fields["dim"] else head_dim,
            "logits": config.get("_logits", True),
        }
        return self.config.from_dict(fields | self.read_biases(config) | self.read_windows(config))

    def read_biases(self, config: dict[str, Any]) -> dict[str, Any]:
        inner, attention = config.get("mlp_bias", False), config.get("attention_bias", False)
        return {"bias": inner, "attention_bias": None if attention == inner else attention}

    def read_windows(self, config: dict[str, Any]) -> dict[str, Any]:
        return {}

    def explain_unsupported(self, config: Any) -> str:
        wrong = {
            f"norm={config.norm!r}": config.norm != "rms",
            f"position={config.position!r}": config.position != "rotary",
            f"feed_forward={config.feed_forward!r}": config.feed_forward not in self.activations.values(),
        }
        return list_unsupported(self.name, wrong | self.find_unsupported(config))

    def find_unsupported(self, config: Any) -> dict[str, bool]:
        """Of those parts in which the families differ, the settings that this one does not have."""
        return {
            f"attention_bias={config.attention_bias!r}": config.projection_biases not in ("", "qkvo"),
            f"window={config.window}": config.window is not None,
        }

    def write_config(self, config: Any) -> dict[str, Any]:
        return {
            "model_type": self.model_types[0],
            "architectures": [f"{self.architecture}{'ForCausalLM' if config.logits else 'Model'}"],
            **self.write_fields(config),
            "num_key_value_heads": config.heads if config.kv_heads is None else config.kv_heads,
            "head_dim": config.head_size,
            "intermediate_size": 4 * config.dim if config.hidden_dim is None else config.hidden_dim,
            # older versions read the first, newer ones the second
            "rope_theta": config.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
            "hidden_act": self.write_activation(config.feed_forward),
            **NO_SPECIAL_TOKENS,
            **self.write_differences(config),
        }

    def write_differences(self, config: Any) -> dict[str, Any]:
        """The keys in which the families differ."""
        return {"attention_bias": config.projection_biases == "qkvo", "mlp_bias": config.bias}

    def has_prefix(self, config: Any) -> bool:
        return config.logits

    def split_rows(self, key: str, tensor: Tensor, config: Any) -> Sequence[int]:
        if key.endswith("projections"):
            kv_heads = config.heads if config.kv_heads is None else config.kv_heads
            return [heads * config.head_size for heads in (config.heads, kv_heads, kv_heads)]
        return super().split_rows(key, tensor, config)
