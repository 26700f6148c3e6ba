"""Labelled images with a fixed split, and their normalisation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.caching import lazy_property
from regard.errors import InputError


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """The training or the test set.

    Attributes:
        pixels: `(image, channel, row, column)`, uint8 from 0 to `white`.
        labels: `(image,)`, int64.
        white: the largest value a pixel may have.
    """

    pixels: Tensor
    labels: Tensor
    white: int = 255

    def __post_init__(self) -> None:
        fine = self.pixels.ndim == 4 and self.pixels.dtype == torch.uint8 and self.labels.dtype == torch.int64
        if not fine or self.labels.shape != self.pixels.shape[:1] or not len(self.pixels):
            raise InputError(
                "Pixels and labels do not form a labelled data set.",
                asked=f"pixels {tuple(self.pixels.shape)} of {self.pixels.dtype}, labels {tuple(self.labels.shape)} "
                f"of {self.labels.dtype}",
                because="pixels are (image, channel, row, column) of uint8, and every image has one label, an int64",
                instead="(images * 255).round().to(torch.uint8), labels.long()",
            )
        if not 0 < self.white <= 255 or int(self.pixels.max()) > self.white:
            raise InputError(
                "A pixel is larger than `white`.",
                asked=f"white={self.white}",
                found=f"a pixel of {int(self.pixels.max())}",
                because="white is the largest value a pixel may have, 1 to 255",
                instead=f"white={max(int(self.pixels.max()), 1)}",
            )

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def images(self) -> Tensor:
        """All images in float32 from 0 to 1, `(image, channel, row, column)`."""
        return self.pixels.float() / self.white


@dataclass(frozen=True, eq=False)
class Images:
    """A data set: training set, test set, and class names.

    The input of a model is `normalise(images)`, `(image - mean) / std` per channel, with the statistics of the training
    set.

        >>> from regard.train.data import digits
        >>> data = digits()
        >>> data
        Images('digits', 1442 training and 355 test images of 1 x 8 x 8 pixels, 10 classes)
        >>> f"{data.mean[0]:.3f} {data.std[0]:.3f}"
        '0.305 0.376'
    """

    name: str
    train: ImageSplit
    test: ImageSplit
    names: tuple[str, ...]
    is_held: bool = False  # whether the test set is a validation split of another data set's training set

    def __post_init__(self) -> None:
        labels = torch.cat((self.train.labels, self.test.labels))
        same = self.train.pixels.shape[1:] == self.test.pixels.shape[1:]
        if not same or int(labels.min()) < 0 or int(labels.max()) >= len(self.names):
            raise InputError(
                "The two splits do not form one data set.",
                asked=f"images {self.shape} and {tuple(self.test.pixels.shape[1:])} with labels "
                f"{int(labels.min())} to {int(labels.max())} and {len(self.names)} names",
                because="all images have the same size, and a label is an index into `names`",
                instead="images of one size, and a name for every class",
            )

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.shape))
        return (
            f"Images({self.name!r}, {len(self.train)} training and {len(self.test)} test images of {size} pixels, "
            f"{len(self.names)} classes)"
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""
        channels, rows, columns = self.train.pixels.shape[1:]
        return channels, rows, columns

    @lazy_property
    def _channel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        # From a histogram: exact, and without 50,000 images in float64.
        means, stds = [], []
        level = torch.arange(256, dtype=torch.float64) / self.train.white
        for channel in self.train.pixels.unbind(1):
            share = channel.flatten().bincount(minlength=256).double() / channel.numel()
            mean = float(share @ level)
            means.append(mean)
            stds.append(float(share @ (level - mean).square()) ** 0.5)
        return tuple(means), tuple(stds)

    @property
    def mean(self) -> tuple[float, ...]:
        """The mean of every channel over the training set."""
        return self._channel_statistics[0]

    @property
    def std(self) -> tuple[float, ...]:
        """The standard deviation of every channel over the training set."""
        return self._channel_statistics[1]

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images from 0 to 1 to mean 0 and standard deviation 1 per channel."""
        mean, std = (images.new_tensor(numbers)[:, None, None] for numbers in (self.mean, self.std))
        return (images - mean) / std.clamp(min=1e-12)  # a constant channel becomes zero

    def held(self) -> Images:
        """The same images with a validation split: a fifth of the training set in place of the test set.

        For choosing hyperparameters without using the test set. In every class, the last of each five images is held
        out.

            >>> from regard.train.data import digits
            >>> digits().held()
            Images('digits, held', 1157 training and 285 test images of 1 x 8 x 8 pixels, 10 classes)
        """
        held = hold_out_fifth(self.train.labels)
        if not bool(held.any()):
            raise InputError(
                "There are too few images for a validation split.",
                asked=f"{self!r}.held()",
                found=f"{int(self.train.labels.bincount().max())} images in the largest class",
                because="one in five images of each class is held out",
                instead="more images, or held=False",
            )
        parts = (ImageSplit(self.train.pixels[one], self.train.labels[one], self.train.white) for one in (~held, held))
        return Images(f"{self.name}, held", *parts, names=self.names, is_held=True)

    @lazy_property
    def digest(self) -> str:
        """A sha256 of the data set, its split and its order."""
        digest = hashlib.sha256("\n".join((str(self.train.white), *self.names)).encode())
        for part in (self.train, self.test):
            digest.update(str(tuple(part.pixels.shape)).encode())
            digest.update(part.pixels.contiguous().numpy().tobytes())
            digest.update(part.labels.numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def hold_out_fifth(labels: Tensor) -> Tensor:
    """The last of each five images of every class, in order: a deterministic split."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        chosen[(labels == label).nonzero()[4::5, 0]] = True
    return chosen
