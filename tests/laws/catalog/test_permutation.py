"""Without positions, the order of tokens does not matter."""

from __future__ import annotations

import pytest
import torch
from plain import (
    Layer,
    TorchAttention,
    TorchEncoderLayer,
    both_ways_alibi,
    causal,
    full,
    naive,
    ours,
    robust,
    slow,
    window,
)
from torch import nn

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["permutation"], fast=True, **options).verdicts[0]


def without_the_tail(query, key, value, mask=None):
    """Keys beyond whole blocks of four are left out."""
    whole = max(key.shape[-2] // 4 * 4, min(key.shape[-2], 4))
    mask = mask if mask is None else mask[..., :whole]
    return full(query, key[:, :, :whole], value[:, :, :whole], mask)


def without_a_tail_behind(block):
    """The last, partial block of keys is left out once there is a whole one."""

    def operator(query, key, value, mask=None):
        whole = key.shape[-2] // block * block or key.shape[-2]
        mask = mask if mask is None else mask[..., :whole]
        return full(query, key[:, :, :whole], value[:, :, :whole], mask)

    return operator


def values_turned(query, key, value, mask=None):
    return full(query, key, value.flip(-2), mask)


def mask_turned(query, key, value, mask=None):
    return full(query, key, value, mask if mask is None or mask.shape[-2] == 1 else mask.roll(1, -2))


class ViewWithoutTranspose(nn.Module):
    """Heads and tokens are mixed."""

    def __init__(self, heads=3):
        super().__init__()
        self.heads, self.inner = heads, nn.Linear(12, 36)

    def forward(self, x):
        query, key, value = (
            part.reshape(len(x), self.heads, -1, 12 // self.heads) for part in self.inner(x).chunk(3, -1)
        )
        return naive(query, key, value).reshape(x.shape)


class Pooled(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = Layer(), how

    def forward(self, x):
        return self.how(self.inner(x))


@pytest.mark.parametrize("target", [naive, *slow(full, robust, ours)])
def test_operators_without_positions_hold(target):
    assert verdict(target).outcome == "holds"


@pytest.mark.parametrize("target", [Layer(), TorchAttention(), TorchEncoderLayer()], ids=["full", "torch", "encoder"])
def test_layers_without_positions_hold(target):
    assert verdict(target, "layer").outcome == "holds"


@pytest.mark.parametrize("target", [causal, window, both_ways_alibi, without_the_tail, values_turned, mask_turned])
def test_operators_with_an_order_are_found(target):
    assert verdict(target).outcome == "broken"


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_a_tail_behind_a_whole_block_is_missed(block):
    assert verdict(without_a_tail_behind(block)).outcome == "broken"


@pytest.mark.parametrize("block", [8, 16, 32, 64])
def test_a_layer_without_its_tail_is_found(block):
    assert verdict(Layer(without_a_tail_behind(block)), "layer").outcome == "broken"


@pytest.mark.parametrize(
    "target",
    [ViewWithoutTranspose(), Layer(causal), TorchAttention(True), Layer(values_turned)],
    ids=["view", "causal", "torch causal", "turned"],
)
def test_layers_with_an_order_are_found(target):
    assert verdict(target, "layer").outcome == "broken"


def test_one_output_for_all_tokens_stays_the_same():
    assert verdict(Pooled(lambda x: x.mean(1)), "layer").outcome == "holds"
    assert verdict(Pooled(lambda x: x[:, 0]), "layer").outcome == "broken"
    assert verdict(Pooled(lambda x: torch.cummax(x, 1).values[:, -1]), "layer").outcome == "holds"
