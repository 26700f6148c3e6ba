"""Quadratic and Gaussian heads: closed forms, the limit of one pixel, and how they start."""

from __future__ import annotations

import math

import pytest
import torch

from regard.biases import Gaussian, Quadratic

GRID = (41, 43)
MIDDLE = 20 * 43 + 21
# alpha: leak in one and in two dimensions, to the digits printed here
LEAKS = {
    0.5: ("0.601057721733", "0.840845058611"),
    1: ("0.435868773781", "0.681755959605"),
    2: ("0.213429292958", "0.381306522824"),
    4: ("0.0353370534729", "0.0694253995976"),
    8: ("6.7047541694e-4", "1.34050129659e-3"),
    12: ("1.22882737e-5", "2.45763964e-5"),
    16: ("2.25070299e-7", "4.50140547e-7"),
    20: ("4.12230723e-9", "8.24461444e-9"),
    32: ("2.53283e-14", "5.06567e-14"),
    40: ("8.49671e-18", "1.69934e-17"),
}


def weights(alpha, centre, grid=None, dtype=torch.float64, query=None) -> torch.Tensor:
    """One head's attention, from a query in the middle, over the whole grid or 83 positions of a line."""
    bias = Quadratic(1, grid=grid, centre=[centre], alpha=alpha, dtype=dtype)
    query = (MIDDLE if grid else 41) if query is None else query
    keys = torch.arange(math.prod(grid) if grid else 83)
    with torch.no_grad():
        return bias.scores(torch.tensor(query), keys)[0].softmax(-1)


def leak(row: torch.Tensor, target: int) -> float:
    """Weight beside the target, summed from the small end: 1 - p would lose all digits."""
    others = row.clone()
    others[target] = 0
    return math.fsum(others.tolist())


def exact_leak(alpha: float, axes: int) -> float:
    """1 - theta^-axes with theta = 1 + tail, without cancellation."""
    tail = 2 * math.fsum(math.exp(-alpha * j * j) for j in range(1, 60))
    return -math.expm1(-axes * math.log1p(tail))


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("alpha", LEAKS)
def test_the_leak_of_an_interior_target_is_the_theta_function(alpha, axes):
    found = leak(weights(alpha, [2]), 43) if axes == 1 else leak(weights(alpha, [-2, 3], GRID), MIDDLE - 2 * 43 + 3)
    assert found == pytest.approx(exact_leak(alpha, axes), rel=1e-10)
    printed = LEAKS[alpha][axes - 1]
    digits = len(printed.split("e")[0].lstrip("0.").replace(".", ""))
    assert f"{found:.{digits - 1}e}" == f"{float(printed):.{digits - 1}e}"


def test_edge_and_corner_leak_less_than_the_interior():
    row, column = 20 * 43 + 0, 0
    found = [leak(weights(4, [0, 0], GRID, query=q), q) for q in (MIDDLE, row, column)]
    assert found == pytest.approx([0.06943, 0.05269, 0.03565], abs=5e-6)


def test_float32_weights_are_exactly_zero_or_one_at_104_and_not_at_88():
    hard = weights(104, [1, -2], GRID, torch.float32)
    assert set(hard.tolist()) == {0.0, 1.0}
    assert hard.argmax().item() == MIDDLE + 43 - 2
    assert not set(weights(88, [1, -2], GRID, torch.float32).tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [*range(1, 130), 0.1, 1 / 3, 1e4])
def test_a_given_alpha_is_exact_in_the_scores(alpha, dtype):
    bias = Quadratic(1, alpha=alpha, centre=[[0]], dtype=dtype)
    expected = torch.tensor([-alpha * n * n if n else 0.0 for n in (0, 1, 2, 4)], dtype=dtype)
    assert torch.equal(bias.scores(torch.tensor(0), torch.tensor([0, 1, 2, 4]))[0], expected)


def test_a_target_outside_the_image_gives_the_nearest_pixel_and_half_integers_tie():
    row = weights(104, [-3, 0], GRID, query=43 + 5)
    assert row.argmax().item() == 5
    assert row.max().item() == 1.0
    row = weights(104, [0, 0.5], GRID)
    assert row[[MIDDLE, MIDDLE + 1]].tolist() == [0.5, 0.5]


def test_softmax_of_the_completed_square_equals_that_of_the_expanded_form():
    bias = Quadratic(5, grid=(7, 11), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    token = torch.arange(77)
    row = (token // 11)[None, :] - (token // 11)[:, None]
    column = (token % 11)[None, :] - (token % 11)[:, None]
    first, second = bias.centre.unbind(1)
    expanded = -bias.alpha[:, None, None] * (
        row**2 + column**2 - 2 * row * first[:, None, None] - 2 * column * second[:, None, None]
    )
    found = bias.scores(token[:, None], token)
    torch.testing.assert_close(found.softmax(-1), expanded.softmax(-1), rtol=0, atol=1e-12)
    assert (found - expanded).abs().max() > 0.1  # the scores themselves differ by alpha |centre|^2
    assert bool((found <= 0).all())


def test_a_head_starts_one_pixel_wide():
    row = weights(0.5, [0, 0], GRID).reshape(GRID)
    assert row.max().item() == pytest.approx(0.5 / math.pi, abs=5e-6)
    assert f"{row.max().item():.5f}" == "0.15915"  # alpha / pi
    offset = torch.arange(41, dtype=torch.float64) - 20
    variance = (row.sum(1) * offset.square()).sum().item()
    assert f"{variance:.8f}" == "0.99999979"
    assert f"{math.sqrt(variance):.3f}" == "1.000"


@pytest.mark.parametrize("axes", [1, 2])
def test_centres_and_spreads_start_as_in_the_paper(axes):
    generator = torch.Generator().manual_seed(0)
    heads = 4001
    grid = None if axes == 1 else (5, 7)
    bias = Quadratic(heads, grid, generator=generator, dtype=torch.float64)
    assert bias.centre.shape == (heads, axes)
    for values, mean, std in ((bias.centre, 0.0, 2.0), (bias.spread, 1.0, 0.01)):
        assert values.mean().item() == pytest.approx(mean, abs=5 * std / values.numel() ** 0.5)
        assert values.std().item() == pytest.approx(std, rel=5 / (2 * values.numel()) ** 0.5)
    assert torch.equal(bias.alpha, bias.spread.square() / 2)


def test_alpha_stays_positive_and_moves_under_training():
    bias = Quadratic(2, grid=(5, 7), alpha=2.0)
    optimiser = torch.optim.Adam(bias.parameters(), lr=0.3)  # far too fast: spread runs through 0 and back
    minima = []
    for _ in range(20):
        optimiser.zero_grad()
        bias.scores(torch.arange(35)[:, None], torch.arange(35)).mean().neg().backward()
        optimiser.step()
        minima.append((bias.spread.min().item(), bias.alpha.min().item()))
    assert min(spread for spread, _ in minima) < 0
    assert all(0 <= alpha < 2 for _, alpha in minima)


def test_a_soft_head_has_the_mean_and_variance_of_its_normal_and_a_hard_one_has_not():
    offset = torch.arange(83, dtype=torch.float64) - 41

    def moments(alpha, centre):
        row = weights(alpha, [centre])
        mean = (row * offset).sum()
        return mean.item(), (row * (offset - mean).square()).sum().item()

    for centre in (0.0, 0.25, 0.5, 1.3):
        mean, variance = moments(0.5, centre)
        assert mean == pytest.approx(centre, abs=2.2e-7)
        assert variance == pytest.approx(1.0, abs=2.2e-7)
    assert f"{moments(2, 0.25)[0]:.4f}" == "0.2274"
    assert moments(50, 0.5) == pytest.approx((0.5, 0.25), abs=1e-12)


def test_a_given_tensor_is_copied_not_shared():
    centre, alpha = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    bias = Quadratic(2, centre=centre, alpha=alpha, dtype=torch.float64)
    with torch.no_grad():
        bias.centre.add_(1)
        bias.reference.add_(1)
    assert not centre.any()
    assert alpha.tolist() == [1, 1]
    assert repr(bias) == "Quadratic(heads=2, centre=[[0.0], [0.0]], alpha=[1.0, 1.0])"


@pytest.mark.parametrize("grid", [None, (5, 7)])
def test_a_round_gaussian_is_quadratic_with_half_the_square_of_its_root(grid):
    axes = 1 if grid is None else 2
    s = torch.tensor([0.7, 1.0, 3.1], dtype=torch.float64)
    centre = torch.randn(3, axes, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    round_ = Gaussian(3, grid, centre, s[:, None, None] * torch.eye(axes), dtype=torch.float64)
    expected = Quadratic(3, grid, centre, s.square() / 2, dtype=torch.float64)
    token = torch.arange(35)
    pairs = (token[:, None], token)
    torch.testing.assert_close(round_.scores(*pairs), expected.scores(*pairs), rtol=1e-14, atol=1e-14)


def test_a_gaussian_starts_round_and_one_pixel_wide():
    bias = Gaussian(4001, (5, 7), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert bias.centre.std().item() == pytest.approx(2.0, rel=5 / (2 * 8002) ** 0.5)
    noise = bias.root - torch.eye(2)
    assert noise.mean().item() == pytest.approx(0, abs=5 * 0.01 / noise.numel() ** 0.5)
    assert noise.std().item() == pytest.approx(0.01, rel=5 / (2 * noise.numel()) ** 0.5)


def test_a_slanted_gaussian_uses_the_root_on_the_documented_side():
    root = torch.tensor([[[1.0, 2.0], [0.0, 3.0]]])
    bias = Gaussian(1, (5, 7), centre=[[0, 0]], root=root)
    # delta = (1, 1): S^T delta = (1, 5), half its square is 13; S delta = (3, 3) would give 9
    assert bias.scores(torch.tensor(0), torch.tensor(8)).tolist() == [-13.0]
