"""Build a module again at other sizes, on the meta device.

The sizes that a module was built with (width, heads, hidden size, layers, vocabulary) are found in its configuration or
its constructor arguments. A module that was changed after it was built is recognised: built again at its own sizes it
has other submodules or parameters than it has now, and then it cannot be rebuilt.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.adapters.rebuild_layers import Configuration, Values, find_layer_configuration


def find_configuration(module: nn.Module, image: tuple[int, int] | None = None) -> Configuration | None:
    """How to build this module again, or None. `image` is the input's size, where the caller gave one."""
    found = None
    for find in (_from_regard_config, _from_hugging_face, _from_timm, find_layer_configuration):
        if (found := find(module, image)) is not None:
            break
    if found is None:
        return None
    build, frozen = found.build, {name for name, each in module.named_parameters() if not each.requires_grad}
    # Which parameters are frozen is known by their names, which tell layers apart.
    fixed = {"L": found.sizes.pop("L")} if frozen and "L" in found.sizes else {}

    def build_alike(sizes: Values) -> nn.Module:
        with torch.device("meta"), _SkipInitialization():
            made = build({**sizes, **fixed})
        made.train(module.training)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in frozen)
        return made

    found.build = build_alike
    try:
        again = build_alike(found.sizes)
    except Exception:  # constructors of other libraries raise anything
        return None
    return found if _describe_structure(again) == _describe_structure(module) else None


class _SkipInitialization(TorchFunctionMode):
    """Tensors on the meta device have no values: initialising them takes time and does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in INITIALIZERS or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else next(iter(kwargs.values()))
        return func(*args, **(kwargs or {}))


INITIALIZERS = {Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_, Tensor.erfinv_}


def _describe_structure(module: nn.Module) -> list[Any]:
    names = [(name, type(each), each.training) for name, each in module.named_modules()]
    shapes = [(name, tuple(each.shape)) for name, each in module.named_parameters()]
    return [names, shapes]


# Models of Regard

FIELDS = {"vocab_size": "V", "context_length": "S", "dim": "D", "layers": "L", "heads": "H", "kv_heads": "G",
          "hidden_dim": "F", "head_dim": "d", "classes": "A", "channels": "C", "patch": "p"}  # fmt: skip


def _from_regard_config(module: nn.Module, image: tuple[int, int] | None) -> Configuration | None:
    config: Any = getattr(module, "config", None)
    if not type(module).__module__.startswith("regard.models") or not hasattr(config, "__dataclass_fields__"):
        return None
    if hasattr(config, "dims"):
        return _describe_stages(module, config)
    values: dict[str, Any] = {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}
    if values.get("hidden_dim", 0) is None:
        values["hidden_dim"] = 4 * values["dim"]
    heads, dim, kv_heads = values.get("heads"), values.get("dim"), values.get("kv_heads")
    shares_keys = isinstance(kv_heads, int) and kv_heads != heads
    if not shares_keys:
        values.pop("kv_heads", None)
    own_head_dim = values.get("head_dim")
    divides = (
        isinstance(heads, int)
        and isinstance(dim, int)
        and dim % heads == 0
        and type(config).__name__ != "SpatialConfig"
    )
    if own_head_dim is None or own_head_dim * (heads or 0) == dim:
        values.pop("head_dim", None)
    else:
        divides = False
    attentions = [value for name, value in vars(config).items() if isinstance(value, tuple) and name != "image"]
    if any(len(each) == config.layers for each in attentions if hasattr(config, "layers")) or getattr(
        config, "window_layers", None
    ):
        values.pop("layers", None)  # layers that differ
    sizes = {FIELDS[name]: value for name, value in values.items() if isinstance(value, int) and value > 0}
    multiples: dict[str, tuple[tuple[str, ...], int]] = {}
    if divides and isinstance(dim, int) and isinstance(heads, int):
        multiples["D"] = (("H",), 2 if (dim // heads) % 2 == 0 else 1)
    elif isinstance(dim, int):
        multiples["D"] = ((), 2 if dim % 2 == 0 else 1)
    if "d" in sizes:
        multiples["d"] = ((), 2 if sizes["d"] % 2 == 0 else 1)
    if shares_keys:
        multiples["H"] = (("G",), 1)
    sides: Any = getattr(config, "image", None)
    is_resized = sides is not None and image in (None, tuple(sides))
    if is_resized and sides is not None:
        sizes |= {"R": sides[0], "W": sides[1]}
        multiples |= {"R": (("p",), 1), "W": (("p",), 1)}
    elif sides is not None:
        sizes.pop("p", None)

    def build(sizes: Values) -> nn.Module:
        changes: dict[str, Any] = {
            name: sizes[symbol] for name, symbol in FIELDS.items() if symbol in sizes and hasattr(config, name)
        }
        if is_resized and "R" in sizes:
            changes["image"] = (sizes["R"], sizes["W"])
        if own_head_dim is not None and "d" not in sizes:
            changes["head_dim"] = changes["dim"] // changes["heads"]
        if kv_heads is not None and "G" not in sizes:
            changes["kv_heads"] = changes["heads"]
        return type(module)(dataclasses.replace(config, **changes))

    return Configuration(sizes, build, multiples, {"S": "N"})


def _describe_stages(module: nn.Module, config: Any) -> Configuration | None:
    """DaViT: the width of every stage, channels and classes.

    The window is a number of the pattern, whose closed forms have it as a number. Heads are groups of channels, each of
    which takes products of its own, and a stage of another depth has other layers.
    """
    if any(config.expansion * dim % dim for dim in config.dims):  # hidden channels are rounded
        return None
    stages = {f"D_{index}": dim for index, dim in enumerate(config.dims, 1)}
    sizes = stages | {"C": config.channels} | ({"A": config.classes} if config.classes else {})

    def build(sizes: Values) -> nn.Module:
        changes = {"dims": tuple(sizes[stage] for stage in stages), "channels": sizes["C"]}
        return type(module)(dataclasses.replace(config, **changes, classes=sizes.get("A", 0)))

    return Configuration(sizes, build, {stage: ((), heads) for stage, heads in zip(stages, config.heads, strict=True)})


# Models of Hugging Face

NAMES = {
    "D": ("hidden_size", "d_model", "n_embd"),
    "L": ("num_hidden_layers", "num_layers", "n_layer"),
    "H": ("num_attention_heads", "num_heads", "n_head"),
    "G": ("num_key_value_heads",),
    "F": ("intermediate_size", "d_ff", "n_inner", "ffn_dim"),
    "d": ("head_dim", "d_kv"),
    "V": ("vocab_size",),
    "S": ("max_position_embeddings", "n_positions"),
    "C": ("num_channels",),
    "p": ("patch_size",),
}
NO_POOLING = {"add_pooling_layer": False}  # an argument beside the configuration


def _from_hugging_face(module: nn.Module, image: tuple[int, int] | None) -> Configuration | None:
    config: Any = getattr(module, "config", None)
    if "transformers" not in sys.modules or not hasattr(config, "model_type"):
        return None
    names = {
        symbol: next((n for n in some if getattr(config, n, None) is not None), None) for symbol, some in NAMES.items()
    }
    sizes = {symbol: getattr(config, name) for symbol, name in names.items() if name is not None}
    sizes = {symbol: size for symbol, size in sizes.items() if isinstance(size, int) and size > 0}
    if not {"D", "H"} <= set(sizes):
        return None
    if hasattr(config, "n_inner") and config.n_inner is None:
        names["F"], sizes["F"] = "n_inner", 4 * sizes["D"]
    if sizes.get("G") == sizes["H"]:
        del sizes["G"]
    follows = sizes.get("d", 0) * sizes["H"] == sizes["D"]
    own = sizes.pop("d", None) if follows else sizes.get("d")
    multiples: dict[str, tuple[tuple[str, ...], int]] = {}
    if "d" in sizes:
        multiples = {"D": ((), 2), "d": ((), 2)} if sizes["D"] % 2 == sizes["d"] % 2 == 0 else {}
    else:
        multiples["D"] = (("H",), 2 if (sizes["D"] // sizes["H"]) % 2 == 0 else 1)
    if "G" in sizes:
        multiples["H"] = (("G",), 1)
    side: Any = getattr(config, "image_size", None)
    resized = isinstance(side, int) and image in (None, (side, side)) and "p" in sizes
    if resized:
        sizes["R"] = side
        multiples["R"] = (("p",), 1)
    else:
        sizes.pop("p", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and len(set(layer_types)) > 1:
        sizes.pop("L", None)

    is_pooled = getattr(module, "pooler", module) is not None
    options = {} if is_pooled or "add_pooling_layer" not in signature(type(module)).parameters else NO_POOLING

    def build(sizes: Values) -> nn.Module:
        changed = copy.deepcopy(config)
        for symbol, name in names.items():
            if name is not None and symbol in sizes:
                setattr(changed, name, sizes[symbol])
        if own is not None and follows:
            setattr(changed, str(names["d"]), sizes["D"] // sizes["H"])
        if names["G"] is not None and "G" not in sizes:
            setattr(changed, str(names["G"]), sizes["H"])
        if "L" in sizes and getattr(config, "num_decoder_layers", None) == getattr(config, str(names["L"])):
            changed.num_decoder_layers = sizes["L"]
        for name in ("encoder_layers", "decoder_layers"):
            if "L" in sizes and isinstance(getattr(config, name, None), int):
                setattr(changed, name, sizes["L"])
        if layer_types is not None and "L" in sizes:
            changed.layer_types = [layer_types[0]] * sizes["L"]
        if resized:
            changed.image_size = sizes["R"]
        make: Any = getattr(type(module), "_from_config", type(module))
        return make(changed, **options)

    return Configuration(sizes, build, multiples, {"S": "N"})


# Models of timm


def _from_timm(module: nn.Module, image: tuple[int, int] | None) -> Configuration | None:
    """Vision transformers: the architecture is in `pretrained_cfg`, its sizes are arguments of `create_model`."""
    timm: Any = sys.modules.get("timm")
    config: Any = getattr(module, "pretrained_cfg", None)
    blocks: Any = getattr(module, "blocks", None)
    if timm is None or not isinstance(config, Mapping) or type(module).__name__ != "VisionTransformer":
        return None
    embed: Any = module.patch_embed
    attention, hidden = blocks[0].attn, blocks[0].mlp.fc1.out_features
    side, patch = embed.img_size, embed.patch_size
    if side is None or side[0] != side[1] or patch[0] != patch[1]:
        return None
    sizes = {"D": module.embed_dim, "H": attention.num_heads, "F": hidden, "L": len(blocks)}
    if getattr(module, "num_classes", 0):
        sizes["A"] = module.num_classes
    multiples: dict[str, tuple[tuple[str, ...], int]] = {"D": (("H",), 1)}
    resized = image in (None, tuple(side))
    if resized:
        sizes |= {"p": patch[0], "R": side[0]}
        multiples["R"] = (("p",), 1)

    def build(sizes: Values) -> nn.Module:
        changes: dict[str, Any] = {"embed_dim": sizes["D"], "num_heads": sizes["H"], "depth": sizes["L"]}
        changes["mlp_ratio"] = (sizes["F"] + 0.5) / sizes["D"]  # timm rounds down
        changes["num_classes"] = sizes.get("A", 0)
        changes["img_size"] = sizes.get("R", side[0])
        if resized:
            changes["patch_size"] = sizes["p"]
        return timm.create_model(str(config.get("architecture")), pretrained=False, **changes)

    return Configuration(sizes, build, multiples)


__all__ = ["Configuration", "find_configuration"]
