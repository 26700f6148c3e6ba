"""RoBERTa as Hugging Face has it: BERT without the second head, whose positions count the tokens that are not padding.

Rows 0 to `pad_token_id` of its table of positions belong to no token of a text: the first has row `pad_token_id + 1`,
and every padding token has row `pad_token_id`, wherever it stands. XLM-RoBERTa and CamemBERT are the same model.

Source: Liu et al., RoBERTa (2019); the positions are fairseq's.
"""

from __future__ import annotations

from typing import Any, ClassVar

from regard.models.config import Config
from regard.models.converters.base import NO_SPECIAL_TOKENS, Converter, check_values, list_unsupported, require
from regard.models.converters.bert import BLOCKS, EMBEDDINGS, HuggingFaceBert


class Roberta(HuggingFaceBert):
    """`RobertaModel` and `RobertaForMaskedLM`.

    Their masked-token head has an exact GELU, whatever the activation of the blocks is.
    """

    name = "RoBERTa"
    model_types = ("roberta", "xlm-roberta", "camembert")
    defaults: ClassVar = {"type_vocab_size": 2}
    names: ClassVar = {
        **EMBEDDINGS,
        **BLOCKS,
        "masked_tokens.inner": "lm_head.dense",
        "masked_tokens.norm": "lm_head.layer_norm",
        "masked_tokens.output": "lm_head.decoder",
    }
    output_bias = "lm_head.bias"
    prefix = "roberta."
    matches = Converter.matches

    def read_config(self, config: dict[str, Any]) -> Config:
        padding = config.get("pad_token_id", 1)
        if (config.get("_heads") or [False])[0]:
            check_values("RoBERTa with a masked-token head", config, {"hidden_act": ("gelu",)})
        positions = require(self.name, config, "max_position_embeddings") - padding - 1
        fields = super().read_config(config | {"max_position_embeddings": positions}).to_dict()
        return self.config.from_dict({**fields, "padding_token": padding})

    def explain_unsupported(self, config: Any) -> str:
        wrong = {
            "segments=0": not config.segments,
            "padding_token=None": config.padding_token is None,
            "next_sentence=True": config.next_sentence,
            f"activation={config.activation!r}": config.masked_tokens and config.activation != "gelu",
        }
        return list_unsupported(self.name, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        return super().write_config(config) | {
            "model_type": "roberta",
            "architectures": ["RobertaForMaskedLM" if config.masked_tokens else "RobertaModel"],
            "max_position_embeddings": config.context_length + config.padding_token + 1,
            "pad_token_id": config.padding_token,
            **NO_SPECIAL_TOKENS,
        }
