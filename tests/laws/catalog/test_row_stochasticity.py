"""L7: weights are non-negative and sum to one."""

from __future__ import annotations

import pytest
import torch
from weighing import Layer, causal, outcome_of, plain, scores_of

from regard.laws import check

outcome = outcome_of("row-stochasticity")


def sigmoid(q, k, v, mask=None):
    return scores_of(q, k, mask).sigmoid() @ v


def over_queries(q, k, v, mask=None):
    return scores_of(q, k, mask).softmax(-2).nan_to_num(0.0) @ v


def over_heads(q, k, v, mask=None):
    return scores_of(q, k, mask).softmax(1).nan_to_num(0.0) @ v


def mask_last(q, k, v, mask=None):
    weights = scores_of(q, k, None).softmax(-1)
    return (weights if mask is None else weights * mask) @ v


def epsilon(q, k, v, mask=None):
    raised = scores_of(q, k, mask).exp()
    return raised @ v / (raised.sum(-1, keepdim=True) + 1e-6)


def features(q, k, v, mask=None):
    q, k = q.exp(), k.exp()
    return q @ (k.mT @ v)


def only_when(fault, when):
    """Wrong on one path only."""

    def operator(q, k, v, mask=None):
        return (fault if when(q.shape[-2], k.shape[-2]) else plain)(q, k, v, mask)

    return operator


def without_the_last_block(block):
    """A partial block at the end is in the normaliser and not in the sum."""

    def operator(q, k, v, mask=None):
        weights = scores_of(q, k, mask).softmax(-1).nan_to_num(0.0)
        whole = k.shape[-2] // block * block or k.shape[-2]
        return weights[..., :whole] @ v[..., :whole, :]

    return operator


FAULTS = [sigmoid, over_queries, over_heads, mask_last, epsilon]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("core", [plain, causal], ids=lambda core: core.__name__)
def test_a_softmax_over_keys_holds(core, seed: int) -> None:
    assert outcome(core, seed=seed) == "holds"
    assert outcome(Layer(core), "layer", seed) == "holds"


@pytest.mark.parametrize("core", FAULTS, ids=lambda core: core.__name__)
def test_what_does_not_sum_to_one_is_broken(core) -> None:
    assert outcome(core) == "broken"
    assert outcome(Layer(core), "layer") == "broken"


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_a_block_that_is_missing_at_the_end_is_found(block: int) -> None:
    assert outcome(without_the_last_block(block)) == "broken"


@pytest.mark.parametrize("keys", [32, 64, 128])
def test_a_fault_in_long_sequences_is_found(keys: int) -> None:
    assert outcome(only_when(mask_last, lambda _, found: found > keys)) == "broken"
    assert outcome(Layer(only_when(sigmoid, lambda _, found: found > keys)), "layer") == "broken"
    assert outcome(Layer(only_when(features, lambda _, found: found > keys)), "layer") == "broken"


def test_a_fault_for_one_query_is_found() -> None:
    assert outcome(only_when(epsilon, lambda queries, keys: queries == 1 and keys > 32)) == "broken"
    assert outcome(only_when(mask_last, lambda queries, keys: queries == 1 and keys > 1)) == "broken"


def test_a_layer_without_observable_weights_is_checked_with_equal_tokens() -> None:
    assert outcome(Layer(features), "layer") == "broken"


def test_a_head_without_weights_is_dead_and_not_excused():
    def last_head_dead(q, k, v, mask=None):
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return torch.cat([weights[:, :-1], weights[:, -1:] * 0], 1) @ v

    for target in (last_head_dead, lambda q, k, v: v * 0):
        report = check(target, kind="operator", claims=["row-stochasticity"], fast=True)
        assert report.verdicts[0].outcome == "broken"


def test_weights_that_are_returned_are_shares_too():
    def layer(x, mask=None, need_weights=False):
        weights = (x @ x.mT / x.shape[-1] ** 0.5).softmax(-1)
        return (weights @ x, 2 * weights) if need_weights else weights @ x

    def operator(q, k, v, mask=None):
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v, 2 * weights

    for target, kind in ((layer, "layer"), (operator, "operator")):
        report = check(target, kind=kind, claims=["row-stochasticity"], fast=True)
        assert report.verdicts[0].outcome == "broken", kind
