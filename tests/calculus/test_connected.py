"""Attention as a fully connected layer, hard attention with a gradient, skipped keys, and noise on a key."""

import math

import pytest
import torch

from regard import attend
from regard.calculus import (
    connected_weight,
    jacobian,
    perturb_attention,
    perturb_key_gaussian,
    skip_keys,
    softmax,
    straight_through,
)
from regard.errors import CalculusError


def test_attention_with_given_weights_is_a_fully_connected_layer():
    query, key, value = torch.randn(5, 3).double(), torch.randn(7, 3).double(), torch.randn(7, 2).double()
    weights = softmax(query @ key.T)
    layer = torch.nn.Linear(14, 10, bias=False, dtype=torch.float64)
    layer.weight.data = connected_weight(weights, 2)
    torch.testing.assert_close(layer(value.flatten()), (weights @ value).flatten(), atol=1e-15, rtol=0)
    assert torch.equal(connected_weight(weights, 2), torch.kron(weights, torch.eye(2).double()))
    batch = connected_weight(weights.expand(2, -1, -1), 2)
    assert torch.equal(batch[1], batch[0])


def test_hard_weights_are_a_selection_and_beta_zero_is_constant():
    scores = torch.randn(5, 7)
    hard = connected_weight(softmax(scores, math.inf), 3)
    assert set(hard.unique().tolist()) == {0, 1}
    assert torch.equal(hard.sum(1), torch.ones(15))
    blocks = connected_weight(softmax(scores, 0.0), 3).view(5, 3, 7, 3)
    assert torch.equal(blocks, (torch.eye(3) / 7)[:, None].expand(5, 3, 7, 3))


def test_straight_through_is_hard_forward_and_soft_backward():
    scores = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    hard = straight_through(scores, 0.7)
    assert torch.equal(hard, softmax(scores, math.inf))
    upstream = torch.randn(4, 6, dtype=torch.float64)
    (grad,) = torch.autograd.grad(hard, scores, upstream)
    expected = (jacobian(scores.detach(), 0.7) @ upstream[..., None])[..., 0]
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-6])
def test_skipped_keys_move_the_output_by_at_most_the_tolerance_times_the_diameter(tolerance):
    query, key, value = (torch.randn(1, 31, 11, dtype=torch.float64) * size for size in (3, 3, 1))
    visible = skip_keys((query @ key.mT)[0], tolerance, beta=0.5)
    moved = attend(query, key, value, mask=visible, scale=0.5) - attend(query, key, value, scale=0.5)
    assert not visible.all()
    assert 0 < moved.norm(dim=-1).max() <= tolerance * torch.cdist(value, value).max()


def test_at_beta_zero_and_among_equal_scores_nothing_is_skipped():
    assert skip_keys(torch.randn(3, 5), 0.5, beta=0.0).all()
    assert skip_keys(torch.zeros(3, 5), 0.999).all()
    with pytest.raises(CalculusError, match="tolerance"):
        skip_keys(torch.zeros(3), 0.0)


def test_noise_on_a_key_has_the_moments_of_the_quadrature_and_of_samples():
    query = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    key = torch.tensor([[1, 0], [0, 1], [-1, 0.5]], dtype=torch.float64)
    value = torch.tensor([[1, 0], [0, 3], [2, -1]], dtype=torch.float64)
    beta, sigma = 1 / math.sqrt(2), 0.1
    weights = softmax(query @ key.T, beta)
    deviation = beta * sigma * query.norm(dim=-1)
    known = (0.001088291233, -0.0004583769673, 0.001080659445)
    for index, expected in enumerate(known):
        moved = perturb_key_gaussian(weights[:, index], weights @ value, value[index], deviation)
        assert abs(moved.weight_mean.item() - expected) < 1e-12
        noise = torch.randn(40_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * sigma
        _, outputs = perturb_attention(query.expand(40_000, 1, 2), key, value, index, shift=noise, beta=beta)
        change = outputs[:, 0] - weights @ value
        spread = moved.covariance[0].diagonal().sqrt() / 200
        assert ((change.mean(0) - moved.mean[0]).abs() < 5 * spread).all()
        torch.testing.assert_close(change.T.cov(), moved.covariance[0], rtol=0.05, atol=1e-5)
        assert torch.linalg.matrix_rank(moved.covariance[0]) == 1


def test_small_noise_has_the_second_order_law_and_none_no_effect():
    weight, output, value = torch.tensor([0.3]).double(), torch.randn(1, 4).double(), torch.randn(4).double()
    small = perturb_key_gaussian(weight, output, value, torch.tensor([1e-3]).double())
    assert abs(small.weight_mean / (0.5e-6 * 0.3 * 0.7 * 0.4) - 1) < 1e-5
    towards = value - output[0]
    torch.testing.assert_close(small.covariance[0], 1e-6 * 0.09 * towards[:, None] * towards, rtol=1e-5, atol=0)
    none = perturb_key_gaussian(weight, output, value, torch.zeros(1).double())
    assert not none.mean.abs().max() > 1e-15
    assert not none.covariance.abs().max() > 1e-30
    with pytest.raises(CalculusError, match="negative"):
        perturb_key_gaussian(weight, output, value, torch.tensor([-1.0]))
