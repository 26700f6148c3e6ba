"""Handwritten digits of 8 x 8 pixels, part of scikit-learn: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from regard.errors import InputError
from regard.train.data.images import Images, ImageSplit, hold_out_fifth


def digits() -> Images:
    """1,797 digits, values 0 to 16: in every class, the last of each five images is in the test set.

    The split is deterministic, so it is the same with every library: 1,442 training and 355 test images, 34 to 36 of
    each class in the test set.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository
    (1998), of which scikit-learn has the test part.
    """
    try:
        from sklearn.datasets import load_digits  # optional, and slow to import
    except ImportError as failure:
        raise InputError(
            "digits needs scikit-learn.",
            asked='data="digits"',
            found=f"{type(failure).__name__}: {failure}",
            because="the images are part of scikit-learn, which is not installed",
            instead="pip install 'regard[train]', or another data set: mnist, cifar10",
        ) from failure
    raw: Any = load_digits()
    pixels = torch.from_numpy(raw.images).to(torch.uint8)[:, None]
    labels = torch.from_numpy(raw.target).long()
    tested = hold_out_fifth(labels)
    parts = (ImageSplit(pixels[chosen], labels[chosen], white=16) for chosen in (~tested, tested))
    return Images("digits", *parts, names=tuple("0123456789"))
