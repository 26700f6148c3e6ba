"""The pairs that interact are those declared, at every length and under every mask."""

from __future__ import annotations

import pytest
import torch
from plain import slow
from weighing import Layer, causal, outcome_of, plain, scores_of

from regard import Causal, Window
from regard.laws import probe

outcome = outcome_of("support")


def window(width: int):
    def windowed(q, k, v, mask=None):
        ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        offset = k.shape[-2] - q.shape[-2]
        band = ones.tril(offset) & ~ones.tril(offset - width)
        return plain(q, k, v, band if mask is None else mask & band)

    return windowed


def ignoring(q, k, v, mask=None):
    return plain(q, k, v)


def inverted(q, k, v, mask=None):
    return plain(q, k, v, None if mask is None else ~mask)


def soft(q, k, v, mask=None):
    scores = scores_of(q, k, None)
    return (scores if mask is None else scores.masked_fill(~mask, -9.0)).softmax(-1) @ v


def without_itself(q, k, v, mask=None):
    past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2] - 1)
    return plain(q, k, v, past if mask is None else mask & past)


FOUR = Causal() & Window(3, 0)


@pytest.mark.parametrize("kind", ["operator", *slow("layer")])
def test_a_window_of_four_keys_holds_and_any_other_is_broken(kind: str) -> None:
    widths = (3, 4, 5, 500)
    targets = {width: window(width) if kind == "operator" else Layer(window(width)) for width in widths}
    found = {width: outcome(target, kind, pattern=FOUR) for width, target in targets.items()}
    assert found == {width: "holds" if width == 4 else "broken" for width in widths}


@pytest.mark.parametrize("kind", ["operator", "layer"])
@pytest.mark.parametrize("core", [ignoring, inverted, soft], ids=lambda core: core.__name__)
def test_a_mask_that_hides_nothing_or_the_wrong_is_broken(core, kind: str) -> None:
    assert outcome(core if kind == "operator" else Layer(core), kind) == "broken"


@pytest.mark.parametrize("kind", ["operator", *slow("layer")])
def test_what_declares_nothing_has_to_obey_its_mask(kind: str) -> None:
    for core in (plain, causal, window(4)):
        assert outcome(core if kind == "operator" else Layer(core), kind) == "holds"


def test_a_query_that_does_not_see_itself_is_not_causal_attention() -> None:
    assert outcome(without_itself, claims=["causality"]) == "broken"
    assert outcome(causal, claims=["causality"]) == "holds"
    assert outcome(window(4), claims=["causality"]) == "holds"


@pytest.mark.slow
def test_nor_is_a_layer_whose_queries_do_not_see_themselves() -> None:
    assert outcome(Layer(without_itself), "layer", pattern=Causal()) == "broken"


def test_probing_measures_the_window() -> None:
    found = {core: probe(core, kind="operator", laws=["support"]) for core in (plain, causal, window(4))}
    measured = [report.verdicts["support"].measured for report in found.values()]
    assert measured == ["full", "causal", "window: 3 keys back"]


def grouped(regroup: bool):
    def core(q, k, v, mask=None):
        group = q.shape[1] // k.shape[1]
        if mask is not None and regroup:
            mask = mask.expand(*q.shape[:3], k.shape[2]).unflatten(1, (-1, k.shape[1])).transpose(1, 2).flatten(1, 2)
        return plain(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask)

    return core


def test_masks_of_heads_that_are_regrouped_with_their_keys_are_broken() -> None:
    assert outcome(grouped(True), claims=["head-groups"]) == "broken"
    assert outcome(grouped(False), claims=["head-groups"]) == "holds"
    assert outcome(plain, claims=["head-groups"]) == "holds"
