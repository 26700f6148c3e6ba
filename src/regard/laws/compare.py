"""Rounding or logic: how far two numbers may be apart before a law is broken.

A difference of two correct computations is bounded by `FACTOR * eps * sqrt(reduction) * scale`: `eps` is the coarsest
precision that the computation passes through, `reduction` the terms summed on the way to a number (their roundings add
up like a random walk), and `scale` the largest number there. FACTOR covers the layers of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.laws.law import Observation

# Roundings in a row that are still called rounding. In float64 a wrong formula shows by many orders of magnitude
# more, so there the bound can afford to be generous.
FACTOR = {torch.float64: 131072.0, torch.float32: 64.0}
# In half precision sums are accumulated in float32, and what is left is a rounding or two of inputs and outputs. This
# goes for the half-precision variant of a subject, of which float32 has already shown that it obeys.
HALF_FACTOR = 2.0
# A difference that float64 does not show is logic only if it is this far above the bound of the other precision.
BEYOND_ROUNDING = 50.0


@dataclass
class Finding:
    """The worst entry of an observation.

    Attributes:
        ratio: the difference, in bounds; above one is more than rounding.
        moved: the difference itself; inf where one of the two is not a number.
        bound: what rounding can do.
        place: the entry, in words: `output[0, 3]`.
        map: the largest difference for each `(batch, token)`, for the picture.
    """

    observation: Observation
    ratio: float
    moved: float
    bound: float
    place: str
    map: Tensor | None


def size_of(observation: Observation) -> float:
    """The largest number of the two sides."""
    numbers = torch.cat([side.detach().flatten().double() for side in (observation.expected, observation.actual)])
    numbers = numbers[numbers.isfinite()]
    return float(numbers.abs().max()) if numbers.numel() else 1.0


def bound_of(observation: Observation, eps: float, factor: float) -> float:
    """How far rounding can move an entry of the observation."""
    scale = size_of(observation) if observation.scale is None else observation.scale
    return factor * eps * math.sqrt(max(observation.reduction, 1)) * scale + 1e-300


def compare(observation: Observation, eps: float, factor: float) -> Finding:
    """Compare the two sides of an observation: bits first, then the bound."""
    expected, actual = observation.expected.detach(), observation.actual.detach()
    if expected.shape != actual.shape:
        sides = f"is {tuple(actual.shape)}, not {tuple(expected.shape)}"
        observation.effect = observation.effect or sides
        return Finding(observation, math.inf, math.inf, 0.0, observation.output, None)
    if expected.numel() == 0:
        return Finding(observation, 0.0, 0.0, 0.0, observation.output, None)
    expected, actual = expected.double(), actual.double()
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    apart = torch.where(same, 0.0, (expected - actual).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    if observation.where is not None:
        where = observation.where.reshape(observation.where.shape + (1,) * (apart.ndim - observation.where.ndim))
        apart = apart.masked_fill(~where, 0.0)
    moved = float(apart.max())
    bound = 0.0 if observation.exact else bound_of(observation, eps, factor)
    ratio = 0.0 if moved == 0 else (moved / bound if bound > 0 else math.inf)
    tokens = apart.flatten(2).amax(-1) if apart.ndim > 2 else (apart if apart.ndim == 2 else None)
    return Finding(observation, ratio, moved, bound, _name_entry(observation, apart), tokens)


def _name_entry(observation: Observation, apart: Tensor) -> str:
    if apart.ndim < 2:
        return observation.output
    row, token = (int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)[:2])
    if observation.tokens is not None:
        token = observation.tokens[token]
    return f"{observation.output}[{row + observation.row}, {token}]"
