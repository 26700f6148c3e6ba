"""Data sets. Images: digits of scikit-learn; MNIST, Fashion-MNIST, CIFAR-10 of packages or files. Text: `text`."""

from __future__ import annotations

import os
from pathlib import Path

from regard import downloads
from regard.errors import InputError
from regard.train.data.cifar import cifar10
from regard.train.data.digits import digits
from regard.train.data.fashion import fashion_mnist
from regard.train.data.idx import mnist
from regard.train.data.images import Images, ImageSplit

__all__ = ["ImageSplit", "Images", "cifar10", "digits", "fashion_mnist", "load", "mnist"]

# Data sets that are read from a folder of files.
READERS = {"mnist": mnist, "fashion-mnist": fashion_mnist, "cifar10": cifar10}
NAMES = ("digits", *READERS)


def load(name: str, folder: str | os.PathLike[str] | None = None, *, held: bool = False) -> Images:
    """The data set of this name; nothing is downloaded.

    folder: your files of MNIST or CIFAR-10; without it, those that `regard data mnist` fetched.
    held: evaluate on a fifth of the training set instead of the test set (`Images.held`).
    """
    images = _load_by_name(name, folder)
    return images.held() if held else images


def _load_by_name(name: str, folder: str | os.PathLike[str] | None) -> Images:
    if name not in NAMES:
        raise InputError(
            f"There is no data set called {name!r}.",
            asked=f"data={name!r}",
            because=f"the data sets are {', '.join(NAMES)}",
            instead="one of these, or train(recipe, data=Images(...)) with images of your own",
        )
    if name == "digits":
        if folder is not None:
            raise InputError(
                "digits takes no folder.",
                asked=f"data='digits', folder={str(folder)!r}",
                because="they come inside scikit-learn",
                instead=f"no folder, or one of {', '.join(READERS)}",
            )
        return digits()
    place = downloads.find(name) if folder is None else Path(folder).expanduser()
    if place is None:
        package = downloads.DATASETS[name]
        raise InputError(
            f"{name} is not downloaded.",
            asked=f"data={name!r}",
            found=f"no {downloads.find_target(name)}",
            because=f"it is {package.megabytes} MB, and downloads only start on an explicit command",
            instead=f"regard data {name}, or the folder of a copy of your own",
        )
    return READERS[name](place)
