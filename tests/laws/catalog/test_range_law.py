"""Large numbers and half precision stay finite, and right."""

from __future__ import annotations

import math

import pytest
import torch
from plain import Layer, TorchAttention, TorchEncoderLayer, Words, alibi, blocks, causal, naive, rotary, scores, slow
from torch.nn import functional

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["range"], fast=True, **options).verdicts[0]


def linear(query, key, value, mask=None):
    """Attention without scores: sums of features."""
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    if mask is not None:
        key = key * mask.any(-2)[..., None]
    return query @ (key.transpose(-1, -2) @ value) / (query @ key.sum(-2)[..., None])


def bare_exponentials(query, key, value, mask=None):
    powers = scores(query, key).exp()
    powers = powers if mask is None else powers * mask
    return powers / powers.sum(-1, keepdim=True) @ value


def padded_exponentials(query, key, value, mask=None):
    powers = scores(query, key).clamp(max=50).exp()
    powers = powers if mask is None else powers * mask
    return powers / (powers.sum(-1, keepdim=True) + 1e-9) @ value


def one_maximum_for_all(query, key, value, mask=None):
    found = scores(query, key)
    powers = (found - found.amax()).exp()
    powers = powers if mask is None else powers * mask
    return powers / powers.sum(-1, keepdim=True) @ value


def small_penalty(query, key, value, mask=None):
    found = scores(query, key)
    found = found if mask is None else found + (~mask) * -1e4
    return found.softmax(-1) @ value


def causal_by_small_penalty(query, key, value):
    later = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).triu(1)
    return (scores(query, key) + later * -1e4).softmax(-1) @ value


def masked_after_the_softmax(query, key, value, mask=None):
    weights = scores(query, key).softmax(-1)
    weights = weights if mask is None else weights * mask
    return weights / weights.sum(-1, keepdim=True) @ value


def half_inside(scale_first):
    """Products in float16, which end at 65504, before or after the scale."""

    def operator(query, key, value, mask=None):
        scale = 1 / math.sqrt(query.shape[-1])
        if scale_first:
            found = ((query * scale).half() @ key.half().transpose(-1, -2)).float()
        else:
            found = (query.half() @ key.half().transpose(-1, -2)).float() * scale
        found = found if mask is None else found.masked_fill(~mask, -torch.inf)
        return found.softmax(-1).to(value.dtype) @ value

    return operator


def filled(fill):
    """Hidden scores are set to a number, which visible ones may lie below."""

    def operator(query, key, value, mask=None):
        found = scores(query, key)
        fill_with = torch.finfo(found.dtype).min if fill is None else fill
        return (found if mask is None else found.masked_fill(~mask, fill_with)).softmax(-1) @ value

    return operator


def bare_if(when):
    """Exponentials without their maximum, on one path only."""

    def operator(query, key, value, mask=None):
        found = scores(query, key)
        found = found if mask is None else found.masked_fill(~mask, -torch.inf)
        powers = found.exp() if when(query, key, mask) else (found - found.amax(-1, keepdim=True)).exp()
        return powers / powers.sum(-1, keepdim=True) @ value

    return operator


def with_a_sink(query, key, value, mask=None):
    """A score of zero that has no value: weights sum to less than one, and to nothing if all others are negative."""
    found = scores(query, key)
    found = found if mask is None else found.masked_fill(~mask, -torch.inf)
    return torch.cat([found, torch.zeros_like(found[..., :1])], -1).softmax(-1)[..., :-1] @ value


def nothing_in_half(query, key, value, mask=None):
    return naive(query, key, value, mask) / (query.dtype != torch.float16)


@pytest.mark.parametrize(
    "target",
    [
        *(naive, half_inside(True), filled(-1e9)),
        *slow(linear, filled(None), with_a_sink, causal, alibi, rotary, blocks),
    ],
)
def test_right_operators_keep_their_range(target):
    assert verdict(target).outcome == "holds"


@pytest.mark.parametrize("target", [TorchEncoderLayer(), *slow(Layer(causal), TorchAttention())])
def test_right_layers_keep_their_range(target):
    assert verdict(target, "layer").outcome == "holds"


def test_a_right_model_keeps_its_range_in_half_precision():
    assert verdict(Words(), "model").outcome == "holds"


@pytest.mark.parametrize(
    "target",
    [
        bare_exponentials,
        padded_exponentials,
        one_maximum_for_all,
        masked_after_the_softmax,
        half_inside(False),
        filled(-1e4),
        bare_if(lambda query, key, mask: key.shape[-2] > 32),
        *slow(small_penalty, causal_by_small_penalty, nothing_in_half, filled(-1e5)),
        *slow(
            bare_if(lambda query, key, mask: query.shape[-2] == 1), bare_if(lambda query, key, mask: mask is not None)
        ),
    ],
)
def test_numbers_that_leave_the_range_are_caught(target):
    assert verdict(target).outcome == "broken"


@pytest.mark.parametrize("target", [filled(-1e9), filled(None)])
def test_layers_that_fill_with_a_number_below_all_scores_hold(target):
    assert verdict(Layer(target), "layer").outcome == "holds"


@pytest.mark.parametrize(
    "target", [bare_exponentials, small_penalty, filled(-1e4), bare_if(lambda query, key, mask: mask is not None)]
)
def test_layers_that_leave_the_range_are_caught(target):
    assert verdict(Layer(target), "layer").outcome == "broken"
