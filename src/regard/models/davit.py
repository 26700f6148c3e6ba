"""DaViT: Dual Attention Vision Transformer (Ding, Xiao, Codella, Luo, Wang, Yuan; ECCV 2022; arXiv 2204.03645).

An image passes four stages; each halves the grid and doubles the channels. A stage repeats two blocks: one attends
between tokens inside windows, the other between channels over all tokens, so that together every number can meet
every other at a cost linear in the pixels.

    image (batch, channel, row, column)
      Stem           patches of 7 x 7 pixels every 4, LayerNorm                     grid (batch, row, column, dim)
      Stage 1..4     [PatchMerging: LayerNorm, patches of 2 x 2], then depth times window and channel blocks
      Head           mean over tokens, LayerNorm, Linear                            logits (batch, class)

Grids keep their channels last from the first layer to the last: norms and linear layers need them last, and so does
torch's depthwise convolution, which is then up to twice as fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from regard.errors import ConfigError
from regard.kernels.eager import is_plain_inference
from regard.kernels.grid import DTYPES, convolve_and_norm
from regard.layers.channels import ChannelAttention
from regard.layers.feedforward import FeedForward
from regard.layers.fused_training import feed_forward, feed_forward_with_residual, norm_with_residual
from regard.layers.linear import Linear, is_plain_module
from regard.layers.patches import PatchEmbedding
from regard.layers.windows import WindowAttention
from regard.models.config import Config, find_published
from regard.models.converters.davit import TimmDaViT
from regard.models.initialization import init_weights, truncated_normal
from regard.models.pretrained import Pretrained
from regard.models.validation import check_sizes, check_tensor


@dataclass(frozen=True)
class DaViTConfig(Config):
    """What a DaViT is built from. Images of any size are read; grids are padded where they have to be.

    Attributes:
        channels: of the image.
        classes: logits; 0 leaves the head's linear layer out.
        dims: channels of each stage.
        heads: heads of window attention and groups of channel attention, in each stage.
        depths: pairs of blocks in each stage.
        window: rows and columns of a window.
        expansion: hidden channels of a feed-forward layer, in multiples of its channels.
        merge: patch of the step between stages: 2 side by side, 3 overlapping (Florence-2).
        scale: of channel attention: "dim" as published, "tokens" (Florence-2).
        qkv_bias: whether query, key and value have a bias.
        drop_path: how often the last block's branches are left out in training; earlier ones less, from 0 on.
        eps: of every LayerNorm.
    """

    channels: int = 3
    classes: int = 1000
    dims: tuple[int, ...] = (96, 192, 384, 768)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    depths: tuple[int, ...] = (1, 1, 3, 1)
    window: int = 7
    expansion: float = 4.0
    merge: int = 2
    scale: Literal["dim", "tokens"] = "dim"
    qkv_bias: bool = True
    drop_path: float = 0.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self)
        problem = None
        if not len(self.dims) == len(self.heads) == len(self.depths) > 0:
            problem = "every stage has its channels, heads and depth"
        elif any(head < 1 or dim % head for dim, head in zip(self.dims, self.heads, strict=True)):
            problem = "heads share the channels of their stage evenly"
        elif self.merge not in (2, 3) or self.scale not in ("dim", "tokens"):
            problem = 'merge is 2 or 3, and scale is "dim" or "tokens"'
        elif min(self.channels, self.window, *self.dims) < 1 or min(self.classes, *self.depths) < 0:
            problem = "sizes are positive; only classes and depths may be 0"
        elif not 1 <= self.expansion * min(self.dims) < math.inf:
            problem = "a feed-forward layer has at least one hidden channel, and finitely many"
        elif not 0 <= self.drop_path < 1:
            problem = "drop_path is a probability, and 1 would leave nothing"
        if problem:
            raise ConfigError(
                "This DaViT cannot be built.",
                asked=repr(self),
                because=problem,
                instead='DaViTConfig.variant("tiny"), changed where you need it',
            )

    @classmethod
    def variant(cls, name: str, **changes: object) -> Self:
        """A published size: tiny, small, base, large, huge or giant; `changes` override its fields.

        >>> DaViTConfig.variant("base", classes=10).dims
        (128, 256, 512, 1024)
        """
        width, depths, window = find_published("DaViT", f"DaViTConfig.variant({name!r})", name, VARIANTS)
        dims = tuple(width * 2**stage for stage in range(4))
        fields = {"dims": dims, "heads": tuple(dim // 32 for dim in dims), "depths": depths, "window": window}
        return cls.from_dict(fields | changes)


# Channels of the first stage, depths and window; heads and groups have 32 channels. Large is the one for 384 x 384;
# huge and giant are as timm builds them.
VARIANTS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "tiny": (96, (1, 1, 3, 1), 7),
    "small": (96, (1, 1, 9, 1), 7),
    "base": (128, (1, 1, 9, 1), 7),
    "large": (192, (1, 1, 9, 1), 12),
    "huge": (256, (1, 1, 9, 1), 7),
    "giant": (384, (1, 1, 12, 3), 7),
}


# Bytes of a feed-forward layer's hidden channels that a stage works on at a time. Images do not depend on one another,
# so a batch may pass a stage in pieces. Larger tensors leave the cache, and above 32 MB their memory is new to the
# process each time: without gradients a whole batch of 8 took 1.1 to 1.2 times as long.
PIECE = 16 << 20


class ConvolutionalPosition(nn.Module):
    """Where a token is, told by its neighbours: `x + depthwise 3 x 3 convolution of x` (Chu et al. 2021).

        output[r, c, a] = x[r, c, a] + bias[a] + sum_{u, v = -1..1} weight[a, u, v] x[r + u, c + v, a]

    Tokens beyond the edge are zero, which is what tells where the edge is. The identity is added to the kernel's
    centre, so that the grid is read once.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, 3, 3).uniform_(-1 / 3, 1 / 3))
        self.bias = nn.Parameter(torch.empty(dim).uniform_(-1 / 3, 1 / 3))

    def forward(self, grid: Tensor) -> Tensor:
        kernel = self.weight + _identity_kernel(self.weight)
        moved = conv2d(grid.permute(0, 3, 1, 2), kernel, self.bias, padding=1, groups=len(kernel))
        return moved.permute(0, 2, 3, 1)

    def with_norm(self, grid: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """`self(grid)` and its norm, in one pass over the grid where no gradient is needed."""
        parameters = (self.weight, self.bias, norm.weight, norm.bias)
        if (
            is_plain_inference(grid, *parameters)
            and is_plain_module(self, ConvolutionalPosition)
            and is_plain_module(norm, nn.LayerNorm)
            and _can_convolve(grid, parameters)
        ):
            return convolve_and_norm(grid, self.weight + _identity_kernel(self.weight), self.bias, norm)
        normed, grid = norm_with_residual(norm, self(grid))
        return grid, normed


def _can_convolve(grid: Tensor, parameters: Sequence[Tensor | None]) -> bool:
    alike = all(each is None or each.dtype == grid.dtype for each in parameters)
    return alike and grid.dtype in DTYPES and grid.ndim == 4


def _identity_kernel(weight: Tensor) -> Tensor:
    """The 3 x 3 kernel that changes nothing."""
    return pad(weight.new_ones(1, 1), (1, 1, 1, 1))


class DaViTBlock(nn.Module):
    """One attention and one feed-forward layer, each after a position, each added to what came before.

        x = ConvolutionalPosition(x);   x = x + Attention(LayerNorm(x))
        x = ConvolutionalPosition(x);   x = x + FeedForward(LayerNorm(x))

    The attention is a `WindowAttention` or a `ChannelAttention`. In training, each of the two branches is left out
    for an image with probability `drop_path` (stochastic depth, Huang et al. 2016).
    """

    def __init__(self, attention: WindowAttention | ChannelAttention, config: DaViTConfig, drop_path: float) -> None:
        super().__init__()
        dim = attention.dim
        self.position1 = ConvolutionalPosition(dim)
        self.norm1 = nn.LayerNorm(dim, eps=config.eps)
        self.attention = attention
        self.position2 = ConvolutionalPosition(dim)
        self.norm2 = nn.LayerNorm(dim, eps=config.eps)
        self.feed_forward = FeedForward(dim, int(dim * config.expansion))
        self.drop_path = drop_path

    def forward(self, grid: Tensor) -> Tensor:
        grid, normed = self.position1.with_norm(grid, self.norm1)
        grid = self._add(grid, self.attention, normed)
        if torch.is_grad_enabled() and not self._drops():  # norm, feed-forward and residual train as one function
            grid = self.position2(grid)
            made = feed_forward_with_residual(self.feed_forward, grid, self.norm2)
            if made is not None:
                return made
            normed, grid = norm_with_residual(self.norm2, grid)
        else:
            grid, normed = self.position2.with_norm(grid, self.norm2)
        return self._add(grid, self.feed_forward, normed)

    def _add(self, grid: Tensor, part: WindowAttention | ChannelAttention | FeedForward, normed: Tensor) -> Tensor:
        if self._drops():
            made = feed_forward(part, normed) if isinstance(part, FeedForward) else part(normed)
            return grid + self._apply_drop_path(made)
        return part.add_to(grid, normed)

    def _drops(self) -> bool:
        return self.training and self.drop_path > 0

    def _apply_drop_path(self, branch: Tensor) -> Tensor:
        """The branch of some images only, larger so that its mean stays."""
        keep = 1 - self.drop_path
        return branch * (branch.new_empty(len(branch), 1, 1, 1).bernoulli_(keep) / keep)


class Stem(nn.Module):
    """The first tokens: `LayerNorm(patches of 7 x 7 pixels, one every 4)`; a ragged image is padded with zeros."""

    def __init__(self, config: DaViTConfig) -> None:
        super().__init__()
        self.embed = PatchEmbedding(config.channels, config.dims[0], patch=7, stride=4, padding=3)
        self.norm = nn.LayerNorm(config.dims[0], eps=config.eps)

    def forward(self, image: Tensor) -> Tensor:
        self.embed.check(image)
        return self.norm(self.embed(_pad_to_multiple(image, 4)))


class PatchMerging(nn.Module):
    """The step between two stages: `patches of 2 x 2 tokens of LayerNorm(x)`; a ragged grid is padded with zeros."""

    def __init__(self, dim: int, out: int, config: DaViTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=config.eps)
        overlap = config.merge == 3
        self.embed = PatchEmbedding(dim, out, patch=config.merge, stride=2, padding=int(overlap))

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.norm(grid).permute(0, 3, 1, 2)
        return self.embed(_pad_to_multiple(grid, 2) if self.embed.tiles else grid)


def _pad_to_multiple(image: Tensor, multiple: int) -> Tensor:
    """Zeros on the right and below, up to multiples."""
    below, right = -image.shape[2] % multiple, -image.shape[3] % multiple
    return pad(image, (0, right, 0, below)) if below or right else image


class Stage(nn.Module):
    """A smaller grid with more channels, then pairs of blocks: between tokens in windows, and between channels."""

    def __init__(self, index: int, config: DaViTConfig, rates: list[float]) -> None:
        super().__init__()
        dim, heads = config.dims[index], config.heads[index]
        self.merge = PatchMerging(config.dims[index - 1], dim, config) if index else nn.Identity()
        self.expansion = max(1, round(config.expansion))
        self.blocks = nn.Sequential()
        for rate in rates:
            window = WindowAttention(dim, heads, config.window, bias=config.qkv_bias)
            channel = ChannelAttention(dim, heads, config.scale, bias=config.qkv_bias)
            self.blocks.extend([DaViTBlock(window, config, rate), DaViTBlock(channel, config, rate)])

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.merge(grid)
        images = max(1, PIECE // (math.prod(grid.shape[1:]) * grid.element_size() * self.expansion))
        if images >= len(grid):
            return self.blocks(grid)
        return torch.cat([self.blocks(piece) for piece in grid.split(images)])


class Head(nn.Module):
    """`logits = LayerNorm(mean over tokens) W + b`."""

    def __init__(self, config: DaViTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dims[-1], eps=config.eps)
        self.classify = Linear(config.dims[-1], config.classes) if config.classes else nn.Identity()

    def forward(self, grid: Tensor) -> Tensor:
        return self.classify(self.norm(grid.mean((1, 2))))


class DaViT(Pretrained):
    """An image classifier, and a pyramid of features.

    >>> model = DaViT(DaViTConfig(classes=5, dims=(8, 16), heads=(1, 2), depths=(1, 1)))
    >>> model(torch.randn(2, 3, 40, 56)).shape
    torch.Size([2, 5])
    >>> model.features(torch.randn(2, 3, 40, 56)).shape      # batch, row, column, channel
    torch.Size([2, 5, 7, 16])
    """

    Config: ClassVar = DaViTConfig
    converters: ClassVar = {"timm": TimmDaViT(DaViTConfig)}

    def __init__(self, config: DaViTConfig) -> None:
        super().__init__(config)
        units = sum(config.depths)
        rates = [config.drop_path * unit / max(units - 1, 1) for unit in range(units)]
        starts = [sum(config.depths[:stage]) for stage in range(len(config.depths))]
        self.stem = Stem(config)
        self.stages = nn.Sequential(
            *(Stage(i, config, rates[start : start + config.depths[i]]) for i, start in enumerate(starts))
        )
        self.head = Head(config)
        init_weights(self, truncated_normal)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, row, column)`."""
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """The last grid, `(batch, row, column, channel)`: 32 pixels to a token with four stages."""
        check_tensor("images", images, "torch.randn(1, 3, 224, 224)")
        return self.stages(self.stem(images))

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """The grid after every stage, finest first, for detection and segmentation."""
        check_tensor("images", images, "torch.randn(1, 3, 224, 224)")
        grids = [self.stem(images)]
        for stage in self.stages:
            grids.append(stage(grids[-1]))
        return grids[1:]


__all__ = ["DaViT", "DaViTConfig"]
