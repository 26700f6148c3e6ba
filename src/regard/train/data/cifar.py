"""CIFAR-10: from the binary version, or from a package with the same images in six PNG files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import torch
from torch import Tensor

from regard.errors import InputError
from regard.train.data.images import Images, ImageSplit

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE


def cifar10(folder: Path) -> Images:
    """CIFAR-10 from a folder, with the official split of 50,000 and 10,000.

    Either the binary version, `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`, in which an image is a
    label followed by its channels; or the npm package's PNG files, in which a row is an image. The pickled Python
    version is not supported, because unpickling can execute code.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009).
    """
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    if (folder / "test_batch.bin").is_file():
        train = [_read_binary(_require_file(folder, f"{name}.bin")) for name in batches]
        parts = [_concatenate_batches(train), _concatenate_batches([_read_binary(folder / "test_batch.bin")])]
    elif (folder / "test_batch.png").is_file():
        train = torch.cat([_read_png(_require_file(folder, f"{name}.png")) for name in batches])
        test = _read_png(folder / "test_batch.png")
        # The package's own spelling.
        parts = [
            ImageSplit(train, _read_labels(_require_file(folder, "train_lables.json"), len(train))),
            ImageSplit(test, _read_labels(_require_file(folder, "test_lables.json"), len(test))),
        ]
    else:
        pickles = (folder / "test_batch").is_file()
        raise InputError(
            f"CIFAR-10 is not in {folder}.",
            asked=f"CIFAR-10 from {folder}",
            found="the pickled Python version" if pickles else "neither test_batch.bin nor test_batch.png",
            because="unpickling can execute code" if pickles else "the folder has no known version of the data set",
            instead="the binary version (cifar-10-binary.tar.gz, unpacked), or python -m regard.downloads cifar10",
        )
    return Images("cifar10", *parts, names=NAMES)


def _read_binary(path: Path) -> tuple[Tensor, Tensor]:
    raw = numpy.fromfile(path, dtype=numpy.uint8)
    if not len(raw) or len(raw) % RECORD:
        raise _damaged_file(path, f"{len(raw):,} bytes, not a multiple of the {RECORD:,} of an image")
    records = torch.from_numpy(raw).view(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0].long()


def _concatenate_batches(batches: list[tuple[Tensor, Tensor]]) -> ImageSplit:
    pixels, labels = zip(*batches, strict=True)
    return ImageSplit(torch.cat(pixels), torch.cat(labels))


def _read_png(path: Path) -> Tensor:
    """Read a PNG file with an image in every row, 1024 RGB pixels."""
    try:
        from PIL import Image  # a dependency of matplotlib; only the PNG version needs it
    except ImportError as failure:
        raise InputError(
            "The PNG files of CIFAR-10 cannot be read.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="PNG files are read by pillow, which is not installed",
            instead="pip install pillow, or the binary version of CIFAR-10 in a folder",
        ) from failure
    try:
        with Image.open(path) as picture:
            pixels = numpy.array(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as failure:  # pillow reports broken PNGs as each of these
        raise _damaged_file(path, f"{type(failure).__name__}: {failure}") from failure
    if pixels.shape[1] != SIDE * SIDE:
        raise _damaged_file(path, f"{pixels.shape[1]} pixels in a row, not {SIDE * SIDE}")
    return torch.from_numpy(pixels).reshape(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2).contiguous()


def _read_labels(path: Path, count: int) -> Tensor:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise _damaged_file(path, f"{type(failure).__name__}: {failure}") from failure
    if not isinstance(values, list):
        raise _damaged_file(path, f"a {type(values).__name__}")
    if len(values) != count or not all(isinstance(value, int) and 0 <= value < len(NAMES) for value in values):
        raise _damaged_file(path, f"{len(values):,} labels for {count:,} images, or labels that are not classes")
    return torch.tensor(values)


def _require_file(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise InputError(
            f"There is no {name} in {folder}.",
            asked=f"CIFAR-10 from {folder}",
            found=", ".join(sorted(file.name for file in folder.iterdir())[:8]),
            because="CIFAR-10 has five training files and one test file",
            instead="all files of one version, or python -m regard.downloads cifar10",
        )
    return folder / name


def _damaged_file(path: Path, found: str) -> InputError:
    return InputError(
        f"{path.name} is not a file of CIFAR-10 images.",
        asked=str(path),
        found=found,
        because="it is truncated, damaged, or of another format",
        instead="download the file again",
    )
