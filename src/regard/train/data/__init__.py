"""Real images to learn from: digits of scikit-learn; MNIST and CIFAR-10 from registry packages or a user's files."""

from __future__ import annotations

from regard.errors import InputError
from regard.train.data.digits import digits
from regard.train.data.images import Images, Part

__all__ = ["Images", "Part", "digits", "load"]

NAMES = ("digits",)


def load(name: str) -> Images:
    """The data set of this name; nothing is downloaded."""
    if name == "digits":
        return digits()
    raise InputError(
        f"There is no data set called {name!r}.",
        asked=f"data={name!r}",
        because=f"known are {', '.join(NAMES)}",
        instead="one of these, or train(recipe, data=Images(...)) with images of your own",
    )
