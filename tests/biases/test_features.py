"""Gaussian scores of relative positions as inner products of features of absolute ones."""

import pytest
import torch

from regard import Alibi, Gaussian, Quadratic, RelativeTable
from regard.biases import features_of, tile_features
from regard.patterns import Lengths

CASES = [
    (Quadratic(3, (5, 7)), (35, 35), 3),
    (Gaussian(3, (5, 7)), (35, 35), 5),
    (Gaussian(3, (5, 7)), (11, 35), 5),
    (Quadratic(3), (11, 13), 2),
    (Quadratic(3), (13, 11), 2),
    (Gaussian(3), (11, 13), 2),
]


@pytest.mark.parametrize(("bias", "lengths", "rank"), CASES, ids=str)
def test_the_products_are_the_scores_up_to_a_constant_of_each_query(bias, lengths, rank):
    lengths, bias = Lengths(*lengths), bias.double()
    query, key = features_of(bias, lengths)
    assert query.shape == (3, lengths.queries, rank)
    assert key.shape == (lengths.keys, rank)
    expected = bias.scores((torch.arange(lengths.queries) + lengths.offset)[:, None], torch.arange(lengths.keys))
    left = query @ key.T - expected
    assert torch.allclose(left, left[..., :1].expand_as(left), rtol=1e-12, atol=1e-10)
    # Of one head, one more than axes; a slanted hill has more features, so that all heads share those of the keys.
    assert torch.linalg.matrix_rank(query.detach() @ key.T).max() == (2 if bias.grid is None else 3)


def test_gradients_reach_centre_and_width():
    bias = Gaussian(2, (3, 5)).double()
    query, key = features_of(bias, Lengths(15, 15))
    slopes = torch.autograd.grad((query @ key.T).softmax(-1).square().sum(), list(bias.parameters()))
    truth = bias.scores(torch.arange(15)[:, None], torch.arange(15)).softmax(-1).square().sum()
    for mine, theirs in zip(slopes, torch.autograd.grad(truth, list(bias.parameters())), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11)


def test_other_biases_and_tokens_outside_the_grid_have_none():
    assert features_of(Alibi(3), Lengths(5, 5)) is None
    assert features_of(RelativeTable(3, grid=(5, 7)), Lengths(35, 35)) is None
    assert features_of(Quadratic(3, (5, 7)), Lengths(36, 36)) is None
    assert features_of(Quadratic(3, (5, 7), start=1), Lengths(36, 36)) is None


def test_counting_from_the_middle_keeps_single_precision():
    """Raw coordinates of 224 pixels lose more than three digits; the middle gives one back."""
    bias = Quadratic(1, (1, 224), centre=[[0, 0.7]], alpha=0.37)
    query, key = features_of(bias, Lengths(224, 224))
    truth = bias.double().scores(torch.arange(224)[:, None], torch.arange(224))[0].softmax(-1)
    places = torch.arange(224.0)
    raw = 0.37 * torch.stack((torch.ones(224), 2 * (places + 0.7)), -1) @ torch.stack((-places.square(), places))
    centred = ((query.float() @ key.float().T)[0].double().softmax(-1) - truth).abs().max()
    assert centred < 0.5 * (raw.double().softmax(-1) - truth).abs().max()


@pytest.mark.parametrize("side", [16, 64, 224])
def test_features_centred_at_a_tile_are_accurate_on_large_grids(side):
    bias = Quadratic(1, grid=(side, side), centre=[[0.3, -0.7]], alpha=0.37)
    corner = torch.arange(7) + side * side - 9
    keys = torch.arange(side * side)
    exact = bias.double().scores(corner[:, None], keys)[0].softmax(-1)
    bias.float()
    query, key = tile_features(bias, corner, keys)
    error = ((query[0] @ key.T).softmax(-1) - exact).abs().max()
    assert error < 1e-5
    raw = features_of(bias, Lengths(side * side, side * side))
    assert raw is not None
    whole = ((raw[0][0, corner] @ raw[1].T).softmax(-1) - exact).abs().max()
    assert side < 224 or whole > 10 * error
