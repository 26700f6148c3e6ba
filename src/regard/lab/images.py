"""Images from the page, decoded by Pillow within bounds of bytes and pixels."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from torch import Tensor

from regard.lab.answers import Refused

MOST_PIXELS = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode_image(content: bytes, shape: tuple[int, int, int]) -> Tensor:
    """An image file as numbers from 0 to 1, `(channel, row, column)` of this shape; the middle of it, resized.

    The size is read from the file's header, and a larger one refused before a pixel is decoded.
    """
    from PIL import Image, ImageOps

    channels, rows, columns = shape
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the bound below is stricter
            opened = Image.open(io.BytesIO(content), formats=FORMATS)
        with opened:
            if opened.width * opened.height > MOST_PIXELS or not opened.width * opened.height:
                raise Refused(
                    "The image is too large.",
                    status=413,
                    found=f"{opened.width:,} x {opened.height:,} pixels",
                    because=f"an image has at most {MOST_PIXELS:,} pixels",
                    instead="a smaller image: the model reads " + f"{columns} x {rows}",
                )
            opened.draft("RGB", (columns, rows))  # JPEGs are decoded at a fraction of their size
            image = ImageOps.exif_transpose(opened)
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image = image.convert("L" if channels == 1 else "RGB")
            image = ImageOps.fit(image, (columns, rows), Image.Resampling.BICUBIC)
    except Refused:
        raise
    except Exception as failure:  # damaged files raise nearly anything; DecompressionBombError is one of them
        raise Refused(
            "The image cannot be read.",
            status=400,
            found=f"{type(failure).__name__}: {str(failure)[:120]}",
            because=f"images are files of the formats {', '.join(FORMATS)}",
            instead="a PNG or JPEG file",
        ) from None
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    return pixels if channels in (1, 3) else pixels.mean(0, keepdim=True).expand(channels, -1, -1)
