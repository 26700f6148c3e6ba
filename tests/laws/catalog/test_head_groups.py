"""Query head h uses key head h // group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weighing import Layer, outcome_of, plain, scores_of

outcome = outcome_of("head-groups")


def spread(repeat, repeat_values=None):
    def core(q, k, v, mask=None):
        group = q.shape[1] // k.shape[1]
        return plain(q, repeat(k, group), (repeat_values or repeat)(v, group), mask)

    return core


def repeated(x: Tensor, group: int) -> Tensor:
    return x.repeat_interleave(group, 1)


def tiled(x: Tensor, group: int) -> Tensor:
    return x.repeat(1, group, 1, 1)


def mixing(q, k, v, mask=None):
    group = q.shape[1] // k.shape[1]
    return scores_of(q, repeated(k, group), mask).softmax(1).nan_to_num(0.0) @ repeated(v, group)


@pytest.mark.parametrize("seed", range(2))
def test_repeated_keys_hold(seed: int) -> None:
    assert outcome(spread(repeated), seed=seed) == "holds"
    assert outcome(Layer(spread(repeated), 4, 2), "layer", seed) == "holds"


@pytest.mark.parametrize("values", [tiled, repeated])
def test_tiled_keys_are_broken(values) -> None:
    assert outcome(spread(tiled, values)) == "broken"
    assert outcome(Layer(spread(tiled, values), 4, 2), "layer") == "broken"


def test_tiled_values_are_broken() -> None:
    assert outcome(spread(repeated, tiled)) == "broken"
    assert outcome(Layer(spread(repeated, tiled), 4, 2), "layer") == "broken"


def test_heads_that_mix_are_broken() -> None:
    assert outcome(mixing) == "broken"


def test_heads_in_another_layout_are_counted_as_the_projection_has_them() -> None:
    class Across(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
            q = q.unflatten(1, (2, 2)).transpose(1, 2)  # the members of groups before the groups
            y = plain(q, k[:, None], v[:, None]).transpose(1, 2).flatten(1, 2)
            return y.transpose(1, 2).flatten(2)

    assert outcome(Across(plain, 4, 2), "layer") == "holds"


def test_equal_numbers_of_heads_have_no_groups() -> None:
    assert outcome(Layer(plain), "layer") == "not applicable"


def test_masks_of_heads_that_are_regrouped_by_tiling_are_broken() -> None:
    def regrouped(q, k, v, mask=None):
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        if mask is not None:
            mask = mask.expand(batch, heads, queries, keys).unflatten(1, (-1, k.shape[1])).transpose(1, 2).flatten(1, 2)
        return spread(repeated)(q, k, v, mask)

    assert outcome(regrouped) == "broken"


@pytest.mark.parametrize("late", [lambda q, k: k.shape[-2] > 32, lambda q, k: q.shape[-2] == 1])
def test_keys_that_are_tiled_at_some_lengths_are_broken(late) -> None:
    def sometimes(q, k, v, mask=None):
        return spread(tiled if late(q, k) else repeated)(q, k, v, mask)

    assert outcome(sometimes) == "broken"


def test_rows_that_see_nothing_are_no_fault_of_groups() -> None:
    def windowed(q, k, v, mask=None):
        apart = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - torch.arange(k.shape[-2])
        near = (apart >= 0) & (apart < 2)
        group = q.shape[1] // k.shape[1]
        weights = scores_of(q, repeated(k, group), near if mask is None else mask & near).softmax(-1)
        return weights @ repeated(v, group)  # NaN where nothing is seen

    assert outcome(windowed) == "holds"
