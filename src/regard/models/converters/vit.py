"""ViT at Hugging Face and in timm."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

from regard.errors import ConfigError
from regard.models.config import Config
from regard.models.converters.base import Converter, State, check_values


def _name_blocks(layer: str, attention: tuple[str, ...], output: str, inner: str, outer: str) -> dict[str, Any]:
    """The names of a block at Hugging Face, in one of two versions."""
    return {
        "blocks.{}.attention_norm": f"{layer}.layernorm_before",
        "blocks.{}.feed_forward_norm": f"{layer}.layernorm_after",
        "blocks.{}.attention.projections": tuple(f"{layer}.attention.{part}" for part in attention),
        "blocks.{}.attention.output": f"{layer}.attention.{output}",
        "blocks.{}.feed_forward.inner": f"{layer}.{inner}",
        "blocks.{}.feed_forward.outer": f"{layer}.{outer}",
    }


class _ViTConverter(Converter):
    """What both libraries share: a batch axis of the table of positions."""

    def read_state(self, state: State, config: Any) -> State:
        ours = super().read_state(state, config)
        if "positions.weight" in ours and ours["positions.weight"].ndim == 3:
            ours["positions.weight"] = ours["positions.weight"][0]
        return ours

    def write_state(self, state: State, config: Any) -> State:
        return super().write_state(state | {"positions.weight": state["positions.weight"][None]}, config)


def _read_image_size(size: Any) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


class HuggingFaceViT(_ViTConverter):
    """`ViTForImageClassification` and `ViTModel` of transformers; the pooler of the latter is not ours."""

    name = "ViT"
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
    defaults: ClassVar = {"layer_norm_eps": 1e-12}
    # Names of the released checkpoints, which every version of transformers reads; then those of version 5.
    names: ClassVar = {
        "class_token": "embeddings.cls_token",
        "positions.weight": "embeddings.position_embeddings",
        "patches": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
        "head": "classifier",
        **_name_blocks(
            "encoder.layer.{}",
            ("attention.query", "attention.key", "attention.value"),
            "output.dense",
            "intermediate.dense",
            "output.dense",
        ),
    }
    also_read: ClassVar = _name_blocks("layers.{}", ("q_proj", "k_proj", "v_proj"), "o_proj", "mlp.fc1", "mlp.fc2")
    prefix = "vit."
    heads = ("head",)
    ignored = re.compile(r"pooler\..*")  # a second, untrained reading of the class token

    def read_config(self, config: dict[str, Any]) -> Config:
        check_values(self.name, config, {"hidden_act": tuple(self.activations)})
        classifies = "ViTForImageClassification" in (config.get("architectures") or ["ViTForImageClassification"])
        labels = config.get("num_labels", len(config.get("id2label") or ()) or 2)
        fields = {
            "image": _read_image_size(config.get("image_size", 224)),
            "activation": self.activations[config.get("hidden_act", "gelu")],
            "classes": labels if classifies else 0,
        }
        return self.config.from_dict(self.read_fields(config) | fields)

    def write_config(self, config: Any) -> dict[str, Any]:
        labels = {str(index): f"LABEL_{index}" for index in range(config.classes)}
        named = {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
        return {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification" if config.classes else "ViTModel"],
            **self.write_fields(config),
            "intermediate_size": config.hidden_dim or 4 * config.dim,
            "attention_probs_dropout_prob": config.dropout,
            "image_size": config.image[0] if config.image[0] == config.image[1] else list(config.image),
            "hidden_act": self.write_activation(config.activation),
            **(named if config.classes else {}),
        }

    def explain_unsupported(self, config: Any) -> str:
        return "" if config.pool == "class" else "transformers' ViT reads the class token, not the mean of the patches"

    def has_prefix(self, config: Any) -> bool:
        return bool(config.classes)


class TimmViT(_ViTConverter):
    """`timm.models.vision_transformer.VisionTransformer` as `vit_*_patch*` builds it."""

    name = "ViT of timm"
    names: ClassVar = {
        "class_token": "cls_token",
        "positions.weight": "pos_embed",
        "patches": "patch_embed.proj",
        "norm": "norm",
        "head": "head",
        "blocks.{}.attention_norm": "blocks.{}.norm1",
        "blocks.{}.feed_forward_norm": "blocks.{}.norm2",
        "blocks.{}.attention.projections": "blocks.{}.attn.qkv",
        "blocks.{}.attention.output": "blocks.{}.attn.proj",
        "blocks.{}.feed_forward.inner": "blocks.{}.mlp.fc1",
        "blocks.{}.feed_forward.outer": "blocks.{}.mlp.fc2",
    }
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

    def matches(self, config: dict[str, Any]) -> bool:
        return str(config.get("architecture", "")).startswith("vit_")

    @property
    def supported(self) -> str:
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
        if unknown := set(arguments) - set(self.fields) - {"img_size", "mlp_ratio", "global_pool"}:
            raise ConfigError(
                "This ViT of timm has arguments that are not known here.",
                asked=", ".join(f"{key}={arguments[key]!r}" for key in sorted(unknown)),
                because=f"known are {', '.join(self.fields)}, img_size, mlp_ratio and global_pool",
                instead="a model without them",
            )
        for stated in (config, arguments):
            check_values(self.name, stated, {"global_pool": ("token",)})
        dim, layers, heads = self.sizes[found[1]]
        fields: dict[str, Any] = {"dim": dim, "layers": layers, "heads": heads, "patch": int(found[2]), "classes": 1000}
        fields |= self.read_fields(arguments)
        fields["image"] = _read_image_size(arguments.get("img_size", int(found[3])))
        fields["hidden_dim"] = int(fields["dim"] * arguments.get("mlp_ratio", 4))
        return self.config.from_dict(fields)

    def write_config(self, config: Any) -> dict[str, Any]:
        ratio = _find_ratio(config.hidden_dim or 4 * config.dim, config.dim)
        return {
            "architecture": "vit_base_patch16_224",
            "num_classes": config.classes,
            "model_args": self.write_fields(config) | {"img_size": list(config.image), "mlp_ratio": ratio},
        }

    def explain_unsupported(self, config: Any) -> str:
        if config.pool != "class":
            return "timm pools the mean before its norm"
        return "" if config.activation == "gelu" and config.norm_eps == 1e-6 else "timm's ViT has GELU and eps 1e-6"


def _find_ratio(hidden_dim: int, dim: int) -> float:
    """The number that timm multiplies `dim` by, and cuts to a whole number, to get `hidden_dim`."""
    ratio = hidden_dim / dim
    return ratio if int(dim * ratio) == hidden_dim else math.nextafter(ratio, math.inf)
