"""Hugging Face's BERT: `BertModel`, `BertForMaskedLM`, `BertForPreTraining`."""

from __future__ import annotations

import re
from typing import Any

import torch

from regard.models.config import Config
from regard.models.converters.rules import ACTIVATIONS, Converter, State, agree, lacks

# Parts of a name, theirs first; both ways are the same table.
NAMES = (
    ("embeddings.word_embeddings.", "embedding."),
    ("embeddings.position_embeddings.", "positions."),
    ("embeddings.token_type_embeddings.", "segments."),
    ("embeddings.LayerNorm.", "norm."),
    ("encoder.layer.", "blocks."),
    ("attention.output.dense.", "attention.output."),
    ("attention.output.LayerNorm.", "attention_norm."),
    ("intermediate.dense.", "feed_forward.inner."),
    ("pooler.dense.", "pooler."),
    ("cls.predictions.transform.dense.", "masked_tokens.inner."),
    ("cls.predictions.transform.LayerNorm.", "masked_tokens.norm."),
    ("cls.predictions.decoder.", "masked_tokens.output."),
    ("cls.seq_relationship.", "next_sentence."),
)
# These end like others begin, so they are told apart by what stands before them.
BLOCK_NAMES = ((".output.dense.", ".feed_forward.outer."), (".output.LayerNorm.", ".feed_forward_norm."))
FIELDS = {
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
PARTS = ("query", "key", "value")


class HuggingFaceBert(Converter):
    """The layout of `transformers`' BERT, with or without its heads."""

    name = "BERT"
    model_types: tuple[str, ...] = ("bert",)

    def __init__(self, config: type[Config]) -> None:
        self.config = config

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type", "bert") == "bert" and "type_vocab_size" in config and "hidden_size" in config

    def add_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        """Configurations do not always say which heads there are; the tensors do."""
        return config | {
            "_heads": [
                any(name.startswith(part) or f".{part}" in name for name in state)
                for part in ("cls.predictions.", "cls.seq_relationship.", "pooler.")
            ]
        }

    def read_config(self, config: dict[str, Any]) -> Config:
        only = {"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)}
        agree(self.name, config, only | {"hidden_act": tuple(ACTIVATIONS)})
        fields = {ours: config[theirs] for theirs, ours in FIELDS.items() if theirs in config}
        names = " ".join(config.get("architectures") or [])
        masked, following, pooler = config.get("_heads") or (
            "MaskedLM" in names or "PreTraining" in names,
            "PreTraining" in names or "NextSentence" in names,
            "MaskedLM" not in names,
        )
        fields |= {"masked_tokens": masked, "next_sentence": following, "pooler": pooler}
        fields["activation"] = ACTIVATIONS[config.get("hidden_act", "gelu")]
        return self.config.from_dict(fields)

    def refuses(self, config: Any) -> str:
        wrong = {
            "segments=0": not config.segments,
            f"padding_token={config.padding_token}": config.padding_token is not None,
        }
        return lacks(self.name, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        written = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
        written["intermediate_size"] = config.hidden_dim or 4 * config.dim
        written["attention_probs_dropout_prob"] = config.dropout
        written["hidden_act"] = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[config.activation]
        architecture = "BertModel"
        if config.masked_tokens:
            architecture = "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"
        elif config.next_sentence:
            architecture = "BertForNextSentencePrediction"
        return {"model_type": "bert", "architectures": [architecture], **written}

    def read_state(self, state: State, config: Any) -> State:
        made: State = {}
        for name, tensor in state.items():
            name = name.removeprefix("bert.")
            name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.scale", "LayerNorm.bias")
            if name == "embeddings.position_ids":
                continue  # numbers that are their own indices
            made[_ours(name)] = tensor
        for block in range(config.layers):
            for kind in ("weight", "bias"):
                parts = [f"blocks.{block}.attention.self.{part}.{kind}" for part in PARTS]
                if all(part in made for part in parts):
                    made[f"blocks.{block}.attention.projections.{kind}"] = torch.cat([made.pop(part) for part in parts])
        if (bias := made.pop("cls.predictions.bias", None)) is not None:
            # One tensor by two names; where they differ the second keeps its name, by which it is then refused.
            twice = made.pop("masked_tokens.output.bias", bias)
            if not torch.equal(twice, bias):
                made["cls.predictions.decoder.bias"] = twice
            made["masked_tokens.output.bias"] = bias
        return made

    def write_state(self, state: State, config: Any) -> State:
        made: State = {}
        prefix = "bert." if config.masked_tokens or config.next_sentence else ""
        for name, tensor in state.items():
            found = re.fullmatch(r"blocks\.(\d+)\.attention\.projections\.(weight|bias)", name)
            if found:
                for part, piece in zip(PARTS, tensor.chunk(3), strict=True):
                    made[f"{prefix}encoder.layer.{found[1]}.attention.self.{part}.{found[2]}"] = piece.contiguous()
            elif name == "masked_tokens.output.bias":
                made["cls.predictions.bias"] = made["cls.predictions.decoder.bias"] = tensor
            else:
                theirs = _theirs(name)
                made[theirs if theirs.startswith("cls.") else prefix + theirs] = tensor
        return made


def _ours(name: str) -> str:
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    if name.startswith("blocks.") and "attention.output" not in name:
        for theirs, ours in BLOCK_NAMES:
            name = name.replace(theirs, ours)
    return name


def _theirs(name: str) -> str:
    if name.startswith("blocks."):
        for theirs, ours in BLOCK_NAMES:
            name = name.replace(ours, theirs)
        name = name.replace("attention.output.", "attention.output.dense.")
        name = name.replace("attention_norm.", "attention.output.LayerNorm.")
        name = name.replace("feed_forward.inner.", "intermediate.dense.")
        return name.replace("blocks.", "encoder.layer.", 1)
    for theirs, ours in NAMES:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name
