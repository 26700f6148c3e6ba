"""DistilBERT as Hugging Face has it: BERT with half the layers, without segments, pooler and next-sentence head.

Source: Sanh et al., DistilBERT (2019).
"""

from __future__ import annotations

from typing import Any, ClassVar

from regard.models.config import Config
from regard.models.converters.base import Converter, check_values, list_unsupported
from regard.models.converters.bert import EMBEDDINGS, HuggingFaceBert

# Of all their norms; no configuration says it.
NORM_EPS = 1e-12


class DistilBert(HuggingFaceBert):
    """`DistilBertModel` and `DistilBertForMaskedLM`.

    Where we differ: our dropout is on what the attention adds as well. Positions that are sinusoids are read as what
    they are in the file, a table, and are learned on.
    """

    name = "DistilBERT"
    model_types = ("distilbert",)
    fields: ClassVar = {
        "dim": "dim",
        "n_layers": "layers",
        "n_heads": "heads",
        "hidden_dim": "hidden_dim",
        "dropout": "dropout",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context_length",
    }
    required = (*fields, "activation")
    activation_key = "activation"
    names: ClassVar = {
        **EMBEDDINGS,
        "blocks.{}.attention.projections": tuple(f"transformer.layer.{{}}.attention.{part}_lin" for part in "qkv"),
        "blocks.{}.attention.output": "transformer.layer.{}.attention.out_lin",
        "blocks.{}.attention_norm": "transformer.layer.{}.sa_layer_norm",
        "blocks.{}.feed_forward.inner": "transformer.layer.{}.ffn.lin1",
        "blocks.{}.feed_forward.outer": "transformer.layer.{}.ffn.lin2",
        "blocks.{}.feed_forward_norm": "transformer.layer.{}.output_layer_norm",
        "masked_tokens.inner": "vocab_transform",
        "masked_tokens.norm": "vocab_layer_norm",
        "masked_tokens.output": "vocab_projector",
    }
    output_bias = None
    prefix = "distilbert."
    matches = Converter.matches

    def read_config(self, config: dict[str, Any]) -> Config:
        check_values(self.name, config, {"tie_word_embeddings": (True,)})
        fields = super().read_config(config).to_dict()
        absent = {"segments": 0, "pooler": False, "next_sentence": False}
        return self.config.from_dict({**fields, "norm_eps": NORM_EPS, **absent})

    def explain_unsupported(self, config: Any) -> str:
        wrong = {
            f"segments={config.segments}": config.segments != 0,
            "pooler=True": config.pooler,
            "next_sentence=True": config.next_sentence,
            f"padding_token={config.padding_token}": config.padding_token is not None,
            f"norm_eps={config.norm_eps}": config.norm_eps != NORM_EPS,
        }
        return list_unsupported(self.name, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        return {
            "model_type": "distilbert",
            "architectures": ["DistilBertForMaskedLM" if config.masked_tokens else "DistilBertModel"],
            **self.write_fields(config),
            "hidden_dim": config.hidden_dim or 4 * config.dim,
            "activation": self.write_activation(config.activation),
            "attention_dropout": config.dropout,
            "sinusoidal_pos_embds": False,
        }
