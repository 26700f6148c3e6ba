"""Contours enclose the mass they claim."""

from __future__ import annotations

import math

import pytest
import torch

from regard import Gaussian, Quadratic
from regard.layers.profiles import HeadProfile, head_profile
from regard.visualize.contours import contours
from regard.visualize.heads import order_by_area


def inside(loop, points):
    """Which points lie within a closed polygon, by the parity of the edges that a ray crosses."""
    count = torch.zeros(len(points), dtype=torch.long)
    for (r0, c0), (r1, c1) in zip(loop, [*loop[1:], loop[0]], strict=True):
        row, column = points[:, 0], points[:, 1]
        crosses = (r0 > row) != (r1 > row)
        where = c0 + (row - r0) / (r1 - r0 if r1 != r0 else 1.0) * (c1 - c0)
        count += (crosses & (column < where)).long()
    return count % 2 == 1


def area(loop) -> float:
    """By the shoelace formula; a hole, which runs the other way, is negative."""
    return sum(r1 * c0 - r0 * c1 for (r0, c0), (r1, c1) in zip(loop, [*loop[1:], loop[0]], strict=True)) / 2


@pytest.mark.parametrize("mass", [0.5, 0.9])
def test_an_ellipse_holds_its_share_of_the_normal_distribution(mass):
    bias = Gaussian(1, grid=(11, 13))
    with torch.no_grad():
        bias.centre.copy_(torch.tensor([[1.3, -2.1]]))
        spread = torch.tensor([[0.9, 0.4], [0.0, 0.6]])
        next(parameter for name, parameter in bias.named_parameters() if name != "centre").copy_(spread[None])
    found = head_profile(bias)
    (contour,) = contours(found, [mass])[0]
    assert contour.ellipse is not None
    step = 0.05
    axis = torch.arange(-10, 10, step, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    off = points - found.centre[0].double()
    density = torch.exp(-0.5 * torch.einsum("na,ab,nb->n", off, found.precision[0].double(), off))
    share = float(density[inside(contour.loops[0], points)].sum() / density.sum())
    # The outline has 96 corners: it cuts off a share 1 - sin(2 pi / 96) / (2 pi / 96) of its area, below 1e-3.
    assert share == pytest.approx(mass, abs=2e-3)


def test_a_round_head_has_a_circle_of_known_radius_around_its_centre():
    half, most = contours(head_profile(Quadratic(1, grid=(11, 13), centre=[[1, -2]], alpha=0.5)))[0]
    assert (half.ellipse.row, half.ellipse.column) == (1.0, -2.0)
    for contour in (half, most):
        radius = math.sqrt(-2 * math.log(1 - contour.mass))  # alpha 1/2 is a deviation of one pixel
        assert contour.ellipse.long == pytest.approx(radius, rel=1e-6)
        assert contour.ellipse.short == pytest.approx(radius, rel=1e-6)


def test_a_long_head_lies_along_its_own_direction():
    turned = torch.tensor([[[1.0, -0.9], [-0.9, 1.0]]])  # precision: long where row and column grow together
    found = HeadProfile(torch.zeros(1, 5, 7), centre=torch.zeros(1, 2), precision=turned)
    (contour,) = contours(found, [0.5])[0]
    assert contour.ellipse is not None
    far = max(contour.loops[0], key=lambda point: math.hypot(*point))
    assert far[0] == pytest.approx(far[1], rel=1e-3)
    assert contour.ellipse.long > 4 * contour.ellipse.short


@pytest.mark.parametrize("mass", [0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_tables_are_outlined_around_the_fewest_pixels_that_hold_the_share(mass, seed):
    scores = 2 * torch.randn(2, 9, 13, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = HeadProfile(scores)
    places = torch.cartesian_prod(torch.arange(-4, 5), torch.arange(-6, 7)).double()
    for head, (contour,) in enumerate(contours(found, [mass])):
        assert contour.ellipse is None
        held = torch.stack([inside(loop, places) for loop in contour.loops]).sum(0) % 2 == 1
        expected = found.inside(mass)[head].flatten()
        assert torch.equal(held, expected)
        assert float(found.weights[head].flatten()[held].sum()) >= mass
        assert sum(area(loop) for loop in contour.loops) == pytest.approx(float(expected.sum()))


def test_pixels_that_touch_at_a_corner_stay_apart():
    scores = torch.full((1, 3, 3), -torch.inf)
    scores[0, 0, 0] = scores[0, 1, 1] = 0.0
    ((contour,),) = contours(HeadProfile(scores), [0.9])
    assert sorted(area(loop) for loop in contour.loops) == [1.0, 1.0]
    assert {len(loop) for loop in contour.loops} == {4}


def test_a_hole_is_a_line_of_its_own():
    scores = torch.zeros(1, 3, 3)
    scores[0, 1, 1] = -torch.inf
    ((contour,),) = contours(HeadProfile(scores), [0.9])
    assert sorted(area(loop) for loop in contour.loops) == [-1.0, 9.0]


def test_wide_shapes_are_paler_and_below_narrow_ones():
    found = contours(head_profile(Quadratic(3, grid=(11, 13), centre=[[0, 0]] * 3, alpha=[0.5, 0.02, 20.0])))
    areas = [half.area for half, _ in found]
    assert areas[0] == pytest.approx(2 * math.pi * math.log(2), rel=2e-3)  # pi r^2, r^2 = 2 ln 2
    assert areas[2] == 1.0
    assert areas[1] > 20
    shades = [half.opacity for half, _ in found]
    assert shades[0] == shades[2] > shades[1] > 0
    assert order_by_area(found) == [1, 0, 2]


def test_hard_heads_and_heads_beyond_the_image_are_outlined_by_pixels():
    hard = Quadratic(1, grid=(5, 7), centre=[[0, 1]], alpha=20.0)
    outside = Quadratic(1, grid=(5, 7), centre=[[0, 9]], alpha=0.5)
    for bias, where in ((hard, (0, 1)), (outside, (0, 6))):
        ((contour, _),) = contours(head_profile(bias))
        assert contour.ellipse is None
        rows, columns = zip(*contour.loops[0], strict=True)
        assert min(columns) < where[1] < max(columns) + 0.1
        assert min(rows) < where[0] < max(rows)
