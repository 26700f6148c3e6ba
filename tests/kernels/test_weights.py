"""Products with weights in their stored format, against the definition in float64, and bits."""

import pytest
import torch
import torch.nn.functional as F

from regard.kernels import library
from regard.kernels.weights import PackedMatrix, weight_products

INSIDE = [1, 7, 8, 9, 31, 40, 769]
OUTSIDE = [1, 3, 8, 19, 131]


def problem(rows, inside, outside, dtype, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = (rows, inside), (outside, inside), (outside,)
    x, weight, bias = (torch.randn(shape, generator=make) for shape in shapes)
    return x, weight.to(dtype), bias


@pytest.fixture(params=["best", "plain", "scalar"])
def chosen(request, using):
    with using(library.name() if request.param == "best" else request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", INSIDE)
def test_products_are_what_they_are_defined_as(chosen, inside, dtype, threads):
    threads(1)
    for rows in range(1, 17):
        for outside in OUTSIDE:
            x, weight, bias = problem(rows, inside, outside, dtype, seed=rows)
            made = weight_products(x, PackedMatrix.from_tensor(weight), bias)
            exact = F.linear(x.double(), weight.double(), bias.double())
            size = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
            assert ((made - exact).abs() <= torch.finfo(torch.float32).eps * (inside + 2) * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_depend_on_the_row_alone(kernels, dtype, threads):
    x, weight, bias = problem(16, 769, 1031, dtype)
    threads(1)
    alone = torch.cat([weight_products(row[None], PackedMatrix.from_tensor(weight), bias) for row in x])
    for count in (1, 2, 3):
        threads(count)
        for rows in range(1, 17):
            made = weight_products(x[:rows], PackedMatrix.from_tensor(weight), bias)
            assert torch.equal(made, alone[:rows])


def test_rows_of_weights_may_lie_apart(kernels):
    x, wide, _ = problem(3, 50, 19, torch.float32)
    weight = wide[:, :37]
    made = weight_products(x[:, :37], PackedMatrix.from_tensor(weight))
    assert torch.equal(made, weight_products(x[:, :37].clone(), PackedMatrix.from_tensor(weight.contiguous())))
