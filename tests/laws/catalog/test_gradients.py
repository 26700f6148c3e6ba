"""L13: the gradient is the derivative."""

from __future__ import annotations

import math

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
    long,
    naive,
    rotary,
    slow,
    window,
)
from torch import nn

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["gradients"], fast=True, **options).verdicts[0]


def by_hand(change=lambda gradients, saved, wanted: gradients, additive=False):
    """Attention with a backward written out, and a change to what it gives."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value, mask):
            ctx.scale, ctx.mask = 1 / math.sqrt(query.shape[-1]), mask
            found = query @ key.transpose(-1, -2) * ctx.scale
            if mask is not None:
                found = found + mask if mask.is_floating_point() else found.masked_fill(~mask, -torch.inf)
            weights = found.softmax(-1)
            ctx.save_for_backward(query, key, value, weights)
            return weights @ value

        @staticmethod
        def backward(ctx, above):
            query, key, value, weights = ctx.saved_tensors
            inner = above @ value.transpose(-1, -2)
            slope = weights * (inner - (inner * weights).sum(-1, keepdim=True))
            bias = slope if additive and ctx.mask is not None and ctx.mask.is_floating_point() else None
            gradients = [slope @ key * ctx.scale, slope.transpose(-1, -2) @ query * ctx.scale]
            gradients.append(weights.transpose(-1, -2) @ above)
            return *change(gradients, (query, key, value, above, ctx.scale), ctx.needs_input_grad), bias

    def operator(query, key, value, mask=None):
        return Attention.apply(query, key, value, mask)

    return operator


def no_scale(gradients, saved, wanted):
    return gradients[0] / saved[4], gradients[1] / saved[4], gradients[2]


def no_tail(gradients, saved, wanted):
    whole = gradients[1].shape[-2] // 64 * 64
    if whole:
        gradients[1][..., whole:, :] = 0
    return gradients


def only_with_queries(gradients, saved, wanted):
    if not wanted[0]:
        raise RuntimeError("the normaliser was not saved")
    return gradients


def never_for_the_mask_alone(gradients, saved, wanted):
    if not any(wanted[:3]):
        raise RuntimeError("the normaliser was not saved")
    return gradients


def wrong_in_single(gradients, saved, wanted):
    factor = 1.0 if gradients[0].dtype == torch.float64 else 1.02
    return [gradient * factor for gradient in gradients]


def values_detached(query, key, value, mask=None):
    return naive(query, key, value.detach(), mask)


def sum_detached(query, key, value, mask=None):
    found = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if mask is not None:
        found = found.masked_fill(~mask, -torch.inf)
    powers = (found - found.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True).detach() @ value


def masked_in_values_only(query, key, value, mask=None):
    if mask is not None:
        value = value * mask.expand(query.shape[0], 1, mask.shape[-2], key.shape[-2])[:, :, 0, :, None]
    return naive(query, key, value)


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def forward(self, x, mask=None):
        return self.inner(x.detach(), mask)


class HalfDetached(Words):
    def forward(self, ids, mask=None):
        output = super().forward(ids, mask)
        return output / 2 + output.detach() / 2


@pytest.mark.parametrize("target", [naive, by_hand(additive=True), *slow(causal, window, alibi, rotary, blocks)])
def test_right_operators_have_right_gradients(target):
    assert verdict(target).outcome == "holds"


@pytest.mark.parametrize("target", [TorchEncoderLayer(), *slow(Layer(causal), TorchAttention())])
def test_right_layers_have_right_gradients(target):
    assert verdict(target, "layer").outcome == "holds"


def test_the_parameters_of_a_model_have_right_gradients():
    assert verdict(Words(), "model").outcome == "holds"


@pytest.mark.parametrize("change", [no_scale, only_with_queries, wrong_in_single, *slow(no_tail)])
def test_a_wrong_backward_is_caught(change):
    assert verdict(by_hand(change)).outcome == "broken"


@pytest.mark.parametrize("target", [values_detached, masked_in_values_only, *slow(sum_detached)])
def test_a_lost_gradient_is_caught(target):
    assert verdict(target).outcome == "broken"


def test_a_mask_that_alone_requires_a_gradient_gets_one():
    found = verdict(by_hand(never_for_the_mask_alone, additive=True))
    assert found.outcome == "broken"
    assert "only the mask" in found.counterexample.effect


def test_a_fault_in_the_last_block_shrinks_to_its_first_key():
    assert verdict(by_hand(no_tail)).counterexample.case["keys"] <= 66


def test_a_layer_that_drops_gradients_is_caught():
    assert verdict(Detached(), "layer", channels=12).outcome == "broken"


@pytest.mark.slow
def test_a_model_that_drops_half_of_its_gradients_is_caught():
    assert verdict(HalfDetached(), "model").outcome == "broken"


class WideReLU(nn.Module):
    """So many kinks that every step crosses some; `factor` is that of the gradient in backward, one if it is right."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down, self.factor = nn.Linear(12, 8192), nn.Linear(8192, 12), factor

    def forward(self, x, mask=None):
        output = self.down(self.up(x).relu())
        return output if self.factor == 1 else self.factor * output - (self.factor - 1) * output.detach()


@pytest.mark.slow
def test_kinks_are_no_faults_and_excuse_none():
    assert verdict(WideReLU(), "layer", channels=12).outcome == "holds"
    assert verdict(WideReLU(1.02), "layer", channels=12).outcome == "broken"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *range(20, 30), *long(*range(1, 20), *range(30, 100))])
def test_a_deep_encoder_with_relu_is_not_accused(seed: int):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    target = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    report = check(target, claims=["gradients"], seed=seed, fast=seed >= 20)
    assert report.verdicts["gradients"].outcome == "holds"


def test_keys_that_long_sequences_detach_are_found_at_the_length_where_it_begins():
    def detached(q, k, v):
        k = k.detach() if k.shape[-2] > 128 else k
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    verdict = check(detached, kind="operator", claims=["gradients"], fast=True).verdicts["gradients"]
    assert verdict.outcome == "broken"
    assert verdict.counterexample.case["keys"] == 129
