"""Published models by their names, for `regard cost model NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

GPTS = {"gpt2": "small", "gpt2-medium": "medium", "gpt2-large": "large", "gpt2-xl": "xl"}
VITS = ("Ti/16", "S/16", "S/32", "B/16", "B/32", "L/16", "L/32", "H/14")
POSITIONS = {"cordonnier": "quadratic", **{f"cordonnier-{kind}": kind for kind in ("gaussian", "learned", "content")}}
# The image that a model was published for, where it is not 224 x 224 and the model itself does not say so.
IMAGES = {"davit-large": (384, 384)}


def build(name: str, image: tuple[int, int] | None = None, *, empty: bool = True) -> nn.Module:
    """A published model; `empty` with shapes and no weights."""
    import torch

    with torch.device("meta" if empty else "cpu"):
        return MODELS[name]({} if image is None else {"image": image}).eval()


def _make_bert(size: str) -> nn.Module:
    from regard.models import Bert, BertConfig

    return Bert(BertConfig.bert(size))


def _make_gpt(size: str) -> nn.Module:
    from regard.models import GPT, GPTConfig

    return GPT(GPTConfig.gpt2(size))


def _make_vit(name: str, image: dict[str, Any]) -> nn.Module:
    from regard.models import ViT, ViTConfig

    return ViT(ViTConfig.vit(name, **image))


def _make_davit(name: str) -> nn.Module:
    from regard.models import DaViT, DaViTConfig

    return DaViT(DaViTConfig.variant(name))


def _make_transformer(size: str) -> nn.Module:
    from regard.models import Transformer, TransformerConfig

    return Transformer(TransformerConfig.base() if size == "base" else TransformerConfig.big())


def _make_cordonnier(position: str, image: dict[str, Any]) -> nn.Module:
    from regard.models import SpatialConfig, SpatialTransformer

    return SpatialTransformer(SpatialConfig(position, **image))


# Each takes the image that is asked for, and those use it whose weights depend on it.
MODELS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    **{
        f"bert-{size}": lambda _, size=size: _make_bert(size)
        for size in ("tiny", "mini", "small", "medium", "base", "large")
    },
    **{name: lambda _, size=size: _make_gpt(size) for name, size in GPTS.items()},
    **{f"vit-{name.lower().replace('/', '')}": lambda image, name=name: _make_vit(name, image) for name in VITS},
    **{f"davit-{size}": lambda _, size=size: _make_davit(size) for size in ("tiny", "small", "base", "large")},
    **{f"transformer-{size}": lambda _, size=size: _make_transformer(size) for size in ("base", "big")},
    **{name: lambda image, kind=kind: _make_cordonnier(kind, image) for name, kind in POSITIONS.items()},
}
