"""Small changes of training images that do not change what they show."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def draw(count: int, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    """How each of `count` images is to be changed: rows down, columns right, and whether mirrored, `(count, 3)`."""
    moves = torch.randint(-shift, shift + 1, (count, 2), generator=generator)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator) * int(flip)
    return torch.cat((moves, mirrored), 1)


def change(images: Tensor, drawn: Tensor, shift: int) -> Tensor:
    """Move every image of `(image, channel, row, column)` by what was drawn for it, and mirror left and right.

    What moves in from outside is 0. A random crop after padding by `shift` is the same thing.

        >>> image = torch.tensor([[[[1, 2, 3], [4, 5, 6]]]])
        >>> change(image, torch.tensor([[1, -1, 0]]), shift=1)[0, 0].tolist()
        [[0, 0, 0], [2, 3, 0]]
        >>> change(image, torch.tensor([[0, 0, 1]]), shift=0)[0, 0].tolist()
        [[3, 2, 1], [6, 5, 4]]
    """
    rows, columns = images.shape[-2:]
    padded = functional.pad(images, (shift, shift, shift, shift))
    row = shift - drawn[:, :1] + torch.arange(rows)
    column = torch.arange(columns).expand(len(images), -1)
    column = torch.where(drawn[:, 2:] > 0, columns - 1 - column, column) + shift - drawn[:, 1:2]
    which = torch.arange(len(images))[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[which, row[:, :, None], column[:, None]]  # (image, row, column, channel)
    return moved.permute(0, 3, 1, 2).contiguous()
