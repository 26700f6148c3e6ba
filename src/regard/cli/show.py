"""`regard show TARGET`: what heads look at, as a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from regard.show import Animation, Picture

DESCRIPTION = """Draw what the heads of TARGET look at.

TARGET is one of
  runs/quadratic              a folder that `regard train` left: the way of its heads; with an image, what a pixel sees
  path/to/checkpoint          a folder with a config.json, or a file of weights
  module:name                 a module; a class is built without arguments
  timm:vit_tiny_patch16_224   a model of timm, transformers:BertModel one of Hugging Face, with random weights
  "Window(128, 0)"            a pattern over --tokens tokens

What it reads is one of --image, --digit and --ids; without one, heads that look by position are drawn by themselves.
"""
EPILOG = """examples:
  regard show runs/quadratic -o heads.svg
  regard show runs/quadratic -o heads.gif
  regard show runs/vit --digit 7 --pixel 3,4 -o seven.svg
  regard show transformers:GPT2Model --ids 5,3,8,1,2 --token 4
  regard show "Causal() & Window(4, 0)" --tokens 24

Ends with 0, or 2 if the picture cannot be made."""


def add(commands: Any) -> None:
    """Teach the command line the word `show`."""
    said = commands.add_parser(
        "show",
        help="draw what the heads of TARGET look at",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    said.add_argument("target", metavar="TARGET", help="whose heads")
    read = said.add_argument_group("what they look at").add_mutually_exclusive_group()
    read.add_argument("--image", metavar="FILE", type=Path, help="an image; it is made as large as the model reads it")
    read.add_argument("--digit", metavar="N", type=int, help="the first test image of this digit")
    read.add_argument("--ids", metavar="N,N,...", type=_numbers, help="the tokens of a text, as numbers")
    read.add_argument("--tokens", metavar="N", type=int, help="so many tokens, for a pattern")
    said.add_argument("--data-folder", metavar="FOLDER", help="of a run: your own files, where it learned from such")
    who = said.add_argument_group("who looks").add_mutually_exclusive_group()
    who.add_argument("--pixel", metavar="ROW,COLUMN", type=_numbers, help="a pixel of the image, counted from 0")
    who.add_argument("--token", metavar="N", type=int, help="a token of the text")
    said.add_argument("--layer", metavar="N,...", type=_numbers, help="only these layers, counted from 0")
    said.add_argument("--head", metavar="N,...", type=_numbers, help="only these heads, counted from 0")
    said.add_argument("--seed", metavar="N", type=int, default=0, help="of random weights (0)")
    said.add_argument(
        "-o", "--out", metavar="FILE", type=Path, default=Path("show.svg"), help=".svg .pdf .png .html, .gif for a run"
    )
    said.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Make the picture, write it, and say what one sees."""
    picture = drawn(asked)
    written = picture.save(asked.out)
    print(picture.caption)
    print(written, file=sys.stderr)
    return 0


def drawn(asked: argparse.Namespace) -> Picture | Animation:
    from regard.show import animate_heads, show

    query = _pixel(asked.pixel) if asked.pixel is not None else asked.token
    choice: dict[str, Any] = {"layer": asked.layer, "head": asked.head, "query": query}
    if asked.tokens is not None:
        from regard.patterns import read_pattern

        return show(read_pattern(asked.target), asked.tokens, query=query)
    folder = Path(asked.target)
    if (folder / "recipe.json").is_file():
        from regard.train import read_history, read_run
        from regard.train.checkpoint import read_claim
        from regard.train.data import load

        if asked.ids is not None:
            raise InputError(
                "A run of images reads no text.",
                asked=f"--ids for {folder}",
                because="it was trained on images",
                instead="--digit 7 or --image FILE, or neither for the way of its heads",
            )
        if asked.image is None and asked.digit is None:
            history = read_history(folder)  # which needs no images
            epochs = [epoch.gazes for epoch in history]
            if asked.out.suffix.lower() != ".gif":
                return show(epochs, **choice)
            for name in ("layer", "head", "query"):
                if choice[name] is not None:
                    raise InputError(
                        f"A film has no {name} to choose.",
                        asked=f"{name} {choice[name]} and {asked.out.name}",
                        because="it shows all heads of all layers on their way",
                        instead="-o heads.svg, or the film without it",
                    )
            return animate_heads(epochs, [f"epoch {epoch.number}, {epoch.accuracy:.1%}" for epoch in history])
        own = None if asked.data_folder is None else load(read_claim(folder)[0].data, asked.data_folder)
        found = read_run(folder, own)
        return show(found.model, found.data.normalise(_image(asked, found.data.shape))[None], **choice)
    from regard.cli.targets import find

    model = find(asked.target, asked.seed)
    if asked.ids is not None:
        return show(model, torch.tensor(asked.ids)[None], **choice)
    if asked.image is None and asked.digit is None:
        return show(model, **choice)
    return show(model, _image(asked, _wanted(model))[None], **choice)


def _image(asked: argparse.Namespace, shape: tuple[int, int, int]) -> Tensor:
    """The image that is asked for, from 0 to 1, `(channel, row, column)` of this shape."""
    if asked.image is not None:
        return _read_image(asked.image, shape)
    from regard.train.data import digits

    data = digits()
    where = (data.test.labels == asked.digit).nonzero().flatten()
    if not len(where) or shape != data.shape:
        raise InputError(
            "There is no such digit for this model." if len(where) else "There is no such digit.",
            asked=f"--digit {asked.digit}",
            found="" if len(where) == 0 else f"a model of {' x '.join(map(str, shape))} images",
            because=f"the digits are 0 to 9, images of {' x '.join(map(str, data.shape))}",
            instead="--image FILE" if len(where) else "--digit 7",
        )
    return data.test.images[int(where[0])]


def _read_image(path: Path, shape: tuple[int, int, int]) -> Tensor:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as failure:
        raise InputError(
            "Image files need Pillow.",
            asked=f"--image {path}",
            because="it comes with matplotlib, and is not installed",
            instead='pip install "regard[show]"',
        ) from failure
    channels, rows, columns = shape
    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if channels == 1 else "RGB").resize((columns, rows), Image.Resampling.BILINEAR)
    except (OSError, UnidentifiedImageError) as failure:
        raise InputError(
            f"{path} is no image that can be read.",
            found=f"{type(failure).__name__}: {failure}",
            because="images are read by Pillow",
            instead="a PNG or JPEG file",
        ) from failure
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(rows, columns, -1)
    return pixels.permute(2, 0, 1).float() / 255


def _wanted(model: Any) -> tuple[int, int, int]:
    """The images that a model reads, as far as it says."""
    config = getattr(model, "config", None)
    size = getattr(config, "image", None) or getattr(config, "image_size", None)
    size = size or getattr(getattr(model, "patch_embed", None), "img_size", None)
    channels = getattr(config, "channels", None) or getattr(config, "num_channels", None) or 3
    if size is None:
        raise InputError(
            "It is not clear which images this model reads.",
            asked=f"an image for {type(model).__name__}",
            because="it says nothing about their size",
            instead="regard.show(model, image) in Python",
        )
    rows, columns = (size, size) if isinstance(size, int) else size
    return channels, rows, columns


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as failure:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, as 0,2 is") from failure


def _pixel(numbers: list[int]) -> tuple[int, int]:
    if len(numbers) != 2:
        raise InputError(
            "A pixel has a row and a column.",
            asked=f"--pixel {','.join(map(str, numbers))}",
            because="two numbers say where it is",
            instead="--pixel 3,4",
        )
    return numbers[0], numbers[1]
