"""PNG images without a library, as bytes and as data URIs that a page carries within itself."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor


def encode_png(pixels: Tensor) -> bytes:
    """A PNG file of red, green and blue from 0 to 1, `(row, column, 3)`; a fourth channel is the opacity.

    >>> from regard.render.png import encode_png
    >>> encode_png(torch.zeros(2, 3, 3))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    rows, columns, channels = pixels.shape
    data = (255 * pixels.detach().cpu().clamp(0, 1)).round().to(torch.uint8)
    # The first byte of each row says that it is not filtered.
    lines = torch.cat((torch.zeros(rows, 1, dtype=torch.uint8), data.reshape(rows, -1)), 1)
    color_type = {3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", columns, rows, 8, color_type, 0, 0, 0)
    body = zlib.compress(bytes(lines.flatten().tolist()), 9)
    parts = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part)) for name, part in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_uri(pixels: Tensor) -> str:
    """The same image as a `data:` URI."""
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode("ascii")
