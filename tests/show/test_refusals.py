"""What cannot be drawn is refused in words, and no choice is left unheard."""

import math

import numpy
import pytest
import torch
from agreement import refused

from regard import Causal
from regard.errors import InputError
from regard.layers import gazes
from regard.models import ViT, ViTConfig
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.show import animate_heads, show


@pytest.fixture(scope="module")
def spatial():
    torch.manual_seed(0)
    return SpatialTransformer(SpatialConfig(image=(5, 7), channels=1, patch=1, dim=4, layers=2, heads=3, hidden=4))


@pytest.fixture(scope="module")
def vit():
    return ViT(ViTConfig(image=(8, 12), patch=4, channels=1, classes=5, dim=8, layers=2, heads=2))


@pytest.mark.parametrize("query", [5, -1, 1.5, "x", (1,), (1, 2, 3), (1.5, 2), ("1", "2")])
def test_who_is_no_pixel_is_refused(spatial, vit, query):
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
        with refused(InputError, "no number", "1 of"):
            show(model, image)


def test_what_is_no_image_at_all_is_refused(spatial):
    for wrong in ("seven.png", (torch.rand(1, 5, 7),), [[1, 2], [3]]):
        with refused(InputError, "nothing that heads could look at", type(wrong).__name__):
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


def test_a_choice_that_would_not_be_heard_is_refused(spatial):
    for target in (spatial, [gazes(spatial)] * 2, gazes(spatial)):
        with refused(InputError, "no head to choose"):
            show(target, head=1)
        with refused(InputError, "no query to choose"):
            show(target, query=(1, 2))
    for query in (5, -1, 0.5):
        with refused(InputError, "no such token", "5 tokens"):
            show(Causal(), 5, query=query)


def test_heads_that_look_nowhere_are_refused(spatial):
    broken = SpatialTransformer(spatial.config)
    with torch.no_grad():
        broken.blocks[1].attention.position.centre[0] = math.nan
    for draw in (show, lambda model: animate_heads([gazes(model)])):
        with refused(InputError, "look nowhere", "blocks.1.attention"):
            draw(broken)


def test_labels_that_do_not_fit_the_epochs_are_refused(spatial):
    with refused(InputError, "1 labels", "3 epochs"):
        animate_heads([gazes(spatial)] * 3, ["first"])
