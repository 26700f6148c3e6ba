"""Attention on a grid: one-dimensional attention in raster order, for all places or for some."""

from __future__ import annotations

import pytest
import torch

from regard.attention import Attention
from regard.biases import Gaussian, RowColumn, TransformerXL
from regard.errors import InputError
from regard.layers.grid import GridAttention
from regard.layers.projections import AttentionSizes
from regard.patterns import Causal, GridWindow, Neighborhood, Padding

GRID = (3, 5)


def descriptions() -> dict[str, Attention]:
    torch.manual_seed(0)
    return {
        "full": Attention(),
        "neighbours": Attention(pattern=Neighborhood(GRID, 1)),
        "windows": Attention(pattern=GridWindow(GRID, 2) & Causal()),
        "rows of a batch": Attention(pattern=Padding([11, 15])),
        "row and column": Attention(bias=RowColumn(2, GRID, dtype=torch.float64)),
        "gaussian": Attention(bias=Gaussian(2, GRID, dtype=torch.float64), scale=0.0),
        "four terms": Attention(bias=TransformerXL(2, 3, grid=GRID, dtype=torch.float64)),
        "a tensor": Attention(bias=torch.randn(2, 15, 15, dtype=torch.float64), pattern=Neighborhood(GRID, 2)),
    }


def layer_of(name: str) -> GridAttention:
    torch.manual_seed(1)
    return GridAttention(AttentionSizes(7, 2, key=3, value=5, output=11), attention=descriptions()[name]).double()


def image(requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, *GRID, 7, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def test_it_is_attention_in_index_notation_over_rows_and_columns():
    layer, x = layer_of("full"), image()
    made = layer.attention.projections(x.flatten(1, 2))
    query, key, value = (part.unflatten(2, GRID) for part in made)
    scores = torch.einsum("bhxyd,bhXYd->bhxyXY", query, key) / 3**0.5
    alpha = torch.exp(scores) / torch.exp(scores).sum((-1, -2), keepdim=True)
    mixed = torch.einsum("bhxyXY,bhXYe->bxyhe", alpha, value).flatten(-2)
    torch.testing.assert_close(layer(x), layer.attention.output(mixed), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weights(x), alpha, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", descriptions())
def test_it_equals_attention_on_the_raster(name):
    layer, x = layer_of(name), image(requires_grad=True)
    output, expected = layer(x), layer.attention(x.reshape(2, 15, 7)).reshape(2, *GRID, 11)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(made.square().sum(), x)[0] for made in (output, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", descriptions())
def test_weights_of_a_place_sum_to_one_over_rows_and_columns(name):
    alpha = layer_of(name).weights(image())
    assert alpha.shape == (2, 2, *GRID, *GRID)
    torch.testing.assert_close(alpha.sum((-1, -2)), torch.ones(2, 2, *GRID, dtype=torch.float64))


@pytest.mark.parametrize("name", descriptions())
def test_a_single_place_equals_the_whole_output_there(name):
    layer, x = layer_of(name), image()
    whole = layer(x)
    for row, column in [(0, 0), (1, 3), (2, 4)]:
        alone = layer.at(x, row, column)
        assert alone.shape == (2, 11)
        torch.testing.assert_close(alone, whole[:, row, column], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", descriptions())
def test_every_second_place_equals_the_whole_output_there_with_gradients(name):
    layer, x = layer_of(name), image(requires_grad=True)
    some = layer.at(x, torch.arange(0, 3, 2)[:, None], torch.arange(0, 5, 2))
    expected = layer(x)[:, ::2, ::2]
    torch.testing.assert_close(some, expected, rtol=1e-12, atol=1e-12)
    inputs = (x, *(p for p in layer.parameters() if p.requires_grad))
    slopes, wanted = (torch.autograd.grad(made.square().sum(), inputs, allow_unused=True) for made in (some, expected))
    for one, other in zip(slopes, wanted, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if one is None else one, zero if other is None else other, rtol=1e-10, atol=1e-12, check_dtype=False
        )


def test_places_may_be_repeated_and_in_any_order():
    layer, x = layer_of("neighbours"), image()
    rows, columns = torch.tensor([2, 0, 2]), torch.tensor([4, 1, 4])
    torch.testing.assert_close(layer.at(x, rows, columns), layer(x)[:, rows, columns], rtol=1e-12, atol=1e-12)


def test_what_is_not_on_the_grid_is_refused():
    layer = layer_of("full")
    for row, column in [(3, 0), (-1, 0), (0, 5), (0.5, 1)]:
        with pytest.raises(InputError, match="3 x 5"):
            layer.at(image(), row, column)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"\(batch, row, column, 7\)"):
        layer(torch.zeros(2, 15, 7))
