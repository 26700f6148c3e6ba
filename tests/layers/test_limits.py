"""Limits of attention, their conditions, and counterexamples to claims about them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from regard import CalculusError, attend, weights
from regard.calculus import sinusoidal
from regard.errors import ConfigError, InputError
from regard.layers.limits import (
    identity_attention,
    mean_pooling,
    permutation_attention,
    required_scale,
    running_linear,
    score_gap,
    shift_attention,
    sinusoidal_gap,
)

DOUBLE = torch.float64


def tokens(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


# Identity and permutation


def test_tokens_of_equal_length_find_themselves():
    x = functional.normalize(tokens(6, 8), dim=-1)
    gap = score_gap(x, x)
    scale = required_scale(gap, keys=6, tolerance=1e-12)
    assert scale == pytest.approx(math.log(5e12) / gap)
    layer = identity_attention(8, scale).double()
    assert (layer(x) - x).abs().max() <= 1e-12
    assert (identity_attention(8, scale / 2).double()(x) - x).abs().max() > 1e-12
    assert torch.equal(identity_attention(8).double()(x), x)


def test_high_beta_alone_only_selects():
    x = torch.tensor([[1.0, 0.0], [3.0, 1.0]], dtype=DOUBLE)
    for scale, weight in ((1.0, 0.8807970779778824), (50.0, 1.0)):
        assert weights(x[None], x[None], scale=scale)[0, 0, 1].item() == pytest.approx(weight, abs=1e-12)
    assert torch.equal(identity_attention(2).double()(x), x[[1, 1]])  # the first token is lost
    assert score_gap(x, x) == -2
    with pytest.raises(CalculusError, match="ahead"):
        required_scale(score_gap(x, x), keys=2, tolerance=0.1)


def test_without_values_that_return_it_is_no_identity_either():
    x = functional.normalize(tokens(6, 8), dim=-1)
    layer = identity_attention(8).double()
    with torch.no_grad():
        layer.output.weight.mul_(2)
    assert torch.equal(layer(x), 2 * x)


def test_a_permutation_by_position_is_exact_whatever_tokens_say():
    order = [3, 0, 4, 1, 2]
    layer = permutation_attention(order, dim=7).double()
    x = 10 * tokens(2, 5, 7).requires_grad_()
    assert torch.equal(layer(x), x[:, order])
    assert torch.equal(layer.weights(x)[0, 0], torch.eye(5, dtype=DOUBLE)[order])
    gradient = torch.autograd.grad(layer(x).mul(tokens(2, 5, 7, seed=2)).sum(), x)[0]
    assert torch.equal(gradient[:, order], tokens(2, 5, 7, seed=2))
    soft = permutation_attention(order, dim=7, scale=required_scale(1.0, 5, 1e-9)).double()
    bound = 1e-9 * (x.max() - x.min())
    assert 0 < (soft(x) - x[:, order]).abs().max() <= bound


def test_what_is_no_permutation_is_refused():
    for order in ([0, 0, 1], [1, 2, 3], []):
        with pytest.raises(ConfigError, match="names each"):
            permutation_attention(order, dim=2)
    with pytest.raises(InputError, match="an order of 3"):
        permutation_attention([2, 0, 1], dim=2)(torch.zeros(4, 2))


# The running linear layer, and the mean


@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_are_the_identity_make_a_convolution_of_width_one(bias):
    linear = nn.Linear(3, 5, bias=bias, dtype=DOUBLE)
    x = tokens(2, 7, 3)
    layer = running_linear(linear)
    assert torch.equal(layer.weights(x)[0, 0], torch.eye(7, dtype=DOUBLE))
    assert torch.equal(layer(x), linear(x))
    conv = functional.conv1d(x.mT, linear.weight[:, :, None], linear.bias).mT
    torch.testing.assert_close(layer(x), conv, rtol=0, atol=4e-16 * 3)
    pooled = mean_pooling(linear)(x)
    assert (pooled - layer(x)).abs().max() > 0.1


def test_beta_zero_is_no_running_linear_layer_but_the_mean():
    linear = nn.Linear(3, 5, dtype=DOUBLE)
    x = tokens(2, 7, 3)
    output = mean_pooling(linear)(x)
    expected = linear(x.mean(1, keepdim=True))
    assert (output - expected).abs().max() <= 1e-15
    assert torch.equal(output, output[:, :1].expand_as(output))


# Convolution by absolute positions


@pytest.mark.parametrize(
    ("dim", "gap", "scale"), [(64, 1.0831683, 13.39), (128, 1.9063162, 7.61), (512, 6.8979022, 2.103)]
)
def test_gaps_of_sinusoidal_positions(dim, gap, scale):
    assert sinusoidal_gap(dim, 1024) == pytest.approx(gap, abs=5e-8)
    assert math.log(2 / 1e-6) / gap == pytest.approx(scale, rel=5e-4)
    table = sinusoidal(torch.arange(1024), dim, dtype=DOUBLE)
    assert score_gap(table, table) == pytest.approx(sinusoidal_gap(dim, 1024), abs=1e-9)
    look = weights(table[None], table[None], scale=math.log(2 / 1e-6) / gap)[0].diagonal()
    assert 1 - look[512].item() == pytest.approx(1e-6, rel=1e-3)  # two neighbours, and hardly anybody else
    assert (1 - look).max() < 1.001e-6


@pytest.mark.parametrize("steps", [(-1, 0, 1), (0, 2, 4), (-3, 1)])
def test_heads_that_rotate_their_keys_are_a_convolution(steps):
    taps, x = tokens(len(steps), 5, 3), tokens(2, 19, 3)
    exact = shift_attention(steps, taps, dim=64, scale=math.inf)
    place = torch.arange(19) + torch.tensor(steps)[:, None]
    expected = torch.einsum("toi,btni->bno", taps, x[:, place.clamp(0, 18)].reshape(2, len(steps), 19, 3))
    torch.testing.assert_close(exact(x), expected, rtol=1e-12, atol=1e-12)
    for tolerance in (1e-3, 1e-6):
        scale = math.log(2 / tolerance) / sinusoidal_gap(64, 19)
        soft = shift_attention(steps, taps, dim=64, scale=scale)
        bound = 1.01 * tolerance * (x.max() - x.min()) * taps.abs().sum((0, 2)).max()
        inside = ((place >= 0) & (place < 19)).all(0)  # beyond the ends two tokens are almost equally near
        assert 0 < (soft(x) - expected)[:, inside].abs().max() <= bound


def test_a_kernel_along_a_line_with_its_ends_left_out():
    conv = nn.Conv1d(3, 5, 3, padding=1, padding_mode="replicate", bias=False, dtype=DOUBLE)
    layer = shift_attention([-1, 0, 1], conv.weight.detach().permute(2, 0, 1), dim=128, scale=math.inf)
    x = tokens(2, 17, 3)
    torch.testing.assert_close(layer(x), conv(x.mT).mT, rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigError, match="as many"):
        shift_attention([0], conv.weight.detach().permute(2, 0, 1), dim=128, scale=1.0)


def test_neither_high_nor_low_beta_by_content_is_a_convolution():
    # By content alone the outputs follow the tokens when these change places; a convolution's do not.
    x, order = tokens(1, 1, 11, 3), torch.randperm(11, generator=torch.Generator().manual_seed(0))
    kernel = tokens(3, 3, 3, seed=4)
    convolved = functional.conv1d(x[:, 0].mT, kernel, padding=1).mT
    moved = functional.conv1d(x[:, 0, order].mT, kernel, padding=1).mT
    assert (moved - convolved[:, order]).abs().max() > 1
    for scale in (0.0, 0.5, 1.0, 2.0, math.inf):
        output = attend(x, x, x, scale=scale)
        shuffled = x[:, :, order]
        torch.testing.assert_close(attend(shuffled, shuffled, shuffled, scale=scale), output[:, :, order])
