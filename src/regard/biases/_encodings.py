"""Encodings of relative positions, for biases that multiply them by learned vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regard.biases._arguments import Grid, make_error
from regard.calculus import sinusoidal


def quadratic_encoding(*along: Tensor) -> Tensor:
    """The encoding `(|delta|^2, delta_1, delta_2, ...)`, with which `TransformerXL` becomes `Quadratic`.

    With `W = I`, zero queries, keys and `u`, and `v = -alpha (1, -2 centre_1, -2 centre_2)`, `TransformerXL`
    scores `-alpha (|delta|^2 - 2 delta . centre)`: the scores of `Quadratic` up to a constant per head.

    Source: Cordonnier, Loukas and Jaggi (ICLR 2020), Lemma 2. Where we differ: any number of axes.

    >>> quadratic_encoding(torch.tensor(2), torch.tensor(-3)).tolist()
    [13, 2, -3]
    """
    return torch.stack((torch.stack(along).square().sum(dim=0), *along), dim=-1)


def sinusoids(features: int, grid: Grid | None) -> Callable[..., Tensor]:
    """Sinusoids of the deltas, rounded up to whole pairs of sine and cosine on every axis."""
    return partial(_sinusoid_per_axis, 2 * -(-features // 2) if grid is None else 2 * -(-features // 4))


def _sinusoid_per_axis(features: int, *along: Tensor) -> Tensor:
    return torch.cat([sinusoidal(delta, features, dtype=torch.float64) for delta in along], dim=-1)


def feature_count(encoding: Callable[..., Tensor], axes: int, device: torch.device | str | None) -> int:
    """The number of features of an encoding, from a call with one delta."""
    origin = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(axes)]
    answer = encoding(*origin)
    if answer.dim() != 2 or answer.shape[0] != 1:
        raise make_error(
            "TransformerXL",
            asked="an encoding of your own",
            found=f"{tuple(answer.shape)} for deltas of shape (1,)",
            because="an encoding turns deltas of any shape into features along one new last axis",
            instead="an encoding that answers (1, feature) here, such as quadratic_encoding",
        )
    return answer.shape[1]
