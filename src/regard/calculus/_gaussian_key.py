"""Mean and covariance of attention when one key has Gaussian noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from regard.calculus._arguments import check_axes, read_shaped, read_tensor
from regard.calculus._perturb import perturb_key
from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Float

NODES = 80  # of the quadrature: exact to rounding for a standard deviation of the score up to about 2


class NoisyKey(NamedTuple):
    """Moments of attention with a noisy key, as changes from the attention without noise.

    `weight_mean`, `weight_variance (*batch, query)` are of the key's weight; `mean (*batch, query, value_dim)` and
    `covariance (*batch, query, value_dim, value_dim)` of the output.
    """

    weight_mean: Tensor
    weight_variance: Tensor
    mean: Tensor
    covariance: Tensor


def perturb_key_gaussian(
    weight: Float[Tensor, "*batch query"],
    output: Float[Tensor, "*batch query value_dim"],
    value: Float[Tensor, "*batch value_dim"],
    deviation: Float[Tensor, "*batch query"],
) -> NoisyKey:
    """Mean and covariance of the change of attention when Gaussian noise is added to one key.

        k -> k + e,  e ~ N(0, sigma^2 I):     s = beta e . q ~ N(0, d^2),     d = beta sigma |q|
        E[dh] = E[g(s)] (v - h),     Cov[dh] = Var[g(s)] (v - h) (v - h)^T,     g(s) = a (e^s - 1) / (1 - a + a e^s)

    a: `weight` of the key for each query; h: `output`; v: the key's value; d: `deviation` of its score; g: the step of
    `perturb_key`. The output moves along one line, so the covariance has rank one. For small d

        E[da] ~ d^2 a (1 - a) (1 - 2 a) / 2,     Cov[dh] ~ d^2 a^2 (v - h) (v - h)^T

    and the mean of the output has no term of first order.

    Source: `perturb_key`, which is exact, integrated over the normal distribution.

    Where we differ: the integrals are computed by Gauss-Hermite quadrature in float64, exact to rounding for deviations
    up to about 2, and with errors below 1e-3 up to 10.

    >>> moved = perturb_key_gaussian(torch.tensor([0.2]), torch.zeros(1, 1), torch.ones(1), torch.tensor([0.1]))
    >>> moved.weight_mean, moved.covariance
    (tensor([0.0005]), tensor([[[0.0004]]]))
    """
    weight, output, value = read_shaped(
        "perturb_key_gaussian",
        weight=(weight, "query"),
        output=(output, "query value_dim"),
        value=(value, "value_dim"),
    )
    deviation = read_tensor("perturb_key_gaussian", "deviation", deviation, weight)
    check_axes("perturb_key_gaussian", weight=(weight, "query"), deviation=(deviation, "query"))
    if not bool((deviation >= 0).all()):
        raise CalculusError(
            "A standard deviation is not negative.",
            asked=f"deviation = {deviation.min().item()}",
            because="it is the root of a variance",
            instead="beta * sigma * query.norm(dim=-1)",
        )
    points, shares = numpy.polynomial.hermite.hermgauss(NODES)
    change = deviation.double() * torch.tensor(points * math.sqrt(2)).to(weight.device).view(-1, *[1] * deviation.ndim)
    share = torch.tensor(shares / math.sqrt(math.pi)).to(weight.device).view(-1, *[1] * weight.ndim)
    weights = weight.double().expand_as(change + weight)
    # With output 0 and value 1 the new output is the step g itself.
    moved = perturb_key(weights, torch.zeros_like(weights)[..., None], torch.ones_like(weights[..., :1, 0]), change)
    rise, step = moved.weight - weights, moved.output[..., 0]
    mean_rise, mean_step = (share * rise).sum(0), (share * step).sum(0)
    variance = (share * (step - mean_step).square()).sum(0)
    towards = value[..., None, :] - output
    return NoisyKey(
        mean_rise.to(weight),
        (share * (rise - mean_rise).square()).sum(0).to(weight),
        mean_step[..., None].to(weight) * towards,
        variance[..., None, None].to(weight) * towards[..., :, None] * towards[..., None, :],
    )
