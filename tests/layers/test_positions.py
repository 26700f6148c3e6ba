"""Additive positions: the values of the paper, the rotation that shifts them, and tables of other sizes."""

import pytest
import torch
from twins import library

from regard import Causal
from regard.calculus import sinusoidal_rotation
from regard.errors import CalculusError, ConfigError, InputError
from regard.layers import GridPositions, LearnedPositions, MultiHeadAttention, SinusoidalPositions

F64 = torch.float64


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_four_parts(error):
    assert error.asked
    assert error.because
    assert error.instead


# Sinusoids


def test_sinusoids_have_the_numbers_of_the_paper():
    table = SinusoidalPositions(4)(torch.tensor([1, 10]), F64)
    expected = [
        [0.84147098480789651, 0.54030230586813972, 0.0099998333341666647, 0.99995000041666528],
        [-0.54402111088936981, -0.83907152907645245, 0.099833416646828152, 0.99500416527802577],
    ]
    assert float((table - torch.tensor(expected, dtype=F64)).abs().max()) <= 2.0**-52


def test_products_of_sinusoids_depend_on_the_distance_only():
    table = SinusoidalPositions(512)(torch.arange(300), F64)
    products = table @ table.T
    for distance, expected in {
        0: 256.0,
        1: 249.102097827363,
        10: 173.7897249236634,
        100: 111.95020864863687,
    }.items():
        assert float((products.diagonal(distance) - expected).abs().max()) <= 1e-10


def test_one_rotation_moves_every_sinusoid():
    positions = torch.arange(50)
    module = SinusoidalPositions(14, base=300.0)
    for shift in (1, 7, -3, 100):
        rotation = sinusoidal_rotation(shift, 14, base=300.0, dtype=F64)
        moved = module(positions, F64) @ rotation.mT
        assert float((moved - module(positions + shift, F64)).abs().max()) <= 1e-12


def test_sinusoids_are_precise_far_away_in_every_dtype():
    far = torch.tensor([[100_003, 7], [5, 6]])
    exact = SinusoidalPositions(6)(far, F64)
    assert exact.shape == (2, 2, 6)
    for dtype in (torch.float32, torch.bfloat16):
        found = SinusoidalPositions(6)(far, dtype)
        assert found.dtype == dtype
        assert float((found.double() - exact).abs().max()) <= torch.finfo(dtype).eps
    assert SinusoidalPositions(6)(far).dtype == torch.float32
    assert repr(SinusoidalPositions(6)) == "SinusoidalPositions(6, base=10000.0)"


def test_sinusoids_come_in_pairs():
    with pytest.raises(CalculusError) as caught:
        SinusoidalPositions(5)
    assert_four_parts(caught.value)


def test_only_positions_break_permutation_equivariance():
    layer, x, order = MultiHeadAttention(12, 3).double(), random(7, 12), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert float((layer(x[order]) - layer(x)[order]).abs().max().detach()) <= 1e-12
    placed = x + SinusoidalPositions(12)(torch.arange(7), F64)
    moved = x[order] + SinusoidalPositions(12)(torch.arange(7), F64)
    assert float((layer(moved) - layer(placed)[order]).abs().max().detach()) > 1e-2
    causal = layer(x[order], pattern=Causal()) - layer(x, pattern=Causal())[order]
    assert float(causal.abs().max().detach()) > 1e-2


# Learned, on a line


def test_learned_positions_are_rows_of_the_table():
    positions = LearnedPositions(11, 5).double()
    indices = torch.tensor([[3, 3], [10, 0]])
    assert torch.equal(positions(indices), positions.weight[indices])
    positions(indices).sum().backward()
    assert positions.weight.grad[:, 0].tolist() == [1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1]


def test_a_line_of_the_same_size_keeps_its_bits_and_another_keeps_its_ends():
    positions = LearnedPositions(11, 5)
    same = positions.resized(11)
    assert torch.equal(same.weight, positions.weight)
    assert same.weight is not positions.weight
    longer = positions.double().resized(21)
    assert float((longer.weight[::2] - positions.weight).abs().max().detach()) <= 1e-15
    between = (positions.weight[:-1] + positions.weight[1:]) / 2
    assert float((longer.weight[1::2] - between).abs().max().detach()) <= 1e-15
    assert longer.weight.dtype == F64
    assert positions.resized(1).weight.shape == (1, 5)


def test_a_position_that_was_not_learned_is_refused_with_a_reason():
    for indices in (torch.tensor([0, 11]), torch.tensor([-1])):
        with pytest.raises(InputError, match="out of range") as caught:
            LearnedPositions(11, 5)(indices)
        assert_four_parts(caught.value)
        assert "11" in caught.value.found
    with pytest.raises(ConfigError, match="at least one row") as caught:
        LearnedPositions(0, 5)
    assert_four_parts(caught.value)


# Learned, on a grid


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_learned_grid_is_returned_bit_for_bit(first):
    positions = GridPositions((5, 7), 3, first=first)
    assert positions() is positions.weight
    assert positions((5, 7)) is positions.weight
    assert positions([5, 7]) is positions.weight
    assert GridPositions([5, 7], 3, first=first)((5, 7)).shape == (first + 35, 3)
    listed = GridPositions([5, 7], 3, first=first)
    assert listed((5, 7)) is listed.weight
    assert torch.equal(positions.resized((5, 7)).weight, positions.weight)


@pytest.mark.parametrize("grid", [(9, 4), (5, 11), (2, 3), (1, 1)])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_another_grid_is_interpolated_as_timm_does(grid, first):
    resample = library("timm.layers").resample_abs_pos_embed
    positions = GridPositions((5, 7), 3, first=first)
    theirs = resample(positions.weight[None], list(grid), [5, 7], num_prefix_tokens=first)[0]
    found = positions(grid)
    assert found.shape == (first + grid[0] * grid[1], 3)
    assert torch.equal(found[:first], positions.weight[:first])
    assert float((found - theirs).abs().max().detach()) <= 1e-7  # numbers of size 0.02 to 0.1, in float32
    resized = positions.resized(grid)
    assert resized.grid == grid
    assert torch.equal(resized(), found)


def test_rows_and_columns_of_a_grid_are_not_exchanged():
    positions = GridPositions((4, 6), 2).double()
    with torch.no_grad():
        row, column = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
        positions.weight.copy_(torch.stack((row, column), -1).reshape(24, 2))
    found = positions((8, 6)).reshape(8, 6, 2)
    assert float((found[..., 0] - found[:, :1, 0]).abs().max().detach()) <= 1e-12  # rows know no column
    assert float((found[..., 1] - torch.arange(6.0)).abs().max().detach()) <= 1e-12
    assert bool((found[1:, 0, 0] > found[:-1, 0, 0]).all())


def test_a_grid_can_be_interpolated_in_half_precision_and_learned_through():
    positions = GridPositions((5, 7), 3, first=1).to(torch.bfloat16)
    assert positions((3, 4)).dtype == torch.bfloat16
    assert LearnedPositions(11, 5).to(torch.bfloat16).resized(7).weight.dtype == torch.bfloat16
    positions.double()((3, 4)).sum().backward()
    assert bool((positions.weight.grad.abs() > 0).any(-1).all())


def test_grids_that_do_not_exist_are_refused_with_a_reason():
    for build in (lambda: GridPositions((0, 3), 4), lambda: GridPositions((2, 3), 4, first=-1)):
        with pytest.raises(ConfigError, match="rows and columns") as caught:
            build()
        assert_four_parts(caught.value)
    with pytest.raises(InputError, match="no such grid") as caught:
        GridPositions((2, 3), 4)((0, 3))
    assert_four_parts(caught.value)
