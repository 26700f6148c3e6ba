"""Scores depend on distances, not on absolute positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weighing import Layer, causal, outcome_of, plain, scores_of

outcome = outcome_of("relative-position")


def turned(x: Tensor, places: Tensor, slip: int = 0) -> Tensor:
    angles = places[:, None] * 100.0 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = angles.cos().to(x.dtype), angles.sin().roll(slip, -1).to(x.dtype)
    left, right = x[..., 0::2], x[..., 1::2]
    return torch.stack([left * cos - right * sin, left * sin + right * cos], -1).flatten(-2)


def rotary(q, k, v, mask=None, slip: int = 0, sign: int = 1):
    places = torch.arange(k.shape[-2])
    return plain(turned(q, places[-q.shape[-2] :], slip), turned(k, sign * places, slip), v, mask)


def slipped(q, k, v, mask=None):
    return rotary(q, k, v, mask, slip=1)


def backwards(q, k, v, mask=None):
    return rotary(q, k, v, mask, sign=-1)


def table(q, k, v, mask=None):
    places = torch.randn(140, q.shape[-1], generator=torch.Generator().manual_seed(0)).to(q.dtype)
    return plain(q + places[: q.shape[-2]], k + places[: k.shape[-2]], v, mask)


def from_the_start(q, k, v, mask=None):
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return (scores_of(q, k, mask) - 0.25 * distance.abs()).softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("core", [plain, causal, rotary], ids=lambda core: core.__name__)
def test_relative_positions_hold(core, seed: int) -> None:
    assert outcome(core, seed=seed) == "holds"
    assert outcome(Layer(core), "layer", seed) == "holds"


@pytest.mark.parametrize("core", [slipped, backwards, table], ids=lambda core: core.__name__)
def test_absolute_positions_are_broken(core) -> None:
    assert outcome(core) == "broken"
    assert outcome(Layer(core), "layer") == "broken"


def test_distances_from_the_wrong_end_are_broken_if_alignment_is_claimed() -> None:
    assert outcome(from_the_start, claims=["alignment"]) == "broken"
    assert outcome(from_the_start) == "holds"


def test_a_table_of_rotations_that_wraps_around_is_broken() -> None:
    def wrapped(q, k, v, mask=None):
        places = torch.arange(k.shape[-2]) % 32
        return plain(turned(q, places[-q.shape[-2] :]), turned(k, places), v, mask)

    assert outcome(wrapped) == "broken"
    assert outcome(Layer(wrapped), "layer") == "broken"
