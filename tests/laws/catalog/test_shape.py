"""L23: output shapes depend on input shapes only."""

from __future__ import annotations

import pytest
import torch
from plain import Layer, TorchAttention, TorchEncoder, TorchEncoderLayer, Words, causal, full, naive, rotary, slow
from torch import nn

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["shape"], fast=True, **options).verdicts[0]


def squeezed(query, key, value, mask=None):
    return full(query, key, value, mask).squeeze(0)


def one_row_for_each_key(query, key, value, mask=None):
    output = full(query, key, value, mask)
    return output[:, :, -key.shape[-2] :]


def refuses_an_empty_row(query, key, value, mask=None):
    if mask is not None and not mask.any(-1).all():
        raise ValueError("a query sees nothing")
    return full(query, key, value, mask)


def single_when_masked(query, key, value, mask=None):
    output = full(query, key, value, mask)
    return output if mask is None else output.to(torch.bfloat16)


class Trims(nn.Module):
    """Columns that every row hides are dropped."""

    def __init__(self, only_quietly=False):
        super().__init__()
        self.inner, self.only_quietly = Layer(), only_quietly

    def forward(self, x, mask=None):
        if mask is not None and not (self.only_quietly and torch.is_grad_enabled()):
            longest = int(mask.sum(1).max())
            x, mask = x[:, :longest], mask[:, :longest]
        return self.inner(x, mask)


class OnlyRealTokens(nn.Module):
    """Raises unless every row is padded on the right."""

    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def forward(self, x, mask=None):
        if mask is not None and (mask.int().diff(dim=1) > 0).any():
            raise RuntimeError("padding belongs on the right")
        return self.inner(x, mask)


@pytest.mark.parametrize("target", [causal, *slow(naive, full, rotary)])
def test_right_operators_hold(target):
    assert verdict(target).outcome == "holds"


@pytest.mark.parametrize(
    "target",
    [TorchEncoderLayer(), *slow(Layer(), TorchAttention(), TorchEncoder(nested=False), TorchEncoder())],
    ids=["encoder layer", "full", "torch", "encoder", "nested"],
)
def test_right_layers_hold(target):
    assert verdict(target, "layer").outcome == "holds"


@pytest.mark.parametrize("target", [Words(False, pooled=True), *slow(Words())], ids=["pooled", "words"])
def test_right_models_hold(target):
    assert verdict(target, "model").outcome == "holds"


@pytest.mark.parametrize("target", [squeezed, one_row_for_each_key, refuses_an_empty_row, single_when_masked])
def test_wrong_operators_are_found(target):
    assert verdict(target).outcome == "broken"


@pytest.mark.parametrize(
    "target",
    [Trims(), Trims(only_quietly=True), OnlyRealTokens()],
    ids=["trims", "trims quietly", "refuses"],
)
def test_wrong_layers_are_found(target):
    assert verdict(target, "layer").outcome == "broken"
