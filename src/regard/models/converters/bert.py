"""Hugging Face's BERT: `BertModel`, `BertForMaskedLM`, `BertForPreTraining`."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch

from regard.models.config import Config
from regard.models.converters.base import Converter, State, check_values, list_unsupported

# The embeddings are called alike in BERT, RoBERTa and DistilBERT.
EMBEDDINGS = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
BLOCKS = {
    "blocks.{}.attention.projections": tuple(
        f"encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")
    ),
    "blocks.{}.attention.output": "encoder.layer.{}.attention.output.dense",
    "blocks.{}.attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "blocks.{}.feed_forward.inner": "encoder.layer.{}.intermediate.dense",
    "blocks.{}.feed_forward.outer": "encoder.layer.{}.output.dense",
    "blocks.{}.feed_forward_norm": "encoder.layer.{}.output.LayerNorm",
    "pooler": "pooler.dense",
}


class HuggingFaceBert(Converter):
    """The layout of `transformers`' BERT, with or without its heads."""

    name = "BERT"
    model_types: tuple[str, ...] = ("bert",)
    fields: ClassVar = {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context_length",
        "type_vocab_size": "segments",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "hidden_dim",
        "layer_norm_eps": "norm_eps",
        "hidden_dropout_prob": "dropout",
    }
    # Their key of the activation.
    activation_key = "hidden_act"
    names: ClassVar = {
        **EMBEDDINGS,
        **BLOCKS,
        "masked_tokens.inner": "cls.predictions.transform.dense",
        "masked_tokens.norm": "cls.predictions.transform.LayerNorm",
        "masked_tokens.output": "cls.predictions.decoder",
        "next_sentence": "cls.seq_relationship",
    }
    # The bias of the masked-token head has a second name.
    output_bias: str | None = "cls.predictions.bias"
    prefix = "bert."
    heads = ("masked_tokens", "next_sentence")
    ignored = re.compile(r"embeddings\.position_ids")  # numbers that are their own indices

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type", "bert") == "bert" and "type_vocab_size" in config and "hidden_size" in config

    def infer_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        """Configurations do not always say which heads there are; the tensors do."""
        found = {self._find_ours(self.normalize_name(name.removeprefix(self.prefix)))[0] for name in state}
        return config | {
            "_heads": [
                any(name.startswith(head) for name in found) or (head == "masked_tokens." and self.output_bias in state)
                for head in ("masked_tokens.", "next_sentence.", "pooler.")
            ]
        }

    def read_config(self, config: dict[str, Any]) -> Config:
        only = {"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)}
        check_values(self.name, config, only | {self.activation_key: tuple(self.activations)})
        names = " ".join(config.get("architectures") or [])
        masked, following, pooler = config.get("_heads") or (
            "MaskedLM" in names or "PreTraining" in names,
            "PreTraining" in names or "NextSentence" in names,
            "MaskedLM" not in names,
        )
        fields = {"masked_tokens": masked, "next_sentence": following, "pooler": pooler}
        fields["activation"] = self.activations[config.get(self.activation_key, "gelu")]
        return self.config.from_dict(self.read_fields(config) | fields)

    def explain_unsupported(self, config: Any) -> str:
        wrong = {
            "segments=0": not config.segments,
            f"padding_token={config.padding_token}": config.padding_token is not None,
        }
        return list_unsupported(self.name, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        architecture = "BertModel"
        if config.masked_tokens:
            architecture = "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"
        elif config.next_sentence:
            architecture = "BertForNextSentencePrediction"
        return {
            "model_type": "bert",
            "architectures": [architecture],
            **self.write_fields(config),
            "intermediate_size": config.hidden_dim or 4 * config.dim,
            "attention_probs_dropout_prob": config.dropout,
            "hidden_act": self.write_activation(config.activation),
        }

    def normalize_name(self, name: str) -> str:
        """The first checkpoints have TensorFlow's names of the parameters of a norm."""
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")

    def read_state(self, state: State, config: Any) -> State:
        ours = super().read_state(state, config)
        if self.output_bias is not None and (bias := ours.pop(self.output_bias, None)) is not None:
            # One tensor by two names; where they differ the second keeps its name, by which it is then refused.
            twice = ours.pop("masked_tokens.output.bias", bias)
            if not torch.equal(twice, bias):
                ours[f"{self.names['masked_tokens.output']}.bias"] = twice
            ours["masked_tokens.output.bias"] = bias
        return ours

    def write_state(self, state: State, config: Any) -> State:
        theirs = super().write_state(state, config)
        if self.output_bias is not None and "masked_tokens.output.bias" in state:
            theirs[self.output_bias] = state["masked_tokens.output.bias"]
        return theirs

    def has_prefix(self, config: Any) -> bool:
        return config.masked_tokens or config.next_sentence
