"""Moments of dot products."""

import math

import pytest
import torch

from regard.calculus import dot_product_moments
from regard.errors import CalculusError


@pytest.mark.parametrize(("dim", "fourth"), [(1, 9), (4, 72), (16, 864), (64, 12672), (256, 198144)])
def test_the_closed_forms(dim, fourth):
    moments = dot_product_moments(dim)
    assert (moments.mean, moments.variance, moments.fourth) == (0, dim, fourth)
    assert moments.excess_kurtosis == pytest.approx(moments.fourth / moments.variance**2 - 3)


def test_the_standard_error_of_the_second_moment():
    assert dot_product_moments(64).standard_error(400_000) == pytest.approx(0.1464, abs=5e-5)
    scaled = dot_product_moments(64, beta=1 / 8)
    assert scaled.variance == 1
    assert scaled.standard_error(400_000) == pytest.approx(math.sqrt((2 + 6 / 64) / 400_000))


def test_400000_samples_stay_within_four_standard_errors():
    moments, samples = dot_product_moments(64), 400_000
    generator = torch.Generator().manual_seed(19)
    total = fourth = 0.0
    for _ in range(8):
        a, b = torch.randn(2, samples // 8, 64, generator=generator)
        s = (a * b).sum(-1).double()
        total += s.square().sum().item() / samples
        fourth += s.pow(4).sum().item() / samples
    assert abs(total - moments.variance) <= 4 * moments.standard_error(samples)
    assert abs(total - 2 * moments.variance) > 4 * moments.standard_error(samples)
    # E[s^8] <= 105 * (1 + small) variance^4: a loose standard error for the fourth moment.
    assert abs(fourth - moments.fourth) <= 4 * math.sqrt(150 * moments.variance**4 / samples)


def test_a_dot_product_of_nothing_is_refused():
    with pytest.raises(CalculusError, match="dim = 0"):
        dot_product_moments(0)
    with pytest.raises(CalculusError, match="samples = 0"):
        dot_product_moments(3).standard_error(0)
