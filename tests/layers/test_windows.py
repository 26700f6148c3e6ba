"""Window attention: two implementations, padding, and cost."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from regard.errors import ConfigError, InputError, PatternError
from regard.kernels import library
from regard.layers.windows import WindowAttention
from regard.patterns import GridWindow

needs_kernels = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


def window_by_window(layer: WindowAttention, grid: torch.Tensor) -> torch.Tensor:
    """The definition: cut, pad, project, attend densely, join."""
    batch, rows, columns, dim = grid.shape
    down, across = layer.window
    padded = pad(grid, (0, 0, 0, -columns % across, 0, -rows % down))
    output = torch.zeros_like(padded)
    for top in range(0, rows, down):
        for left in range(0, columns, across):
            place = (slice(None), slice(top, top + down), slice(left, left + across))
            tokens = padded[place].reshape(batch, down * across, dim)
            query, key, value = (
                part.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for part in layer.qkv(tokens).chunk(3, -1)
            )
            visible = torch.ones(down * across, dtype=torch.bool)
            if not layer.sees_padding:
                row, column = torch.arange(down)[:, None] + top, torch.arange(across) + left
                visible = ((row < rows) & (column < columns)).flatten()
            scores = (query @ key.transpose(-1, -2)) / (dim // layer.heads) ** 0.5
            weight = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            mixed = layer.proj((weight @ value).transpose(1, 2).flatten(2))
            output[place] = mixed.reshape(batch, down, across, dim)
    return output[:, :rows, :columns]


@pytest.mark.parametrize("sees_padding", [True, False])
@pytest.mark.parametrize(
    ("grid", "window"), [((6, 9), 3), ((5, 7), 3), ((1, 1), 3), ((2, 5), 7), ((4, 11), (2, 5)), ((13, 2), (5, 1))]
)
def test_windows_attend_one_by_one(grid, window, sees_padding):
    torch.manual_seed(1)
    layer = WindowAttention(10, 2, window, sees_padding=sees_padding).double()
    x = torch.randn(2, *grid, 10, dtype=torch.float64, requires_grad=True)
    output, expected = layer(x), window_by_window(layer, x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn_like(output)
    inputs = (x, *layer.parameters())
    slopes, wanted = (torch.autograd.grad(made, inputs, slope) for made in (output, expected))
    for one, other in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("window", [7, (3, 5)])
def test_reading_in_place_and_folding_into_the_batch_agree(window, dtype):
    torch.manual_seed(2)
    layer = WindowAttention(6, 3, window)
    down, across = layer.window
    qkv = torch.randn(2, 2 * down, 3 * across, 18, dtype=dtype, requires_grad=True)
    ways = [layer._attend_in_place(qkv), layer._attend_folded(qkv)]
    slope = torch.randn_like(ways[0])
    slopes = [torch.autograd.grad(way, qkv, slope)[0] for way in ways]
    # Sums over a window of at most 49 keys, in whatever order.
    bound = 49 * torch.finfo(dtype).eps * 8
    torch.testing.assert_close(*ways, rtol=bound, atol=bound)
    torch.testing.assert_close(*slopes, rtol=bound, atol=bound)


def test_padding_is_seen_unless_it_is_hidden():
    torch.manual_seed(3)
    layer = WindowAttention(6, 2, 3).double()
    hidden = WindowAttention(6, 2, 3, sees_padding=False).double()
    hidden.load_state_dict(layer.state_dict())
    x = torch.randn(1, 3, 5, 6, dtype=torch.float64)
    same = (layer(x) - hidden(x)).abs().amax((0, 3))
    assert same[:, :3].max() < 1e-14  # whole windows
    assert same[:, 3:].min() > 1e-6  # a window with one column of padding


def test_a_token_never_sees_another_window():
    layer = WindowAttention(4, 1, 2)
    x = torch.randn(1, 4, 6, 4)
    changed = x.clone()
    changed[:, :2, :2] += 1
    moved = (layer(x) != layer(changed)).any(-1)[0]
    assert moved[:2, :2].all()
    assert not moved[2:].any()
    assert not moved[:, 2:].any()


def multiplications(layer, x, operator: str | None = None) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if operator is None or operator in str(name)) // 2


@needs_kernels
@pytest.mark.parametrize(
    ("window", "scores", "both", "projections"),
    [
        (7, 11_063_808, 22_127_616, 462_422_016),  # 16 is padded to 21
        (8, 8_388_608, 16_777_216, 268_435_456),
        (4, 2_097_152, 4_194_304, 268_435_456),
        (16, 33_554_432, 67_108_864, 268_435_456),  # one window: every patch sees every patch
    ],
)
def test_sixteen_by_sixteen_patches_of_512_channels_cost_what_the_textbook_says(window, scores, both, projections):
    layer, x = WindowAttention(512, 16, window), torch.randn(1, 16, 16, 512)
    assert multiplications(layer, x, "attention") == both == 2 * scores  # scores, and the weighted sum
    assert multiplications(layer, x, "addmm") == projections
    assert multiplications(layer, x) == both + projections


@needs_kernels
def test_hidden_padding_costs_nothing():
    layer, x = WindowAttention(6, 2, 7, sees_padding=False), torch.randn(1, 16, 9, 6)
    pairs = GridWindow((16, 9), 7).pairs(144)
    assert multiplications(layer, x, "attention") == 2 * pairs * 6
    assert multiplications(layer, x, "addmm") == 4 * 144 * 36


def test_what_is_no_grid_and_no_window_is_refused():
    with pytest.raises(InputError, match=r"\(batch, row, column, 6\)"):
        WindowAttention(6, 2, 3)(torch.zeros(2, 9, 6))
    with pytest.raises(InputError, match="channels come first"):
        WindowAttention(6, 2, 3)(torch.zeros(2, 6, 5, 7))
    with pytest.raises(ConfigError, match="4 equal heads"):
        WindowAttention(6, 4, 3)
    with pytest.raises(PatternError, match="window"):
        WindowAttention(6, 2, 0)


@pytest.mark.parametrize("sees_padding", [True, False])
def test_the_weights_and_the_padding_s_share_give_the_output(sees_padding):
    """What is missing to one is the weight of padding, whose value is the value's bias."""
    torch.manual_seed(0)
    layer = WindowAttention(6, heads=2, window=(3, 2), sees_padding=sees_padding).double()
    torch.nn.init.normal_(layer.qkv.bias)
    grid = torch.randn(2, 5, 7, 6, dtype=torch.float64)
    weight = layer.weights(grid, range(35))
    assert weight.shape == (2, 2, 35, 35)
    apart = ~GridWindow((5, 7), (3, 2)).matrix(35, 35)
    assert not weight[..., apart].any()
    missing = 1 - weight.sum(-1, keepdim=True)
    assert (missing.abs().max() > 0.05) == sees_padding
    value = layer.qkv(grid.flatten(1, 2))[..., 12:].unflatten(-1, (2, 3)).transpose(1, 2)
    mixed = weight @ value + missing * layer.qkv.bias[12:].view(2, 1, 3)
    output = layer.proj(mixed.transpose(1, 2).flatten(2)).view_as(grid)
    torch.testing.assert_close(output, layer(grid))
    torch.testing.assert_close(layer.weights(grid, [33, 8]), weight[:, :, [33, 8]])
