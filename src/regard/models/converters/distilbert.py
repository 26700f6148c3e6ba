"""DistilBERT as Hugging Face has it: BERT with half the layers, without segments, pooler and next-sentence head.

Source: Sanh et al., DistilBERT (2019).
"""

from __future__ import annotations

import re
from typing import Any

from regard.models.config import Config
from regard.models.converters.bert import HuggingFaceBert
from regard.models.converters.rules import State, agree, lacks, need, renamed

# Beginnings of names, theirs first, and those of BERT.
NAMES = {
    "distilbert.": "bert.",
    "vocab_transform.": "cls.predictions.transform.dense.",
    "vocab_layer_norm.": "cls.predictions.transform.LayerNorm.",
    "vocab_projector.": "cls.predictions.decoder.",
}
# Inside a layer.
INSIDE = {
    "attention.q_lin.": "attention.self.query.",
    "attention.k_lin.": "attention.self.key.",
    "attention.v_lin.": "attention.self.value.",
    "attention.out_lin.": "attention.output.dense.",
    "sa_layer_norm.": "attention.output.LayerNorm.",
    "ffn.lin1.": "intermediate.dense.",
    "ffn.lin2.": "output.dense.",
    "output_layer_norm.": "output.LayerNorm.",
}
LAYER = re.compile(r"(bert\.|)(?:transformer|encoder)\.layer\.(\d+)\.(.+)")
# Of all their norms; no configuration says it.
NORM_EPS = 1e-12
FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "activation": "hidden_act",
}


class DistilBert(HuggingFaceBert):
    """`DistilBertModel` and `DistilBertForMaskedLM`.

    Where we differ: our dropout is on what the attention adds as well. Positions that are sinusoids are read as what
    they are in the file, a table, and are learned on.
    """

    name = "DistilBERT"
    model_types = ("distilbert",)

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "distilbert"

    def add_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        return super().add_heads(config, renamed(state, NAMES))

    def read_config(self, config: dict[str, Any]) -> Config:
        agree(self.name, config, {"tie_word_embeddings": (True,)})
        theirs: dict[str, Any] = {berts: need(self.name, config, own) for own, berts in FIELDS.items()}
        theirs |= {name: need(self.name, config, name) for name in ("vocab_size", "max_position_embeddings")}
        theirs |= {name: config[name] for name in ("_heads", "architectures") if name in config}
        fields = super().read_config(theirs | {"layer_norm_eps": NORM_EPS}).to_dict()
        return self.config.from_dict({**fields, "segments": 0, "pooler": False, "next_sentence": False})

    def refuses(self, config: Any) -> str:
        wrong = {
            f"segments={config.segments}": config.segments != 0,
            "pooler=True": config.pooler,
            "next_sentence=True": config.next_sentence,
            f"padding_token={config.padding_token}": config.padding_token is not None,
            f"norm_eps={config.norm_eps}": config.norm_eps != NORM_EPS,
        }
        return lacks(self.name, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        written = super().write_config(config)
        return {
            "model_type": "distilbert",
            "architectures": ["DistilBertForMaskedLM" if config.masked_tokens else "DistilBertModel"],
            **{own: written[berts] for own, berts in FIELDS.items()},
            **{name: written[name] for name in ("vocab_size", "max_position_embeddings")},
            "attention_dropout": config.dropout,
            "sinusoidal_pos_embds": False,
        }

    def read_state(self, state: State, config: Any) -> State:
        made: State = {}
        for name, tensor in renamed(state, NAMES).items():
            found = LAYER.fullmatch(name)
            inside = found and next((berts for own, berts in INSIDE.items() if found[3].startswith(own)), None)
            if found and inside:
                name = f"{found[1]}encoder.layer.{found[2]}.{inside}{found[3].rpartition('.')[2]}"
            made[name] = tensor
        return super().read_state(made, config)

    def write_state(self, state: State, config: Any) -> State:
        made: State = {}
        for name, tensor in super().write_state(state, config).items():
            found = LAYER.fullmatch(name)
            if name == "cls.predictions.bias":
                continue  # theirs has it once, by the name of the matrix that it belongs to
            if found:
                own = next(own for own, berts in INSIDE.items() if found[3].startswith(berts))
                name = f"{found[1]}transformer.layer.{found[2]}.{own}{found[3].rpartition('.')[2]}"
            made[name] = tensor
        return renamed(made, {berts: own for own, berts in NAMES.items()})
