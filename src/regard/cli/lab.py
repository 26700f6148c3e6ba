"""`regard lab [MODEL ...]`: attention in the browser, served to this machine alone."""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.cli.arguments import read_count
from regard.errors import InputError, RegardError

if TYPE_CHECKING:
    from torch import Tensor

    from regard.lab.sources import LoadedModel, Source

DESCRIPTION = """Open a page that shows what models attend to, checks and prices them, and watches them train.

MODEL is one of
  path/to/model               a folder or a file of weights: ours, Hugging Face's, timm's; with its tokenizer
  runs/quadratic              a folder of `regard train`: its model, and its course in the view Train
  transformers:BertModel      a tiny random model of a class of Hugging Face, timm:vit_tiny_patch16_224 one of timm
  module:name                 a module, or a function or class that makes one: its code is run

Models that `python -m regard.downloads` has fetched are in the list by themselves. The page cannot name others:
what may be loaded is what this command line says. The server listens on 127.0.0.1 alone, and its address holds a
random token.
"""
EPILOG = """examples:
  regard lab
  regard lab path/to/bert runs/quadratic
  regard lab mypackage.models:make_model --port 8765 --no-open

Ends with Ctrl-C. Exit codes: 0, or 2 for a wrong command."""


def add(commands: Any) -> None:
    """Add the command `lab`."""
    parser = commands.add_parser(
        "lab", help="attention in the browser, for any model, offline", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("models", metavar="MODEL", nargs="*", help="models and runs to have in the list")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="the port (a free one)")
    parser.add_argument("--no-open", action="store_true", help="print the address and open no browser")
    parser.add_argument("--memory", metavar="MB", type=read_count, default=2048, help="for inputs, in megabytes (2048)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of random weights (0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the page until an interrupt."""
    lab_server = _import_server()
    from regard.lab.sources import find_downloaded
    from regard.lab.state import Lab

    sources = [make_source(target, args.seed) for target in args.models]
    runs = find_runs(args.models)
    lab = Lab([*sources, *find_downloaded()], runs, args.memory << 20)

    def announce(address: str) -> None:
        print(f"The lab is at {address}", flush=True)
        if not args.no_open and not webbrowser.open(address):
            print("Open this address in a browser; Ctrl-C ends the lab.", file=sys.stderr)

    lab_server.serve(lab, args.port, announce)
    return 0


def _import_server() -> Any:
    try:
        from regard.lab import server
    except ImportError as failure:
        raise InputError(
            "The lab needs a web server.",
            asked="regard lab",
            found=f"{type(failure).__name__}: {failure}",
            because="starlette, uvicorn, python-multipart and pillow are the extra `lab`",
            instead='pip install "regard[lab]"',
        ) from failure
    return server


def is_run(target: str) -> bool:
    """Whether a target is the folder of a training run."""
    try:
        return (Path(target).expanduser() / "recipe.json").is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def find_runs(targets: Sequence[str]) -> dict[str, Path]:
    """The runs among the targets by their names: of two folders of one name the second has its parent's, too."""
    found: dict[str, Path] = {}
    for target in targets:
        if is_run(target):
            place = Path(target).expanduser().resolve()
            name, number = place.name, 2
            while name in found:
                name, number = f"{place.name} ({number})", number + 1
            found[name] = place
    return found


def make_source(target: str, seed: int = 0) -> Source:
    """The model that a target of the command line names; it is loaded when the page opens it."""
    from regard.lab.sources import Source

    try:
        exists = bool(target.strip()) and Path(target).expanduser().exists()
    except (OSError, ValueError):
        exists = False
    if not exists and ":" not in target:
        raise InputError(
            f"{target!r} is no model.",
            asked=f"regard lab {target}",
            because="there is no such file or folder, and it has no colon (module:name)",
            instead="a folder with a config.json, or transformers:BertModel",
        )
    if is_run(target):
        return Source(Path(target).resolve().name, f"run {target}", lambda: _load_run(target), None, True)
    name = Path(target).expanduser().resolve().name if exists else target
    return Source(name, target, lambda: _load(target, seed), None, exists)


def _load(target: str, seed: int) -> LoadedModel:
    from regard.cli.targets import make_target
    from regard.lab.sources import LoadedModel
    from regard.visualize.text_input import find_tokenizer

    module = make_target(make_target(target, seed), seed)
    tokenizer = None
    python = ["from regard.cli.targets import load_target", f"model = load_target({target!r}, {seed})"]
    if Path(target).expanduser().exists():
        try:
            tokenizer = find_tokenizer(target)
            python += [
                "from regard.visualize.text_input import find_tokenizer",
                f"tokenizer = find_tokenizer({target!r})",
            ]
        except RegardError:  # a model of images, or one whose tokens are numbers
            tokenizer = None
    config = getattr(module, "config", None)
    names = getattr(config, "id2label", None) or {}
    class_names = [str(names[key]) for key in sorted(names)]
    return LoadedModel(module, tokenizer, find_normalization(module, target), class_names, python)


def find_normalization(module: Any, target: str) -> Callable[[Tensor], Tensor] | None:
    """How a model wants its images: with the mean and deviation of timm's configuration, or of Hugging Face's file."""
    config = getattr(module, "pretrained_cfg", None) or {}
    mean, std = config.get("mean"), config.get("std")
    try:
        found = json.loads((Path(target).expanduser() / "preprocessor_config.json").read_text(encoding="utf-8"))
        if found.get("do_normalize", True):
            mean, std = found.get("image_mean"), found.get("image_std")
    except (OSError, ValueError):  # no such file, or none that can be read
        pass
    if not mean or not std:
        return None
    center, width = (torch.tensor([float(number) for number in each])[:, None, None] for each in (mean, std))

    def normalize(images: Tensor) -> Tensor:
        return (images - center) / width

    return normalize


def _load_run(target: str) -> LoadedModel:
    """The model of a run: its best, its final one or its newest checkpoint, as `regard generate` takes it."""
    from regard.cli.generate import find_model_folder
    from regard.cli.targets import load_target
    from regard.lab.sources import LoadedModel
    from regard.train.data.text import read_tokenizer

    place = find_model_folder(target)
    python = ["from regard.cli.targets import load_target", f"model = load_target({str(place)!r})"]
    if not (place / "tokenizer.json").is_file():  # of images, which are normalised as in training
        from regard.train import read_run

        found = read_run(target)
        python = ["from regard.train import read_run", f"run = read_run({target!r})", "model = run.model"]
        data = getattr(found, "data", None)
        normalize = getattr(data, "normalise", None)
        names = [str(name) for name in getattr(data, "names", ()) or ()]
        return LoadedModel(found.model, None, normalize, names, python)
    python += [
        "from regard.train.data.text import read_tokenizer",
        f"tokenizer = read_tokenizer({str(place)!r})",
    ]
    return LoadedModel(load_target(str(place)), read_tokenizer(place), python=python)
