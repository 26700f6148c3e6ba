"""GPT-2 as Hugging Face has it.

Its linear layers are stored as (input, output), transposed to everybody else's, and queries, keys and values lie in one
matrix, as ours do.
"""

from __future__ import annotations

import re
from typing import Any

from regard.models.converters.rules import Converter, State, agree, lacks, need

# Outside the layers, and inside them: their name and ours.
OUTSIDE = {"wte": "embedding", "wpe": "positions", "ln_f": "norm"}
INSIDE = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.projections",
    "attn.c_proj": "attention.output",
    "ln_2": "feed_forward_norm",
    "mlp.c_fc": "feed_forward.inner",
    "mlp.c_proj": "feed_forward.outer",
}
TRANSPOSED = ("c_attn", "c_proj", "c_fc")
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Masks that old versions kept among the weights.
NO_WEIGHTS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


class GPT2(Converter):
    """`GPT2LMHeadModel`, or `GPT2Model` alone, whose output matrix is the embedding.

    Where we differ: one probability of dropout for all places, that of the residuals.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    model_types = ("gpt2",)

    def read_config(self, config: dict[str, Any]) -> Any:
        allowed = {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "activation_function": tuple(ACTIVATIONS),
        }
        agree("GPT-2", config, allowed)
        return self.config.from_dict(
            {
                "vocab_size": need("GPT-2", config, "vocab_size"),
                "context_length": config.get("n_positions", 1024),
                "dim": need("GPT-2", config, "n_embd"),
                "layers": need("GPT-2", config, "n_layer"),
                "heads": need("GPT-2", config, "n_head"),
                "hidden_dim": config.get("n_inner"),
                "norm": "layer",
                "norm_eps": config.get("layer_norm_epsilon", 1e-5),
                "position": "learned",
                "feed_forward": ACTIVATIONS[config.get("activation_function", "gelu_new")],
                "bias": True,
                "tie_embeddings": config.get("tie_word_embeddings", True),
                "dropout": config.get("resid_pdrop", 0.1),
            }
        )

    def refuses(self, config: Any) -> str:
        activations = set(ACTIVATIONS.values())
        wrong = {
            f"norm={config.norm!r}": config.norm != "layer",
            f"position={config.position!r}": config.position != "learned",
            f"feed_forward={config.feed_forward!r}": config.feed_forward not in activations,
            f"bias={config.bias}": not config.bias,
            f"attention_bias={config.attention_bias!r}": config.projection_biases != "qkvo",
            f"head_dim={config.head_dim}": config.head_size * config.heads != config.dim,
            "logits=False": not config.logits,
            f"kv_heads={config.kv_heads}": config.kv_heads not in (None, config.heads),
            f"window={config.window}": config.window is not None,
        }
        return lacks("GPT-2", wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.feed_forward)
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": config.vocab_size,
            "n_positions": config.context_length,
            "n_embd": config.dim,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.hidden_dim,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": activation,
            "tie_word_embeddings": config.tie_embeddings,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            # theirs has ids of its own vocabulary as defaults, which need not exist in another
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def read_state(self, state: State, config: Any) -> State:
        ours: State = {}
        for name, tensor in state.items():
            short = name.removeprefix("transformer.")
            if NO_WEIGHTS.fullmatch(short):
                continue
            stem, _, kind = short.rpartition(".")
            transposed = kind == "weight" and stem.endswith(TRANSPOSED) and tensor.ndim == 2
            ours[_renamed(stem, kind) or name] = tensor.T if transposed else tensor
        return ours

    def write_state(self, state: State, config: Any) -> State:
        outside = {ours: theirs for theirs, ours in OUTSIDE.items()}
        inside = {ours: theirs for theirs, ours in INSIDE.items()}
        theirs: State = {}
        for name, tensor in state.items():
            stem, _, kind = name.rpartition(".")
            if stem == "output":
                theirs["lm_head.weight"] = tensor
                continue
            if stem in outside:
                theirs[f"transformer.{outside[stem]}.{kind}"] = tensor
                continue
            _, layer, part = stem.split(".", 2)
            transposed = kind == "weight" and inside[part].endswith(TRANSPOSED)
            theirs[f"transformer.h.{layer}.{inside[part]}.{kind}"] = tensor.T if transposed else tensor
        return theirs


def _renamed(stem: str, kind: str) -> str | None:
    """Our name of a tensor, None where we have none."""
    if stem == "lm_head":
        return f"output.{kind}"
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    found = re.fullmatch(r"h\.(\d+)\.(.+)", stem)
    if found is None or found[2] not in INSIDE:
        return None
    return f"blocks.{found[1]}.{INSIDE[found[2]]}.{kind}"
