"""Maps, matrices, kernels and descriptions: the numbers that are drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard import Alibi, Causal, Quadratic, RegardError, RelativeTable, TransformerXL, Window, show
from regard.convert import conv_to_attention
from regard.layers.profiles import HeadProfile, head_profile
from regard.layers.windows import WindowAttention
from regard.models import GPT, DaViT, DaViTConfig, GPTConfig, ViT, ViTConfig
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.visualize import attention_maps, draw_kernels
from regard.visualize.kernels import effective_kernels, find_strongest_pairs
from regard.visualize.token_grid import TokenGrid, find_token_grid


@pytest.fixture
def vit():
    return ViT(ViTConfig(image=(8, 12), patch=4, classes=5, dim=8, layers=2, heads=2))


@pytest.fixture
def spatial():
    return SpatialTransformer(SpatialConfig(image=(5, 7), channels=1, patch=1, dim=4, layers=2, heads=3, hidden_dim=5))


# Which token is which pixel


def test_a_pixel_belongs_to_the_token_that_holds_it():
    places = TokenGrid((2, 3), first=1)
    assert [places.token((row, column), (8, 12)) for row, column in ((0, 0), (3, 3), (3, 4), (4, 0), (7, 11))] == [
        1, 1, 2, 4, 6,
    ]  # fmt: skip
    assert places.box(6, (8, 12)) == (4, 8, 4, 4)
    spread = places.spread(torch.arange(6.0).view(2, 3), (8, 12))
    assert spread.shape == (8, 12)
    assert spread[7, 11] == 5
    assert spread[3, 4] == 1


def test_the_grid_is_found_by_configuration_or_by_proportion(vit):
    assert find_token_grid(vit, 7, (8, 12)) == TokenGrid((2, 3), 1)
    assert find_token_grid(nn.Identity(), 25, (8, 12)) == TokenGrid((4, 6), 1)
    assert find_token_grid(nn.Identity(), 24, (8, 12)) == TokenGrid((4, 6), 0)
    with pytest.raises(RegardError, match="which part of the image"):
        find_token_grid(nn.Identity(), 23 * 101, (8, 12))


def test_a_pixel_outside_is_refused(vit):
    with pytest.raises(RegardError, match="no such pixel"):
        show(vit, torch.rand(3, 8, 12), query=(8, 0))


# Maps


def test_window_attention_is_drawn_on_the_grid_of_each_stage():
    """A DaViT has a smaller grid in each stage; its channel attention has no weights between tokens."""
    torch.manual_seed(0)
    model = DaViT(DaViTConfig(channels=1, classes=3, dims=(6, 8), heads=(3, 2), depths=(1, 2), window=2)).eval()
    picture = show(model, torch.rand(1, 16, 24), query=(5, 13))
    layers = picture.data["layers"]
    assert list(layers) == ["stages.0.blocks.0.attention", "stages.1.blocks.0.attention", "stages.1.blocks.2.attention"]
    assert [tuple(each.shape) for each in layers.values()] == [(3, 4, 6), (2, 2, 3), (2, 2, 3)]
    first = layers["stages.0.blocks.0.attention"]
    # The pixel is in token (1, 3) of the first grid, whose window has rows 0 and 1 and columns 2 and 3.
    torch.testing.assert_close(first[:, :2, 2:4].sum((1, 2)), torch.ones(3))
    assert first.sum() == first[:, :2, 2:4].sum()
    assert "goes to" not in show(model, torch.rand(1, 16, 24), layer=0).caption
    # The second grid has 2 x 3 tokens: the windows on the right are completed with zeros.
    assert "goes to the zeros that complete its windows" in show(model, torch.rand(1, 16, 24), query=(0, 23)).caption
    layer = WindowAttention(6, heads=2, window=2)
    assert show(layer, torch.rand(1, 4, 6, 6), query=(3, 1)).data["token"] == 19


def test_a_map_has_the_weights_of_the_query_pixel(vit):
    image = torch.rand(3, 8, 12)
    picture = show(vit, image, query=(5, 9))
    assert picture.data["token"] == 6
    for attention in attention_maps(vit, image[None]):
        drawn = picture.data["layers"][attention.name]
        torch.testing.assert_close(drawn, attention.rows([6])[:, 0, 1:].view(2, 2, 3))
    assert "row 5, column 9" in picture.caption
    assert "class token outside the image" in picture.caption


def test_the_class_token_is_the_default_query(vit, spatial):
    assert "the class token" in show(vit, torch.rand(3, 8, 12)).caption
    assert show(vit, torch.rand(3, 8, 12)).data["token"] == 0
    assert show(spatial, torch.rand(1, 5, 7)).data["query"] == (2, 3)


def test_the_bluest_pixel_is_the_heaviest_and_the_query_is_outlined(spatial):
    picture = show(spatial, torch.zeros(1, 5, 7), query=(1, 2), layer=0, head=2)
    (panel,) = picture.figure.axes
    colors = torch.tensor(panel.images[0].get_array())
    weights = picture.data["layers"]["blocks.0.attention"][0]
    blue = colors[..., 2] - colors[..., 0]
    assert int(blue.flatten().argmax()) == int(weights.flatten().argmax())
    (mark,) = panel.patches
    assert (mark.get_x(), mark.get_y(), mark.get_width(), mark.get_height()) == (1.5, 0.5, 1, 1)


def test_layers_and_heads_are_chosen_or_refused(spatial):
    image = torch.rand(1, 5, 7)
    picture = show(spatial, image, layer=1, head=[0, 2])
    assert list(picture.data["layers"]) == ["blocks.1.attention"]
    assert picture.data["layers"]["blocks.1.attention"].shape == (2, 5, 7)
    for words, message in (
        ({"layer": 2}, "no such layer"),
        ({"head": 3}, "no such head"),
        ({"head": []}, "have numbers"),
    ):
        with pytest.raises(RegardError, match=message):
            show(spatial, image, **words)


def test_a_head_profile_can_be_laid_over_an_image():
    bias = Quadratic(1, grid=(5, 7), centre=[[0, 1]], alpha=200.0)
    picture = show(head_profile(bias), torch.rand(5, 7), query=(2, 3))
    assert picture.data["layers"][""][0].nonzero().tolist() == [[2, 4]]


# Texts


def test_long_texts_are_drawn_in_tiles_and_say_so():
    model = GPT(GPTConfig(vocab_size=23, context_length=300, dim=8, layers=1, heads=2))
    text = torch.randint(23, (293,))
    picture = show(model, text)
    assert picture.data["cell"] == 3
    assert picture.data["layers"]["blocks.0.attention"].shape == (2, 98, 98)
    assert "One cell is 3 by 3 tokens" in picture.caption
    assert (picture.data["layers"]["blocks.0.attention"].triu(1) == 0).all()


def test_one_token_lists_its_largest_weights_and_their_number():
    model = GPT(GPTConfig(vocab_size=23, context_length=300, dim=8, layers=1, heads=2))
    text = torch.randint(23, (293,))
    picture = show(model, text, query=200, head=1)
    (weights,) = picture.data["layers"].values()
    (panel,) = picture.figure.axes
    (bars,) = (kind for kind in panel.containers if kind.get_label() == "weight")
    lengths = [bar.get_width() for bar in bars]
    assert lengths == pytest.approx(weights[0].sort(descending=True).values[:12].tolist())
    assert "Of 201 visible keys the 12" in picture.caption
    for query in (293, -1):
        with pytest.raises(RegardError, match="no such token"):
            show(model, text, query=query)
    with pytest.raises(RegardError, match="has a number"):
        show(model, text, query=(1, 2))


# Kernels


def test_the_kernel_of_a_converted_convolution_is_the_convolutions():
    conv = nn.Conv2d(3, 5, 3, padding=1)
    picture = draw_kernels({"convolution": conv, "attention": conv_to_attention(conv)}, count=4)
    drawn = picture.data["kernels"]
    torch.testing.assert_close(drawn["convolution"], drawn["attention"], rtol=0, atol=1e-6)
    assert picture.data["pairs"]["convolution"] == picture.data["pairs"]["attention"]
    for kernel, (out, into) in zip(drawn["convolution"], picture.data["pairs"]["convolution"], strict=True):
        torch.testing.assert_close(kernel, conv.weight[out, into].detach())


@pytest.mark.parametrize(
    "words",
    [
        {"kernel_size": 3, "dilation": 2, "padding": 2},
        {"kernel_size": (4, 3), "padding": (1, 1)},
        {"kernel_size": 3, "padding": 1, "groups": 2},
        {"kernel_size": 5, "padding": "same"},
    ],
)
def test_kernels_are_drawn_at_their_offsets(words):
    conv = nn.Conv2d(4, 6, **words)
    pairs = [(out, out % 4) for out in range(6)]
    torch.testing.assert_close(
        effective_kernels(conv, pairs, 4), effective_kernels(conv_to_attention(conv), pairs, 4), rtol=0, atol=1e-6
    )


def test_the_effective_kernel_is_the_sum_of_the_heads():
    found = HeadProfile(torch.randn(3, 5, 7), values=torch.randn(3, 4, 2))
    kernel = found.kernel
    for (out, into), drawn in zip(
        pairs := find_strongest_pairs(found, 4),
        effective_kernels(found, find_strongest_pairs(found, 4), 2),
        strict=True,
    ):
        torch.testing.assert_close(drawn, kernel[out, into][:, 1:6])
    norms = kernel.flatten(2).norm(dim=-1)
    assert [out for out, _ in pairs] == norms.amax(1).argsort(descending=True).tolist()
    assert all(into == int(norms[out].argmax()) for out, into in pairs)


def test_one_scale_serves_kernels_that_can_be_compared():
    small, large = torch.full((1, 1, 3, 3), 0.1), torch.full((1, 1, 3, 3), -1.0)
    picture = draw_kernels({"small": small, "large": large})
    pale, strong = (torch.tensor(panel.images[0].get_array()) for panel in picture.figure.axes)
    assert float(pale.min()) > 0.7
    assert float(strong.min()) < 0.1
    assert "±1" in picture.caption


def test_kernels_need_values():
    with pytest.raises(RegardError, match="effective kernel is not known"):
        draw_kernels({"bias": Quadratic(2, grid=(5, 7))})
    with pytest.raises(RegardError, match="no kernels"):
        draw_kernels({})


# Descriptions


def test_a_pattern_is_drawn_as_its_mask():
    picture = show(Causal() & Window(2, 0), 11, query=4)
    assert torch.equal(torch.tensor(picture.figure.axes[0].images[0].get_array()).bool(), picture.data["mask"])
    assert picture.data["pairs"] == 30
    with pytest.raises(RegardError, match="how many tokens"):
        show(Causal())
    with pytest.raises(RegardError, match="too long"):
        show(Causal(), 5000)


def test_a_bias_along_a_line_is_drawn_by_distance():
    picture = show(Alibi(2), 7)
    distance, scores = picture.data["distance"], picture.data["scores"]
    assert distance.tolist() == list(range(-6, 7))
    place = torch.arange(7)
    for steps, column in zip(distance.tolist(), scores.T, strict=True):
        query = torch.tensor(max(0, -steps))
        torch.testing.assert_close(column, Alibi(2).scores(query, place[query + steps]).float())
    assert show(RelativeTable(3, 7), 7).data["scores"].shape == (3, 13)
    with pytest.raises(RegardError, match="by content"):
        show(TransformerXL(2, 4), 7)


def test_what_cannot_be_shown_is_refused_with_what_can(vit):
    with pytest.raises(RegardError, match="cannot be shown"):
        show(3.5)
    with pytest.raises(RegardError, match="attends by content"):
        show(vit)


def test_a_picture_is_written_to_its_path(tmp_path, spatial):
    show(spatial, path=tmp_path / "heads.svg")
    assert (tmp_path / "heads.svg").is_file()
