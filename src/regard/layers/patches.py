"""Patch embedding: a token for every patch of an image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from regard.autocast import is_autocast_enabled
from regard.errors import ConfigError, InputError
from regard.layers.linear import linear

# Numbers in a patch from which one matrix product beats torch's convolution (two cores, AVX2, float32): at 768 it is
# 1.0 to 1.3 times as fast, with and without gradients; at 12 and at 192 it is slower.
LARGE_PATCH = 512


class PatchEmbedding(nn.Module):
    """A token for every patch of an image: a convolution that steps from patch to patch.

        token[r, c] = bias + sum_{a, u, v} weight[:, a, u, v] image[a, r s + u - p, c s + v - p]

    `a` runs over channels, `u` and `v` over the `patch x patch` pixels, `s` is the stride and `p` the padding with
    zeros. With `stride=None` the stride is the patch: every pixel is read once, and this is the linear projection of
    flattened patches.

    Images are `(batch, channel, row, column)`, tokens `(batch, row, column, dim)`. Parameters have a convolution's
    shape, whichever way the product is computed.

    Source: Dosovitskiy et al., An Image is Worth 16x16 Words (2021), equation 1.

    Where we differ: an image that is not a whole number of patches is refused; nothing is cut off silently.

        >>> PatchEmbedding(3, 8, patch=4)(torch.randn(2, 3, 20, 12)).shape
        torch.Size([2, 5, 3, 8])

    Args:
        channels: channels of the image.
        dim: channels of a token.
        patch: side of a patch, in pixels.
        stride: pixels from one patch to the next; the patch if `None`.
        padding: zeros around the image.
        bias: whether a bias is added.
    """

    def __init__(
        self, channels: int, dim: int, patch: int, stride: int | None = None, padding: int = 0, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.channels, self.dim, self.patch, self.padding = channels, dim, patch, padding
        self.stride = patch if stride is None else stride
        sizes = {"channels": channels, "dim": dim, "patch": patch, "stride": self.stride, "padding + 1": padding + 1}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(
                    f"A patch embedding needs {name} of at least 1.",
                    asked=f"PatchEmbedding({channels}, {dim}, patch={patch}, stride={stride}, padding={padding})",
                    because="patches have at least one pixel, and the next one lies further on",
                    instead="positive sizes, and a padding of zero or more",
                )
        self.weight = nn.Parameter(torch.empty(dim, channels, patch, patch))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within `1 / sqrt(numbers in a patch)`, as torch's convolutions and linear layers start."""
        bound = 1 / math.sqrt(self.channels * self.patch**2)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def tiles(self) -> bool:
        """Whether patches lie side by side: every pixel belongs to one."""
        return self.stride == self.patch and self.padding == 0

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image of this size."""
        reach = 2 * self.padding - self.patch
        return (rows + reach) // self.stride + 1, (columns + reach) // self.stride + 1

    def forward(self, image: Tensor) -> Tensor:
        self.check(image)
        if self.tiles and self.channels * self.patch**2 >= LARGE_PATCH:
            return self._embed_by_matmul(image)
        tokens = conv2d(image, self.weight, self.bias, stride=self.stride, padding=self.padding)
        return tokens.permute(0, 2, 3, 1)

    def _embed_by_matmul(self, image: Tensor) -> Tensor:
        """The same as one matrix product; the pixels of a patch are laid out in the order that memory already has."""
        batch, channels, height, width = image.shape
        side = self.patch
        rows, columns = height // side, width // side
        patches = image.reshape(batch, channels, rows, side, columns, side)
        if image.stride(1) == 1 and channels > 1:  # a grid of tokens, channels side by side
            patches, weight = patches.permute(0, 2, 4, 3, 5, 1), self.weight.permute(0, 2, 3, 1)
        else:
            patches, weight = patches.permute(0, 2, 4, 1, 3, 5), self.weight
        return linear(patches.reshape(batch, rows, columns, -1), weight.reshape(self.dim, -1), self.bias)

    def check(self, image: Tensor) -> None:
        """Refuses what is not an image of whole patches, in four parts."""
        if image.ndim != 4 or image.shape[1] != self.channels:
            raise InputError(
                "This is not an image of the right kind.",
                asked=f"{self.channels} channels: (batch, {self.channels}, row, column)",
                found=f"a tensor {tuple(image.shape)}",
                because="there is one weight for every channel of a patch"
                if image.ndim == 4
                else "images are (batch, channel, row, column)",
                instead="image[None] for one image without a batch axis"
                if image.ndim == 3
                else "image.permute(0, 3, 1, 2), if channels come last"
                if image.ndim == 4 and image.shape[-1] == self.channels
                else f"images with {self.channels} channels",
            )
        check_pixels(image, self.weight)
        height, width = image.shape[2:]
        if self.tiles and (height % self.patch or width % self.patch):
            tall, wide = (-(-size // self.patch) * self.patch for size in (height, width))
            raise InputError(
                "The image is not a whole number of patches.",
                asked=f"patches of {self.patch} x {self.patch} pixels",
                found=f"an image of {height} x {width}",
                because="the pixels that are left over would be lost",
                instead=f"resize it, or pad it to {tall} x {wide}: "
                f"torch.nn.functional.pad(image, (0, {wide - width}, 0, {tall - height}))",
            )
        if min(self.grid(height, width)) < 1:
            raise InputError(
                "The image is smaller than one patch.",
                asked=f"patches of {self.patch} x {self.patch} pixels with padding {self.padding}",
                found=f"an image of {height} x {width}",
                because="not a single patch fits in",
                instead="a larger image",
            )

    def extra_repr(self) -> str:
        extra = "" if self.tiles else f", stride={self.stride}, padding={self.padding}"
        return f"{self.channels}, {self.dim}, patch={self.patch}{extra}"


def check_pixels(image: Tensor, weight: Tensor) -> None:
    """Refuses pixels that cannot be multiplied with the weights: whole numbers, and numbers of another precision.

    Under autocast precisions may differ, except for float64, which it leaves alone.
    """
    if not image.dtype.is_floating_point:
        raise InputError(
            "Pixels are not floating-point numbers.",
            asked="images to be multiplied with weights",
            found=f"an image of {image.dtype}",
            because="weights and pixels meet in a product",
            instead="image.float() / 255 for bytes, then the normalisation the model was trained with",
        )
    if image.dtype == weight.dtype:
        return
    if torch.float64 in (image.dtype, weight.dtype) or not is_autocast_enabled(image.device):
        raise InputError(
            "The image and the weights have different precisions.",
            asked=f"an image of {image.dtype}",
            found=f"weights of {weight.dtype}",
            because="weights and pixels meet in a product, and nothing is rounded silently",
            instead=f"image.to({weight.dtype}), or the model in {image.dtype}",
        )


__all__ = ["PatchEmbedding", "check_pixels"]
