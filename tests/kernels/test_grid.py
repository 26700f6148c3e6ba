"""Channel attention and the convolution with its norm, against their definitions in float64 and their scalar twins."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from regard.kernels import library
from regard.kernels.grid import channel_attention, convolve_and_norm

DTYPES = [torch.float32, torch.float64]
# batch, tokens, groups, channels of a group: fewer than a vector, one, a panel and a bit; more tokens than a piece.
GROUPS = [(1, 1, 1, 1), (2, 5, 3, 7), (3, 131, 2, 32), (1, 290, 1, 19), (2, 17, 1, 67), (5, 49, 3, 16)]
# batch, rows, columns, channels: one of each, fewer than a vector, and some with a rest.
GRIDS = [(1, 1, 1, 1), (2, 5, 7, 19), (1, 1, 17, 96), (3, 11, 1, 5), (2, 3, 37, 40)]


@pytest.fixture(params=["best", "plain", "scalar"])
def chosen(request, using):
    """The kernels of this machine, those of any machine, and the scalar twins."""
    with using(library.name() if request.param == "best" else request.param):
        yield request.param


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def define_channel_attention(qkv, groups, scale):
    parts = qkv.double().unflatten(-1, (3, groups, -1))
    query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
    weights = (scale * query.mT @ key).softmax(-1)
    return (value @ weights.mT).transpose(1, 2).flatten(2), weights


def assert_channel_attention(made, qkv, groups, scale):
    """A score of N products is off by (N + 2) eps of their sizes; a weight moves by twice that, relative."""
    exact, weights = define_channel_attention(qkv, groups, scale)
    eps = torch.finfo(made.dtype).eps
    parts = qkv.double().abs().unflatten(-1, (3, groups, -1))
    query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
    off = eps * (qkv.shape[1] + 2) * (abs(scale) * query.mT @ key).amax(-1, keepdim=True) + eps * (qkv.shape[2] + 8)
    limit = (value @ (4 * off * weights).mT).transpose(1, 2).flatten(2)
    assert made.shape == exact.shape
    assert ((made.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", GROUPS)
def test_channel_attention_is_what_it_is_defined_as(chosen, sizes, dtype):
    batch, tokens, groups, channels = sizes
    qkv = random(batch, tokens, 3 * groups * channels, dtype=dtype)
    for scale in (tokens**-0.5, 1.0, 0.0, -0.3):
        assert_channel_attention(channel_attention(qkv, groups, scale), qkv, groups, scale)


def test_the_bound_of_channel_attention_can_be_broken():
    qkv = random(2, 37, 42, dtype=torch.float32)
    with pytest.raises(AssertionError):
        assert_channel_attention(channel_attention(qkv, 2, 0.11), qkv, 2, 0.1)


def define_convolution(grid, kernel, bias, norm):
    moved = F.conv2d(grid.double().permute(0, 3, 1, 2), kernel.double(), bias.double(), padding=1, groups=len(kernel))
    moved = moved.permute(0, 2, 3, 1)
    weight, shift = (None if t is None else t.detach().double() for t in (norm.weight, norm.bias))
    return moved, F.layer_norm(moved, moved.shape[-1:], weight, shift, norm.eps)


def make_norm(channels, dtype, affine=True, bias=True):
    norm = nn.LayerNorm(channels, eps=1e-3, elementwise_affine=affine, bias=bias).to(dtype).requires_grad_(False)
    for seed, parameter in enumerate(norm.parameters()):
        parameter.copy_(random(channels, seed=seed + 11))
    return norm


def assert_convolution(found, grid, kernel, bias, norm):
    made, normed = found
    exact, exact_norm = define_convolution(grid, kernel, bias, norm)
    eps, channels = torch.finfo(made.dtype).eps, grid.shape[3]
    size = define_convolution(grid.abs(), kernel.abs(), bias.abs(), norm)[0]
    off = 12 * eps * size
    assert ((made.double() - exact).abs() <= off).all()
    # A norm divides what is off by the deviation, and its mean and deviation are off, too.
    deviation = (exact.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    relative = (off.amax(-1, keepdim=True) + eps * (channels + 8) * exact.abs().amax(-1, keepdim=True)) / deviation
    scale = 1.0 if norm.weight is None else norm.weight.abs().double()
    shift = 0.0 if norm.bias is None else norm.bias.abs().double()
    limit = 4 * relative * (1 + exact_norm.abs().amax(-1, keepdim=True)) * scale + 4 * eps * (shift + scale)
    assert ((normed.double() - exact_norm).abs() <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GRIDS)
def test_a_convolution_and_its_norm_are_what_they_are_defined_as(chosen, shape, dtype):
    channels = shape[3]
    grid, kernel, bias = (
        random(*shape, dtype=dtype),
        random(channels, 1, 3, 3, dtype=dtype),
        random(channels, dtype=dtype),
    )
    for affine, has_bias in ((True, True), (True, False), (False, False)):
        norm = make_norm(channels, dtype, affine, has_bias)
        assert_convolution(convolve_and_norm(grid, kernel, bias, norm), grid, kernel, bias, norm)


def test_the_bound_of_a_convolution_can_be_broken():
    grid, kernel, bias, norm = random(1, 5, 7, 11), random(11, 1, 3, 3), random(11), make_norm(11, torch.float64)
    with pytest.raises(AssertionError):
        assert_convolution(convolve_and_norm(grid, kernel.flip(2), bias, norm), grid, kernel, bias, norm)


def test_an_infinite_number_beyond_the_edge_of_a_neighbour_stays_there(kernels):
    """Beyond the edge nothing is multiplied: no NaN comes from zero times infinity."""
    grid, kernel = torch.zeros(1, 3, 5, 19), torch.full((19, 1, 3, 3), float("inf"))
    made, _ = convolve_and_norm(torch.ones_like(grid), kernel, torch.zeros(19), make_norm(19, torch.float32))
    assert (made == float("inf")).all()
    grid[0, 0, 0] = float("nan")
    made, normed = convolve_and_norm(grid, torch.ones(19, 1, 3, 3), torch.zeros(19), make_norm(19, torch.float32))
    touched = torch.zeros(3, 5, dtype=torch.bool)
    touched[:2, :2] = True
    assert torch.equal(made[0].isnan().all(-1), touched)
    assert torch.equal(normed[0].isnan().any(-1), touched)


def test_a_nan_reaches_its_group_and_its_image_alone(kernels):
    qkv = random(2, 23, 3 * 2 * 7, dtype=torch.float32)
    qkv[0, 5, 3] = float("nan")  # a query of the first group
    made = channel_attention(qkv, 2, 0.2)
    assert made[0, :, 3].isnan().all()
    assert made.isnan().sum() == 23


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_neither_on_the_batch_nor_on_threads(kernels, threads, dtype):
    qkv, grid = random(5, 83, 3 * 4 * 32, dtype=dtype), random(5, 13, 29, 96, dtype=dtype)
    kernel, bias, norm = random(96, 1, 3, 3, dtype=dtype), random(96, dtype=dtype), make_norm(96, dtype)
    threads(1)
    mixed = [channel_attention(one[None], 4, 0.1)[0] for one in qkv]
    moved = [convolve_and_norm(one[None], kernel, bias, norm) for one in grid]
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(channel_attention(qkv, 4, 0.1), torch.stack(mixed))
        for made, alone in zip(convolve_and_norm(grid, kernel, bias, norm), zip(*moved, strict=True), strict=True):
            assert torch.equal(made, torch.cat(alone))


def test_empty_inputs_stay_empty(chosen):
    assert channel_attention(torch.empty(0, 5, 6), 2, 1.0).shape == (0, 5, 2)
    assert channel_attention(torch.empty(3, 0, 6), 2, 1.0).shape == (3, 0, 2)
    made, normed = convolve_and_norm(
        torch.empty(0, 3, 5, 7), random(7, 1, 3, 3).float(), torch.zeros(7), nn.LayerNorm(7)
    )
    assert made.shape == normed.shape == (0, 3, 5, 7)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_sizes(kernels, data):
    few = st.integers(1, 40)
    batch, rows, columns = data.draw(st.integers(1, 3)), data.draw(few), data.draw(few)
    channels, groups, dtype = data.draw(few), data.draw(st.integers(1, 3)), data.draw(st.sampled_from(DTYPES))
    qkv = random(batch, rows * columns, 3 * groups * channels, dtype=dtype, seed=data.draw(few))
    assert_channel_attention(channel_attention(qkv, groups, 0.1), qkv, groups, 0.1)
    grid = random(batch, rows, columns, channels, dtype=dtype, seed=data.draw(few))
    kernel, bias = random(channels, 1, 3, 3, dtype=dtype), random(channels, dtype=dtype)
    norm = make_norm(channels, dtype)
    assert_convolution(convolve_and_norm(grid, kernel, bias, norm), grid, kernel, bias, norm)
