"""`torch.nn.Transformer`, with the embedding that it leaves to its user.

torch's module reads and writes vectors. What surrounds it here, in state and configuration, has our own names: the
tensor `embedding.weight` (and `target_embedding.weight`, `output.weight` where they are not one), the field
`vocab_size` and how positions are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from regard.errors import CheckpointError
from regard.models.config import Config
from regard.models.converters.rules import Converter, State, agree, lacks, need

KIND = "torch.nn.Transformer"
INSIDE = {
    "self_attn.in_proj_": "attention.projections.",
    "self_attn.out_proj.": "attention.output.",
    "multihead_attn.in_proj_": "cross.projections.",
    "multihead_attn.out_proj.": "cross.output.",
    "linear1.": "feed_forward.inner.",
    "linear2.": "feed_forward.outer.",
}
# The norm after each part; the encoder has no part in the middle.
NORMS = {
    "encoder": {"norm1.": "attention_norm.", "norm2.": "feed_forward_norm."},
    "decoder": {"norm1.": "attention_norm.", "norm2.": "cross_norm.", "norm3.": "feed_forward_norm."},
}
FIELDS = {
    "d_model": "dim",
    "nhead": "heads",
    "num_encoder_layers": "layers",
    "dim_feedforward": "hidden_dim",
    "dropout": "dropout",
    "activation": "activation",
    "layer_norm_eps": "norm_eps",
}
# What torch's module does not have: fields that keep our names.
OUTER = ("vocab_size", "context_length", "position", "shared", "start")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}
LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
BLOCK = re.compile(r"(encoder|decoder)\.(\d+)\.(.+)")


class TorchTransformer(Converter):
    """The arguments and the state of torch's module."""

    model_types = (KIND,)

    def __init__(self, config: type[Config]) -> None:
        self.config = config

    def read_config(self, config: dict[str, Any]) -> Config:
        layers = need(KIND, config, "num_encoder_layers")
        allowed = {"num_decoder_layers": (layers,), "bias": (True,), "activation": tuple(ACTIVATIONS)}
        agree(KIND, config, allowed)
        fields = {ours: config[theirs] for theirs, ours in FIELDS.items() if theirs in config}
        fields |= {name: config[name] for name in OUTER if name in config}
        fields |= {"order": "pre" if config.get("norm_first", False) else "post", "final_norm": True}
        return self.config.from_dict(fields)

    def refuses(self, config: Any) -> str:
        ends = config.order == "pre" if config.final_norm is None else config.final_norm
        wrong = {
            "attention_bias=False": not config.attention_bias,
            f"activation={config.activation!r}": config.activation not in ACTIVATIONS,
            "final_norm=False": not ends,
        }
        return lacks(KIND, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        written = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
        written |= {"num_decoder_layers": config.layers, "norm_first": config.order == "pre", "bias": True}
        return {"model_type": KIND} | written | {name: getattr(config, name) for name in OUTER}

    def read_state(self, state: State, config: Any) -> State:
        made: State = {}
        for name, tensor in state.items():
            if found := LAYER.fullmatch(name):
                part = _renamed(found[3], INSIDE | NORMS[found[1]])
                made[f"{found[1]}.{found[2]}.{part}"] = tensor
            else:
                made[_renamed(name, {"encoder.norm.": "encoder_norm.", "decoder.norm.": "decoder_norm."})] = tensor
        return made

    def write_state(self, state: State, config: Any) -> State:
        made: State = {}
        for name, tensor in state.items():
            if found := BLOCK.fullmatch(name):
                names = {ours: theirs for theirs, ours in (INSIDE | NORMS[found[1]]).items()}
                made[f"{found[1]}.layers.{found[2]}.{_renamed(found[3], names)}"] = tensor
            else:
                made[_renamed(name, {"encoder_norm.": "encoder.norm.", "decoder_norm.": "decoder.norm."})] = tensor
        return made


def described(module: nn.Transformer) -> dict[str, Any]:
    """The arguments a module was built with, read off its parts; refuses parts that somebody put in their place."""
    layers: list[Any] = [*module.encoder.layers, *module.decoder.layers]
    first = layers[0]
    because = ""
    if not all(isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) for layer in layers):
        because = "its layers are not torch's own"
    elif len({(layer.norm_first, layer.activation) for layer in layers}) > 1:
        because = "its layers differ from one another"
    elif first.activation not in ACTIVATIONS.values():
        because = f"its activation is {first.activation}, and known are {', '.join(ACTIVATIONS)}"
    elif module.encoder.norm is None or module.decoder.norm is None:
        because = "it does not end with a norm on both sides"
    if because:
        raise CheckpointError(
            "This Transformer of torch's has no counterpart here.",
            asked="Transformer.from_torch(module, ...)",
            because=because,
            instead="nn.Transformer as torch builds it, with ReLU or GELU",
        )
    return {
        "model_type": KIND,
        "d_model": module.d_model,
        "nhead": module.nhead,
        "num_encoder_layers": len(module.encoder.layers),
        "num_decoder_layers": len(module.decoder.layers),
        "dim_feedforward": first.linear1.out_features,
        "dropout": first.dropout.p,
        "activation": next(name for name, bend in ACTIVATIONS.items() if bend is first.activation),
        "layer_norm_eps": first.norm1.eps,
        "norm_first": first.norm_first,
        "bias": first.linear1.bias is not None,
    }


def _renamed(name: str, names: dict[str, str]) -> str:
    """The name with its beginning replaced, where it is one of these; others stay, and are refused by name later."""
    for old, new in names.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
