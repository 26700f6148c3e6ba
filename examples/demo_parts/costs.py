"""The cost of the models: counted, and measured."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard import cost
from regard.cost_model import Quantity
from regard.cost_model.symbols import size_symbols
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.train import Run

SIDES = (8, 16, 32, 64)


@dataclass
class ModelCost:
    """The cost of one image: counted, and measured in batches."""

    name: str
    parameters: int
    macs: int
    saved_bytes: int  # activations for backward
    milliseconds: float
    formula: Quantity  # multiply-adds of any size


@dataclass
class Mixing:
    """Multiply-adds on a square image: axis by axis, or over all pairs of pixels."""

    side: int
    separable: int
    pairs: int


def measure_cost(name: str, run: Run) -> ModelCost:
    found = cost(run.model)
    images = run.data.normalise(run.data.test.images)
    return ModelCost(
        name,
        int(found.parameters),
        int(found.macs),
        int(found.activation_bytes),
        measure_seconds(run.model, images) * 1000,
        found.macs,
    )


def measure_seconds(model: nn.Module, images: Tensor, repeat: int = 5) -> float:
    """Seconds for an image in a batch: the median of a few passes."""
    times = []
    with torch.no_grad():
        model(images)
        for _ in range(repeat):
            start = time.perf_counter()
            model(images)
            times.append(time.perf_counter() - start)
    return sorted(times)[repeat // 2] / len(images)


def mixing(config: SpatialConfig, separable: Quantity) -> list[Mixing]:
    """The whole model on images of increasing size, with heads whose multiply-adds are `separable`, and with others.

    A quadratic score is a sum over the axes, so its softmax is a product; that of a general Gaussian is not. One
    formula of each serves every size.
    """
    assert config.position == "quadratic"
    with torch.device("meta"):
        model = SpatialTransformer(dataclasses.replace(config, position="gaussian"))
    macs = separable, cost(model).macs
    rows, columns = size_symbols("R W")
    return [Mixing(side, *(int(each.at({rows: side, columns: side})) for each in macs)) for side in SIDES]
