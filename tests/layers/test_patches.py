"""Patches of images as tokens: a convolution, and an unfolding followed by a linear layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from regard.errors import ConfigError, InputError
from regard.layers import patches
from regard.layers.patches import PatchEmbedding

# Patches of 2, 3, 5 and of more than LARGE_PATCH numbers (3 * 17^2 = 867), on grids that are never square.
SIZES = [(3, 7, 2, (3, 5)), (1, 5, 3, (1, 1)), (2, 3, 5, (2, 3)), (3, 11, 17, (2, 1))]


def embedding_and_image(channels, dim, patch, grid, dtype=torch.float64):
    torch.manual_seed(channels + patch)
    layer = PatchEmbedding(channels, dim, patch).to(dtype)
    return layer, torch.randn(2, channels, grid[0] * patch, grid[1] * patch, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(("channels", "dim", "patch", "grid"), SIZES)
def test_a_patch_is_unfolded_and_projected(channels, dim, patch, grid):
    layer, image = embedding_and_image(channels, dim, patch, grid)
    flat = functional.unfold(image, patch, stride=patch).transpose(1, 2)
    expected = functional.linear(flat, layer.weight.flatten(1), layer.bias).unflatten(1, grid)
    torch.testing.assert_close(layer(image), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("channels", "dim", "patch", "grid"), SIZES)
def test_a_patch_in_float32_is_right_to_rounding(channels, dim, patch, grid):
    layer, image = embedding_and_image(channels, dim, patch, grid, torch.float32)
    exact = PatchEmbedding(channels, dim, patch).double()
    exact.load_state_dict(layer.state_dict())
    bound = 2**-23 * channels * patch**2 * layer.weight.abs().max() * image.abs().max()
    assert (layer(image) - exact(image.double())).abs().max() <= bound


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("channels", "dim", "patch", "grid"), SIZES)
def test_the_product_and_the_convolution_agree_with_their_gradients(
    channels, dim, patch, grid, channels_last, monkeypatch
):
    layer, image = embedding_and_image(channels, dim, patch, grid)
    seen = []
    for large in (1, 10**9):
        monkeypatch.setattr(patches, "LARGE_PATCH", large)
        given = image.contiguous(memory_format=torch.channels_last) if channels_last else image
        output = layer(given)
        slope = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
        seen.append((output, *torch.autograd.grad(output, (image, layer.weight, layer.bias), slope)))
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_both_paths_are_taken():
    def operators(layer, side):
        with FlopCounterMode(display=False) as counter:
            layer(torch.zeros(1, layer.channels, side, side))
        return {str(operator) for operator in counter.get_flop_counts()["Global"]}

    assert operators(PatchEmbedding(3, 5, 16), 32) == {"aten.addmm"}
    assert operators(PatchEmbedding(3, 5, 4), 32) == {"aten.convolution"}


def test_patches_may_overlap():
    layer = PatchEmbedding(3, 5, patch=7, stride=4, padding=3).double()
    image = torch.randn(2, 3, 20, 33, dtype=torch.float64)
    expected = functional.conv2d(image, layer.weight, layer.bias, stride=4, padding=3).permute(0, 2, 3, 1)
    torch.testing.assert_close(layer(image), expected, rtol=0, atol=0)
    assert layer(image).shape[1:3] == layer.grid(20, 33) == (5, 9)


def test_parameters_are_those_of_a_convolution():
    layer, twin = PatchEmbedding(3, 5, 4), torch.nn.Conv2d(3, 5, 4, stride=4)
    layer.load_state_dict(twin.state_dict())
    image = torch.randn(1, 3, 8, 12)
    torch.testing.assert_close(layer(image), twin(image).permute(0, 2, 3, 1))
    assert PatchEmbedding(3, 5, 4, bias=False).bias is None


@pytest.mark.parametrize(
    ("image", "headline", "instead"),
    [
        (torch.zeros(3, 8, 12), "right kind", "image[None]"),
        (torch.zeros(2, 5, 8, 12), "right kind", "3 channels"),
        (torch.zeros(2, 8, 12, 3), "right kind", "permute(0, 3, 1, 2)"),
        (torch.zeros(2, 3, 9, 12), "whole number of patches", "pad(image, (0, 0, 0, 3))"),
        (torch.zeros(2, 3, 8, 11), "whole number of patches", "8 x 12"),
        (torch.zeros(2, 3, 0, 4), "smaller than one patch", "larger"),
        (torch.zeros(2, 3, 8, 12, dtype=torch.uint8), "floating-point", "float()"),
        (torch.zeros(2, 3, 8, 12, dtype=torch.float16), "different precisions", "image.to(torch.float32)"),
        (torch.zeros(2, 3, 8, 12, dtype=torch.float64), "different precisions", "image.to(torch.float32)"),
    ],
)
def test_a_wrong_image_is_refused_in_four_parts(image, headline, instead):
    with pytest.raises(InputError) as caught:
        PatchEmbedding(3, 5, 4)(image)
    error = caught.value
    assert headline in error.headline
    assert instead in error.instead
    assert all((error.asked, error.found, error.because))


def test_a_patch_without_pixels_is_refused():
    with pytest.raises(ConfigError, match="patch"):
        PatchEmbedding(3, 5, 0)
    with pytest.raises(ConfigError, match="padding"):
        PatchEmbedding(3, 5, 4, padding=-1)


@pytest.mark.parametrize("patch", [4, 17])
def test_autocast_may_mix_precisions_but_for_float64(patch):
    torch.manual_seed(7)
    layer, image = PatchEmbedding(3, 5, patch), torch.randn(2, 3, 2 * patch, patch)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = layer(image.bfloat16())
        with pytest.raises(InputError, match="different precisions"):
            layer(image.double())
    assert tokens.dtype == torch.bfloat16
    # Weights, pixels and the sum are rounded once each; the products are of numbers below 5 and 1.
    terms = 3 * patch**2
    torch.testing.assert_close(tokens.float(), layer(image), rtol=0, atol=3 * 2**-8 * 5 * terms**0.5)
