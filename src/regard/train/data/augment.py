"""Augmentation of training images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of training images, drawn anew in every epoch.

    shift: largest shift in pixels along each axis; by whole pixels unless it is a fraction or combined with `turn` or
        `stretch`: then bilinear. A random crop after padding is such a shift.
    turn: largest rotation in degrees, either way.
    stretch: largest relative scaling, along each axis independently.
    flip: horizontal flip with probability one half.

    Pixels from outside the image are 0.

        >>> image = torch.tensor([[[[1.0, 2, 3], [4, 5, 6]]]])
        >>> moved = Augmentation(shift=1).apply(image, torch.tensor([[1.0, -1, 0, 0, 0, 0]]))
        >>> moved[0, 0].tolist()
        [[0.0, 0.0, 0.0], [2.0, 3.0, 0.0]]
    """

    shift: float = 0.0
    turn: float = 0.0
    stretch: float = 0.0
    flip: bool = False

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """For each image: rows down, columns right, whether mirrored, degrees, stretch of rows and of columns."""
        if self._shifts_whole_pixels:
            moves = torch.randint(-round(self.shift), round(self.shift) + 1, (count, 2), generator=generator).float()
        else:
            moves = self.shift * self._draw_uniform((count, 2), generator)
        mirrored = torch.randint(0, 2, (count, 1), generator=generator).float() * self.flip
        angles = self.turn * self._draw_uniform((count, 1), generator)
        return torch.cat((moves, mirrored, angles, self.stretch * self._draw_uniform((count, 2), generator)), 1)

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Apply the drawn parameters to images `(image, channel, row, column)` from 0 to 1."""
        if not (self.shift or self.turn or self.stretch or self.flip):
            return images
        images = torch.where(drawn[:, 2, None, None, None] > 0, images.flip(-1), images)
        return self._shift_pixels(images, drawn) if self._shifts_whole_pixels else self._warp_affine(images, drawn)

    @property
    def _shifts_whole_pixels(self) -> bool:
        return not self.turn and not self.stretch and float(self.shift).is_integer()

    @staticmethod
    def _draw_uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Uniform random numbers from -1 to 1."""
        return 2 * torch.rand(shape, generator=generator) - 1

    def _shift_pixels(self, images: Tensor, drawn: Tensor) -> Tensor:
        side = round(self.shift)
        padded = functional.pad(images, (side, side, side, side)).permute(0, 2, 3, 1)
        row, column = (
            side - drawn[:, axis, None].long() + torch.arange(size) for axis, size in enumerate(images.shape[-2:])
        )
        which = torch.arange(len(images))[:, None, None]
        return padded[which, row[:, :, None], column[:, None]].permute(0, 3, 1, 2).contiguous()

    def _warp_affine(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Affine warp about the centre of the image, with bilinear sampling."""
        rows, columns = images.shape[-2:]
        down, right, _, angle, taller, wider = drawn.unbind(1)
        cosine, sine = torch.cos(angle * math.pi / 180), torch.sin(angle * math.pi / 180)
        # affine_grid has columns before rows, and coordinates in units of half an image.
        across = torch.stack(((1 + wider) * cosine, -(1 + taller) * sine * rows / columns, -2 * right / columns), 1)
        along = torch.stack(((1 + wider) * sine * columns / rows, (1 + taller) * cosine, -2 * down / rows), 1)
        where = functional.affine_grid(torch.stack((across, along), 1), list(images.shape), align_corners=False)
        return functional.grid_sample(images, where, align_corners=False)
