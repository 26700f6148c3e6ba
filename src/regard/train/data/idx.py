"""MNIST's files: integers in the IDX format, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

from regard.errors import InputError
from regard.train.data.images import Images, ImageSplit

# The dtype code of uint8, the only one that MNIST and its variants use.
UNSIGNED_BYTES = 0x08


def mnist(folder: Path) -> Images:
    """MNIST, or another set of the same layout (Fashion-MNIST, EMNIST's digits), from a folder with its four files.

    `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, each also
    with `.gz`, and with a dot in place of the second hyphen, as some copies have it. The split is the official one.

    Source: LeCun, Cortes and Burges, The MNIST database of handwritten digits.
    """
    parts = []
    for start in ("train", "t10k"):
        pixels = read_idx(_find_file(folder, f"{start}-images-idx3-ubyte"))
        labels = read_idx(_find_file(folder, f"{start}-labels-idx1-ubyte"))
        if pixels.ndim != 3 or labels.shape != pixels.shape[:1]:
            raise InputError(
                f"The images and labels in {folder} do not match.",
                asked=f"{start}: images {tuple(pixels.shape)}, labels {tuple(labels.shape)}",
                because="images are (image, row, column), and each has one label",
                instead="the four files of one data set",
            )
        parts.append(ImageSplit(pixels[:, None], labels.long()))
    count = int(max(part.labels.max() for part in parts)) + 1
    return Images("mnist", *parts, names=tuple(map(str, range(max(count, 10)))))


def read_idx(path: Path) -> Tensor:
    """The array in an IDX file, plain or gzipped: two zero bytes, dtype code, number of axes, sizes, data."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as failure:
        raise _damaged_file(path, f"{type(failure).__name__}: {failure}") from failure
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTES:
        raise _damaged_file(path, f"it begins with {raw[:4].hex(' ') or 'nothing'}")
    axes = raw[3]
    start = 4 + 4 * axes
    if len(raw) < start:
        raise _damaged_file(path, f"{len(raw)} bytes, too few for the sizes of {axes} axes")
    sizes = struct.unpack(f">{axes}I", raw[4:start])
    if len(raw) - start != math.prod(sizes):
        raise _damaged_file(path, f"{len(raw) - start:,} values, but the header says {' x '.join(map(str, sizes))}")
    return torch.from_numpy(numpy.frombuffer(raw, dtype=numpy.uint8, offset=start).reshape(sizes).copy())


def _find_file(folder: Path, name: str) -> Path:
    first, _, rest = name.rpartition("-idx")
    for spelling in (name, f"{first}.idx{rest}"):
        for path in (folder / spelling, folder / f"{spelling}.gz"):
            if path.is_file():
                return path
    raise InputError(
        f"There is no {name} in {folder}.",
        asked=f"MNIST from {folder}",
        found=", ".join(sorted(file.name for file in folder.iterdir())[:6]) if folder.is_dir() else "no such folder",
        because="MNIST has four files, two of images and two of labels",
        instead=f"the folder that has {name} or {name}.gz",
    )


def _damaged_file(path: Path, found: str) -> InputError:
    return InputError(
        f"{path.name} is not an IDX file of uint8.",
        asked=str(path),
        found=found,
        because="it is truncated, damaged, or of another format",
        instead="download the file again",
    )
