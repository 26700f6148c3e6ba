"""Products with quantised weights: blocks of the package gguf, definitions in float64, bounds, bits, random bytes."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from regard.kernels import library
from regard.kernels.blocks import BLOCK_FORMATS, QUANTIZERS, dequantize_rows, quantize_rows, row_bytes
from regard.kernels.weights import PackedMatrix, weight_products

BLOCKS = [name for name in BLOCK_FORMATS if name != "bf16"]
FLOATS = {"q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q4_k": [0, 2], "q6_k": [208]}  # where a block has float16s
EPS = torch.finfo(torch.float32).eps


def random_blocks(format, rows, cols, seed=0, *, tame=True):
    """Random bytes; `tame` ones have scales of the size that weights have."""
    make = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, row_bytes(format, cols)), generator=make, dtype=torch.uint8)
    if tame:
        blocks = data.view(rows, -1, BLOCK_FORMATS[format].bytes)
        for at in FLOATS[format]:
            scale = torch.rand(rows, blocks.shape[1], 1, generator=make) * 0.01 + 0.001
            blocks[..., at : at + 2] = scale.half().view(torch.uint8)
    return data


def matrix_of(data, format, cols):
    return PackedMatrix(format, data.shape[0], cols, data, data.stride(0))


def split_groups(x):
    """Activations `(row, group, 32)`, and the scale of each group."""
    groups = F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return groups, groups.abs().amax(-1, keepdim=True) / 127


def round_activations(x):
    groups, scale = split_groups(x)
    rounded = (groups * (127 / groups.abs().amax(-1, keepdim=True))).round().nan_to_num() * scale
    return rounded.flatten(-2)[..., : x.shape[-1]]


@pytest.fixture(params=["best", "avx512", "avx2", "plain", "scalar"])
def chosen(request, using):
    name = library.name() if request.param == "best" else request.param
    try:
        with using(name):
            yield name
    except ValueError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_of_any_bytes_are_the_numbers_that_gguf_reads(format):
    data = random_blocks(format, 61, 3 * 256, tame=False)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[format.upper()])
    torch.testing.assert_close(
        dequantize_rows(data, format, 3 * 256), torch.from_numpy(theirs.copy()), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("format", BLOCKS)
def test_products_are_those_of_activations_in_eight_bits(chosen, format, threads):
    threads(1)
    make = torch.Generator().manual_seed(3)
    for cols, outputs in ((1, 1), (31, 5), (37, 8), (300, 19), (512, 37)):
        data = random_blocks(format, outputs, cols, seed=cols)
        weight = dequantize_rows(data, format, cols).double()
        bias = torch.randn(outputs, generator=make)
        for rows in (1, 2, 3, 6, 7, 13):
            x = torch.randn(rows, cols, generator=make) * 10 ** torch.randn(rows, 1, generator=make)
            made = weight_products(x, matrix_of(data, format, cols), bias)
            rounded = round_activations(x).double()
            # whole numbers are exact; each group is rounded, scaled and added, and formats with a minimum cancel
            size = (
                31 * 127 * dequantize_rows(data, format, cols).abs().amax().double() * split_groups(x)[1].double().sum()
            )
            size = size + F.linear(rounded.abs(), weight.abs(), bias.double().abs())
            exact = F.linear(rounded, weight, bias.double())
            assert ((made - exact).abs() <= EPS * (cols // 32 + 4) * size).all()


@pytest.mark.parametrize("format", ["q8_0", "q4_1", "q6_k"])
def test_the_error_against_exact_activations_is_within_its_bound(kernels, format):
    x, data = torch.randn(11, 700, generator=torch.Generator().manual_seed(5)), random_blocks(format, 43, 700)
    weight = dequantize_rows(data, format, 700).double()
    error = (weight_products(x, matrix_of(data, format, 700)) - F.linear(x.double(), weight)).abs()
    half_steps = (split_groups(x)[1] / 2).expand(-1, -1, 32).flatten(-2)[:, :700].double()
    bound = F.linear(half_steps, weight.abs())
    assert (error <= bound * (1 + 1e-3)).all()
    assert error.max() > bound.max() / 200  # a bound, and not a barn door


@pytest.mark.parametrize("format", BLOCKS)
def test_the_bits_of_a_row_depend_on_the_row_alone(kernels, format, threads):
    x, data = torch.randn(41, 512, generator=torch.Generator().manual_seed(7)), random_blocks(format, 1031, 512)
    weight = matrix_of(data, format, 512)
    threads(1)
    alone = torch.cat([weight_products(row[None], weight) for row in x])
    for count, rows in ((1, 2), (2, 3), (3, 6), (1, 7), (2, 16), (3, 41)):
        threads(count)
        assert torch.equal(weight_products(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("format", BLOCKS)
def test_random_bytes_crash_nothing_and_a_scale_that_is_nan_reaches_its_output(kernels, format):
    for seed in range(20):
        cols = 256 * (1 + seed % 3)
        data = random_blocks(format, 23, cols, seed, tame=False)
        weight = dequantize_rows(data, format, cols)
        x = torch.randn(1 + seed % 9, cols, generator=torch.Generator().manual_seed(seed)) + 4
        made = weight_products(x, matrix_of(data, format, cols))
        assert made[:, weight.isnan().any(1)].isnan().all()
        tame = weight.abs().amax(1) < 1e30
        assert made[:, tame].isfinite().all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_an_activation_that_is_not_finite_makes_its_row_nan_and_no_other(chosen, wrong):
    x, data = torch.randn(9, 100, generator=torch.Generator().manual_seed(1)), random_blocks("q4_1", 17, 100)
    clean = weight_products(x, matrix_of(data, "q4_1", 100))
    x[4, 99] = wrong
    made = weight_products(x, matrix_of(data, "q4_1", 100))
    assert made[4].isnan().all()
    kept = torch.arange(9) != 4
    assert torch.equal(made[kept], clean[kept])


@pytest.mark.parametrize("format", QUANTIZERS)
def test_quantising_is_off_by_at_most_half_a_step(format):
    make = torch.Generator().manual_seed(0)
    weight = torch.randn(13, 331, generator=make) * 10 ** (3 * torch.randn(13, 1, generator=make) - 2)
    weight[3], weight[4], weight[5, :64] = 0, 1e-9, 3.25
    data = quantize_rows(weight, format)
    error = (dequantize_rows(data, format, 331) - weight).abs()
    groups, _ = split_groups(weight)
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    largest = groups.abs().amax(-1, keepdim=True)
    step = {
        "bf16": groups.abs() * 2**-7,
        "q8_0": largest / 127 * (1 + 2**-10),
        "q4_0": largest / 8 * (2 + 2**-7)
        + 2**-21,  # the side without the largest ends at 7, not 8; its scale is rounded
        "q4_1": (high - low) / 15 * (1 + 2**-10) + 2**-10 * low.abs() * (1 + 1 / 15),
    }[format]
    bound = step.expand_as(groups).flatten(-2)[:, :331] / 2 + 2**-24  # the smallest float16
    assert (error <= bound).all()


def test_q8_0_is_at_least_as_accurate_as_that_of_gguf():
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(2))
    ours = (dequantize_rows(quantize_rows(weight, "q8_0"), "q8_0", 4096) - weight).abs()
    stored = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    theirs = (torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q8_0).copy()) - weight).abs()
    assert ours.square().mean() <= theirs.square().mean()
    assert ours.max() <= theirs.max()
