"""What cannot be drawn is refused with a reason, and so are options without effect."""

import math

import numpy
import pytest
import torch
from agreement import refused

from regard import Alibi, Causal
from regard.errors import InputError, RegardError
from regard.layers import head_profiles
from regard.layers.profiles import head_profile
from regard.models import GPT, GPTConfig, ViT, ViTConfig
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.visualize import (
    ExplorerModel,
    animate_heads,
    attention_maps,
    draw_head_paths,
    draw_heads,
    draw_kernels,
    make_explorer,
    make_player,
    show,
)


@pytest.fixture(scope="module")
def spatial():
    torch.manual_seed(0)
    return SpatialTransformer(SpatialConfig(image=(5, 7), channels=1, patch=1, dim=4, layers=2, heads=3, hidden_dim=4))


@pytest.fixture(scope="module")
def vit():
    return ViT(ViTConfig(image=(8, 12), patch=4, channels=1, classes=5, dim=8, layers=2, heads=2))


@pytest.mark.parametrize("query", [5, -1, 1.5, "x", (1,), (1, 2, 3), (1.5, 2), ("1", "2")])
def test_a_query_outside_the_image_is_refused(spatial, vit, query):
    for model, image in ((spatial, torch.rand(1, 5, 7)), (vit, torch.rand(1, 8, 12))):
        with refused(InputError, "a row and a column", f"query={query!r}"):
            show(model, image, query=query)


def test_numbers_of_numpy_are_numbers(spatial):
    one, two = numpy.int64(1), numpy.int64(2)
    picture = show(spatial, torch.rand(1, 5, 7), query=(one, two), layer=one, head=[two])
    assert picture.data["token"] == 1 * 7 + 2
    assert list(picture.data["layers"]) == ["blocks.1.attention"]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_an_image_with_a_pixel_that_is_no_number_is_refused(spatial, vit, wrong):
    for model, image in ((spatial, torch.rand(1, 5, 7)), (vit, torch.rand(1, 8, 12))):
        image[0, 2, 3] = wrong
        with refused(InputError, "not finite", "1 of"):
            show(model, image)


def test_what_is_no_image_at_all_is_refused(spatial):
    for wrong in ("seven.png", (torch.rand(1, 5, 7),), [[1, 2], [3]]):
        with refused(InputError, "a tensor, an array or a dict of tensors", type(wrong).__name__):
            show(spatial, wrong)


def test_of_several_images_none_is_chosen_in_silence(spatial, vit):
    for model, images in ((spatial, torch.rand(2, 1, 5, 7)), (vit, torch.rand(2, 1, 8, 12))):
        with refused(InputError, "at a time"):
            show(model, images)


@pytest.mark.parametrize("wrong", [[], "a", [0.5]])
def test_layers_and_heads_that_are_no_numbers_are_refused(spatial, wrong):
    for name in ("layer", "head"):
        with refused(InputError, "have numbers"):
            show(spatial, torch.rand(1, 5, 7), **{name: wrong})


def test_an_option_without_effect_is_refused(spatial):
    for target in (spatial, [head_profiles(spatial)] * 2, head_profiles(spatial)):
        with refused(InputError, "no head to select"):
            show(target, head=1)
        with refused(InputError, "no query to select"):
            show(target, query=(1, 2))
    for query in (5, -1, 0.5):
        with refused(InputError, "no such token", "5 tokens"):
            show(Causal(), 5, query=query)


def test_heads_without_a_centre_are_refused(spatial):
    broken = SpatialTransformer(spatial.config)
    with torch.no_grad():
        broken.blocks[1].attention.position.centre[0] = math.nan
    for draw in (show, lambda model: animate_heads([head_profiles(model)])):
        with refused(InputError, "have no position", "blocks.1.attention"):
            draw(broken)


def test_labels_that_do_not_fit_the_epochs_are_refused(spatial):
    with refused(InputError, "1 labels", "3 epochs"):
        animate_heads([head_profiles(spatial)] * 3, ["first"])


# Anything else


JUNK = [None, 3, 2.5, True, "x", b"x", [], ["a"], object(), lambda: 0, {"a": 1}, [{}], math.nan, torch.tensor(1.0),
        torch.zeros(1, 0).long(), torch.rand(1, 2, 3), torch.tensor([[99]]), torch.tensor([[-1]]),
        torch.ones(1, 17).long(), torch.tensor([1j]), torch.nn.Linear(2, 2)]  # fmt: skip


def calls(spatial, vit):
    gpt = GPT(GPTConfig(vocab_size=23, context_length=16, dim=8, layers=1, heads=1))
    torch_layer = torch.nn.MultiheadAttention(6, 2, batch_first=True)
    image, ids = torch.rand(1, 1, 5, 7), torch.ones(1, 3).long()
    yield from [attention_maps, head_profile, head_profiles, draw_heads, draw_head_paths, animate_heads, draw_kernels]
    yield lambda junk: make_player(junk, ["a"], "")
    yield lambda junk: draw_kernels({"a": junk})
    yield lambda junk: make_explorer([junk], image, ["a"], "")
    yield lambda junk: make_explorer([ExplorerModel("a", junk, image, ["?"])], image, ["a"], "")
    yield lambda junk: make_explorer([ExplorerModel("a", spatial, image, ["?"])], junk, ["a"], "")
    for target in (gpt, vit, torch_layer, Causal(), Alibi(2)):
        yield lambda junk, target=target: show(junk, target)
        yield lambda junk, target=target: show(target, junk)
    for word in ("query", "layer", "head", "words"):
        yield lambda junk, word=word: show(gpt, ids, **{word: junk})
        yield lambda junk, word=word: show(spatial, image, **{word: junk})
        yield lambda junk, word=word: show(Causal(), 5, **{word: junk})
    yield lambda junk: show(Causal(), 5, path=junk)


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: f"{type(junk).__name__}")
def test_whatever_is_given_is_drawn_or_refused_in_four_parts(spatial, vit, junk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusals = 0
    for call in calls(spatial, vit):
        try:
            call(junk)
        except RegardError as refusal:
            text = str(refusal)
            assert "\n  asked " in text or "\n  found " in text, text
            assert "\n  because " in text, text
            assert "\n  instead " in text, text
            refusals += 1
    assert refusals > 10
