"""A residual convolutional network for small images: the baseline that attention is compared with.

    x = relu(norm(conv(image)))
    x = relu(x + norm(conv(relu(norm(conv(x))))))       in every block; a stage after the first halves the grid
    logits = W mean(x) + b

Source: He, Zhang, Ren and Sun, Deep Residual Learning (CVPR 2016), section 4.2, with shortcuts of option A: the grid
is subsampled, and new channels are zeros. `ResNetConfig(blocks=(3, 3, 3))` is their ResNet-20, 269,722 parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import pad

from regard.models.config import Config
from regard.models.pretrained import Pretrained
from regard.models.validation import check_sizes


@dataclass(frozen=True)
class ResNetConfig(Config):
    """Sizes of a ResNet.

    Attributes:
        channels, classes: of the image, and logits.
        width: channels of the first stage; each further stage has twice as many.
        blocks: residual blocks of each stage, of two convolutions each.
    """

    channels: int = 3
    classes: int = 10
    width: int = 16
    blocks: tuple[int, ...] = (3, 3, 3)

    def __post_init__(self) -> None:
        check_sizes(self, "channels", "classes", "width")


class ResNet(Pretrained):
    """A residual network.

    >>> import torch
    >>> model = ResNet(ResNetConfig())
    >>> sum(parameter.numel() for parameter in model.parameters())
    269722
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    Config: ClassVar = ResNetConfig

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        self.config: ResNetConfig = config
        self.stem = nn.Conv2d(config.channels, config.width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(config.width)
        self.blocks, dim = nn.ModuleList(), config.width
        for stage, count in enumerate(config.blocks):
            for block in range(count):
                halves = stage > 0 and block == 0
                self.blocks.append(ResidualBlock(dim, 2 * dim if halves else dim, 2 if halves else 1))
                dim = 2 * dim if halves else dim
        self.head = nn.Linear(dim, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, row, column)`."""
        x = self.stem_norm(self.stem(image)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3 pixels, and a shortcut around them."""

    def __init__(self, dim: int, out_dim: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new = stride, out_dim - dim
        self.first = nn.Conv2d(dim, out_dim, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out_dim)
        self.second = nn.Conv2d(out_dim, out_dim, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        made = self.second_norm(self.second(self.first_norm(self.first(x)).relu()))
        shortcut = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new)) if self.new else x
        return (made + shortcut).relu()
