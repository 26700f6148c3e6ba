"""GPT-2 as Hugging Face has it.

Its linear layers are stored as (input, output), transposed to ours; queries, keys and values lie in one matrix in both.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from regard.models.converters.base import NO_SPECIAL_TOKENS, Converter, check_values, list_unsupported


class GPT2(Converter):
    """`GPT2LMHeadModel`, or `GPT2Model` alone, whose output matrix is the embedding.

    Where we differ: one probability of dropout for all places, that of the residuals.
    """

    name = "GPT-2"
    model_types = ("gpt2",)
    fields: ClassVar = {
        "vocab_size": "vocab_size",
        "n_positions": "context_length",
        "n_embd": "dim",
        "n_layer": "layers",
        "n_head": "heads",
        "n_inner": "hidden_dim",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
        "resid_pdrop": "dropout",
    }
    required = ("vocab_size", "n_embd", "n_layer", "n_head")
    defaults: ClassVar = {"resid_pdrop": 0.1}
    names: ClassVar = {
        "embedding": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "output": "lm_head",
        "blocks.{}.attention_norm": "h.{}.ln_1",
        "blocks.{}.attention.projections": "h.{}.attn.c_attn",
        "blocks.{}.attention.output": "h.{}.attn.c_proj",
        "blocks.{}.feed_forward_norm": "h.{}.ln_2",
        "blocks.{}.feed_forward.inner": "h.{}.mlp.c_fc",
        "blocks.{}.feed_forward.outer": "h.{}.mlp.c_proj",
    }
    prefix = "transformer."
    heads = ("output",)
    transposed = ("attention.projections", "attention.output", "feed_forward.inner", "feed_forward.outer")
    ignored = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # masks that old versions kept among the weights

    def read_config(self, config: dict[str, Any]) -> Any:
        allowed = {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "activation_function": tuple(self.activations),
        }
        check_values(self.name, config, allowed)
        activation = self.activations[config.get("activation_function", "gelu_new")]
        return self.config.from_dict(self.read_fields(config) | {"feed_forward": activation})

    def explain_unsupported(self, config: Any) -> str:
        wrong = {
            f"norm={config.norm!r}": config.norm != "layer",
            f"position={config.position!r}": config.position != "learned",
            f"feed_forward={config.feed_forward!r}": config.feed_forward not in self.activations.values(),
            f"bias={config.bias}": not config.bias,
            f"attention_bias={config.attention_bias!r}": config.projection_biases != "qkvo",
            f"head_dim={config.head_dim}": config.head_size * config.heads != config.dim,
            "logits=False": not config.logits,
            f"kv_heads={config.kv_heads}": config.kv_heads not in (None, config.heads),
            f"window={config.window}": config.window is not None,
        }
        return list_unsupported(self.name, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **self.write_fields(config),
            "activation_function": self.write_activation(config.feed_forward),
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            **NO_SPECIAL_TOKENS,
        }
