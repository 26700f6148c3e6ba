"""L5: hidden keys and values may be NaN, infinite or huge."""

from __future__ import annotations

import pytest
import torch
from plain import Layer, Words, full, naive, ours, ours_causal, robust, scores, slow

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["masked-values"], fast=True, **options).verdicts[0]


def large_negative(query, key, value, mask=None):
    """A score of 1e30 is above any number that is added to it."""
    found = scores(query, key)
    return (found if mask is None else found - 1e9 * ~mask).softmax(-1) @ value


def forgets_the_keys(query, key, value, mask=None):
    """Values are cleaned; a key that is no number is added to -inf."""
    if mask is None:
        return full(query, key, value)
    gone = ~mask.any(-2).any(1, keepdim=True)[..., None]
    bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return (scores(query, key) + bias).softmax(-1) @ value.masked_fill(gone, 0.0)


def forgets_the_values(query, key, value, mask=None):
    return naive(query, key, value, mask)


def only_if_hidden_from_all(query, key, value, mask=None):
    """Right for keys that are hidden from all, wrong for those hidden from some."""
    if mask is not None:
        gone = ~mask.any(-2).any(1, keepdim=True)[..., None]
        key, value = key.masked_fill(gone, 0.0), value.masked_fill(gone, 0.0)
    return naive(query, key, value, mask)


def past_only(query, key, value):
    """Causal, with no mask to give; the future is multiplied by zero."""
    triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(key.shape[-2] - query.shape[-2])
    return naive(query, key, value, triangle)


def careless_beyond(keys, queries=0):
    """Another path for many keys, or for one query."""

    def operator(query, key, value, mask=None):
        careless = key.shape[-2] > keys and (not queries or query.shape[-2] == queries)
        return (naive if careless else robust)(query, key, value, mask)

    return operator


@pytest.mark.parametrize("target", [robust, *slow(ours, ours_causal)])
def test_operators_that_never_touch_what_is_hidden_hold(target):
    assert verdict(target).outcome == "holds"


def test_a_layer_that_never_touches_what_is_hidden_holds():
    assert verdict(Layer(robust), "layer").outcome == "holds"


@pytest.mark.parametrize(
    "target", [large_negative, forgets_the_keys, forgets_the_values, only_if_hidden_from_all, past_only]
)
def test_operators_that_touch_it_are_found(target):
    assert verdict(target).outcome == "broken"


@pytest.mark.parametrize(
    "target", [careless_beyond(32), careless_beyond(64), careless_beyond(128), careless_beyond(32, 1)]
)
def test_operators_that_touch_it_in_long_sequences_are_found(target):
    found = verdict(target)
    assert found.outcome == "broken"
    assert found.cases < 30


@pytest.mark.parametrize("target", [large_negative, careless_beyond(32), careless_beyond(128)])
def test_a_layer_that_touches_it_is_found(target):
    assert verdict(Layer(target), "layer").outcome == "broken"


def test_words_are_numbers_always():
    assert verdict(Words(), "model").outcome == "not applicable"
