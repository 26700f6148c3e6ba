"""timm's DaViT: its `config.json` and its names."""

from __future__ import annotations

import re
from typing import Any

import torch

from regard.errors import ConfigError
from regard.models.config import Config
from regard.models.converters.base import Converter, State

# timm's architectures: channels of the first stage, depths, and what else differs from its defaults.
ARCHITECTURES: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "davit_tiny": (96, (1, 1, 3, 1), {}),
    "davit_small": (96, (1, 1, 9, 1), {}),
    "davit_base": (128, (1, 1, 9, 1), {}),
    "davit_large": (192, (1, 1, 9, 1), {}),
    "davit_huge": (256, (1, 1, 9, 1), {}),
    "davit_giant": (384, (1, 1, 12, 3), {}),
    "davit_base_fl": (128, (1, 1, 9, 1), {"window_size": 12, "down_kernel_size": 3, "channel_attn_v2": True}),
    "davit_huge_fl": (256, (1, 1, 9, 1), {"window_size": 12, "down_kernel_size": 3, "channel_attn_v2": True}),
}
# timm's arguments and our fields, where only the name differs, with timm's defaults.
ARGUMENTS: dict[str, tuple[str, Any]] = {
    "in_chans": ("channels", 3),
    "embed_dims": ("dims", (96, 192, 384, 768)),
    "num_heads": ("heads", (3, 6, 12, 24)),
    "depths": ("depths", (1, 1, 3, 1)),
    "window_size": ("window", 7),
    "mlp_ratio": ("expansion", 4.0),
    "down_kernel_size": ("merge", 2),
    "qkv_bias": ("qkv_bias", True),
    "drop_path_rate": ("drop_path", 0.0),
    "norm_eps": ("eps", 1e-5),
}
# Arguments that are accepted with this value only; `None` for those that change no result.
ONLY: dict[str, Any] = {
    "norm_layer": "layernorm2d",
    "norm_layer_cl": "layernorm",
    "attn_types": ("spatial", "channel"),
    "ffn": True,
    "cpe_act": False,
    "drop_rate": 0.0,
    "global_pool": "avg",
    "head_norm_first": False,
    "named_blocks": None,
    "img_size": None,
}
# Parts of a name, timm's first. Both ways are the same table read from either side.
NAMES = (
    ("stem.conv.", "stem.embed."),
    ("downsample.norm.", "merge.norm."),
    ("downsample.conv.", "merge.embed."),
    ("cpe1.proj.", "position1."),
    ("cpe2.proj.", "position2."),
    ("attn.", "attention."),
    ("mlp.fc1.", "feed_forward.inner."),
    ("mlp.fc2.", "feed_forward.outer."),
    ("head.fc.", "head.classify."),
)
BLOCK = re.compile(r"\.blocks\.(\d+)\.(0|1|spatial_block|channel_block)\.")
KINDS = {"0": 0, "1": 1, "spatial_block": 0, "channel_block": 1}


class TimmDaViT(Converter):
    """timm's DaViT, as its hub folders hold it.

        {"architecture": "davit_tiny", "num_classes": 1000, "model_args": {"window_size": 12}, ...}

    The two blocks of a unit lie in a list of their own there, `blocks.j.0` and `blocks.j.1`; here the blocks of a
    stage are one list. timm's first channel attention has the roles of query, key and value permuted: its k is the
    query, its v the key and its q the value, so that the rows of `qkv` turn by a third.
    """

    def matches(self, config: dict[str, Any]) -> bool:
        return str(config.get("architecture", "")).split(".")[0] in ARCHITECTURES

    @property
    def supported(self) -> str:
        return f"architecture {', '.join(ARCHITECTURES)}"

    def read_config(self, config: dict[str, Any]) -> Config:
        width, depths, more = ARCHITECTURES[str(config["architecture"]).split(".")[0]]
        dims = tuple(width * 2**stage for stage in range(4))
        arguments = {"embed_dims": dims, "num_heads": tuple(dim // 32 for dim in dims), "depths": depths, **more}
        arguments |= config.get("model_args") or {}
        classes = arguments.pop("num_classes", config.get("num_classes", 1000))
        by_tokens = arguments.pop("channel_attn_v2", False)
        fields: dict[str, Any] = {"classes": classes, "scale": "tokens" if by_tokens else "dim"}
        for name, value in arguments.items():
            value = tuple(value) if isinstance(value, list) else value
            if name in ARGUMENTS:
                fields[ARGUMENTS[name][0]] = value
            elif name not in ONLY or ONLY[name] not in (None, value):
                raise ConfigError(
                    "timm builds a DaViT here that Regard does not have.",
                    asked=f"model_args {name}={value!r}",
                    because=f"only {name}={ONLY[name]!r} is built here" if name in ONLY else f"{name} is unknown here",
                    instead="timm itself for this model, or a checkpoint without this argument",
                )
        return self.config.from_dict(fields)

    def write_config(self, config: Any) -> dict[str, Any]:
        sizes = (config.dims, config.heads, config.depths)
        architecture = "davit_tiny"
        arguments: dict[str, Any] = {}
        for name, (width, depths, more) in ARCHITECTURES.items():
            dims = tuple(width * 2**stage for stage in range(4))
            if not more and sizes == (dims, tuple(dim // 32 for dim in dims), depths):
                architecture = name
                break
        else:
            arguments = {
                "embed_dims": list(config.dims),
                "num_heads": list(config.heads),
                "depths": list(config.depths),
            }
        for name, (field, default) in ARGUMENTS.items():
            if name not in ("embed_dims", "num_heads", "depths") and getattr(config, field) != default:
                arguments[name] = getattr(config, field)
        if config.scale == "tokens":
            arguments["channel_attn_v2"] = True
        written = {"architecture": architecture, "num_classes": config.classes, "num_features": config.dims[-1]}
        return written | ({"model_args": arguments} if arguments else {})

    def read_state(self, state: State, config: Any) -> State:
        read = {}
        for name, tensor in state.items():
            block = BLOCK.search(name)
            ours = name
            if block is not None:
                ours = ours.replace(block[0], f".blocks.{2 * int(block[1]) + KINDS[block[2]]}.", 1)
            for theirs, here in NAMES:
                ours = ours.replace(theirs, here)
            read[ours] = _roll_qkv(tensor, -1) if _is_permuted_qkv(ours, config) else tensor
        return read

    def write_state(self, state: State, config: Any) -> State:
        written = {}
        for name, tensor in state.items():
            theirs = name
            for there, ours in NAMES:
                theirs = theirs.replace(ours, there)
            theirs = re.sub(
                r"\.blocks\.(\d+)\.", lambda block: ".blocks.{}.{}.".format(*divmod(int(block[1]), 2)), theirs
            )
            written[theirs] = _roll_qkv(tensor, 1) if _is_permuted_qkv(name, config) else tensor
        return written


def _is_permuted_qkv(name: str, config: Any) -> bool:
    """Whether a tensor of ours is the joint projection of a channel attention whose roles timm has permuted."""
    found = re.search(r"\.blocks\.(\d+)\.attention\.qkv\.", name)
    return found is not None and int(found[1]) % 2 == 1 and config.scale == "dim"


def _roll_qkv(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Query, key and value of a joint projection in another order: `by=-1` turns q, k, v into k, v, q."""
    if tensor.ndim == 0 or len(tensor) % 3:
        return tensor  # misshapen; the model names it
    return tensor.unflatten(0, (3, -1)).roll(by, 0).flatten(0, 1)


__all__ = ["TimmDaViT"]
