"""Vision transformers of timm and torchvision: images in, logits out; their attentions and windows as layers.

A model's tokens are patches that a caller cannot address, so a model claims what any module does. A block of Swin
claims more: a patch sees the patches of its own window, and a shifted window that the image's edge cuts is smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter, Variant
from regard.adapters.call_signature import parameters
from regard.adapters.example_inputs import ExampleInputs
from regard.adapters.known_layer import MODULE_CLAIMS, GridLayer, KnownLayer, comes_from, conventions_of, named
from regard.adapters.layer import find_channels
from regard.adapters.model import IMAGE_ATTRIBUTES, ImageModelAdapter
from regard.patterns import Lengths, Pattern

BLOCKS = ("SwinTransformerV2Block", "SwinTransformerBlock")
SMALL = 64  # pixels on a side, where a model takes any size


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Adapter | None:
    """The adapter of a module of timm or torchvision, or None."""
    if not isinstance(target, nn.Module) or not comes_from(target, "timm", "torchvision"):
        return None
    if named(target, *BLOCKS) and (shifted := _find_shifted_windows(target)) is not None and kind in (None, "layer"):
        return _adapt_block(target, shifted, name, options)
    if hasattr(target, "forward_features") or named(target, "VisionTransformer", "SwinTransformer", "MaxVit"):
        return _adapt_model(target, name, options)
    takes = parameters(target)
    if "attn_mask" in takes and next(iter(takes)) == "x" and kind in (None, "layer"):
        return _adapt_attention(target, name, options)
    return None


# Models


class TimmImageModel(ImageModelAdapter):
    """Images, in whichever order memory keeps their channels, by fused attention or not."""

    def variants(self) -> dict[str, Variant]:
        variants = super().variants()
        variants["channels last"] = lambda x, mask=None: self.run(x.contiguous(memory_format=torch.channels_last))
        return variants


def _adapt_model(target: nn.Module, name: str, options: dict[str, Any]) -> Adapter:
    image = options.get("image_size") or _find_image_size(target)
    adapter = TimmImageModel(target, name, conventions_of(options), image_size=image)
    adapter.claims = (*MODULE_CLAIMS, "paths")
    adapter.declared = f"{type(target).__module__.split('.')[0]}'s {type(target).__name__}, images {image}"
    return adapter


def _find_image_size(target: nn.Module) -> tuple[int, int, int]:
    """The size it was made for; a small one, if it takes any."""
    channels = next(part.in_channels for part in target.modules() if isinstance(part, nn.Conv2d))
    for holder in target.modules():
        for field in IMAGE_ATTRIBUTES:
            size = getattr(holder, field, None)
            if isinstance(size, int):
                return channels, size, size
            if isinstance(size, tuple) and len(size) == 2:
                return channels, size[0], size[1]
    made_for = (getattr(target, "pretrained_cfg", None) or {}).get("input_size", (channels, 224, 224))
    for size in ((channels, SMALL, SMALL), (channels, *made_for[1:])):
        try:
            with torch.no_grad():
                target(torch.zeros(1, *size, dtype=next(target.parameters()).dtype))
            return size
        except Exception:  # this size is not for it
            continue
    return channels, *made_for[1:]


# Layers


class MaskedLayer(KnownLayer):
    """An attention or a block `f(x, attn_mask=None)`, whose mask is boolean, True being seen, or added to scores."""

    can = ("aligned", "float", "lengths", "gradients", "mask")

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        if mask is not None:
            more["attn_mask"] = mask[:, None, None, :]
        return self.target(x, **more)

    def variants(self) -> dict[str, Variant]:
        variants = super().variants()
        variants["additive mask"] = self._run_with_additive_mask
        return variants

    def _run_with_additive_mask(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.run(x)
        added = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf)
        return self.target(x, attn_mask=added[:, None, None, :])


def _adapt_attention(target: nn.Module, name: str, options: dict[str, Any]) -> Adapter:
    channels = find_channels(target)[0]
    claims = [*MODULE_CLAIMS, "paths", "padding", "permutation"]
    adapter = MaskedLayer(target, name, conventions_of(options), channels=channels, claims=claims)
    adapter.declared = f"timm's {type(target).__name__}"
    return adapter


# Windows


@dataclass(frozen=True)
class ShiftedWindows(Pattern):
    """Patches of one window of a grid; windows begin `shift` rows and columns inside it, and nothing wraps around."""

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]

    def _check(self, lengths: Lengths) -> None:
        return None

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return (self._find_window(i)[0] == self._find_window(j)[0]) & (
            self._find_window(i)[1] == self._find_window(j)[1]
        )

    def _find_window(self, place: Tensor) -> tuple[Tensor, Tensor]:
        along = (place // self.grid[1], place % self.grid[1])
        down, across = (
            (where - shift).div(size, rounding_mode="floor")
            for where, shift, size in zip(along, self.shift, self.window, strict=True)
        )
        return down, across


class WindowBlock(GridLayer):
    """A block of Swin on one grid of patches."""

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        return []  # they belong to windows, not to tokens


def _find_shifted_windows(target: nn.Module) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None:
    """Grid, window and shift of a block of Swin, or None if it is another kind of block."""
    holder = target if hasattr(target, "window_size") else getattr(target, "attn", None)
    window, shift = getattr(holder, "window_size", None), getattr(holder, "shift_size", None)
    if window is None or shift is None:
        return None
    window, shift = tuple(window), tuple(shift)
    grid = getattr(target, "input_resolution", None) or (window[0] * 2 + 1, window[1] + 1)
    return tuple(grid), window, shift  # type: ignore[return-value]


def _adapt_block(
    target: nn.Module, shifted: tuple[tuple[int, int], ...], name: str, options: dict[str, Any]
) -> Adapter:
    grid, window, shift = shifted
    own = {"pattern": ShiftedWindows(grid, window, shift)}
    width = next(part.normalized_shape[0] for part in target.modules() if isinstance(part, nn.LayerNorm))
    claims = [*MODULE_CLAIMS, "support"]
    adapter = WindowBlock(target, name, conventions_of(options, **own), channels=width, claims=claims, grid=grid)
    adapter.declared = f"windows {window} shifted by {shift} on a grid {grid}"
    return adapter


# Example inputs


def fill_inputs(module: nn.Module, inputs: ExampleInputs) -> bool:
    """Example inputs from the configuration of timm's pretraining."""
    config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    if not isinstance(config, Mapping) or len(config.get("input_size") or ()) != 3:
        return False
    channels, *size = config["input_size"]
    own = getattr(getattr(module, "patch_embed", None), "img_size", None)  # built for another size than pretrained
    first = next((each for each in module.modules() if isinstance(each, nn.Conv2d)), None)
    inputs.args = (inputs.image(own or size, channels if first is None else first.in_channels),)
    return True


__all__ = ["fill_inputs", "recognise"]
