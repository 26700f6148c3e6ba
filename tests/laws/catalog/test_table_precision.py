"""Position tables are computed before they are rounded."""

from __future__ import annotations

import pytest
import torch
from plain import Layer, TorchAttention, Words, alibi, causal, naive, rotary, scores, slow

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["table-precision"], fast=True, **options).verdicts[0]


def turning(precision=None, frequencies=None):
    """Rotary attention whose angles, or frequencies, are in some precision; None is that of the input."""

    def turned(x):
        dim, places = x.shape[-1], torch.arange(x.shape[-2])
        speed = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        speed = speed.to(x.dtype if frequencies == "own" else torch.float32)
        own = x.dtype if precision == "own" else precision
        angle = places.to(own)[:, None] * speed.to(own)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def operator(query, key, value, mask=None):
        return causal(turned(query), turned(key), value, mask)

    return operator


def bias_in_half(query, key, value, mask=None):
    slopes = (2.0 ** -torch.arange(1, query.shape[1] + 1)).to(query.dtype)
    found = scores(query, key) + slopes[:, None, None] * torch.arange(key.shape[-2]).to(query.dtype)
    later = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).triu(1 + key.shape[-2] - query.shape[-2])
    return found.masked_fill(later, -torch.inf).softmax(-1) @ value


right = turning(torch.float32)
in_own = turning("own")


@pytest.mark.parametrize("target", [naive, right, *slow(alibi, rotary)])
def test_right_operators_keep_their_tables(target):
    assert verdict(target).outcome == "holds"


@pytest.mark.parametrize("target", [Layer(naive), *slow(TorchAttention(), Layer(right, heads=2))])
def test_right_layers_keep_their_tables(target):
    assert verdict(target, "layer").outcome == "holds"


def test_learned_positions_are_no_table():
    assert verdict(Words(), "model").outcome == "holds"


@pytest.mark.parametrize(
    "target", [in_own, turning(torch.bfloat16), turning(torch.float32, frequencies="own"), bias_in_half]
)
def test_tables_computed_in_half_precision_are_caught(target):
    assert verdict(target).outcome == "broken"


@pytest.mark.slow
def test_a_layer_with_angles_in_half_precision_is_caught():
    assert verdict(Layer(in_own, heads=2), "layer").outcome == "broken"
