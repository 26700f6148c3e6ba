"""A convolution of rank r in r + 1 heads, and never in fewer than r."""

import pytest
import torch
from torch import nn

from regard import conv_to_attention
from regard.convert import attention_to_conv, kernel_rank, low_rank_heads
from regard.layers import SpatialAttention, TableAttention

DOUBLE = torch.float64


def conv_of_rank(rank, kernel=5, inside=6, out=7, groups=1, **options):
    made = torch.Generator().manual_seed(rank)
    conv = nn.Conv2d(inside, out, kernel, groups=groups, dtype=DOUBLE, **options)
    spots = torch.randn(rank, kernel, kernel, generator=made, dtype=DOUBLE)
    matrices = torch.randn(out, inside // groups, rank, generator=made, dtype=DOUBLE)
    with torch.no_grad():
        conv.weight.copy_(torch.einsum("oir,rkl->oikl", matrices, spots))
    return conv


@pytest.mark.parametrize("rank", [1, 2, 3, 7])
@pytest.mark.parametrize("edges", ["zeros", "replicate", "circular", "reflect"])
def test_one_head_more_than_the_rank_is_enough(rank, edges):
    conv = conv_of_rank(rank, padding=2, padding_mode=edges)
    layer = conv_to_attention(conv, heads="minimal")
    image = torch.randn(2, 6, 11, 13, dtype=DOUBLE)
    assert kernel_rank(conv.weight) == rank
    assert isinstance(layer, TableAttention)
    assert layer.heads == rank + 1
    # Sums of 150 products, and what is lifted cancels again: a few units of rounding for each root of them.
    assert (layer(image) - conv(image)).abs().max() < 4 * 2.2e-16 * 150**0.5 * conv(image).abs().max()
    assert (layer.offset_weights > 0).all()
    torch.testing.assert_close(layer.offset_weights.sum(-1), torch.ones(rank + 1, dtype=DOUBLE))


def test_gradients_are_those_of_the_convolution():
    conv = conv_of_rank(2, padding=2, stride=2)
    layer = conv_to_attention(conv, heads="minimal")
    image = torch.randn(1, 6, 7, 11, dtype=DOUBLE)
    mine, theirs = image.clone().requires_grad_(), image.clone().requires_grad_()
    layer(mine).sin().sum().backward()
    conv(theirs).sin().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    # The kernel is sum_h W^(h) a_h, so that the gradient of W^(h) is the kernel's, seen by a_h.
    expected = torch.einsum("oit,ht->oih", conv.weight.grad.flatten(2), layer.offset_weights.detach())
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(
        lambda scores: torch.func.functional_call(layer, {"scores": scores}, (image[..., :5, :3],)),
        layer.scores.detach().clone().requires_grad_(),
    )


def test_with_groups_and_along_a_line():
    conv = conv_of_rank(2, inside=6, out=9, groups=3, padding=1, stride=2, dilation=2)
    layer = conv_to_attention(conv, heads="minimal")
    image = torch.randn(2, 6, 17, 13, dtype=DOUBLE)
    assert layer.heads == 3
    torch.testing.assert_close(layer(image), conv(image), rtol=1e-11, atol=1e-11)
    line = nn.Conv1d(1, 1, 7, padding=3, dtype=DOUBLE)
    layer = conv_to_attention(line, heads="minimal")
    assert layer.heads == 2  # a single channel is of rank 1
    signal = torch.randn(2, 1, 19, dtype=DOUBLE)
    torch.testing.assert_close(layer(signal), line(signal), rtol=1e-12, atol=1e-12)


def test_a_kernel_of_one_sign_needs_no_uniform_head():
    blur = nn.Conv2d(1, 1, 3, padding=1, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        blur.weight.copy_(-torch.outer(torch.tensor([1.0, 2, 1]), torch.tensor([1.0, 2, 0])))
    layer = conv_to_attention(blur, heads="minimal")
    image = torch.randn(1, 1, 5, 7, dtype=DOUBLE)
    assert layer.heads == 1
    torch.testing.assert_close(layer(image), blur(image), rtol=1e-12, atol=1e-12)
    assert layer.scores.isinf().sum() == 3  # taps of weight zero are hidden
    layer(image).sum().backward()
    assert layer.scores.grad.isfinite().all()


def test_a_full_rank_takes_its_taps():
    layer = conv_to_attention(nn.Conv2d(6, 7, 3), heads="minimal")
    assert isinstance(layer, SpatialAttention)
    assert layer.heads == 9
    assert low_rank_heads(torch.zeros(2, 3, 9)) is None


def test_fewer_heads_than_the_rank_cannot_do_it():
    # The kernel of any heads by position is a sum of as many products, so of no larger rank: the nearest one is off by
    # the singular value that is left over.
    conv = conv_of_rank(3)
    layer = TableAttention(
        6, 7, heads=2, steps=[(row, column) for row in range(5) for column in range(5)], dtype=DOUBLE
    )
    assert kernel_rank(layer.kernel().unflatten(2, (5, 5))) == 2
    values = torch.linalg.svdvals(conv.weight.detach().flatten(2).flatten(0, 1))
    assert values[2] > 0.1 * values[0]
    made = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        made.zero_grad()
        off = (layer.kernel() - conv.weight.detach().flatten(2)).square().sum()
        off.backward()
        return off

    made.step(loss)
    assert loss().item() >= values[2].item() ** 2 * (1 - 1e-9)


def test_back_to_the_same_convolution():
    conv = conv_of_rank(2, kernel=3, padding=1, stride=2)
    fit = attention_to_conv(conv_to_attention(conv, heads="minimal"))
    assert str(fit.conv) == str(conv)
    torch.testing.assert_close(fit.kernel, conv.weight, rtol=1e-12, atol=1e-12)


def test_in_float32_the_lift_costs_less_than_a_digit():
    conv = conv_of_rank(3, padding=2)
    image = torch.randn(2, 6, 11, 13, dtype=DOUBLE)
    truth = conv(image)
    layer = conv_to_attention(conv, heads="minimal").float()
    assert (layer(image.float()) - truth).abs().max() < 4 * 1.2e-7 * 150**0.5 * truth.abs().max()
