"""Layers of images cost what they do: patches, windows, channels, grids; odd grids, one window, several images."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch
from cost_model.counting import count
from cost_model.rules.agreeing import assert_formulas_hold

from regard import Attention, Neighborhood
from regard.cost_model import cost
from regard.errors import CostError
from regard.kernels import library
from regard.layers import ChannelAttention, PatchEmbedding, WindowAttention
from regard.layers.grid import GridAttention
from regard.patterns import GridWindow

seeds = pytest.mark.parametrize("seed", range(12))


def grid_of(draw: random.Random, width: int, longest: int = 8) -> torch.Tensor:
    return torch.randn(draw.choice([1, 2, 3]), draw.randint(1, longest), draw.randint(1, longest), width)


# Patches


@seeds
def test_patches_side_by_side(seed: int) -> None:
    """As a convolution, and where patches have many numbers as a product, for which they are copied."""
    draw = random.Random(seed)
    channels, side = draw.choice([(1, 2), (3, 4), (5, 3), (3, 16), (2, 16), (1, 32), (520, 1)])
    layer = PatchEmbedding(channels, draw.choice([1, 5, 7]), side, bias=draw.random() < 0.7)
    image = side * draw.randint(1, 3), side * draw.randint(1, 3)
    assert_formulas_hold(layer, torch.randn(draw.choice([1, 2]), channels, *image), image)


@pytest.mark.parametrize(
    ("side", "stride", "padding", "image"), [(7, 4, 3, (9, 13)), (3, 2, 1, (5, 8)), (3, 5, 0, (13, 9))]
)
def test_patches_that_overlap_or_leave_gaps(side: int, stride: int, padding: int, image: tuple[int, int]) -> None:
    assert_formulas_hold(PatchEmbedding(2, 5, side, stride, padding), torch.randn(2, 2, *image), image)


def test_patches_that_are_learned_send_gradients_back() -> None:
    """The image is not learned, so there is one product on the way back; of tokens there would be two."""
    layer, image = PatchEmbedding(3, 5, 4), torch.randn(2, 3, 8, 12)
    found = cost(layer, batch=2, image=(8, 12), step="backward").macs
    assert found == count(layer, image, backward=True, learns_input=False).macs
    assert 2 * found == count(layer, image, backward=True, learns_input=True).macs


# Windows


@seeds
def test_windows(seed: int) -> None:
    draw = random.Random(seed)
    heads, window = draw.choice([1, 2, 3]), (draw.randint(1, 4), draw.randint(1, 4))
    width = heads * draw.choice([1, 2, 4])
    layer = WindowAttention(
        width,
        heads,
        window if seed % 2 else window[0],
        bias=draw.random() < 0.7,
        sees_padding=draw.random() < 0.6,
    )
    grid = grid_of(draw, width)
    assert_formulas_hold(layer, grid, (grid.shape[1], grid.shape[2]))


@pytest.mark.parametrize(
    ("size", "window"), [((7, 7), 7), ((5, 6), 7), ((9, 16), 7), ((6, 9), 3), ((1, 1), 1), ((5, 7), (2, 3))]
)
@pytest.mark.parametrize("sees_padding", [True, False])
def test_pairs_are_those_of_the_windows(size, window, sees_padding: bool) -> None:
    layer = WindowAttention(6, 3, window, sees_padding=sees_padding)
    read = size
    if sees_padding:
        read = tuple(-(-length // side) * side for length, side in zip(size, layer.window, strict=True))
    exact = GridWindow(read, layer.window).pairs(read[0] * read[1])
    found = cost(layer, batch=2, image=size)
    assert found.pairs == found.exponentials == 2 * 3 * exact
    assert found.by_part()["scores"].macs == found.by_part()["values"].macs == 2 * 6 * exact


@pytest.mark.parametrize("size", [(6, 9), (5, 7), (3, 3)])
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_windows_that_are_copied_into_the_batch_do_what_the_mathematics_asks(size, step: str) -> None:
    """Without our kernels whole windows become rows of the batch, and even the reference computes only their pairs."""
    layer, grid = WindowAttention(8, 2, 3), torch.randn(2, *size, 8)
    with patch.object(library, "missing", lambda: "not now"):
        run = count(layer, grid, backward=step == "backward").macs
    assert cost(layer, batch=2, image=size, step=step).macs == run


@pytest.mark.parametrize("backend", ["native", "blocked"])
def test_kernels_visit_windows_and_compute_scores_again(backend: str) -> None:
    layer = WindowAttention(8, 2, 7)
    sizes = {"batch": 2, "image": (16, 23)}
    forward, back = (cost(layer, backend=backend, step=step, **sizes) for step in ("forward", "backward"))
    exact = cost(layer, **sizes)
    assert forward.pairs == exact.pairs
    assert exact.macs <= forward.macs < cost(layer, backend="reference", **sizes).macs
    visited = forward.by_part()["scores"].macs
    assert back.by_part()["scores"].macs == 3 * visited
    assert back.by_part()["values"].macs == 2 * visited
    assert forward.activation_bytes == exact.activation_bytes


def test_the_depth_of_windows_by_hand() -> None:
    """Inner products of 8, 4 and 4 numbers, a softmax of 4, and 8 again; a bias takes one step more."""
    softmax = 2 + 1 + 1 + 2 + 1
    layer = WindowAttention(8, 2, 2)
    assert cost(layer, image=(4, 6)).depth == (4 + 1) + 3 + softmax + 3 + (4 + 1)
    assert cost(layer, image=(4, 6), stable=False).depth == (4 + 1) + 3 + softmax - 3 + 3 + (4 + 1)
    assert cost(layer, image=(4, 6), serial=True).depth == (8 + 1) + 4 + (3 + 1 + 1 + 3 + 1) + 4 + (8 + 1)


# Channels


@seeds
def test_channels(seed: int) -> None:
    """Few groups are multiplied one by one, many together; several images of many groups are copied."""
    draw = random.Random(seed)
    groups = draw.choice([1, 2, 3, 8, 9, 12])
    width = groups * draw.choice([1, 2, 4])
    layer = ChannelAttention(width, groups, draw.choice(["dim", "tokens"]), bias=draw.random() < 0.7)
    grid = grid_of(draw, width, longest=5)
    assert_formulas_hold(layer, grid, (grid.shape[1], grid.shape[2]))


def test_channels_may_be_asked_by_tokens() -> None:
    layer = ChannelAttention(12, 3)
    by_tokens, by_grid = cost(layer, batch=2, tokens=15), cost(layer, batch=2, image=(3, 5))
    for name in ("macs", "activation_bytes", "depth", "pairs", "bytes"):
        assert by_tokens.quantity(name) == by_grid.quantity(name)
    assert by_tokens.pairs == 2 * 3 * 4 * 4


# UDL 12.9: 16 x 16 patches of 512 channels


def attention_alone(found) -> int:
    parts = found.by_part()
    return int(parts["scores"].macs + parts["values"].macs)


def test_channels_that_all_meet_cost_twice_what_patches_do() -> None:
    found = cost(ChannelAttention(512, groups=1), tokens=256)
    assert found.by_part()["scores"].macs == 67_108_864
    assert attention_alone(found) == 134_217_728
    assert found.macs == 402_653_184
    assert found.exponentials == 262_144
    (equal,) = (
        cost(ChannelAttention(512, groups=1), tokens=256)
        .by_part()["scores"]
        .solve("tokens", cost(Attention(), tokens=256, dim=512).by_part()["scores"])
    )
    assert equal == 512


def test_groups_and_windows_of_davit() -> None:
    grouped = cost(ChannelAttention(512, groups=16), tokens=256)
    assert grouped.by_part()["scores"].macs == 4_194_304
    assert attention_alone(grouped) == 8_388_608
    assert grouped.exponentials == 16_384
    seven = cost(WindowAttention(512, 16, 7), image=(16, 16))
    assert seven.by_part()["scores"].macs == 11_063_808
    assert attention_alone(seven) == 22_127_616
    assert seven.macs - attention_alone(seven) == 462_422_016
    assert attention_alone(cost(WindowAttention(512, 16, 8), image=(16, 16))) == 16_777_216
    assert attention_alone(cost(WindowAttention(512, 16, 4), image=(16, 16))) == 4_194_304


# Grids


@pytest.mark.parametrize("seed", range(6))
def test_grids(seed: int) -> None:
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 3])
    grid = grid_of(draw, 4 * heads, longest=5)
    size = grid.shape[1], grid.shape[2]
    pattern = Neighborhood(size, 1) if seed % 2 else None
    layer = GridAttention(4 * heads, heads, attention=Attention(pattern=pattern), bias=draw.choice([True, "o", False]))
    assert_formulas_hold(layer, grid, size)


# What is not known, and what cannot be asked


def test_formulas_without_sizes() -> None:
    windows = cost(WindowAttention(8, 2, 3)).macs
    assert str(windows.formula) == "4*B*D**2*w**2*ceiling(R/w)*ceiling(W/w) + 2*B*D*w**4*ceiling(R/w)*ceiling(W/w)"
    with pytest.raises(CostError, match="nothing says how large R, W is"):
        _ = windows.value
    assert str(cost(ChannelAttention(12, 3)).exponentials.formula) == "B*D**2/H"
    assert str(cost(PatchEmbedding(3, 8, 4)).macs.formula) == "B*C*D*R*W"
    assert cost(WindowAttention(8, 2, (3, 5)), image=(6, 10)).pairs == 2 * 4 * 15**2


@pytest.mark.parametrize("backend", ["native", "blocked"])
def test_a_plan_needs_a_grid(backend: str) -> None:
    with pytest.raises(CostError):
        _ = cost(WindowAttention(8, 2, 3), backend=backend).macs.value


@pytest.mark.parametrize("layer", [PatchEmbedding(3, 8, 4), WindowAttention(8, 2, 3), ChannelAttention(8, 2)])
def test_images_have_no_next_token(layer) -> None:
    with pytest.raises(CostError, match="no next token"):
        cost(layer, step="decode", image=(12, 12))


def test_a_length_is_no_grid() -> None:
    with pytest.raises(CostError, match="asked about a text"):
        cost(WindowAttention(8, 2, 3), tokens=12)


def test_pixels_that_are_left_over_are_refused() -> None:
    with pytest.raises(CostError, match=r"image=\(12, 16\)"):
        cost(PatchEmbedding(3, 8, 4), image=(9, 16))
