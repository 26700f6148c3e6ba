"""Leakage and steepness of soft heads, against high-precision sums and real attention."""

import math

import mpmath
import pytest
import torch

from regard import CalculusError
from regard.convert import hardness, leak, steepness, theta
from regard.layers import Lattice, SpatialAttention

# alpha, one axis, two axes
LEAKS = [
    (0.5, 0.601057721733, 0.840845058611),
    (1, 0.435868773781, 0.681755959605),
    (2, 0.213429292958, 0.381306522824),
    (4, 0.0353370534729, 0.0694253995976),
    (8, 6.7047541694e-4, 1.34050129659e-3),
    (12, 1.22882737e-5, 2.45763964e-5),
    (16, 2.25070299e-7, 4.50140547e-7),
    (20, 4.12230723e-9, 8.24461444e-9),
    (32, 2.53283e-14, 5.06567e-14),
    (40, 8.49671e-18, 1.69934e-17),
]
WIDTHS = {
    1e-1: 3.61022571,
    1e-2: 5.98392997,
    1e-3: 8.29329930,
    1e-4: 10.59655973,
    1e-6: 15.20180417,
    1e-8: 19.80697510,
    1e-12: 29.01731548,
    1e-16: 38.22765585,
}


@pytest.mark.parametrize(("alpha", "line", "image"), LEAKS)
def test_the_table_of_leaks(alpha, line, image):
    assert leak(alpha, 1) == pytest.approx(line, rel=1e-5 if alpha > 20 else 1e-8)
    assert leak(alpha, 2) == pytest.approx(image, rel=1e-5 if alpha > 20 else 1e-8)


@pytest.mark.parametrize("alpha", [0.003, 0.02, 0.5, 3.14, 3.15, 7.0, 40.0, 600.0])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_leaks_have_all_their_digits(alpha, dims):
    with mpmath.workdps(300):
        exact = mpmath.jtheta(3, 0, mpmath.exp(-mpmath.mpf(alpha)))
        assert theta(alpha) == pytest.approx(float(exact), rel=4e-16)
        assert leak(alpha, dims) == pytest.approx(float(1 - exact**-dims), rel=1e-14)
        empty = mpmath.exp(-mpmath.mpf(alpha) / 2)
        outside = (exact - 1) / 2 * exact ** (dims - 1)
        worst = max(1 - 1 / (exact**dims + empty), outside / (outside + empty))
        assert leak(alpha, dims, null=True) == pytest.approx(float(worst), rel=1e-14)


@pytest.mark.parametrize(("tolerance", "alpha"), WIDTHS.items())
def test_the_table_of_widths(tolerance, alpha):
    assert steepness(tolerance) == pytest.approx(alpha, abs=1e-8)
    assert steepness(tolerance) <= math.log(4 / tolerance)
    assert steepness(tolerance, 1) == pytest.approx(steepness(tolerance) - math.log(2), abs=tolerance + 1e-13)
    assert steepness(tolerance, null=True) == pytest.approx(2 * math.log(1 / tolerance), abs=4 * tolerance**0.5 + 1e-13)


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("tolerance", [0.9, 0.3, 1e-5, 1e-15, 1e-200])
def test_the_width_is_the_smallest(tolerance, null):
    alpha = steepness(tolerance, null=null)
    assert leak(alpha, null=null) <= tolerance < leak(alpha * (1 - 1e-12), null=null)


@pytest.mark.parametrize("alpha", [0.5, 2.0, 4.0, 8.0])
def test_a_head_in_the_middle_leaks_that_much_and_one_at_an_edge_less(alpha):
    layer = SpatialAttention(1, 1, [(0, 0)], alpha=alpha, lattice=Lattice(edges="replicate"), dtype=torch.float64)
    peaks = layer.weights((15, 17))[0].diagonal().detach().reshape(15, 17)
    lost = 1 - peaks
    assert lost[7, 8].item() == pytest.approx(leak(alpha), rel=1e-12)
    assert lost[0, 0] < lost[0, 8] < lost[7, 8]
    if alpha == 4:
        assert lost[0, 8].item() == pytest.approx(0.05269, abs=5e-6)
        assert lost[0, 0].item() == pytest.approx(0.03565, abs=5e-6)


@pytest.mark.parametrize(("alpha", "error"), [(16, 3.36e-4), (32, 1.13e-7), (40, 2.06e-9), (64, 1.27e-14)])
def test_the_null_key_errs_alike_on_both_sides(alpha, error):
    layer = SpatialAttention(1, 1, [(0, 1)], alpha=alpha, dtype=torch.float64)
    weights = layer.weights((15, 17))[0].detach().reshape(15, 17, -1)
    inside = 1 - weights[7, 8, 7 * 17 + 9].item()
    outside = weights[7, 16, :-1].sum().item()
    for lost in (inside, outside):
        assert lost == pytest.approx(error, rel=0.04 if alpha == 64 else 0.005)  # 1 - weight has few digits at 1e-14
    assert max(inside, outside) <= leak(alpha, null=True) + 1e-15


@pytest.mark.parametrize(
    ("dtype", "rounds", "vanishes", "flushes"),
    [
        (torch.bfloat16, 6.93, 92.88, 87.34),
        (torch.float16, 9.01, 17.33, 9.70),
        (torch.float32, 18.02, 103.97, 87.34),
        (torch.float64, 38.12, 745.13, 708.40),
    ],
)
def test_from_where_on_a_format_takes_soft_for_hard(dtype, rounds, vanishes, flushes):
    found = hardness(dtype)
    assert (found.rounds, found.vanishes, found.flushes) == pytest.approx((rounds, vanishes, flushes), abs=0.006)
    above, below = math.exp(-found.rounds - 1e-3), math.exp(-found.rounds + 1e-2)
    assert torch.tensor(1 + 4 * above, dtype=torch.float64).to(dtype) == 1 or dtype == torch.float64
    if dtype != torch.float64:
        assert torch.tensor(1 + 4 * below, dtype=torch.float64).to(dtype) > 1


def test_in_float32_weights_are_exactly_one_and_zero_from_104_on():
    for alpha, exact in ((104.0, True), (88.0, False)):
        layer = SpatialAttention(1, 1, [(0, 1)], alpha=alpha, lattice=Lattice(edges="replicate"))
        weights = layer.weights((5, 7)).detach()
        assert bool(((weights == 0) | (weights == 1)).all()) == exact
    # The null key stands half as far below, so that it takes twice as much.
    for alpha, exact in ((208.0, True), (170.0, False)):
        weights = SpatialAttention(1, 1, [(0, 1)], alpha=alpha).weights((5, 7)).detach()
        assert bool(((weights == 0) | (weights == 1)).all()) == exact


def test_impossible_tolerances_are_refused():
    steep = [lambda tolerance=tolerance: steepness(tolerance) for tolerance in (0.0, 1.0, math.nan)]
    for ask in (lambda: leak(-1.0), lambda: leak(1.0, dims=0), *steep, lambda: hardness(torch.int8)):
        with pytest.raises(CalculusError, match="instead"):
            ask()
    assert (leak(0.0), leak(math.inf), leak(math.inf, null=True)) == (1.0, 0.0, 0.0)
