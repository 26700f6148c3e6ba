"""L2: unequal lengths are aligned at the end; other alignments are found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain import Layer, alibi, causal, full, naive, rotary, rotated, scores, slow, total, window

from regard.laws import check


def verdict(target, kind="operator", **options):
    return check(target, kind=kind, claims=["alignment"], fast=True, **options).verdicts[0]


def start_aligned(query, key, value, mask=None):
    triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    return total(
        scores(query, key), (triangle if mask is None else triangle & mask).expand(scores(query, key).shape), value
    )


def upper_left(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def right_for_one_query_only(query, key, value, mask=None):
    shift = key.shape[-2] - 1 if query.shape[-2] == 1 else 0
    triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(shift)
    return total(
        scores(query, key), (triangle if mask is None else triangle & mask).expand(scores(query, key).shape), value
    )


def never_before_the_first_key(query, key, value, mask=None):
    """More queries than keys are aligned at the start."""
    shift = max(key.shape[-2] - query.shape[-2], 0)
    triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(shift)
    return total(
        scores(query, key), (triangle if mask is None else triangle & mask).expand(scores(query, key).shape), value
    )


def rotated_from_zero(query, key, value, mask=None):
    query, key = (rotated(x, torch.arange(x.shape[-2])) for x in (query, key))
    return causal(query, key, value, mask)


def scaled_by_its_queries(query, key, value, mask=None):
    """A temperature that depends on how many queries are asked together, above 32 of them."""
    return full(query * (1.1 if query.shape[-2] > 32 else 1.0), key, value, mask)


def start_aligned_beyond(keys):
    """Another path for many keys."""

    def operator(query, key, value, mask=None):
        return (start_aligned if key.shape[-2] > keys else causal)(query, key, value, mask)

    return operator


def other_in_the_tail(block):
    """Queries behind whole blocks of them see one key less."""

    def operator(query, key, value, mask=None):
        whole = query.shape[-2] // block * block
        output = full(query, key, value, mask)
        if not whole or whole == query.shape[-2]:
            return output
        rest = full(query[:, :, whole:], key[:, :, 1:], value[:, :, 1:], mask if mask is None else mask[:, :, -1:, 1:])
        return torch.cat([output[:, :, :whole], rest], 2)

    return operator


@pytest.mark.parametrize("target", [causal, *slow(naive, full, window, alibi, rotary)])
def test_what_aligns_at_the_end_holds(target):
    found = verdict(target)
    assert found.outcome == "holds", str(found)
    assert found.refused == 0


@pytest.mark.parametrize(
    "target",
    [
        start_aligned,
        upper_left,
        right_for_one_query_only,
        never_before_the_first_key,
        rotated_from_zero,
        scaled_by_its_queries,
        start_aligned_beyond(32),
        start_aligned_beyond(128),
        other_in_the_tail(16),
        other_in_the_tail(128),
    ],
)
def test_what_aligns_elsewhere_is_found(target):
    assert verdict(target).outcome == "broken"


def test_alignment_at_the_start_may_be_declared():
    assert verdict(start_aligned, align="start").outcome == "holds"
    assert verdict(causal, align="start").outcome == "broken"


def test_layers_have_one_length_only():
    assert verdict(Layer(causal), "layer").outcome == "not applicable"


def test_a_counterexample_is_small():
    found = verdict(upper_left)
    assert found.counterexample is not None
    assert found.counterexample.case["keys"] <= 3
    assert found.counterexample.case["queries"] <= 3
