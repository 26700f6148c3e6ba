"""L10: the rows of a batch do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from plain import (
    Layer,
    TorchAttention,
    TorchEncoderLayer,
    Words,
    alibi,
    blocks,
    causal,
    full,
    naive,
    rotary,
    scores,
    slow,
)
from torch import nn

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["batch-independence"], fast=True, **options).verdicts[0]


def softmax_over_the_batch(query, key, value, mask=None):
    return scores(query, key).softmax(0) @ value


def shifted_by_the_largest(query, key, value, mask=None):
    """Scores are divided by the largest of the batch."""
    found = scores(query, key)
    return (found / found.abs().max()).softmax(-1) @ value


def first_mask(query, key, value, mask=None):
    return full(query, key, value, None if mask is None else mask[:1])


def tokens_for_rows(query, key, value, mask=None):
    """A batch as large as the sequence is taken for the sequence."""
    if query.shape[0] == query.shape[-2] == key.shape[-2]:
        query, key, value = (x.transpose(0, 2) for x in (query, key, value))
        return full(query, key, value).transpose(0, 2)
    return full(query, key, value, mask)


class AcrossTheBatch(nn.Module):
    """Rows first, given to a layer that expects tokens first."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 3)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class SharedBuffer(nn.Module):
    """Keys lie in a buffer that every caller uses."""

    def __init__(self):
        super().__init__()
        self.inner = Layer()
        self.held = None

    def forward(self, x, mask=None):
        query, key, value = self.inner.split(x)
        self.held = (key, value)
        for _ in range(20):
            query = query * 1.0
        key, value = self.held
        output = full(query, key, value, None if mask is None else mask[:, None, None, :])
        return self.inner.outward(output.transpose(1, 2).flatten(2))


class RemembersTheLastBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Layer(), None

    def forward(self, x):
        mean = x.mean((0, 1)) if self.last is None else self.last
        self.last = x.mean((0, 1)).detach()
        return self.inner(x - 0.1 * mean)


class PlacesOfTheFirstRow(Words):
    def forward(self, ids, mask=None):
        if mask is None:
            return super().forward(ids)
        x = self.words(ids) + self.places((mask[:1].long().cumsum(1) - 1).clamp(min=0))
        for layer in self.layers:
            x = x + layer(self.norm(x), mask)
        return self.head(x)


class Pictures(nn.Module):
    def __init__(self, across):
        super().__init__()
        self.patches, self.layer, self.across = nn.Conv2d(3, 12, 4, 4), Layer(), across
        self.img_size = 16

    def forward(self, x):
        x = self.layer(self.patches(x).flatten(2).transpose(1, 2)).mean(1)
        return x - x.mean(0) if self.across else x


@pytest.mark.parametrize("target", [causal, *slow(naive, full, alibi, rotary, blocks)])
def test_right_operators_hold(target):
    assert verdict(target).outcome == "holds"


@pytest.mark.parametrize(
    "target", [TorchAttention(), *slow(Layer(), TorchEncoderLayer())], ids=["torch", "full", "encoder"]
)
def test_right_layers_hold(target):
    assert verdict(target, "layer").outcome == "holds"


@pytest.mark.parametrize(
    "target", [Pictures(False), *slow(Words(), Words(False, pooled=True))], ids=["pictures", "words", "pooled"]
)
def test_right_models_hold(target):
    assert verdict(target, "model").outcome == "holds"


@pytest.mark.parametrize("target", [softmax_over_the_batch, shifted_by_the_largest, first_mask, tokens_for_rows])
def test_wrong_operators_are_found(target):
    assert verdict(target).outcome == "broken"


@pytest.mark.parametrize("target", [AcrossTheBatch(), RemembersTheLastBatch()], ids=["across", "remembers"])
def test_wrong_layers_are_found(target):
    assert not verdict(target, "layer").ok


class AcrossLongBatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def forward(self, x, mask=None):
        return self.inner(x + 0.1 * x.mean(0) if x.shape[1] > 40 else x, mask)


class Dropping(nn.Module):
    def __init__(self, across):
        super().__init__()
        self.inner, self.across = Layer(), across

    def forward(self, x, mask=None):
        return self.inner(torch.dropout(x, 0.3, True) + (x.mean(0) if self.across else 0), mask)


@pytest.mark.slow
def test_a_buffer_shared_by_callers_is_found():
    for seed in range(3):
        assert verdict(SharedBuffer(), "layer", seed=seed).outcome == "broken"


def test_rows_that_meet_in_long_inputs_alone_are_found():
    assert verdict(AcrossLongBatches(), "layer").outcome == "broken"


def test_chance_is_no_other_row_and_hides_none():
    assert verdict(Dropping(False), "layer").outcome == "holds"
    assert verdict(Dropping(True), "layer").outcome == "broken"


@pytest.mark.parametrize("target", [PlacesOfTheFirstRow(), Pictures(True)], ids=["places", "pictures"])
def test_wrong_models_are_found(target):
    assert verdict(target, "model").outcome == "broken"
