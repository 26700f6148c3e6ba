"""What the models cost: by formula, and by the clock."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard import cost
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.train import Run

SIDES = (8, 16, 32, 64)


@dataclass
class Price:
    """One image through one model: counted, and measured in batches."""

    name: str
    parameters: int
    macs: int
    kept: int  # bytes that a backward pass needs
    milliseconds: float


@dataclass
class Mixing:
    """Heads over a square image: one axis after the other, or all pairs of pixels."""

    side: int
    separable: int
    pairs: int


def price(name: str, run: Run) -> Price:
    found = cost(run.model)
    images = run.data.normalise(run.data.test.images)
    return Price(
        name, int(found.parameters), int(found.macs), int(found.activation_bytes), clock(run.model, images) * 1000
    )


def clock(model: nn.Module, images: Tensor, repeat: int = 5) -> float:
    """Seconds for an image in a batch: the median of a few passes."""
    times = []
    with torch.no_grad():
        model(images)
        for _ in range(repeat):
            start = time.perf_counter()
            model(images)
            times.append(time.perf_counter() - start)
    return sorted(times)[repeat // 2] / len(images)


def mixing(config: SpatialConfig) -> list[Mixing]:
    """The whole model on larger and larger images, with heads that fall apart into rows and columns, and without.

    A quadratic score is a sum over the axes, so that its softmax is a product; a slanted Gaussian's is not.
    """
    found = []
    for side in SIDES:
        macs = []
        for position in ("quadratic", "gaussian"):
            sizes = dataclasses.replace(config, image=(side, side), position=position)
            with torch.device("meta"):
                macs.append(int(cost(SpatialTransformer(sizes)).macs))
        found.append(Mixing(side, *macs))
    return found
