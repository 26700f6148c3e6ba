"""Positional attention as a convolution, and the nearest convolution of other attention."""

import pytest
import torch
from convolutions import DOUBLE, conv_of, convolutions, image_of
from hypothesis import given, settings
from torch import nn

from regard import Attention, Neighborhood, attention_to_conv, conv_to_attention
from regard.convert import fit_conv
from regard.errors import InputError
from regard.layers import GridAttention, Lattice, SpatialAttention
from regard.models.spatial import SpatialConfig, SpatialTransformer

# What torch says about its own convolution, once, when it pads one side more than the other.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@settings(max_examples=80)
@given(convolutions())
def test_there_and_back_is_the_same_convolution(case):
    conv, image = case
    fit = attention_to_conv(conv_to_attention(conv), image)
    assert fit.residual <= 1e-14
    assert fit.conv(image).shape == conv(image).shape
    if conv.padding != "same":  # which is said in numbers where these do
        assert (fit.conv.kernel_size, fit.conv.padding) == (conv.kernel_size, conv.padding)
        assert torch.equal(fit.kernel, conv.weight)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (3, 4), "stride": (2, 1), "padding": (1, 2), "dilation": (2, 1), "padding_mode": "circular"},
        {"kernel_size": 2, "padding": "same"},
        {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 3), "padding_mode": "reflect"},
        {"kernel_size": 1, "stride": 3},
        {"kernel_size": 3, "stride": 3, "dilation": 2, "padding": 4},
    ],
)
def test_every_setting_comes_back(options):
    conv = conv_of(nn.Conv2d, 6, 4, groups=2, **options)
    fit = attention_to_conv(conv_to_attention(conv))
    assert str(fit.conv) == str(conv)
    assert torch.equal(fit.kernel, conv.weight)
    assert torch.equal(fit.conv.bias, conv.bias)


def test_a_pruned_or_lopsided_layer_is_a_convolution_too():
    # Taps on one side only, and twice the same: the kernel gets the zeros it needs to be padded alike on both sides.
    layer = SpatialAttention(3, 4, [(0, 2), (0, -1), (3, 2), (0, 2)], lattice=Lattice(trim=(1, 0)), dtype=DOUBLE)
    image = image_of(2, 3, 7, 11)
    fit = attention_to_conv(layer, image)
    assert fit.residual < 1e-14
    assert fit.kernel.count_nonzero() == 3 * 4 * 3
    torch.testing.assert_close(fit.conv(image), layer(image), rtol=1e-12, atol=1e-12)


def test_taps_that_no_spaced_line_reaches_on_both_sides_are_spaced_closer():
    # Steps two apart, and an output that is one shorter: a dilation of two would end a pixel too early.
    layer = SpatialAttention(3, 4, [(-2,), (0,)], lattice=Lattice(trim=1), dtype=DOUBLE)
    image = image_of(2, 3, 11)
    fit = attention_to_conv(layer)
    assert fit.conv.dilation == (1,)
    torch.testing.assert_close(fit.conv(image), layer(image), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("edges", ["zeros", "replicate", "circular", "reflect"])
def test_soft_heads_are_a_convolution_away_from_the_edges(edges):
    layer = SpatialAttention(
        3, 4, [(0.3, -1.2), (1.0, 0.5)], alpha=torch.tensor([0.9, 1.7]), lattice=Lattice(edges=edges), dtype=DOUBLE
    )
    image = image_of(2, 3, 23, 29)
    fit = attention_to_conv(layer, image)
    inside = (layer(image) - fit.conv(image))[..., 9:-9, 9:-9]
    assert inside.abs().max() < 1e-6  # tails of 1e-9 are cut
    if edges in ("circular", "reflect"):  # no edge squeezes the look
        assert fit.residual < 1e-6
    else:
        assert 1e-3 < fit.residual < 0.3
    # Half a pixel between two columns: both see the same.
    kernel = fit.kernel.sum((0, 1))
    assert kernel.shape[0] % 2 == 1
    assert kernel.isfinite().all()


def test_a_soft_layer_that_is_steep_is_the_convolution_it_came_from():
    conv = conv_of(nn.Conv2d, 3, 4, 3, padding=1)
    fit = attention_to_conv(conv_to_attention(conv, exact=False, tolerance=1e-12), image_of(2, 3, 11, 13))
    assert fit.conv.kernel_size == (3, 3)
    torch.testing.assert_close(fit.kernel, conv.weight, rtol=1e-11, atol=1e-11)
    assert fit.residual < 1e-11


def test_the_heads_of_a_spatial_transformer_have_a_kernel():
    torch.manual_seed(5)
    model = SpatialTransformer(SpatialConfig(image=(26, 34), patch=2, dim=6, heads=4, layers=1)).double().eval()
    heads = model.blocks[0].attention
    fit = attention_to_conv(heads)
    assert fit.kernel.shape == (6, 6, 25, 33)
    image = image_of(2, 6, 13, 17)
    off = heads(image.movedim(1, -1)).movedim(-1, 1) - fit.conv(image)
    middle = off[..., 6, 8].abs().max()
    assert middle < 1e-2 * off.abs().max()


def test_content_attention_is_refused_by_conversion_and_accepted_by_the_fit():
    torch.manual_seed(6)
    layer = GridAttention(4, 2, attention=Attention(pattern=Neighborhood((7, 11), 1), scale=8.0)).double()
    with pytest.raises(InputError, match="content"):
        attention_to_conv(layer)
    image = image_of(9, 4, 7, 11)

    def first(x):
        return layer(x.movedim(1, -1)).movedim(-1, 1)

    fit = fit_conv(first, image, 3)
    assert 0.1 < fit.residual < 1


@pytest.mark.parametrize("groups", [1, 2])
def test_the_nearest_convolution_of_a_convolution_is_itself(groups):
    conv = conv_of(nn.Conv2d, 4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=groups)
    fit = fit_conv(conv, image_of(5, 4, 11, 13), (3, 2), stride=2, padding=1, dilation=(1, 2), groups=groups)
    torch.testing.assert_close(fit.kernel, conv.weight, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fit.conv.bias, conv.bias, rtol=1e-10, atol=1e-10)
    assert fit.residual < 1e-12
    line = conv_of(nn.Conv1d, 2, 3, 5, padding=2, bias=False)
    fit = fit_conv(line, image_of(5, 2, 31), 5, bias=False)
    torch.testing.assert_close(fit.kernel, line.weight, rtol=1e-10, atol=1e-10)


def test_no_other_convolution_comes_nearer():
    image = image_of(5, 2, 11, 13)

    def bent(x):
        return nn.functional.conv2d(x, torch.ones(3, 2, 3, 3, dtype=DOUBLE), padding=1).relu()

    fit = fit_conv(bent, image)
    assert 0.1 < fit.residual < 0.9
    best = (bent(image) - fit.conv(image)).square().sum()
    for parameter in fit.conv.parameters():
        for size in (1e-3, -1e-3):
            with torch.no_grad():
                step = size * image_of(*parameter.shape, seed=7)
                parameter.add_(step)
                assert (bent(image) - fit.conv(image)).square().sum() > best
                parameter.sub_(step)


def test_attention_by_content_with_any_temperature_is_no_convolution():
    # A temperature that is neither high nor low does not make a convolution: the weights follow the image, so that
    # twice the image is not twice the output.
    torch.manual_seed(8)
    images = image_of(9, 4, 5, 7)
    for scale in (0.3, 1.0, 3.0):
        layer = GridAttention(4, 1, attention=Attention(scale=scale), bias=False).double()
        found = fit_conv(lambda x, f=layer: f(x.movedim(1, -1)).movedim(-1, 1), images, 3)
        assert found.residual > 0.1
        pixels = images.movedim(1, -1)
        assert (layer(2 * pixels) - 2 * layer(pixels)).abs().max() > 0.1 * layer(pixels).abs().max()


def test_what_cannot_be_compared_is_refused():
    image = image_of(2, 3, 7, 11)
    with pytest.raises(InputError, match="different sizes"):
        fit_conv(nn.AvgPool2d(2), image, 3)
    with pytest.raises(InputError, match="from images to images"):
        fit_conv(lambda x: x.flatten(1), image, 3)
    # Tails of 18 pixels, which torch wraps round no image of 7.
    layer = SpatialAttention(3, 2, [(0, -1), (0, 1)], alpha=0.05, lattice=Lattice(edges="circular"), dtype=DOUBLE)
    with pytest.raises(InputError, match="images of at least"):
        attention_to_conv(layer, image)
    assert attention_to_conv(layer, image_of(1, 3, 23, 24)).residual < 1e-3
