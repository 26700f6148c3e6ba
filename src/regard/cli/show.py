"""`regard show TARGET`: plots of attention maps."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.cli.arguments import read_integers
from regard.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from regard.visualize import Animation, Picture

DESCRIPTION = """Plot the attention maps of TARGET.

TARGET is one of
  runs/quadratic              a folder of `regard train`: its heads in every epoch; with an image, its attention maps
  path/to/checkpoint          a folder with a config.json, or a file of weights (.gguf, .safetensors, ...)
  module:name                 a module; a class is built without arguments
  timm:vit_tiny_patch16_224   a model of timm, transformers:BertModel one of Hugging Face, with random weights
  "Window(128, 0)"            a pattern over --tokens tokens

The input is one of --text, --ids, --image and --digit; without one, positional heads are drawn around the query.
Layers, heads, tokens, rows and columns are counted from 0, here and in the plots.
"""
EPILOG = """examples:
  regard show runs/quadratic -o heads.html                     a page with a slider through the epochs
  regard show runs/quadratic -o heads.gif
  regard show runs/vit --digit 7 --pixel 3,4 -o seven.svg
  regard show path/to/gpt --text "The keys to the cabinet are" --token 5 --layer 2 --head 0,4
  regard show transformers:GPT2Model --ids 5,3,8,1,2 --token 4
  regard show "Causal() & Window(4, 0)" --tokens 24

Exit codes: 0, or 2 for a wrong command or input."""
UNTRAINED = "random weights (not trained)"


def add(commands: Any) -> None:
    """Add the command `show`."""
    parser = commands.add_parser(
        "show",
        help="plot the attention maps of TARGET",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("target", metavar="TARGET", help="the model, the run or the pattern")
    source = parser.add_argument_group("input").add_mutually_exclusive_group()
    source.add_argument("--text", metavar="TEXT", help="a text, encoded by the tokenizer of the model")
    source.add_argument("--ids", metavar="N,N,...", help="the token ids of a text")
    source.add_argument("--image", metavar="FILE", type=Path, help="an image file, resized to the input of the model")
    source.add_argument("--digit", metavar="N", type=int, help="the first test image of this digit")
    source.add_argument("--tokens", metavar="N", type=int, help="the sequence length, for a pattern")
    parser.add_argument(
        "--data-folder", metavar="FOLDER", help="for a run that was trained on your own files: their folder"
    )
    query = parser.add_argument_group("query").add_mutually_exclusive_group()
    query.add_argument("--pixel", metavar="ROW,COLUMN", help="a pixel of the image")
    query.add_argument("--token", metavar="N", type=int, help="a token of the text")
    parser.add_argument("--layer", metavar="N,...", help="only these layers")
    parser.add_argument("--head", metavar="N,...", help="only these heads")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of random weights (0)")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, default=Path("show.svg"), help=".svg .pdf .png .html, .gif for a run"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw the picture, write it, and print its caption."""
    picture = make_picture(args)
    written = picture.save(args.out)
    print(picture.caption)
    print(written, file=sys.stderr)
    return 0


def make_picture(args: argparse.Namespace) -> Picture | Animation:
    from regard.visualize import show

    query = args.token if args.pixel is None else _read_pixel(args.pixel)
    layer, head = (read_integers(name, getattr(args, name)) for name in ("layer", "head"))
    choice: dict[str, Any] = {"layer": layer, "head": head, "query": query}
    if args.tokens is not None:
        from regard.patterns import read_pattern

        return show(read_pattern(args.target), args.tokens, **choice)
    if _is_run(args.target):
        return _show_run(args, choice)
    words = None
    if args.text is not None:
        from regard.visualize.text_input import encode_text, find_tokenizer

        words = find_tokenizer(args.target)
        ids: list[int] | None = encode_text(words, args.text)
    else:
        ids = read_integers("ids", args.ids)
    from regard.cli.targets import load_target

    model = load_target(args.target, args.seed)
    if ids is not None:
        _check_ids(model, ids, "--text" if args.ids is None else "--ids")
        picture = show(model, torch.tensor(ids)[None], words=words, **choice)
    elif args.image is None and args.digit is None:
        picture = show(model, **choice)
    else:
        picture = show(model, _load_input(args, _find_image_shape(model))[None], **choice)
    if _is_untrained(args.target):
        picture.add_note(UNTRAINED)
    return picture


def _is_run(target: str) -> bool:
    try:
        return (Path(target) / "recipe.json").is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _show_run(args: argparse.Namespace, choice: dict[str, Any]) -> Picture | Animation:
    """The heads of a run in every epoch, or its attention maps on an image."""
    from regard.train import read_history, read_run
    from regard.train.checkpoint import read_claimed_recipe
    from regard.train.data import load
    from regard.visualize import animate_heads, show
    from regard.visualize.heads import draw_head_paths

    folder = Path(args.target)
    for flag in ("text", "ids"):
        if getattr(args, flag) is not None:
            raise InputError(
                f"--{flag} does not apply to this run.",
                asked=f"--{flag} for {folder}",
                because="it was trained on images",
                instead="--digit 7 or --image FILE, or neither for its heads in every epoch",
            )
    if args.image is not None or args.digit is not None:
        data = None if args.data_folder is None else load(read_claimed_recipe(folder)[0].data, args.data_folder)
        found = read_run(folder, data)
        return show(found.model, found.data.normalise(_load_input(args, found.data.shape))[None], **choice)
    for name in ("head", "query"):
        if choice[name] is not None:
            raise InputError(
                f"Without an input there is no {name} to select.",
                asked=f"--{name if name == 'head' else 'token' if args.pixel is None else 'pixel'}",
                because="all heads of a layer are drawn in one panel, around the query",
                instead="--digit 7 or --image FILE with it, or --layer alone",
            )
    history = read_history(folder)  # which needs no images
    epochs = [epoch.head_profiles for epoch in history]
    labels = [f"epoch {epoch.number}, {epoch.accuracy:.1%}" for epoch in history]
    if args.out.suffix.lower() == ".gif":
        return animate_heads(epochs, labels, layers=choice["layer"])
    return draw_head_paths(epochs, choice["layer"], labels)


def _is_untrained(target: str) -> bool:
    """Whether the model was built from a name or a configuration, without loading weights."""
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
    """Raise for token ids without an embedding, and for more tokens than positions."""
    from regard.visualize.inputs import read_limits

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
            because="there are no position embeddings beyond that",
            instead=f"the first {positions:,} tokens",
        )


def _load_input(args: argparse.Namespace, shape: tuple[int, int, int]) -> Tensor:
    """The image of `--image` or `--digit`, from 0 to 1, `(channel, row, column)` of this shape."""
    if args.image is not None:
        return _read_image(args.image, shape)
    from regard.train.data import digits

    data = digits()
    where = (data.test.labels == args.digit).nonzero().flatten()
    if not len(where) or shape != data.shape:
        raise InputError(
            "There is no such digit for this model." if len(where) else "There is no such digit.",
            asked=f"--digit {args.digit}",
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
            because="Pillow, a dependency of matplotlib, is not installed",
            instead='pip install "regard[show]"',
        ) from failure
    channels, rows, columns = shape
    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if channels == 1 else "RGB").resize((columns, rows), Image.Resampling.BILINEAR)
    except (OSError, UnidentifiedImageError) as failure:
        raise InputError(
            f"{path} cannot be read as an image.",
            found=f"{type(failure).__name__}: {failure}",
            because="images are read by Pillow",
            instead="a PNG or JPEG file",
        ) from failure
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(rows, columns, -1)
    return pixels.permute(2, 0, 1).float() / 255


def _find_image_shape(model: Any) -> tuple[int, int, int]:
    """Channels, rows and columns of the images that a model takes, from its configuration."""
    config = getattr(model, "config", None)
    size = getattr(config, "image", None) or getattr(config, "image_size", None)
    size = size or getattr(getattr(model, "patch_embed", None), "img_size", None)
    channels = getattr(config, "channels", None) or getattr(config, "num_channels", None) or 3
    if size is None:
        raise InputError(
            "The image size of this model is unknown.",
            asked=f"an image for {type(model).__name__}",
            because="its configuration has no image size",
            instead="regard.show(model, image) in Python",
        )
    rows, columns = (size, size) if isinstance(size, int) else size
    return channels, rows, columns


def _read_pixel(text: str) -> tuple[int, int]:
    numbers = read_integers("pixel", text) or []
    if len(numbers) != 2:
        raise InputError(
            "A pixel has a row and a column.",
            asked=f"--pixel {text}",
            because="a pixel is given by two integers",
            instead="--pixel 3,4",
        )
    return numbers[0], numbers[1]
