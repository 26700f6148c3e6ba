"""ViT at Hugging Face and in timm."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import torch

from regard.errors import ConfigError
from regard.models.config import Config
from regard.models.converters.rules import ACTIVATIONS, Converter, State, agree

PARTS = ("query", "key", "value")

# transformers


class HuggingFaceViT(Converter):
    """`ViTForImageClassification` and `ViTModel` of transformers; the pooler of the latter is not ours."""

    names = (
        ("layernorm_before.", "attention_norm."),
        ("layernorm_after.", "feed_forward_norm."),
        ("attention.output.dense.", "attention.output."),
        ("attention.o_proj.", "attention.output."),
        ("intermediate.dense.", "feed_forward.inner."),
        ("mlp.fc1.", "feed_forward.inner."),
        ("mlp.fc2.", "feed_forward.outer."),
        ("output.dense.", "feed_forward.outer."),
    )
    outside: ClassVar = {
        "embeddings.cls_token": "class_token",
        "embeddings.position_embeddings": "positions.weight",
        "embeddings.patch_embeddings.projection.weight": "patches.weight",
        "embeddings.patch_embeddings.projection.bias": "patches.bias",
        "layernorm.weight": "norm.weight",
        "layernorm.bias": "norm.bias",
        "classifier.weight": "head.weight",
        "classifier.bias": "head.bias",
    }
    model_types = ("vit",)
    fields: ClassVar = {
        "num_channels": "channels",
        "patch_size": "patch",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "hidden_dim",
        "layer_norm_eps": "norm_eps",
        "qkv_bias": "qkv_bias",
        "hidden_dropout_prob": "dropout",
    }

    def __init__(self, config: type[Config]) -> None:
        self.config = config

    def read_config(self, config: dict[str, Any]) -> Config:
        agree("ViT", config, {"hidden_act": tuple(ACTIVATIONS)})
        fields = {ours: config[theirs] for theirs, ours in self.fields.items() if theirs in config}
        size = config.get("image_size", 224)
        fields["image"] = (size, size) if isinstance(size, int) else tuple(size)
        fields["activation"] = ACTIVATIONS[config.get("hidden_act", "gelu")]
        fields.setdefault("norm_eps", 1e-12)  # their default, not ours
        classifies = "ViTForImageClassification" in (config.get("architectures") or ["ViTForImageClassification"])
        labels = config.get("num_labels", len(config.get("id2label") or ()) or 2)
        fields["classes"] = labels if classifies else 0
        return self.config.from_dict(fields)

    def write_config(self, config: Any) -> dict[str, Any]:
        written = {theirs: getattr(config, ours) for theirs, ours in self.fields.items()}
        written["intermediate_size"] = config.hidden_dim or 4 * config.dim
        written["attention_probs_dropout_prob"] = config.dropout
        written["image_size"] = config.image[0] if config.image[0] == config.image[1] else list(config.image)
        written["hidden_act"] = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[config.activation]
        architecture = "ViTForImageClassification" if config.classes else "ViTModel"
        labels = {str(index): f"LABEL_{index}" for index in range(config.classes)}
        if config.classes:
            written |= {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
        return {"model_type": "vit", "architectures": [architecture], **written}

    def refuses(self, config: Any) -> str:
        return "" if config.pool == "class" else "transformers' ViT reads the class token, not the mean of the patches"

    def read_state(self, state: State, config: Any) -> State:
        made: State = {}
        for name, tensor in state.items():
            bare = name.removeprefix("vit.")
            if bare.startswith("pooler."):
                continue  # a second, untrained reading of the class token
            made[self._ours(bare)] = tensor
        if made.get("positions.weight", torch.empty(0)).ndim == 3:
            made["positions.weight"] = made["positions.weight"][0]
        for block in range(config.layers):
            for kind in ("weight", "bias"):
                for pattern in ("blocks.{}.attention.attention.{}.{}", "blocks.{}.attention.{}_proj.{}"):
                    short = "attention.attention" in pattern
                    parts = [pattern.format(block, part if short else part[0], kind) for part in PARTS]
                    if all(part in made for part in parts):
                        joined = torch.cat([made.pop(part) for part in parts])
                        made[f"blocks.{block}.attention.projections.{kind}"] = joined
        return made

    def write_state(self, state: State, config: Any) -> State:
        made: State = {}
        prefix = "vit." if config.classes else ""
        outside = {ours: theirs for theirs, ours in self.outside.items()}
        for name, tensor in state.items():
            found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
            if found is None:
                theirs = outside[name]
                tensor = tensor[None] if name == "positions.weight" else tensor
                made[theirs if theirs.startswith("classifier.") else prefix + theirs] = tensor
            elif found[2] == "attention.projections":
                for part, piece in zip(PARTS, tensor.chunk(3), strict=True):
                    made[f"{prefix}{self._block(found[1])}.attention.{self._part(part)}.{found[3]}"] = (
                        piece.contiguous()
                    )
            else:
                inner = {
                    "attention_norm": "layernorm_before",
                    "feed_forward_norm": "layernorm_after",
                    "attention.output": self._part("output"),
                    "feed_forward.inner": self._part("inner"),
                    "feed_forward.outer": self._part("outer"),
                }[found[2]]
                inner = f"attention.{inner}" if found[2] == "attention.output" else inner
                made[f"{prefix}{self._block(found[1])}.{inner}.{found[3]}"] = tensor
        return made

    def _block(self, index: str) -> str:
        return f"encoder.layer.{index}"

    def _part(self, part: str) -> str:
        """Names of the released checkpoints, which every version of transformers reads."""
        return {"output": "output.dense", "inner": "intermediate.dense", "outer": "output.dense"}.get(
            part, f"attention.{part}"
        )

    def _ours(self, name: str) -> str:
        if name in self.outside:
            return self.outside[name]
        name = re.sub(r"^(encoder\.layer|layers)\.", "blocks.", name)
        for theirs, ours in self.names:
            if theirs == "output.dense." and "attention.output" in name:
                continue
            name = name.replace(theirs, ours)
        return name


# timm


class TimmViT(Converter):
    """`timm.models.vision_transformer.VisionTransformer` as `vit_*_patch*` builds it."""

    names = (
        ("norm1.", "attention_norm."),
        ("norm2.", "feed_forward_norm."),
        ("attn.qkv.", "attention.projections."),
        ("attn.proj.", "attention.output."),
        ("mlp.fc1.", "feed_forward.inner."),
        ("mlp.fc2.", "feed_forward.outer."),
        ("patch_embed.proj.", "patches."),
    )
    sizes: ClassVar = {
        "tiny": (192, 12, 3),
        "small": (384, 12, 6),
        "base": (768, 12, 12),
        "large": (1024, 24, 16),
        "huge": (1280, 32, 16),
    }
    fields: ClassVar = {
        "in_chans": "channels",
        "patch_size": "patch",
        "num_classes": "classes",
        "embed_dim": "dim",
        "depth": "layers",
        "num_heads": "heads",
        "qkv_bias": "qkv_bias",
    }

    def __init__(self, config: type[Config]) -> None:
        self.config = config

    def matches(self, config: dict[str, Any]) -> bool:
        return str(config.get("architecture", "")).startswith("vit_")

    @property
    def reads(self) -> str:
        return f"architecture vit_*_patch*_* of {', '.join(self.sizes)}"

    def read_config(self, config: dict[str, Any]) -> Config:
        name = str(config["architecture"])
        found = re.fullmatch(r"vit_(tiny|small|base|large|huge)_patch(\d+)_(\d+)", name)
        arguments = dict(config.get("model_args") or {})
        if "num_classes" in config:
            arguments.setdefault("num_classes", config["num_classes"])
        if found is None:
            raise ConfigError(
                f"This ViT of timm has parts that are not known here: {name!r}.",
                asked=f"architecture={name!r}",
                because="known are vit_{tiny, small, base, large, huge}_patch{side}_{pixels}",
                instead="vit_base_patch16_224",
            )
        dim, layers, heads = self.sizes[found[1]]
        fields: dict[str, Any] = {"dim": dim, "layers": layers, "heads": heads, "patch": int(found[2]), "classes": 1000}
        fields["image"] = (int(found[3]), int(found[3]))
        strangers = set(arguments) - set(self.fields) - {"img_size", "mlp_ratio", "global_pool"}
        if strangers:
            raise ConfigError(
                "This ViT of timm has arguments that are not known here.",
                asked=", ".join(f"{key}={arguments[key]!r}" for key in sorted(strangers)),
                because=f"known are {', '.join(self.fields)}, img_size, mlp_ratio and global_pool",
                instead="a model without them",
            )
        for said in (config, arguments):
            agree("ViT of timm", said, {"global_pool": ("token",)})
        fields |= {ours: arguments[theirs] for theirs, ours in self.fields.items() if theirs in arguments}
        if "img_size" in arguments:
            size = arguments["img_size"]
            fields["image"] = (size, size) if isinstance(size, int) else tuple(size)
        fields["hidden_dim"] = int(fields["dim"] * arguments.get("mlp_ratio", 4))
        return self.config.from_dict(fields)

    def write_config(self, config: Any) -> dict[str, Any]:
        arguments = {theirs: getattr(config, ours) for theirs, ours in self.fields.items()}
        arguments |= {
            "img_size": list(config.image),
            "mlp_ratio": _ratio(config.hidden_dim or 4 * config.dim, config.dim),
        }
        return {
            "architecture": "vit_base_patch16_224",
            "num_classes": config.classes,
            "model_args": arguments,
        }

    def refuses(self, config: Any) -> str:
        if config.pool != "class":
            return "timm pools the mean before its norm"
        return "" if config.activation == "gelu" and config.norm_eps == 1e-6 else "timm's ViT has GELU and eps 1e-6"

    def read_state(self, state: State, config: Any) -> State:
        made: State = {}
        for name, tensor in state.items():
            for theirs, ours in self.names:
                name = name.replace(theirs, ours)
            made[{"cls_token": "class_token", "pos_embed": "positions.weight"}.get(name, name)] = tensor
        if made.get("positions.weight", torch.empty(0)).ndim == 3:
            made["positions.weight"] = made["positions.weight"][0]
        return made

    def write_state(self, state: State, config: Any) -> State:
        made: State = {}
        for name, tensor in state.items():
            for theirs, ours in self.names:
                name = name.replace(ours, theirs)
            if name == "positions.weight":
                name, tensor = "pos_embed", tensor[None]
            made["cls_token" if name == "class_token" else name] = tensor
        return made


def _ratio(hidden: int, dim: int) -> float:
    """The number that timm multiplies `dim` by, and cuts to a whole number, to get `hidden`."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf)
