"""`regard show TARGET`: what heads look at, as a picture."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from regard.visualize import Animation, Picture

DESCRIPTION = """Draw what the heads of TARGET look at.

TARGET is one of
  runs/quadratic              a folder that `regard train` left: its heads, epoch by epoch; with an image, its maps
  path/to/checkpoint          a folder with a config.json, or a file of weights (.gguf, .safetensors, ...)
  module:name                 a module; a class is built without arguments
  timm:vit_tiny_patch16_224   a model of timm, transformers:BertModel one of Hugging Face, with random weights
  "Window(128, 0)"            a pattern over --tokens tokens

The input is one of --text, --ids, --image and --digit; without one, heads that look by position are
drawn by themselves. Layers, heads, tokens, rows and columns are counted from 0, here and in the pictures.
"""
EPILOG = """examples:
  regard show runs/quadratic -o heads.html                     a page with a slider through the epochs
  regard show runs/quadratic -o heads.gif
  regard show runs/vit --digit 7 --pixel 3,4 -o seven.svg
  regard show path/to/gpt --text "The keys to the cabinet are" --token 5 --layer 2 --head 0,4
  regard show transformers:GPT2Model --ids 5,3,8,1,2 --token 4
  regard show "Causal() & Window(4, 0)" --tokens 24

Ends with 0, or 2 if the picture cannot be made."""
UNTRAINED = "random weights (not trained)"


def add(commands: Any) -> None:
    """Teach the command line the word `show`."""
    said = commands.add_parser(
        "show",
        help="draw what the heads of TARGET look at",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    said.add_argument("target", metavar="TARGET", help="the model, the run or the pattern")
    read = said.add_argument_group("input").add_mutually_exclusive_group()
    read.add_argument("--text", metavar="TEXT", help="a text, read by the tokenizer that lies beside the model")
    read.add_argument("--ids", metavar="N,N,...", help="the token ids of a text")
    read.add_argument("--image", metavar="FILE", type=Path, help="an image; it is resized to what the model reads")
    read.add_argument("--digit", metavar="N", type=int, help="the first test image of this digit")
    read.add_argument("--tokens", metavar="N", type=int, help="the sequence length, for a pattern")
    said.add_argument("--data-folder", metavar="FOLDER", help="of a run: your own files, where it learned from such")
    who = said.add_argument_group("query").add_mutually_exclusive_group()
    who.add_argument("--pixel", metavar="ROW,COLUMN", help="a pixel of the image")
    who.add_argument("--token", metavar="N", type=int, help="a token of the text")
    said.add_argument("--layer", metavar="N,...", help="only these layers")
    said.add_argument("--head", metavar="N,...", help="only these heads")
    said.add_argument("--seed", metavar="N", type=int, default=0, help="of random weights (0)")
    said.add_argument(
        "-o", "--out", metavar="FILE", type=Path, default=Path("show.svg"), help=".svg .pdf .png .html, .gif for a run"
    )
    said.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Make the picture, write it, and print its caption."""
    picture = make_picture(asked)
    written = picture.save(asked.out)
    print(picture.caption)
    print(written, file=sys.stderr)
    return 0


def make_picture(asked: argparse.Namespace) -> Picture | Animation:
    from regard.visualize import show

    query = asked.token if asked.pixel is None else _read_pixel(asked.pixel)
    layer, head = (_read_numbers(name, getattr(asked, name)) for name in ("layer", "head"))
    choice: dict[str, Any] = {"layer": layer, "head": head, "query": query}
    if asked.tokens is not None:
        from regard.patterns import read_pattern

        return show(read_pattern(asked.target), asked.tokens, **choice)
    if _is_run(asked.target):
        return _show_run(asked, choice)
    words = None
    if asked.text is not None:
        from regard.visualize.text_input import encode_text, find_tokenizer

        words = find_tokenizer(asked.target)
        ids: list[int] | None = encode_text(words, asked.text)
    else:
        ids = _read_numbers("ids", asked.ids)
    from regard.cli.targets import find

    model = find(asked.target, asked.seed)
    if ids is not None:
        _check_ids(model, ids, "--text" if asked.ids is None else "--ids")
        picture = show(model, torch.tensor(ids)[None], words=words, **choice)
    elif asked.image is None and asked.digit is None:
        picture = show(model, **choice)
    else:
        picture = show(model, _image(asked, _wanted(model))[None], **choice)
    if _is_untrained(asked.target):
        picture.add_note(UNTRAINED)
    return picture


def _is_run(target: str) -> bool:
    try:
        return (Path(target) / "recipe.json").is_file()
    except (OSError, ValueError):  # no name that a file could have
        return False


def _show_run(asked: argparse.Namespace, choice: dict[str, Any]) -> Picture | Animation:
    """What `regard train` left: the heads epoch by epoch, or what a pixel of an image sees."""
    from regard.train import read_history, read_run
    from regard.train.checkpoint import read_claim
    from regard.train.data import load
    from regard.visualize import animate_heads, show
    from regard.visualize.heads import draw_head_paths

    folder = Path(asked.target)
    for flag in ("text", "ids"):
        if getattr(asked, flag) is not None:
            raise InputError(
                "A run of images reads no text.",
                asked=f"--{flag} for {folder}",
                because="it was trained on images",
                instead="--digit 7 or --image FILE, or neither for its heads epoch by epoch",
            )
    if asked.image is not None or asked.digit is not None:
        own = None if asked.data_folder is None else load(read_claim(folder)[0].data, asked.data_folder)
        found = read_run(folder, own)
        return show(found.model, found.data.normalise(_image(asked, found.data.shape))[None], **choice)
    for name in ("head", "query"):
        if choice[name] is not None:
            raise InputError(
                f"Without an input there is no {name} to choose.",
                asked=f"--{name if name == 'head' else 'token' if asked.pixel is None else 'pixel'}",
                because="all heads of a layer are drawn in one picture, around the query",
                instead="--digit 7 or --image FILE with it, or --layer alone",
            )
    history = read_history(folder)  # which needs no images
    epochs = [epoch.head_profiles for epoch in history]
    labels = [f"epoch {epoch.number}, {epoch.accuracy:.1%}" for epoch in history]
    if asked.out.suffix.lower() == ".gif":
        return animate_heads(epochs, labels, layers=choice["layer"])
    return draw_head_paths(epochs, choice["layer"], labels)


def _is_untrained(target: str) -> bool:
    """Whether the model was built from a name or a configuration, and no weights were loaded."""
    try:
        if Path(target).exists():
            return False
    except (OSError, ValueError):
        return False
    place = target.partition(":")[0]
    if place == "timm":
        return re.search(r"pretrained\s*=\s*True", target) is None
    return place in ("transformers", "torch", "regard") or place.startswith(("torch.", "regard."))


def _check_ids(model: Any, ids: list[int], flag: str) -> None:
    """Refuse token ids that the model has no embedding for, and more of them than it has positions."""
    from regard.visualize.failures import read_limits

    vocab_size, positions = read_limits(model)
    wrong = [number for number in ids if number < 0 or (vocab_size is not None and number >= vocab_size)]
    if wrong:
        raise InputError(
            f"There is no token {wrong[0]}.",
            asked=f"{flag} with {', '.join(map(str, wrong[:5]))}{' ...' if len(wrong) > 5 else ''}",
            found=f"{type(model).__name__}"
            + (f" with a vocabulary of {vocab_size:,}" if vocab_size is not None else ""),
            because="token ids are counted from 0",
            instead="--ids 5,3,8" if vocab_size is None else f"ids from 0 to {vocab_size - 1}",
        )
    if positions is not None and len(ids) > positions:
        raise InputError(
            "The text is too long for this model.",
            asked=f"{flag} with {len(ids):,} tokens",
            found=f"{type(model).__name__} with positions for {positions:,}",
            because="tokens beyond that have no position",
            instead=f"the first {positions:,} tokens",
        )


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


def _read_numbers(flag: str, text: str | None) -> list[int] | None:
    """Whole numbers with commas between them."""
    if text is None:
        return None
    because = "numbers have commas between them and nothing else" if text.strip() else "it is empty"
    try:
        numbers = [int(part) for part in text.split(",")]
        if any(abs(number) >= 2**63 for number in numbers):
            because = "a number has more than 64 bits"
            raise ValueError
        return numbers
    except ValueError as failure:
        raise InputError(
            f"{text!r} is no list of whole numbers.",
            asked=f"--{flag} {text}",
            because=because,
            instead=f"--{flag} 0,2",
        ) from failure


def _read_pixel(text: str) -> tuple[int, int]:
    numbers = _read_numbers("pixel", text) or []
    if len(numbers) != 2:
        raise InputError(
            "A pixel has a row and a column.",
            asked=f"--pixel {text}",
            because="two numbers say where it is",
            instead="--pixel 3,4",
        )
    return numbers[0], numbers[1]
