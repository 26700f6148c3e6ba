"""L6: a query that sees no key has a documented output."""

from __future__ import annotations

import pytest
import torch
from plain import Layer, TorchEncoder, Words, causal, full, naive, ours_causal, robust, scores, slow, total, window

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["empty-rows"], fast=True, **options).verdicts[0]


def mean_of_all(query, key, value, mask=None):
    found = scores(query, key)
    if mask is not None:
        found = found.masked_fill(~mask, torch.finfo(found.dtype).min)
    return found.softmax(-1) @ value


def gradient_of_nan(query, key, value, mask=None):
    """The output is repaired, its gradient is not."""
    if mask is None:
        return full(query, key, value)
    bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return (scores(query, key) + bias).softmax(-1).nan_to_num(0.0) @ value


def only_whole_rows(query, key, value, mask=None):
    """Zero for a row of the batch that hides all, not for one query."""
    if mask is None or not mask.any():
        return full(query, key, value, mask)
    output = naive(query, key, value, mask)
    return output.masked_fill(~mask.flatten(1).any(1)[:, None, None, None], 0.0)


def only_without_weights(query, key, value, mask=None, need_weights=False):
    return naive(query, key, value, mask) if need_weights else full(query, key, value, mask)


def running(query, key, value, mask=None):
    """A running softmax over blocks of 64 keys, which starts from -inf minus -inf."""
    if mask is None:
        return full(query, key, value)
    found = scores(query, key).masked_fill(~mask, -torch.inf)
    highest = torch.full_like(found[..., :1], -torch.inf)
    weight, output = torch.zeros_like(highest), torch.zeros_like(query)
    for start in range(0, key.shape[-2], 64):
        block = found[..., start : start + 64]
        new = torch.maximum(highest, block.amax(-1, keepdim=True))
        kept, fresh = (highest - new).exp(), (block - new).exp()
        weight = weight * kept + fresh.sum(-1, keepdim=True)
        output = output * kept + fresh @ value[..., start : start + 64, :]
        highest = new
    visible = mask.expand(found.shape).any(-1, keepdim=True)
    return (output / weight).masked_fill(~visible, 0.0)


def first_key_if_none(query, key, value, mask=None):
    """Attends to the first key when there is no other."""
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], key.shape[-2]).clone()
        mask[..., 0] |= ~mask.any(-1)
    return full(query, key, value, mask)


def causal_to_nan(query, key, value):
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(key.shape[-2] - query.shape[-2])
    return naive(query, key, value, visible)


def causal_to_zero(query, key, value):
    found = scores(query, key)
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(key.shape[-2] - query.shape[-2])
    return total(found, visible.expand(found.shape), value)


@pytest.mark.parametrize("target", [causal_to_zero, *slow(causal, full, window, robust, ours_causal)])
def test_operators_that_return_zeros_hold(target):
    assert verdict(target).outcome == "holds"


@pytest.mark.parametrize(
    "target",
    [
        naive,
        mean_of_all,
        gradient_of_nan,
        only_whole_rows,
        only_without_weights,
        running,
        first_key_if_none,
        causal_to_nan,
    ],
)
def test_operators_that_return_anything_else_are_found(target):
    assert verdict(target).outcome == "broken"


@pytest.mark.parametrize(("target", "empty"), [(mean_of_all, "mean"), (naive, "nan"), (first_key_if_none, "finite")])
def test_another_output_may_be_declared(target, empty):
    assert verdict(target, empty=empty).outcome == "holds"
    if empty != "finite":
        assert verdict(full, empty=empty).outcome == "broken"


@pytest.mark.parametrize("target", [Layer(), Layer(causal), Layer(mean_of_all)], ids=["full", "causal", "mean"])
def test_layers_that_stay_finite_hold(target):
    assert verdict(target, "layer").outcome == "holds"


@pytest.mark.parametrize(
    "target", [Layer(naive), Layer(gradient_of_nan), TorchEncoder(False)], ids=["naive", "gradient", "torch"]
)
def test_layers_that_do_not_are_found(target):
    assert verdict(target, "layer").outcome == "broken"


def test_models_are_held_to_it_too():
    assert verdict(Words(), "model").outcome == "holds"


def test_nothing_is_hidden_without_a_mask():
    assert verdict(lambda query, key, value: full(query, key, value)).outcome == "not applicable"
