"""Cache consistency: caches of many styles obey it, and each fault breaks it."""

from __future__ import annotations

import pytest
import torch
from caches import RIGHT, WRONG
from plain import slow_but
from third_party_attention import causal, naive

from regard.adapters import adapt
from regard.adapters.rng import Rng
from regard.laws import check
from regard.laws.cached_runs import split_into


@pytest.mark.parametrize("name", slow_but(("window", "filled", "inside", "model"), RIGHT))
def test_a_cache_that_is_right_obeys_the_law(name):
    target, kind = RIGHT[name]
    verdict = check(target, kind=kind, claims=["cache"], seed=3, fast=True).verdicts["cache"]
    assert verdict.outcome == "holds"
    assert verdict.refused == 0


@pytest.mark.parametrize("name", WRONG)
def test_a_cache_that_is_wrong_breaks_the_law(name):
    target, kind = WRONG[name]
    verdict = check(target, kind=kind, claims=["cache"], seed=1).verdicts["cache"]
    assert verdict.outcome == "broken"
    assert verdict.counterexample is not None
    assert verdict.counterexample.case["tokens"] <= 7


def test_a_window_is_passed_before_its_fault_shows():
    target, kind = WRONG["window kept short"]
    counterexample = check(target, kind=kind, claims=["cache"]).verdicts["cache"].counterexample
    assert counterexample is not None
    assert counterexample.case["tokens"] == target.window


def test_an_operator_is_decoded_with_by_keeping_its_keys():
    assert check(causal, kind="operator", claims=["cache"], fast=True).ok
    # Attention to later keys cannot be decoded with a cache.
    assert not check(naive, kind="operator", claims=["cache"], fast=True).ok


def test_an_operator_aligned_at_the_start_cannot_decode():
    def upper_left(query, key, value, mask=None):
        triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        return naive(query, key, value, triangle if mask is None else triangle & mask)

    assert check(upper_left, kind="operator", claims=["cache"], fast=True).verdicts["cache"].outcome == "broken"


def test_a_layer_without_a_cache_is_not_accused():
    from third_party_attention import Layer

    assert adapt(Layer(), "layer").caching is None
    assert check(Layer(), kind="layer", claims=["cache"]).verdicts["cache"].outcome == "not applicable"


@pytest.mark.parametrize("split", ["ones", "halves", "first", "last", "twos", "prefill", "threes", "random"])
def test_pieces_make_up_the_whole(split):
    for tokens in (1, 2, 3, 7, 13):
        pieces = split_into(split, tokens, Rng(5, "pieces"))
        assert sum(pieces) == tokens
        assert min(pieces) >= 1
