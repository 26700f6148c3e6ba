"""Every convolution is an attention: kernel, stride, dilation, padding, edges, groups, values and gradients."""

import itertools
import math

import pytest
import torch
from convolutions import DOUBLE, conv_of, convolutions, image_of
from hypothesis import given, settings
from torch import nn

from regard import conv_to_attention
from regard.convert import steepness
from regard.errors import ConfigError, InputError
from regard.layers import SpatialAttention, TableAttention
from regard.layers.lattice import EDGES

# What torch says about its own convolution, once, when it pads one side more than the other.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

# kernel, stride, dilation, padding
NINE = [
    (3, 1, 1, 1),
    (5, 1, 1, 2),
    (3, 1, 2, 2),
    (3, 2, 1, 1),
    (3, 3, 2, 4),
    (4, 2, 1, 1),
    (2, 1, 1, 0),
    (7, 4, 1, 3),
    (1, 1, 1, 0),
]


def assert_same(mine, truth, dtype, summed):
    """Equal but for rounding: every output is a sum of `summed` products of numbers of size 1, added in two orders."""
    assert mine.shape == truth.shape
    assert mine.dtype == truth.dtype == dtype
    bound = 4 * torch.finfo(dtype).eps * math.sqrt(summed) * max(1.0, float(truth.detach().abs().max()))
    assert (mine - truth).abs().max() <= bound


def assert_same_layer(conv, image, **options):
    """Outputs and all gradients: of the image, of the kernel through the heads' values, of the bias."""
    conv.zero_grad()
    layer = conv_to_attention(conv, **options)
    mine, theirs = image.clone().requires_grad_(), image.clone().requires_grad_()
    output, expected = layer(mine), conv(theirs)
    summed = conv.weight[0].numel()
    assert_same(output, expected, image.dtype, summed)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).cos().reshape(output.shape).to(image.dtype)
    output.backward(upstream)
    expected.backward(upstream)
    pixels = output[0].numel() * len(output)
    assert_same(mine.grad, theirs.grad, image.dtype, summed * conv.out_channels)
    taps = conv.weight.grad.flatten(2)
    if layer.weight.shape == taps.shape:  # no tap was dropped
        assert_same(layer.weight.grad, taps, image.dtype, pixels)
    if conv.bias is not None:
        assert_same(layer.bias.grad, conv.bias.grad, image.dtype, pixels)
    return layer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kernel", "stride", "dilation", "padding"), NINE)
def test_the_nine_cases_with_zeros_beyond_the_edges(kernel, stride, dilation, padding, dtype):
    conv = conv_of(nn.Conv2d, 3, 4, kernel, stride, padding, dilation, dtype=dtype)
    image = image_of(2, 3, 11, 13, dtype=dtype)
    layer = assert_same_layer(conv, image)
    assert layer.exact
    assert layer.heads == kernel**2
    error = (layer(image) - conv(image)).abs().max() / conv(image).abs().max()
    assert error <= (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize(("kernel", "stride", "dilation", "padding"), NINE)
def test_the_nine_cases_along_a_line_with_any_edges(kernel, stride, dilation, padding, edges):
    conv = conv_of(nn.Conv1d, 3, 5, kernel, stride, padding, dilation, padding_mode=edges)
    assert_same_layer(conv, image_of(2, 3, 17))


@settings(max_examples=80)
@given(convolutions())
def test_any_convolution_is_an_attention(case):
    conv, image = case
    assert_same_layer(conv, image)
    single = conv.float(), image[0].float()
    assert_same(conv_to_attention(single[0])(single[1]), single[0](single[1]), torch.float32, conv.weight[0].numel())


@settings(max_examples=40)
@given(convolutions())
def test_soft_heads_come_as_near_as_the_tolerance(case):
    conv, image = case
    for tolerance in (1e-3, 1e-9):
        layer = conv_to_attention(conv, exact=False, tolerance=tolerance)
        spread = max(0.0, float(image.max())) - min(0.0, float(image.min()))
        bound = tolerance * spread * conv.weight.abs().sum((1, 2) if conv.weight.ndim == 3 else (1, 2, 3)).max()
        assert (layer(image) - conv(image)).abs().max() <= bound + 1e-12
        assert layer.alpha.unique().tolist() == [layer.alpha[0].round().item()]


def test_a_layer_serves_images_of_any_size():
    conv = conv_of(nn.Conv2d, 3, 4, (3, 2), stride=(2, 1), padding=1)
    layer = conv_to_attention(conv)
    for size in [(5, 7), (13, 11), (3, 1), (1, 2)]:
        image = image_of(2, 3, *size)
        torch.testing.assert_close(layer(image), conv(image), rtol=1e-12, atol=1e-12)
    assert layer(image_of(0, 3, 5, 7)).shape == conv(image_of(0, 3, 5, 7)).shape
    assert layer(image_of(3, 5, 7)).shape == conv(image_of(3, 5, 7)).shape


def test_depthwise_and_grouped_convolutions_keep_no_zeros():
    for groups in (2, 3, 6):
        conv = conv_of(nn.Conv2d, 6, 12, 3, padding=1, groups=groups)
        layer = assert_same_layer(conv, image_of(2, 6, 7, 5))
        assert sum(parameter.numel() for parameter in layer.parameters()) == conv.weight.numel() + 12


def test_heads_with_blocks_of_channels_are_a_grouped_convolution_with_a_tap_each():
    # What multi-head attention is before its output matrix: head h looks one step further and keeps its own channels.
    image = image_of(2, 3 * 5, 17)
    heads = [SpatialAttention(5, 5, [step], bias=False, dtype=DOUBLE) for step in (-1, 0, 1)]
    mine = torch.cat([head(part) for head, part in zip(heads, image.chunk(3, 1), strict=True)], 1)
    kernel = torch.zeros(15, 5, 3, dtype=DOUBLE)
    for tap, head in enumerate(heads):
        kernel[5 * tap : 5 * tap + 5, :, tap] = head.weight[:, :, 0]
    expected = nn.functional.conv1d(image, kernel, padding=1, groups=3)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_taps_that_are_zero_get_no_head():
    conv = conv_of(nn.Conv2d, 3, 4, 3, padding=1)
    with torch.no_grad():
        conv.weight[:, :, 0] = 0
        conv.weight[:, :, 1, 1] = 0
        conv.weight[0, :, 2, 2] = 0  # not the whole tap
    layer = assert_same_layer(conv, image_of(2, 3, 7, 5))
    assert layer.steps == ((0, -1), (0, 1), (1, -1), (1, 0), (1, 1))
    with torch.no_grad():
        conv.weight.zero_()
    assert assert_same_layer(conv, image_of(2, 3, 7, 5)).heads == 1


@pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(("inside", "out"), [(3, 5), (5, 3)])
def test_values_and_outputs_as_two_matrices(inside, out, head_dim):
    conv = conv_of(nn.Conv2d, 2 * inside, 2 * out, 3, padding=1, groups=2)
    if head_dim < 3:
        with pytest.raises(ConfigError, match="rank 3"):
            conv_to_attention(conv, head_dim=head_dim)
        with torch.no_grad():  # taps of a rank that fits
            left, right = image_of(3, 3, 2 * out, head_dim), image_of(3, 3, head_dim, inside, seed=5)
            conv.weight.copy_((left @ right).permute(2, 3, 0, 1))
    layer = conv_to_attention(conv, head_dim=head_dim)
    image = image_of(2, 2 * inside, 7, 5)
    torch.testing.assert_close(layer(image), conv(image), rtol=1e-11, atol=1e-11)
    assert layer.value.shape == (2, 9, head_dim, inside)
    assert layer.output.shape == (2 * out, head_dim, 9)
    expected = conv.weight.flatten(2).permute(2, 0, 1)
    torch.testing.assert_close(layer.matrices(), expected, rtol=1e-11, atol=1e-11)
    if head_dim >= inside:  # a head hands its pixel on, and the tap is its output
        assert torch.equal(layer.value[0, 0, :inside], torch.eye(inside, dtype=DOUBLE))


def test_what_is_frozen_stays_frozen_and_modes_are_kept():
    conv = conv_of(nn.Conv2d, 3, 4, 3, dtype=torch.float32).eval()
    conv.weight.requires_grad_(False)
    layer = conv_to_attention(conv)
    assert not layer.training
    assert [name for name, parameter in layer.named_parameters() if parameter.requires_grad] == ["bias"]
    assert layer.weight.data_ptr() != conv.weight.data_ptr()


def test_a_converted_layer_can_be_trained_on():
    torch.manual_seed(3)
    conv, image = conv_of(nn.Conv2d, 2, 3, 3, padding=1), image_of(4, 2, 7, 5)
    layer = conv_to_attention(conv).with_alpha(0.5)
    before = layer.step.detach().clone()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = (layer(image) - conv(image).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert (layer.step - before).abs().min() > 1e-3
    assert (layer.spread - 1).abs().min() > 1e-3


def test_the_width_follows_from_the_tolerance_and_from_the_null_key():
    padded, bare = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 3, 3)
    for tolerance in (1e-2, 1e-6, 1e-12):
        with_null = conv_to_attention(padded, exact=False, tolerance=tolerance)
        without = conv_to_attention(bare, exact=False, tolerance=tolerance)
        assert with_null.alpha[0].item() == math.ceil(steepness(tolerance, null=True))
        assert without.alpha[0].item() == math.ceil(steepness(tolerance))
        assert without.lattice.edges == "replicate"


# Claims that are wrong


def test_a_kernel_that_is_flipped_is_another_convolution():
    # With steps counted from key to query the kernel has to be turned round; the same taps without that are wrong.
    conv, image = conv_of(nn.Conv2d, 3, 4, 3, padding=1), image_of(1, 3, 11, 13)
    layer = conv_to_attention(conv)
    steps = [(-row, -column) for row, column in layer.steps]
    turned = SpatialAttention(3, 4, steps, lattice=layer.lattice, dtype=DOUBLE)
    with torch.no_grad():
        turned.weight.copy_(layer.weight)
        turned.bias.copy_(layer.bias)
    assert (turned(image) - conv(image)).abs().max() > 10
    with torch.no_grad():
        turned.weight.copy_(layer.weight.flip(-1))
    torch.testing.assert_close(turned(image), conv(image), rtol=1e-12, atol=1e-12)


def test_a_stride_is_fewer_queries_and_no_pooling():
    conv, image = conv_of(nn.Conv2d, 3, 4, 3, stride=2, padding=1), image_of(1, 3, 11, 13)
    every = conv_to_attention(conv_of(nn.Conv2d, 3, 4, 3, padding=1))(image)
    expected = conv(image)
    torch.testing.assert_close(every[..., ::2, ::2], expected, rtol=1e-12, atol=1e-12)
    pooled = nn.functional.max_pool2d(every, kernel_size=1, stride=2)
    torch.testing.assert_close(pooled, expected, rtol=1e-12, atol=1e-12)
    for pool in (nn.functional.avg_pool2d, nn.functional.max_pool2d):
        assert (pool(every, 2, ceil_mode=True) - expected).abs().max() > 5


def test_padding_alone_is_not_enough_the_output_is_cropped_too():
    conv, image = conv_of(nn.Conv2d, 3, 4, 3, padding=1), image_of(1, 3, 11, 13)
    layer = conv_to_attention(conv)
    uncropped = layer(nn.functional.pad(image, (1, 1, 1, 1)))
    assert uncropped.shape[2:] == (13, 15)
    torch.testing.assert_close(uncropped[..., 1:-1, 1:-1], conv(image), rtol=1e-12, atol=1e-12)


# Refusals


class Odd(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


def unknown_mode():
    conv = nn.Conv2d(3, 4, 3)
    conv.padding_mode = "wrap"
    return conv


@pytest.mark.parametrize(
    ("conv", "because"),
    [
        (nn.ConvTranspose2d(3, 4, 3), "neither a Conv1d nor a Conv2d"),
        (nn.Conv3d(3, 4, 3), "neither a Conv1d nor a Conv2d"),
        (nn.Linear(3, 4), "neither a Conv1d nor a Conv2d"),
        (nn.Conv2d(3, 4, 3, dtype=torch.complex64), "real numbers"),
        (Odd(3, 4, 3), "something of its own"),
        (unknown_mode(), "padding mode 'wrap'"),
    ],
)
def test_what_is_no_such_convolution_is_refused(conv, because):
    with pytest.raises(ConfigError, match="instead") as refusal:
        conv_to_attention(conv)
    assert because in str(refusal.value)


def test_a_lazy_and_a_quantised_convolution_are_refused():
    with pytest.raises(ConfigError, match="its channels are set by the first input"):
        conv_to_attention(nn.LazyConv2d(4, 3))
    quantised = torch.ao.nn.qat.Conv2d(3, 4, 3, qconfig=torch.ao.quantization.default_qat_qconfig)
    with pytest.raises(ConfigError, match="something of its own"):
        conv_to_attention(quantised)


def test_a_mirror_shows_no_more_than_the_image():
    conv = nn.Conv2d(3, 4, 5, padding=2, padding_mode="reflect")
    for layer in (conv_to_attention(conv), conv_to_attention(conv, exact=False)):
        torch.testing.assert_close(layer(torch.ones(1, 3, 3, 7)), conv(torch.ones(1, 3, 3, 7)))
        with pytest.raises(InputError, match="mirror"):
            layer(torch.ones(1, 3, 2, 7))


def test_unknown_numbers_of_heads_and_soft_tables_are_refused():
    conv = nn.Conv2d(3, 4, 3)
    for options in [{"heads": 5}, {"heads": "minimal", "exact": False}, {"heads": "minimal", "head_dim": 2}]:
        with pytest.raises(ConfigError, match="heads"):
            conv_to_attention(conv, **options)


def test_without_numbers_every_tap_keeps_its_head_and_ranks_are_refused():
    conv = nn.Conv2d(4, 6, (3, 2), stride=2, device="meta")
    for options in [{}, {"exact": False}, {"head_dim": 4}]:
        layer = conv_to_attention(conv, **options)
        assert layer.heads == 6
        assert layer(torch.zeros(2, 4, 5, 7, device="meta")).shape == (2, 6, 2, 3)
    for options in [{"heads": "minimal"}, {"head_dim": 3}]:
        with pytest.raises(ConfigError, match="no rank"):
            conv_to_attention(conv, **options)


@pytest.mark.parametrize("options", [{}, {"exact": False}, {"heads": "minimal"}])
def test_autocast_shortens_the_output_of_a_layer_as_that_of_the_convolution(options):
    conv, image = nn.Conv2d(1, 4, 5, padding=2), torch.randn(2, 1, 7, 11)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = conv_to_attention(conv, **options)(image), conv(image)
    # 25 products of numbers of size one, each rounded to 8 bits.
    torch.testing.assert_close(found, expected, rtol=0, atol=25 * 2.0**-8)


def test_parametrised_weights_are_read():
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    image = torch.randn(1, 3, 5, 7)
    torch.testing.assert_close(conv_to_attention(conv)(image), conv(image))


@pytest.mark.parametrize("heads", ["taps", "minimal"])
def test_every_combination_of_options_is_one_of_the_two_layers_and_equals_the_convolution(heads):
    signal = torch.randn(2, 4, 11, dtype=torch.float64)
    for bias, groups in itertools.product([True, False], [1, 2]):
        conv = nn.Conv1d(4, 6, 3, bias=bias, groups=groups).double()
        layer = conv_to_attention(conv, heads=heads)
        assert isinstance(layer, SpatialAttention | TableAttention)
        torch.testing.assert_close(layer(signal), conv(signal))
