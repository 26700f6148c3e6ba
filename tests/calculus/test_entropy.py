"""Entropy of attention weights, and its derivative in beta."""

import math

import mpmath
import pytest
import torch

from regard.calculus import entropy, entropy_slope

INF = math.inf
Z = torch.tensor([-3, 1, 0.5, 2, -1], dtype=torch.float64)


def test_the_three_numbers_of_the_worked_example():
    assert entropy(Z, 0.0).item() == pytest.approx(math.log(5), rel=1e-15, abs=0)
    assert entropy(Z, 1.0).item() == pytest.approx(1.0368259857, abs=5e-11)
    assert entropy_slope(Z, 1.0).item() == pytest.approx(-0.6132739688, abs=5e-11)


def test_the_slope_is_the_finite_difference():
    step = 1e-5
    difference = (entropy(Z, 1 + step) - entropy(Z, 1 - step)) / (2 * step)
    assert abs(difference - entropy_slope(Z, 1.0)) < 1e-10


@pytest.mark.parametrize("beta", [-2.0, -0.3, 0.0, 0.7, 5.0])
def test_the_slope_is_what_autograd_finds(beta):
    slope = torch.func.grad(lambda b: entropy(Z, b))(torch.tensor(beta, dtype=torch.float64))
    torch.testing.assert_close(slope, entropy_slope(Z, beta), rtol=0, atol=1e-14)


def test_two_scores_by_hand():
    # p = (1/4, 3/4) when z = (0, ln 3): H = ln 4 - (3/4) ln 3, Var = (3/16) (ln 3)^2.
    scores = torch.tensor([0.0, math.log(3)], dtype=torch.float64)
    assert entropy(scores).item() == pytest.approx(math.log(4) - 0.75 * math.log(3), rel=1e-15, abs=0)
    assert entropy_slope(scores).item() == pytest.approx(-3 / 16 * math.log(3) ** 2, rel=1e-15, abs=0)


def test_ties_at_infinite_beta_have_the_logarithm_of_their_number():
    scores = torch.tensor([[2.0, 2.0, 2.0, 1.0], [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    assert entropy(scores, INF).tolist() == pytest.approx([math.log(3), 0])
    assert entropy(scores, -INF).tolist() == [0, 0]
    assert entropy_slope(scores, INF).tolist() == [0, 0]
    assert entropy_slope(scores, -INF).tolist() == [0, 0]


def test_a_saturated_row_keeps_all_the_digits_of_a_tiny_entropy():
    scores = torch.tensor([-3, 1, 100, 5, -1], dtype=torch.float64)
    with mpmath.workdps(80):
        powers = [mpmath.exp(z) for z in scores.tolist()]
        shares = [power / mpmath.fsum(powers) for power in powers]
        exact = -mpmath.fsum(p * mpmath.log(p) for p in shares)
        mean = mpmath.fsum(p * z for p, z in zip(shares, scores.tolist(), strict=True))
        slope = -mpmath.fsum(p * (z - mean) ** 2 for p, z in zip(shares, scores.tolist(), strict=True))
    assert entropy(scores).item() == pytest.approx(float(exact), rel=1e-14, abs=0)
    assert entropy_slope(scores).item() == pytest.approx(float(slope), rel=1e-14, abs=0)
    y = torch.softmax(scores, 0)
    assert -(y * y.log()).sum().item() != pytest.approx(float(exact), rel=1e-3, abs=0)  # the plain sum loses them


def test_hidden_scores_do_not_count_and_an_empty_row_has_no_entropy():
    scores = torch.tensor([[0.0, 0.0, -INF], [-INF, -INF, -INF]], requires_grad=True)
    value = entropy(scores)
    torch.testing.assert_close(value, torch.tensor([math.log(2), 0.0]))
    value.sum().backward()
    assert scores.grad.isfinite().all()
    where = torch.tensor([True, False, True])
    torch.testing.assert_close(
        entropy(torch.tensor([1.0, math.nan, 2.0]), where=where), entropy(torch.tensor([1.0, 2.0]))
    )


@pytest.mark.parametrize("beta", [1.0, -0.8, 0.0])
def test_gradients_agree_with_finite_differences(beta):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    where = torch.rand(3, 5, generator=generator) > 0.3
    where[1] = False
    assert torch.autograd.gradcheck(lambda z: entropy(z, beta, where=where), scores)
    assert torch.autograd.gradcheck(lambda z: entropy_slope(z, beta, where=where), scores)


def test_any_axis_can_be_measured_and_mapped():
    scores = torch.randn(3, 5, 7)
    torch.testing.assert_close(entropy(scores, dim=1), entropy(scores.mT))
    torch.testing.assert_close(entropy_slope(scores, 2.0, dim=0), entropy_slope(scores.movedim(0, -1), 2.0))
    torch.testing.assert_close(torch.func.vmap(entropy)(scores), entropy(scores))
    assert entropy(torch.zeros(3, 0)).tolist() == [0, 0, 0]
