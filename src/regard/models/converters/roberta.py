"""RoBERTa as Hugging Face has it: BERT without the second head, whose positions count the tokens that are not padding.

Rows 0 to `pad_token_id` of its table of positions belong to no token of a text: the first has row `pad_token_id + 1`,
and every padding token has row `pad_token_id`, wherever it stands. XLM-RoBERTa and CamemBERT are the same model.

Source: Liu et al., RoBERTa (2019); the positions are fairseq's.
"""

from __future__ import annotations

from typing import Any

from regard.models.config import Config
from regard.models.converters.bert import HuggingFaceBert
from regard.models.converters.rules import State, agree, lacks, need, renamed

# Beginnings of names, theirs first, and those of BERT.
NAMES = {
    "roberta.": "bert.",
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.decoder.": "cls.predictions.decoder.",
    "lm_head.bias": "cls.predictions.bias",
}


class Roberta(HuggingFaceBert):
    """`RobertaModel` and `RobertaForMaskedLM`.

    Their masked-token head has an exact GELU, whatever the activation of the blocks is.
    """

    name = "RoBERTa"
    model_types = ("roberta", "xlm-roberta", "camembert")

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") in self.model_types

    def add_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        return super().add_heads(config, renamed(state, NAMES))

    def read_config(self, config: dict[str, Any]) -> Config:
        padding = config.get("pad_token_id", 1)
        if (config.get("_heads") or [False])[0]:
            agree("RoBERTa with a masked-token head", config, {"hidden_act": ("gelu",)})
        places = need(self.name, config, "max_position_embeddings") - padding - 1
        theirs = config | {"max_position_embeddings": places}
        theirs.setdefault("type_vocab_size", 2)
        return self.config.from_dict({**super().read_config(theirs).to_dict(), "padding_token": padding})

    def refuses(self, config: Any) -> str:
        wrong = {
            "segments=0": not config.segments,
            "padding_token=None": config.padding_token is None,
            "next_sentence=True": config.next_sentence,
            f"activation={config.activation!r}": config.masked_tokens and config.activation != "gelu",
        }
        return lacks(self.name, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        return super().write_config(config) | {
            "model_type": "roberta",
            "architectures": ["RobertaForMaskedLM" if config.masked_tokens else "RobertaModel"],
            "max_position_embeddings": config.context_length + config.padding_token + 1,
            "pad_token_id": config.padding_token,
            # theirs has ids of its own vocabulary as defaults, which need not exist in another
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def read_state(self, state: State, config: Any) -> State:
        return super().read_state(renamed(state, NAMES), config)

    def write_state(self, state: State, config: Any) -> State:
        return renamed(super().write_state(state, config), {ours: theirs for theirs, ours in NAMES.items()})
