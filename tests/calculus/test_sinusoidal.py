"""Sinusoidal positions."""

import math

import mpmath
import pytest
import torch

from regard.calculus import sinusoidal, sinusoidal_rotation
from regard.errors import CalculusError

DOUBLE = torch.float64


def test_positions_1_and_10_in_four_dimensions():
    expected = torch.tensor(
        [
            [0.84147098480789651, 0.54030230586813972, 0.0099998333341666647, 0.99995000041666528],
            [-0.54402111088936981, -0.83907152907645245, 0.099833416646828152, 0.99500416527802577],
        ],
        dtype=DOUBLE,
    )
    torch.testing.assert_close(sinusoidal([1, 10], 4, dtype=DOUBLE), expected, rtol=1e-15, atol=0)


def test_inner_products_depend_on_the_distance_only():
    for distance, expected in {
        0: 256,
        1: 249.102097827363,
        10: 173.7897249236634,
        100: 111.95020864863687,
    }.items():
        for position in (0, 3, 997):
            a, b = sinusoidal([position, position + distance], 512, dtype=DOUBLE)
            assert (a @ b).item() == pytest.approx(expected, abs=1e-10)


def test_one_rotation_shifts_every_position():
    table = sinusoidal(torch.arange(101), 14, dtype=DOUBLE)
    for shift in (1, 7, -13):
        rotation = sinusoidal_rotation(shift, 14, dtype=DOUBLE)
        shifted = sinusoidal(torch.arange(101) + shift, 14, dtype=DOUBLE)
        torch.testing.assert_close(table @ rotation.mT, shifted, rtol=0, atol=1e-13)
        torch.testing.assert_close(rotation @ rotation.mT, torch.eye(14, dtype=DOUBLE))


def test_rotations_compose_and_come_in_batches():
    batch = sinusoidal_rotation(torch.tensor([2, 3, 5]), 6, dtype=DOUBLE)
    assert batch.shape == (3, 6, 6)
    torch.testing.assert_close(batch[0] @ batch[1], batch[2])
    # By hand: the fastest pair turns by the shift itself.
    expected = torch.tensor([[math.cos(2), math.sin(2)], [-math.sin(2), math.cos(2)]], dtype=DOUBLE)
    torch.testing.assert_close(batch[0, :2, :2], expected)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_the_table_is_cast_after_it_is_computed(dtype, unit):
    position, dim = 99991, 34
    table = sinusoidal(position, dim, dtype=dtype)
    assert table.dtype == dtype
    with mpmath.workdps(30):
        for i in range(dim // 2):
            angle = position * mpmath.mpf(10000) ** (-mpmath.mpf(2 * i) / dim)
            assert abs(table[2 * i].item() - mpmath.sin(angle)) <= unit
            assert abs(table[2 * i + 1].item() - mpmath.cos(angle)) <= unit


def test_the_shape_follows_the_positions_and_the_dtype_the_default():
    assert sinusoidal(torch.zeros(3, 5), 8).shape == (3, 5, 8)
    assert sinusoidal(2.5, 8).dtype == torch.get_default_dtype()


@pytest.mark.parametrize("dim", [0, 1, 7])
def test_an_odd_dimension_is_refused(dim):
    with pytest.raises(CalculusError, match="an even dim"):
        sinusoidal(0, dim)
    with pytest.raises(CalculusError, match="base = 0"):
        sinusoidal_rotation(0, 4, base=0)
