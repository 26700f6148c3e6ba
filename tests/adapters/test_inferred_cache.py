"""How a third-party module takes a cache is inferred by trying."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import RIGHT, WRONG, Made, MadeTrimmed, Returned

from regard.adapters import adapt
from regard.adapters.rng import Rng

STYLES = {
    "returned": ("returned", 1),
    "window": ("returned", 1),
    "filled": ("dict", None),
    "made": ("made", None),
    "trimmed": ("made", None),
    "inside": ("inside", None),
    "switched": ("inside", None),
    "model": ("returned", "past_key_values"),
    "running": ("returned", 1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_style_of_a_cache_is_recognised(name):
    caching = adapt(*RIGHT[name]).caching
    assert (caching.style, caching.place) == STYLES[name]


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_cache_is_a_cache(name):
    assert adapt(*WRONG[name]).caching is not None


def test_a_target_that_insists_on_its_cache_and_its_place_is_called_all_the_same():
    class Insisting(Returned):
        def forward(self, x, start_pos, cache):
            output, cache = super().forward(x, None, cache)
            assert start_pos + x.shape[1] == cache[2]
            return output, cache

    caching = adapt(Insisting(), "layer").caching
    assert (caching.style, caching.offset) == ("returned", "start_pos")


def test_a_bare_tree_is_cut_along_its_tokens_and_taken_by_its_rows():
    class Turned(Returned):
        """Keeps tokens on the first axis and rows on the second."""

        def forward(self, x, cache=None):
            past = None if cache is None else (*(t.permute(1, 2, 0, 3) for t in cache["kv"]), cache["length"])
            output, (key, value, length) = super().forward(x, None, past)
            return output, {"kv": [key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)], "length": length}

    subject = adapt(Turned(), "layer")
    caching = subject.caching
    with torch.no_grad():
        _, state = caching.step(caching.start(3, 7), subject.draw(3, 5, Rng(0)))
        assert state.held["kv"][0].shape[:2] == (5, 3)
        cut = caching.crop(copy.deepcopy(state), 2)
        assert (cut.held["kv"][1].shape[0], cut.held["length"], cut.tokens) == (2, 2, 2)
        taken = caching.reorder(state, torch.tensor([2, 0]))
    assert taken.held["kv"][0].shape[:2] == (5, 2)
    assert torch.equal(taken.held["kv"][0][:, 0], state.held["kv"][0][:, 2])


def test_a_state_that_has_dropped_tokens_is_not_cropped():
    subject = adapt(Returned(window=5), "layer")
    with torch.no_grad():
        _, state = subject.caching.step(subject.caching.start(1, 11), subject.draw(1, 11, Rng(0)))
        assert subject.caching.crop(state, 7) is None


@pytest.mark.parametrize("target", [Made(), MadeTrimmed()], ids=["tokens that stay", "tokens that go"])
def test_crop_methods_are_called_with_the_count_that_they_expect(target):
    subject = adapt(target, "layer")
    with torch.no_grad():
        _, state = subject.caching.step(subject.caching.start(1, 11), subject.draw(1, 7, Rng(0)))
        assert subject.caching.crop(state, 2).held.length == 2
