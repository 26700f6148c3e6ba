"""A softmax over a grid that factors into one over rows and one over columns."""

import pytest
import torch
from plain import slow
from torch.utils.flop_counter import FlopCounterMode

from regard import Gaussian, Quadratic, RowColumn, attend, weights
from regard.biases import axis_scores
from regard.calculus import axis_weights, separable_attention, separable_weights

HEADS = 3
GRIDS = [(5, 7), (1, 7), (5, 1), (1, 1)]


def make(kind, grid):
    bias = kind(HEADS, grid, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    if kind is RowColumn:
        with torch.no_grad():  # tables of size 0.02 would look almost everywhere alike
            bias.row.mul_(60)
            bias.column.mul_(60)
    return bias


def both_ways(kind, grid, dtype=torch.float64):
    """Output and gradients by the two axes, and by `attend` over all pairs in float64."""
    x = torch.randn(2, *grid, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for by_axes, precision in ((True, dtype), (False, torch.float64)):
        bias, mine = make(kind, grid).to(precision), x.to(precision).requires_grad_()
        if by_axes:
            output = separable_attention(*axis_weights(*axis_scores(bias)), mine)
        else:
            tokens = mine.flatten(1, 2)[:, None]
            nothing = torch.zeros_like(tokens[..., :1])
            output = attend(nothing.expand(-1, HEADS, -1, -1), nothing, tokens, scale=1.0, bias=bias)
            output = output.transpose(1, 2).reshape(2, *grid, HEADS, 11)
        upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).cos().reshape(output.shape)
        learned = [mine, *bias.parameters()]
        found.append([output, *torch.autograd.grad(output, learned, upstream.to(precision))])
    return found


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", [Quadratic, RowColumn])
def test_one_axis_after_the_other_equals_all_pairs_at_once(kind, grid):
    for mine, truth in zip(*both_ways(kind, grid), strict=True):
        assert mine.shape == truth.shape
        assert torch.allclose(mine, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Quadratic, RowColumn])
def test_in_float32_it_stays_within_its_rounding(kind):
    found = both_ways(kind, (5, 7), torch.float32)
    # A score of up to 100 is off by four units in its last place, and so is the exponent; a weight is one of 35.
    for mine, truth in zip(*found, strict=True):
        bound = torch.finfo(torch.float32).eps * (4 * 100 + 35) * truth.detach().abs().max().clamp(min=1.0)
        assert (mine.double() - truth).abs().max() < bound


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", [Quadratic, RowColumn])
def test_the_weights_multiplied_out_are_those_of_the_bias(kind, grid):
    bias = make(kind, grid)
    square = separable_weights(*axis_weights(*axis_scores(bias)))
    nothing = torch.zeros(HEADS, grid[0] * grid[1], 1, dtype=torch.float64)
    assert torch.allclose(square, weights(nothing, nothing, bias=bias), rtol=0, atol=1e-14)


def test_the_products_are_as_many_as_rows_and_columns_not_their_square():
    x = torch.zeros(2, 5, 7, 11)
    factors = axis_weights(*axis_scores(Quadratic(HEADS, (5, 7))))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        separable_attention(*factors, x)
    assert counter.get_total_flops() == 2 * 2 * HEADS * 35 * (5 + 7) * 11


@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32)])
def test_queries_on_another_grid_than_the_keys_see_all_of_them(dtype):
    generator = torch.Generator().manual_seed(3)
    rows, columns = axis_weights(
        torch.randn(3, 2, 5, generator=generator, dtype=dtype), torch.randn(3, 11, 7, generator=generator, dtype=dtype)
    )
    x = torch.randn(2, 5, 7, 13, generator=generator, dtype=dtype)
    found = separable_attention(rows, columns, x)
    square = separable_weights(rows, columns)
    assert square.shape == (3, 2 * 11, 5 * 7)
    truth = torch.einsum("hqk,bkc->bqhc", square.double(), x.flatten(1, 2).double()).unflatten(1, (2, 11))
    # 12 products and sums on the way, of numbers whose weights sum to one
    assert (found.double() - truth).abs().max() <= 14 * torch.finfo(dtype).eps * x.abs().max()
    assert torch.autograd.gradcheck(separable_attention, [t.double().requires_grad_() for t in (rows, columns, x)])


def test_a_slanted_covariance_does_not_fall_apart():
    slanted = Gaussian(1, (5, 7), centre=[[0.3, -0.6]], root=[[[1.0, 0.0], [0.9, 0.4]]], dtype=torch.float64)
    nothing = torch.zeros(1, 35, 1, dtype=torch.float64)
    square = weights(nothing, nothing, bias=slanted).detach()[0].unflatten(0, (5, 7)).unflatten(-1, (5, 7))
    # If a product equalled it, its factors would be the sums over the other axis.
    rows, columns = square.sum(-1)[:, 0], square.sum(-2)[0]
    product = separable_weights(rows[None], columns[None])[0].reshape(square.shape)
    assert (product - square).abs().max() > 0.1
