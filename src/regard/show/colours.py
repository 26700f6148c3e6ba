"""The colours of every picture, and small images as text for a page."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

# One for each head, after Tol's "muted" scheme, which people tell apart however they see colours; some are darker here
# so that they stand out from white paper. The second row is for dark paper. A head has its number beside it as well.
HEADS = ("#332288", "#2b8fc4", "#2a9584", "#117733", "#85851f", "#b8860b", "#c8505f", "#882255", "#aa4499")
HEADS_LIGHTER = ("#a79bff", "#88ccee", "#5cd0bc", "#66c47a", "#cbcb5a", "#e8cf73", "#f5919e", "#e07aa8", "#dd94d4")

INK, FAINT, LINE, PAPER = "#1d1f23", "#6a6f78", "#dddcd6", "#fcfcfa"
ACCENT = "#c2410c"  # what is asked about: the query
LOOK = (0.0, 0.36, 0.72)  # what is looked at, as red, green and blue

# From blue through white to red, nearly linear in lightness; the middle is zero.
NEGATIVE, POSITIVE = (0.0196, 0.2863, 0.5882), (0.6980, 0.0941, 0.1255)


def head_colour(head: int, dark: bool = False) -> str:
    """The colour of a head; after nine they begin again."""
    colours = HEADS_LIGHTER if dark else HEADS
    return colours[head % len(colours)]


def diverging(values: Tensor, largest: float) -> Tensor:
    """Red, green and blue, `(*values, 3)`: white at 0, red at `largest` and above, blue at `-largest` and below.

    >>> from regard.show.colours import diverging
    >>> (255 * diverging(torch.tensor([-2.0, 0.0, 2.0]), 2.0)).round().int().tolist()
    [[5, 73, 150], [255, 255, 255], [178, 24, 32]]
    """
    share = (values / largest if largest > 0 else torch.zeros_like(values)).clamp(-1, 1).unsqueeze(-1)
    ends = [torch.tensor(end, dtype=share.dtype, device=share.device) for end in (NEGATIVE, POSITIVE)]
    # A little more colour for small values, which the eye takes for white otherwise.
    bend = share.abs() ** 0.8
    return 1 - bend * (1 - torch.where(share < 0, ends[0], ends[1]))


def overlay(image: Tensor, weights: Tensor) -> Tensor:
    """An image `(row, column)` in greys with `weights` `(row, column)` laid over it in blue, `(row, column, 3)`.

    Both from 0 to 1. The image keeps to the light greys, so that the blue is read everywhere.
    """
    grey = (1 - 0.55 * image.clamp(0, 1)).unsqueeze(-1)
    share = 0.9 * weights.clamp(0, 1).unsqueeze(-1)
    return grey * (1 - share) + share * torch.tensor(LOOK, dtype=grey.dtype)


def png(pixels: Tensor) -> bytes:
    """A PNG file of red, green and blue from 0 to 1, `(row, column, 3)`; a fourth channel is how opaque a pixel is.

    >>> from regard.show.colours import png
    >>> png(torch.zeros(2, 3, 3))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    rows, columns, channels = pixels.shape
    data = (255 * pixels.detach().cpu().clamp(0, 1)).round().to(torch.uint8)
    # A byte before each row says that it is written as it is.
    lines = torch.cat((torch.zeros(rows, 1, dtype=torch.uint8), data.reshape(rows, -1)), 1)
    kind = {3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", columns, rows, 8, kind, 0, 0, 0)
    body = zlib.compress(bytes(lines.flatten().tolist()), 9)
    parts = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part)) for name, part in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_uri(pixels: Tensor) -> str:
    """The same as the address of an image that a page carries within itself."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")
