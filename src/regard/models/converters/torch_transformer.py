"""`torch.nn.Transformer`, with the embedding that it leaves to its user.

torch's module reads and writes vectors. What surrounds it here, in state and configuration, has our own names: the
tensor `embedding.weight` (and `target_embedding.weight`, `output.weight` where they are not one), the field
`vocab_size` and how positions are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from regard.errors import CheckpointError
from regard.models.config import Config
from regard.models.converters.base import Converter, check_values, list_unsupported

KIND = "torch.nn.Transformer"
# What torch's module does not have: fields that keep our names.
OUTER = ("vocab_size", "context_length", "position", "shared", "start")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}


def _name_blocks(side: str, norms: tuple[str, ...]) -> dict[str, str]:
    """The names of a block; the norm after each part has the number of the part."""
    ours, theirs = f"{side}.{{}}", f"{side}.layers.{{}}"
    names = {
        f"{ours}.feed_forward.inner": f"{theirs}.linear1",
        f"{ours}.feed_forward.outer": f"{theirs}.linear2",
        f"{side}_norm": f"{side}.norm",
    }
    attentions = {"attention": "self_attn"} | ({"cross": "multihead_attn"} if side == "decoder" else {})
    for part, module in attentions.items():
        names[f"{ours}.{part}.output"] = f"{theirs}.{module}.out_proj"
        for kind in ("weight", "bias"):
            names[f"{ours}.{part}.projections.{kind}"] = f"{theirs}.{module}.in_proj_{kind}"
    return names | {f"{ours}.{norm}": f"{theirs}.norm{number}" for number, norm in enumerate(norms, 1)}


class TorchTransformer(Converter):
    """The arguments and the state of torch's module."""

    name = KIND
    model_types = (KIND,)
    fields: ClassVar = {
        "d_model": "dim",
        "nhead": "heads",
        "num_encoder_layers": "layers",
        "dim_feedforward": "hidden_dim",
        "dropout": "dropout",
        "activation": "activation",
        "layer_norm_eps": "norm_eps",
        **{name: name for name in OUTER},
    }
    required = ("num_encoder_layers",)
    names: ClassVar = {
        "embedding": "embedding",
        "target_embedding": "target_embedding",
        "output": "output",
        "source_positions": "source_positions",
        "target_positions": "target_positions",
        **_name_blocks("encoder", ("attention_norm", "feed_forward_norm")),
        **_name_blocks("decoder", ("attention_norm", "cross_norm", "feed_forward_norm")),
    }

    def read_config(self, config: dict[str, Any]) -> Config:
        fields = self.read_fields(config)
        allowed = {"num_decoder_layers": (fields["layers"],), "bias": (True,), "activation": tuple(ACTIVATIONS)}
        check_values(KIND, config, allowed)
        order = "pre" if config.get("norm_first", False) else "post"
        return self.config.from_dict(fields | {"order": order, "final_norm": True})

    def explain_unsupported(self, config: Any) -> str:
        ends = config.order == "pre" if config.final_norm is None else config.final_norm
        wrong = {
            "attention_bias=False": not config.attention_bias,
            f"activation={config.activation!r}": config.activation not in ACTIVATIONS,
            "final_norm=False": not ends,
        }
        return list_unsupported(KIND, wrong)

    def write_config(self, config: Any) -> dict[str, Any]:
        more = {"num_decoder_layers": config.layers, "norm_first": config.order == "pre", "bias": True}
        return {"model_type": KIND} | self.write_fields(config) | more


def read_arguments(module: nn.Transformer) -> dict[str, Any]:
    """The arguments a module was built with, read off its parts; refuses parts that are not torch's own."""
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
        "activation": next(name for name, function in ACTIVATIONS.items() if function is first.activation),
        "layer_norm_eps": first.norm1.eps,
        "norm_first": first.norm_first,
        "bias": first.linear1.bias is not None,
    }
