"""L19: the counted operations are those declared."""

from __future__ import annotations

import pytest
import torch
from plain import Layer, TorchEncoderLayer, Words, blocks, naive, ours, scores, slow, window
from torch.nn import functional

from regard.laws import check, probe
from regard.laws.catalog.cost_law import Counter, is_quadratic


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["cost"], fast=True, **options).verdicts[0]


def linear(query, key, value):
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    return query @ (key.transpose(-1, -2) @ value) / (query @ key.sum(-2)[..., None])


def fused(query, key, value):
    return functional.scaled_dot_product_attention(query, key, value)


def without_matrices(query, key, value):
    weights = (query[..., :, None, :] * key[..., None, :, :]).sum(-1).softmax(-1)
    return (weights[..., None] * value[..., None, :, :]).sum(-2)


def cubic(query, key, value):
    weights = scores(query, key).softmax(-1)
    return weights @ weights @ value


def across_the_batch(query, key, value):
    batch, heads, tokens, dim = query.shape
    parts = [part.transpose(0, 1).reshape(1, heads, batch * tokens, dim) for part in (query, key, value)]
    rows = torch.arange(batch * tokens) // tokens
    return naive(*parts, rows[:, None] == rows)[0].view(heads, batch, tokens, dim).transpose(0, 1)


class Declaring(Layer):
    def flops(self, tokens):
        return 2 * tokens * 12 * 48 + 4 * tokens * tokens * 12


class Forgetful(Layer):
    """Scores and sums over values are left out: the count is a straight line."""

    def flops(self, tokens):
        return 2 * tokens * 12 * 48


@pytest.mark.parametrize("target", [naive, fused, ours, *slow(blocks, without_matrices)])
def test_quadratic_cost_is_distinguished_from_linear(target):
    assert verdict(target, growth=2).outcome == "holds"
    assert verdict(target, growth=1).outcome == "broken"


def test_linear_cost_is_distinguished_from_quadratic():
    assert verdict(linear, growth=1).outcome == "holds"
    assert verdict(linear, growth=2).outcome == "broken"


def test_a_window_that_computes_the_whole_square_is_caught():
    assert verdict(window, growth=1).outcome == "broken"


def test_more_than_quadratic_cost_is_caught_without_a_declaration():
    assert verdict(cubic).outcome == "broken"


def test_work_across_the_batch_is_caught():
    assert verdict(across_the_batch).outcome == "broken"


def test_a_declared_count_is_met_to_the_unit():
    assert verdict(Declaring(), "layer").outcome == "holds"
    found = verdict(Forgetful(), "layer")
    assert found.outcome == "broken"
    assert "it declares" in found.counterexample.effect


def test_layers_and_models_of_torch_are_counted_without_their_fast_path():
    assert verdict(TorchEncoderLayer(), "layer", growth=2).outcome == "holds"
    assert verdict(Words(), "model", growth=2).outcome == "holds"


def test_what_shows_no_product_is_not_judged():
    found = check(lambda query, key, value: value + 0 * query, kind="operator", claims=["cost"]).verdicts[0]
    assert found.outcome == "not applicable"


def test_attention_on_the_cpu_is_counted_by_hand():
    query, key, value = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 7)
    for attend in (fused, naive):
        with Counter() as counter:
            attend(query, key, value)
        assert counter.products == 2 * 2 * 3 * 5 * 11 * (7 + 7)


def test_a_square_is_a_square_and_a_line_is_none():
    assert is_quadratic([5 + 3 * t + 2 * t * t for t in (1, 2, 3, 4)])
    assert not is_quadratic([5 + 3 * t for t in (1, 2, 3, 4)])


def test_probe_measures_the_power():
    assert "tokens^2.00" in probe(naive, kind="operator", laws=["cost"]).verdicts[0].measured
