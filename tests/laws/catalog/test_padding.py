"""L4: padding does not affect the outputs of real tokens."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from plain import (
    Layer,
    TorchAttention,
    TorchEncoder,
    TorchEncoderLayer,
    Words,
    alibi,
    blocks,
    both_ways_alibi,
    both_ways_window,
    causal,
    full,
    naive,
    rotary,
    scores,
    slow,
    window,
)
from torch import nn

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["padding"], fast=True, **options).verdicts[0]


def on_values_only(query, key, value, mask=None):
    if mask is not None:
        value = value * mask.any(-2)[..., None]
    return scores(query, key).softmax(-1) @ value


def after_the_softmax(query, key, value, mask=None):
    weights = scores(query, key).softmax(-1)
    return (weights if mask is None else weights * mask) @ value


def times_the_scores(query, key, value, mask=None):
    found = scores(query, key)
    return (found if mask is None else found * mask).softmax(-1) @ value


def inverted(query, key, value, mask=None):
    return naive(query, key, value, None if mask is None else ~mask | mask.all(-1, keepdim=True))


def too_weak(query, key, value, mask=None):
    found = scores(query, key)
    return (found if mask is None else found - 9.0 * ~mask).softmax(-1) @ value


def first_row_for_all(query, key, value, mask=None):
    return naive(query, key, value, None if mask is None else mask[:1])


def first_head_for_all(query, key, value, mask=None):
    return naive(query, key, value, None if mask is None else mask[:, :1])


def transposed(query, key, value, mask=None):
    if mask is not None and mask.shape[-1] == mask.shape[-2]:
        mask = mask.transpose(-1, -2)
    return full(query, key, value, mask)


def not_beyond_sixty_four(query, key, value, mask=None):
    """The last, partial block is not masked."""
    if mask is not None and key.shape[-2] > 64:
        mask = mask.expand(*mask.shape[:-1], key.shape[-2]).clone()
        mask[..., key.shape[-2] // 64 * 64 :] = True
    return naive(query, key, value, mask)


def unmasked_tail_behind(block):
    """The last, partial block of keys is seen whatever the mask says."""

    def operator(query, key, value, mask=None):
        whole = key.shape[-2] // block * block
        if mask is not None and whole:
            mask = mask.clone()
            mask[..., whole:] = True
        return naive(query, key, value, mask)

    return operator


def unmasked_for_one_query(query, key, value, mask=None):
    return naive(query, key, value, mask if query.shape[-2] > 1 or key.shape[-2] < 32 else None)


def in_the_normaliser(query, key, value, mask=None):
    """Linear attention; hidden keys stay in the sum of weights."""
    query, key = query.exp(), key.exp()
    total = query @ key.sum(-2)[..., None]
    if mask is not None and mask.shape[-2] == 1:
        value = value * mask.transpose(-1, -2)
    return query @ (key.transpose(-1, -2) @ value) / total


def causal_without_a_mask(query, key, value, mask=None):
    return causal(query, key, value) if mask is None else naive(query, key, value, mask)


class LeavesOut(nn.Module):
    """A layer that does something wrong to its mask."""

    def __init__(self, fault):
        super().__init__()
        self.inner, self.fault = Layer(), fault

    def forward(self, x, mask=None):
        return self.inner(x, None if mask is None else self.fault(mask))


class MeanOverAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(31, 12), Layer()

    def forward(self, ids, mask=None):
        x = self.layer(self.words(ids), mask)
        return (x if mask is None else x * mask[..., None]).mean(1)


class ReadsTheMaskAsOrder(nn.Module):
    """Right while hidden tokens lie on the right: only their number is used."""

    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def forward(self, x, mask=None):
        if mask is not None:
            mask = torch.arange(x.shape[1]) < mask.sum(1, keepdim=True)
        return self.inner(x, mask)


@pytest.mark.parametrize(
    "target", [naive, *slow(alibi, full, causal, window, both_ways_window, both_ways_alibi, rotary, blocks)]
)
def test_right_operators_hold(target):
    assert verdict(target).outcome == "holds"


@pytest.mark.parametrize(
    "target",
    [
        Layer(rotary),
        *slow(
            TorchEncoderLayer(),
            Layer(),
            Layer(causal),
            Layer(blocks),
            TorchAttention(),
            TorchAttention(True),
            TorchEncoder(),
        ),
    ],
    ids=["rotary", "encoder layer", "full", "causal", "blocks", "torch", "torch causal", "encoder"],
)
def test_right_layers_hold(target):
    assert verdict(target, "layer").outcome == "holds"


@pytest.mark.parametrize(
    "target", [Words(), *slow(Words(False), Words(False, pooled=True))], ids=["gpt", "bert", "pooled"]
)
def test_right_models_hold(target):
    assert verdict(target, "model").outcome == "holds"


@pytest.mark.parametrize(
    "target",
    [
        on_values_only,
        after_the_softmax,
        times_the_scores,
        inverted,
        too_weak,
        first_row_for_all,
        first_head_for_all,
        transposed,
        not_beyond_sixty_four,
        in_the_normaliser,
        causal_without_a_mask,
    ],
)
def test_wrong_operators_are_found(target):
    assert verdict(target).outcome == "broken"


@pytest.mark.parametrize(
    "target",
    [
        LeavesOut(lambda mask: torch.ones_like(mask)),
        LeavesOut(lambda mask: mask[:1].expand_as(mask)),
        LeavesOut(lambda mask: ~mask | mask.all(1, keepdim=True)),
        LeavesOut(lambda mask: mask if len(mask) > 1 else torch.ones_like(mask)),
        LeavesOut(lambda mask: mask if mask.shape[1] <= 128 else torch.ones_like(mask)),
        LeavesOut(lambda mask: mask if not torch.is_grad_enabled() else torch.ones_like(mask)),
        ReadsTheMaskAsOrder(),
    ],
    ids=["none", "first row", "inverted", "batch of one", "long", "with gradients", "as order"],
)
def test_wrong_layers_are_found(target):
    assert verdict(target, "layer").outcome == "broken"


def test_places_counted_from_the_padding_are_found():
    assert verdict(Words(counted=False), "model").outcome == "broken"
    assert verdict(Words(counted=False), "model", left=False).outcome == "holds"


def test_left_padding_is_required_of_an_encoder_only_if_it_is_declared():
    assert verdict(Words(False), "model", left=True).outcome == "broken"
    assert verdict(Words(False, counted=True), "model", left=True).outcome == "holds"


def test_a_mean_over_hidden_tokens_is_found():
    assert verdict(MeanOverAll(), "model").outcome == "broken"


def test_without_a_mask_there_is_no_padding():
    assert verdict(lambda query, key, value: full(query, key, value)).outcome == "not applicable"


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_a_tail_that_is_not_masked_is_found(block):
    assert verdict(unmasked_tail_behind(block)).outcome == "broken"
    assert verdict(Layer(unmasked_tail_behind(block)), "layer").outcome == "broken"


def test_a_mask_that_is_lost_for_one_query_is_found():
    found = verdict(unmasked_for_one_query)
    assert found.outcome == "broken"
    assert found.cases < 45


def test_every_question_comes_early():
    """A slow subject meets long sequences, small ones and masks of pairs before its time is over."""
    from regard.adapters.operator import OperatorAdapter
    from regard.laws.catalog.padding import PaddingLaw

    early = list(islice(PaddingLaw().cases(OperatorAdapter(naive, "naive"), True), 30))
    assert {case["comparison"] for case in early} == {"ones", "pairs", "content", "removal", "gradient"}
    assert max(case.get("keys", case.get("tokens")) for case in early) > 32
