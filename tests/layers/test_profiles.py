"""Head profiles: moments, contours and kernels of attention weights, by hand and against the layers."""

import math

import pytest
import torch
from agreement import refused
from torch.nn import functional

from regard import Alibi, Gaussian, Quadratic, RelativeTable, RowColumn, TransformerXL
from regard.errors import InputError
from regard.layers import HeadProfile, MultiHeadAttention, head_profile, head_profiles
from regard.models.spatial import POSITIONS, SpatialConfig, SpatialHeads, SpatialTransformer

GRID = (11, 13)
BY_POSITION = [position for position in POSITIONS if position != "content"]


def biases(dtype=torch.float64):
    random = torch.Generator().manual_seed(3)
    kinds = (Quadratic, Gaussian, RowColumn)
    found = [kind(3, grid=(5, 7), start=2, generator=random, dtype=dtype) for kind in kinds]
    return [*found, RelativeTable(3, grid=(5, 7), start=2, generator=random, dtype=dtype)]


# One hill


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_head_with_alpha_one_half_is_one_pixel_wide_and_peaks_at_alpha_over_pi(dtype):
    profile = head_profile(Quadratic(1, GRID, centre=[[0, 0]], alpha=0.5, dtype=dtype))
    # A theta function: the sum over whole numbers of exp(-x^2 / 2) differs from sqrt(2 pi) by 2 exp(-2 pi^2) of it.
    variance = profile.covariance[0].diagonal()
    expected = torch.tensor(0.99999979, dtype=dtype)
    assert torch.allclose(variance, expected, rtol=0, atol=5e-9 if dtype == torch.float64 else 3e-6)
    assert math.isclose(profile.width.item(), 1.0, abs_tol=1e-3)
    assert math.isclose(profile.weights.max().item(), 0.5 / math.pi, rel_tol=2e-6)
    assert profile.weights[0, 10, 12] == profile.weights.max()


def test_soft_heads_have_their_mass_at_their_centre_and_hard_ones_at_the_nearest_pixel():
    centres = [[0.25, -1.0], [0.5, 2.0]]
    soft = head_profile(Quadratic(2, GRID, centre=centres, alpha=0.4, dtype=torch.float64))
    assert torch.allclose(soft.mean, soft.centre, rtol=0, atol=1e-5)
    assert torch.allclose(soft.covariance.diagonal(dim1=1, dim2=2), torch.tensor(1.25).double(), rtol=0, atol=1e-5)
    harder = head_profile(Quadratic(2, GRID, centre=centres, alpha=2.0, dtype=torch.float64))
    assert abs(harder.mean[0, 0].item() - 0.2274) < 5e-5
    hard = head_profile(Quadratic(2, GRID, centre=centres, alpha=104.0, dtype=torch.float64))
    assert torch.allclose(hard.mean, torch.tensor([[0.0, -1.0], [0.5, 2.0]]).double(), rtol=0, atol=1e-9)
    assert math.isclose(hard.covariance[1, 0, 0].item(), 0.25, rel_tol=1e-9)  # between two pixels, for ever


def test_a_slanted_head_has_the_covariance_of_its_precision():
    root = [[[0.7, 0.3], [0.0, 0.6]]]
    profile = head_profile(Gaussian(1, (17, 19), centre=[[1, -2]], root=root, dtype=torch.float64))
    assert torch.allclose(
        profile.precision, torch.tensor([[[0.58, 0.18], [0.18, 0.36]]], dtype=torch.float64), rtol=1e-14
    )
    assert torch.allclose(profile.covariance, profile.precision.inverse(), rtol=0, atol=1e-5)
    assert profile.covariance[0, 0, 1] < -1
    assert torch.allclose(profile.mean, profile.centre, rtol=0, atol=1e-5)


# Entries


@pytest.mark.parametrize("bias", biases(), ids=lambda bias: type(bias).__name__)
def test_every_entry_is_the_bias_of_its_relative_position(bias):
    profile = head_profile(bias)
    assert profile.grid == (5, 7)
    token = torch.arange(2, 37)
    square = bias.scores(token[:, None], token)
    for query in range(35):
        for key in range(35):
            row, column = key // 7 - query // 7, key % 7 - query % 7
            assert torch.equal(profile.scores[:, row + 4, column + 6], square[:, query, key])
    assert (profile.centre is None) == (profile.precision is None) == isinstance(bias, RelativeTable | RowColumn)


@pytest.mark.parametrize("position", BY_POSITION)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_layer_of_the_spatial_transformer_attends_as_its_profile(position, dtype):
    torch.manual_seed(7)
    layer = SpatialHeads(SpatialConfig(position, image=(10, 14), dim=3, heads=5, attention_dropout=0)).to(dtype).eval()
    profile, x = layer.head_profile(), torch.randn(2, 5, 7, 3, dtype=dtype)
    row, column = 3, 2
    window = profile.scores[:, 4 - row : 9 - row, 6 - column : 13 - column]  # what the query has on the grid
    weight = window.flatten(1).softmax(-1)
    expected = torch.einsum("hk,hoi,bki->bo", weight, profile.values, x.flatten(1, 2)) + layer.value.bias
    tolerance = 60 * torch.finfo(dtype).eps
    assert torch.allclose(layer(x)[:, row, column], expected, rtol=tolerance, atol=tolerance)


def test_on_a_large_image_a_layer_is_the_convolution_with_its_kernel():
    # Nine sharp heads around the query: nothing of any of them reaches the border from the middle.
    torch.manual_seed(2)
    offsets = [[row, column] for row in (-1, 0, 1) for column in (-1, 0, 1)]
    layer = SpatialHeads(SpatialConfig(image=(14, 18), dim=3, heads=9, attention_dropout=0)).double()
    layer.position = Quadratic(9, (7, 9), centre=offsets, alpha=40.0, dtype=torch.float64)
    x = torch.randn(2, 7, 9, 3, dtype=torch.float64)
    kernel = layer.head_profile().kernel
    assert kernel.shape == (3, 3, 13, 17)
    convolved = functional.conv2d(x.permute(0, 3, 1, 2), kernel, layer.value.bias, padding=(6, 8))
    inner = layer(x).permute(0, 3, 1, 2)[:, :, 1:-1, 1:-1]
    assert torch.allclose(inner, convolved[:, :, 1:-1, 1:-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_norm_of_the_kernel_needs_no_kernel(dtype):
    random = torch.Generator().manual_seed(1)
    profile = HeadProfile(
        torch.randn(5, 3, 7, generator=random).to(dtype), values=torch.randn(5, 2, 11, generator=random).to(dtype)
    )
    assert torch.allclose(profile.kernel_norm, profile.kernel.norm(), rtol=40 * torch.finfo(dtype).eps)
    by_hand = sum(profile.weights[h][None, None] * profile.values[h][:, :, None, None] for h in range(5))
    assert torch.allclose(profile.kernel, by_hand, rtol=1e-5)


# Contours


def test_contours_of_a_known_head():
    weight = torch.tensor([[[0.4, 0.1, 0.05], [0.3, 0.1, 0.05], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    profile = HeadProfile(weight.log())
    levels = {0.4: 0.4, 0.5: 0.3, 0.7: 0.3, 0.75: 0.1, 0.9: 0.1, 0.95: 0.05, 1.0: 0.05}
    for mass, level in levels.items():
        assert math.isclose(profile.mass_level(mass).item(), level, rel_tol=1e-12), mass
        assert profile.weights[profile.inside(mass)].sum() >= mass - 1e-12
    assert [int(profile.inside(mass).sum()) for mass in levels] == [1, 2, 2, 4, 4, 6, 6]
    assert profile.inside(0.9)[0].tolist() == [[True, True, False], [True, True, False], [False, False, False]]


def test_every_level_holds_its_mass_and_no_higher_one_does():
    random = torch.Generator().manual_seed(9)
    profile = HeadProfile(3 * torch.randn(7, 5, 9, generator=random, dtype=torch.float64))
    for mass in (0.1, 0.5, 0.9, 1.0):
        held = (profile.weights * profile.inside(mass)).sum((1, 2))
        assert bool((held >= mass - 1e-12).all())
        above = (profile.weights * (profile.weights > profile.mass_level(mass)[:, None, None])).sum((1, 2))
        assert bool((above < mass).all())


def test_coverage_counts_each_position_once():
    profile = head_profile(Quadratic(3, (5, 7), centre=[[0, 0], [0, 0], [2, -3]], alpha=50.0))
    assert profile.coverage() == 2
    softer = head_profile(Quadratic(2, (5, 7), centre=[[0, 0], [0, 1]], alpha=1.0))
    assert max(int(inside.sum()) for inside in softer.inside(0.9)) < softer.coverage(0.9) < softer.inside(0.9).sum()


def test_a_mass_that_no_head_has_is_refused():
    for mass in (0.0, -0.5, 1.5, math.nan):
        with pytest.raises(InputError, match="sum to one"):
            HeadProfile(torch.zeros(1, 3, 5)).mass_level(mass)


# Heads without a preferred position


def test_the_papers_rule_finds_heads_that_are_flat_along_a_direction_or_everywhere():
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    precisions = [
        (1.0, 1.0),
        (1.0, 1.01e-3),
        (1.0, 0.99e-3),
        (1.0, 0.0),
        (1.01e-5, 1.01e-5),
        (0.99e-5, 0.99e-5),
        (0, 0),
    ]
    roots = torch.stack([turn @ torch.tensor(pair, dtype=torch.float64).sqrt().diag() for pair in precisions])
    profile = head_profile(Gaussian(7, (5, 7), root=roots.tolist(), dtype=torch.float64))
    assert profile.degenerate().tolist() == [False, False, True, True, False, True, True]
    assert profile.degenerate(condition=1e9, least=0.0).tolist() == [False, False, False, True, False, False, False]
    round_ones = head_profile(Quadratic(3, (5, 7), alpha=[0.5, 6e-6, 4e-6]))
    assert round_ones.degenerate().tolist() == [False, False, True]


def test_a_table_is_degenerate_when_it_is_as_flat_as_such_a_gaussian():
    limit = 1e-5 / 2 * (4**2 + 6**2)
    scores = torch.zeros(5, 9, 13, dtype=torch.float64)
    scores[1, 2, 3], scores[2, 2, 3] = 0.99 * limit, 1.01 * limit
    scores[3] = torch.linspace(0, 9, 13)  # flat down the rows: it still has something to say
    scores[4] = -math.inf
    assert HeadProfile(scores).degenerate().tolist() == [True, True, False, False, True]


def test_a_head_that_sees_nothing_has_no_weights_and_no_nan():
    profile = HeadProfile(torch.full((1, 3, 5), -math.inf), values=torch.ones(1, 2, 2))
    assert not profile.weights.any()
    assert not profile.mean.any()
    assert not profile.kernel.any()


# Content


def test_content_heads_are_observed_on_average():
    torch.manual_seed(1)
    layer = SpatialHeads(SpatialConfig(image=(6, 10), dim=4, heads=3)).double()
    square = layer.weights(torch.empty(1, 3, 5, 4, dtype=torch.float64))
    profile = HeadProfile.observed(square.expand(7, -1, -1, -1), (3, 5))
    for row in range(-2, 3):
        for column in range(-4, 5):
            pairs = [
                square[0, :, query, query + row * 5 + column]
                for query in range(15)
                if 0 <= query // 5 + row < 3 and 0 <= query % 5 + column < 5
            ]
            expected = torch.stack(pairs).mean(0)
            assert torch.allclose(profile.scores[:, row + 2, column + 4].exp(), expected, rtol=1e-12)
    with refused(InputError, "5 x 5"):
        HeadProfile.observed(square, (5, 5))


def test_content_and_sequence_attention_are_refused():
    content = SpatialHeads(SpatialConfig("content", image=(6, 10), dim=4, heads=3))
    for source in (content, TransformerXL(2, 8), MultiHeadAttention(8, 2), torch.nn.Linear(2, 3)):
        with pytest.raises(InputError, match="content-based"):
            head_profile(source)
    for source in (Alibi(4), Quadratic(3), RelativeTable(3, distance=5)):
        with pytest.raises(InputError, match="relative rows and columns"):
            head_profile(source)


@pytest.mark.parametrize("position", POSITIONS)
def test_a_model_has_a_profile_of_every_positional_layer(position):
    model = SpatialTransformer(SpatialConfig(position, image=(6, 10), dim=4, heads=3, layers=2))
    names = [] if position == "content" else ["blocks.0.attention", "blocks.1.attention"]
    assert list(head_profiles(model)) == names


# Files and copies


@pytest.mark.parametrize("bias", biases(torch.float32), ids=lambda bias: type(bias).__name__)
def test_a_head_profile_comes_back_from_its_tensors(bias):
    profile = head_profile(bias)
    again = HeadProfile.from_tensors(profile.to_tensors())
    assert profile.to_tensors().keys() == again.to_tensors().keys()
    assert all(torch.equal(again.to_tensors()[name], value) for name, value in profile.to_tensors().items())
    with pytest.raises(InputError, match="a head profile has scores"):
        HeadProfile.from_tensors(profile.to_tensors() | {"score": torch.zeros(1)})


def test_a_head_profile_is_unchanged_by_training():
    layer = SpatialHeads(SpatialConfig(image=(6, 10), dim=4, heads=3))
    profile = layer.head_profile()
    before = {name: value.clone() for name, value in profile.to_tensors().items()}
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(profile.to_tensors()[name], value) for name, value in before.items())
    assert not any(value.requires_grad for value in profile.to_tensors().values())


def test_tensors_that_do_not_belong_together_are_refused():
    scores = torch.zeros(3, 5, 7)
    for wrong in (
        {"scores": scores[0]},
        {"scores": scores[:, :4]},
        {"scores": scores, "centre": torch.zeros(3, 3)},
        {"scores": scores, "centre": torch.zeros(2, 2)},
        {"scores": scores, "precision": torch.zeros(3, 2)},
        {"scores": scores, "values": torch.zeros(3, 4)},
    ):
        with pytest.raises(InputError, match="no head profile"):
            HeadProfile(**wrong)
    with pytest.raises(InputError, match="not known"):
        _ = HeadProfile(scores).kernel
