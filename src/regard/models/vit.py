"""ViT: a transformer encoder over the patches of an image.

    x = [class; patches W + b] + position
    x = x + attention(norm(x)),  x = x + feed_forward(norm(x))          in every layer
    logits = norm(x)_class W + b

Source: Dosovitskiy et al., An Image is Worth 16x16 Words (2021), equations 1 to 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import ConfigError, InputError
from regard.layers.block import BlockList, TransformerBlock
from regard.layers.feedforward import PLAIN, FeedForward
from regard.layers.linear import Linear
from regard.layers.multihead import MultiHeadAttention
from regard.layers.patches import PatchEmbedding
from regard.layers.positions import GridPositions
from regard.models.attention_layers import build_layer, check_attentions, find_grids
from regard.models.config import Config
from regard.models.converters.vit import HuggingFaceViT, TimmViT
from regard.models.initialization import init_weights, truncated_normal
from regard.models.pretrained import Pretrained
from regard.models.validation import check_sizes, check_tensor

# dim, layers, heads, hidden of the published models
SIZES = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
}


@dataclass(frozen=True, eq=False)
class ViTConfig(Config):
    """AttentionSizes and choices of a ViT; the defaults are ViT-B/16's.

    Attributes:
        image: rows and columns that positions are learned for; other sizes are interpolated.
        channels, patch, classes: of the image, side of a patch, number of classes (0 for no head).
        dim, layers, heads, hidden_dim: hidden size, blocks, heads, feed-forward channels (`4 dim` if `None`).
        activation, norm_eps, qkv_bias: of the blocks.
        pool: "class" reads the class token, "mean" the mean of all patches.
        dropout: while training.
        attention: an `Attention` for all layers, or one for each; `None` sees everything. The class token comes
            first, then the patches row by row: grids have `start=1`. Each layer has a copy of the bias, learned
            parameters included.
    """

    image: tuple[int, int] = (224, 224)
    channels: int = 3
    patch: int = 16
    classes: int = 1000
    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden_dim: int | None = None
    activation: str = "gelu"
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    pool: str = "class"
    dropout: float = 0.0
    attention: Attention | tuple[Attention, ...] | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "channels", "patch", "dim", "layers", "heads", "hidden_dim")
        because = ""
        if self.classes < 0:
            because = "there are no fewer than no classes"
        elif self.activation not in PLAIN:
            because = f"activations are {', '.join(PLAIN)}"
        elif self.pool not in ("class", "mean"):
            because = 'an image becomes one vector by its "class" token or by the "mean" of its patches'
        elif min(self.image) < 1 or self.image[0] % self.patch or self.image[1] % self.patch:
            because = f"{self.image[0]} x {self.image[1]} pixels are not made of patches of {self.patch}"
        if because:
            raise ConfigError(
                "ViT cannot be built so.",
                asked=f"image={self.image}, patch={self.patch}, pool={self.pool!r}, activation={self.activation!r}",
                because=because,
                instead='ViTConfig.vit("B/16")',
            )
        check_attentions(self, "attention", self.attention, self.grid)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[0] // self.patch, self.image[1] // self.patch

    @classmethod
    def vit(cls, name: str = "B/16", **changes: Any) -> ViTConfig:
        """`"Ti/16"`, `"S/16"`, `"S/32"`, `"B/16"`, `"B/32"`, `"L/16"`, `"L/32"`, `"H/14"`: the size and the patch."""
        size, _, patch = name.partition("/")
        if size not in SIZES or not patch.isdecimal():
            raise ConfigError(
                f"There is no ViT called {name!r}.",
                asked=f"ViTConfig.vit({name!r})",
                because=f"a name is a size ({', '.join(SIZES)}) and the side of a patch",
                instead='ViTConfig.vit("B/16")',
            )
        dim, layers, heads, hidden = SIZES[size]
        fields = {"patch": int(patch), "dim": dim, "layers": layers, "heads": heads, "hidden_dim": hidden}
        return cls.from_dict(fields | changes)


class ViT(Pretrained):
    """A classifier of images.

    >>> from regard.models import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image=(8, 12), patch=4, classes=5, dim=8, layers=2, heads=2)).eval()
    >>> model(torch.randn(2, 3, 8, 12)).shape
    torch.Size([2, 5])
    """

    Config: ClassVar = ViTConfig
    converters: ClassVar = {"huggingface": HuggingFaceViT(ViTConfig), "timm": TimmViT(ViTConfig)}

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.config: ViTConfig = config
        self.patches = PatchEmbedding(config.channels, config.dim, config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.positions = GridPositions(config.grid, config.dim, first=1)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = BlockList(_build_block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.classes) if config.classes else None
        self._init_weights()

    def forward(self, images: Tensor, *, resize: bool = False) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, row, column)`.

        resize: read an image of another size than was learned, with interpolated positions.
        """
        tokens = self.tokens(images, resize=resize)
        pooled = tokens[:, 0] if self.config.pool == "class" else tokens[:, 1:].mean(1)
        return pooled if self.head is None else self.head(pooled)

    def tokens(self, images: Tensor, *, resize: bool = False) -> Tensor:
        """Hidden states of the class token and of every patch, `(batch, 1 + patch, dim)`."""
        check_tensor("images", images, "torch.randn(1, 3, 224, 224)")
        if images.ndim == 4 and tuple(images.shape[2:]) != self.config.image and not resize:
            raise InputError(
                "The image has another size.",
                asked=f"images {tuple(images.shape)}      # (batch, channel, row, column)",
                found=f"positions for {self.config.image[0]} x {self.config.image[1]} pixels",
                because="every patch has a learned position, and these are other patches",
                instead="images of that size, or model(images, resize=True), which interpolates the positions",
            )
        grid = self.patches(images)  # (batch, row, column, dim)
        if tuple(grid.shape[1:3]) != self.config.grid and any(find_grids(b.attention.attention) for b in self.blocks):
            raise InputError(
                "The image has another grid of patches than the attention.",
                asked=f"images {tuple(images.shape)}, of {grid.shape[1]} x {grid.shape[2]} patches",
                found=f"an attention on a grid of {self.config.grid[0]} x {self.config.grid[1]} patches",
                because="its pattern or bias would count rows and columns of other patches",
                instead="images of the size that the model is configured for",
            )
        x = torch.cat((self.class_token.expand(len(grid), -1, -1), grid.flatten(1, 2)), 1)
        x = self.dropout(x + self.positions((grid.shape[1], grid.shape[2])))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    @torch.no_grad()
    def _init_weights(self) -> None:
        init_weights(self, truncated_normal)
        nn.init.normal_(self.class_token, std=0.02)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)


def _build_block(config: ViTConfig, layer: int) -> TransformerBlock:
    hidden = 4 * config.dim if config.hidden_dim is None else config.hidden_dim
    return TransformerBlock(
        MultiHeadAttention(
            config.dim,
            config.heads,
            attention=build_layer(config.attention, layer),
            bias=True if config.qkv_bias else "o",
            dropout=config.dropout,
        ),
        FeedForward(config.dim, hidden, config.activation, dropout=config.dropout),
        eps=config.norm_eps,
        dropout=config.dropout,
    )
