"""Inferred claims: labelled, and dropped where ordinary input refutes them; explicit claims are kept."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from regard.adapters import adapt
from regard.adapters.huggingface import tiny
from regard.adapters.third_party_imports import mend_torchvision
from regard.laws import check

# Attention whose weights do not sum to one, each by design.


def scores_of(q, k, mask):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def sigmoid(q, k, mask=None):
    return scores_of(q, k, mask).sigmoid()


def softmax_one(q, k, mask=None):
    """A key that is always there, with score and value zero; large scores are taken off first."""
    scores = scores_of(q, k, mask)
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (-top).exp())


def relu(q, k, mask=None):
    return scores_of(q, k, mask).relu() / k.shape[-2]


def sink(q, k, mask=None):
    scores = scores_of(q, k, mask)
    return torch.cat([scores, torch.full_like(scores[..., :1], 0.7)], -1).softmax(-1)[..., :-1]


def differential(q, k, mask=None):
    return scores_of(q, k, mask).softmax(-1) - 0.4 * scores_of(q.flip(-1), k, mask).softmax(-1)


def retention(q, k, mask=None):
    back = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - torch.arange(k.shape[-2])
    weights = q @ k.mT * torch.where(back >= 0, 0.9 ** back.clamp(min=0), 0.0).to(q.dtype)
    return weights if mask is None else weights.masked_fill(~mask, 0.0)


# Faults that only look alike.


def over_queries(q, k, mask=None):
    return scores_of(q, k, mask).softmax(-2)


def over_heads(q, k, mask=None):
    return scores_of(q, k, None).softmax(1)


def over_the_batch(q, k, mask=None):
    return scores_of(q, k, None).softmax(0)


def over_queries_and_keys(q, k, mask=None):
    return scores_of(q, k, mask).flatten(-2).softmax(-1).unflatten(-1, (q.shape[-2], k.shape[-2]))


def mask_last(q, k, mask=None):
    weights = scores_of(q, k, None).softmax(-1)
    return weights if mask is None else weights * mask


def epsilon(q, k, mask=None):
    weights = scores_of(q, k, mask).exp()
    return weights / (weights.sum(-1, keepdim=True) + 1e-3)


def long_sigmoid(q, k, mask=None):
    return (sigmoid if k.shape[-2] > 32 else plain)(q, k, mask)


def one_row_sigmoid(q, k, mask=None):
    return (sigmoid if q.shape[0] == 1 else plain)(q, k, mask)


def dead_head(q, k, mask=None):
    weights = scores_of(q, k, mask).softmax(-1)
    return torch.cat([weights[:, :-1], 0 * weights[:, -1:]], 1)


def one_head_doubled(q, k, mask=None):
    weights = scores_of(q, k, mask).softmax(-1)
    return torch.cat([weights[:, :-1], 2 * weights[:, -1:]], 1)


def plain(q, k, mask=None):
    return scores_of(q, k, mask).softmax(-1).nan_to_num(0.0)


BY_DESIGN = [sigmoid, softmax_one, relu, sink, differential, retention]
FAULTS = [
    over_queries,
    over_heads,
    over_the_batch,
    over_queries_and_keys,
    mask_last,
    epsilon,
    long_sigmoid,
    one_row_sigmoid,
    dead_head,
    one_head_doubled,
]


def operator(weigh):
    def attention(q, k, v, mask=None):
        return weigh(q, k, mask) @ v

    return attention


class Layer(nn.Module):
    def __init__(self, weigh) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weigh, self.qkv = weigh, nn.Linear(12, 36)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        pairs = None if mask is None else mask[:, None, None]
        return (self.weigh(q, k, pairs) @ v).transpose(1, 2).flatten(2)


def verdict_on(target, kind, **how):
    return check(target, kind=kind, only=["row-stochasticity"], fast=True, **how).verdicts[0]


@pytest.mark.parametrize("weigh", BY_DESIGN, ids=lambda weigh: weigh.__name__)
def test_weights_that_do_not_sum_to_one_by_design_are_not_claimed(weigh):
    for target, kind in ((operator(weigh), "operator"), (Layer(weigh), "layer")):
        verdict = verdict_on(target, kind)
        assert (verdict.outcome, verdict.inferred) == ("not applicable", True), f"{kind}: {verdict}"
        assert verdict.reason.startswith("not claimed: inferred, and refuted by ordinary input")


@pytest.mark.parametrize("weigh", BY_DESIGN, ids=lambda weigh: weigh.__name__)
def test_a_claim_that_was_made_binds(weigh):
    assert verdict_on(operator(weigh), "operator", claims=["row-stochasticity"]).outcome == "broken"


@pytest.mark.parametrize("weigh", FAULTS, ids=lambda weigh: weigh.__name__)
def test_a_fault_is_caught_although_its_claim_was_inferred(weigh):
    verdict = verdict_on(operator(weigh), "operator")
    assert (verdict.outcome, verdict.inferred) == ("broken", True), str(verdict)


def test_an_ordinary_softmax_keeps_its_inferred_claim():
    for target, kind in ((operator(plain), "operator"), (Layer(plain), "layer")):
        verdict = verdict_on(target, kind)
        assert (verdict.outcome, verdict.inferred) == ("holds", True)
        assert "inferred" in str(verdict)


def test_every_form_of_a_report_marks_inferred_claims():
    report = check(operator(mask_last), kind="operator", only=["row-stochasticity"], also=["permutation"], fast=True)
    assert "broken, inferred" in str(report)
    assert "inferred from the kind of subject" in str(report.violations[0])
    assert json.loads(report.to_json())["verdicts"][0]["inferred"] is True
    assert "broken, inferred" in report.to_html()
    dropped = check(operator(sigmoid), kind="operator", only=["row-stochasticity"], fast=True)
    assert "not claimed: inferred" in " ".join(str(dropped).split())
    assert "not claimed: inferred" in dropped.to_html()


def test_claims_that_are_made_or_documented_are_not_called_inferred():
    made = check(operator(plain), kind="operator", claims=["row-stochasticity"], fast=True)
    assert not made.verdicts[0].inferred
    documented = check(nn.MultiheadAttention(12, 3, batch_first=True), only=["shape"], fast=True)
    assert not documented.verdicts[0].inferred
    also = check(operator(plain), kind="operator", only=["permutation"], also=["permutation"], fast=True)
    assert not also.verdicts[0].inferred


def test_a_user_may_assert_laws_of_attention_with_a_sink():
    report = check(operator(sink), kind="operator", only=["row-stochasticity", "shape"], fast=True)
    report.require()
    assert {verdict.slug: verdict.outcome for verdict in report.verdicts} == {
        "row-stochasticity": "not applicable",
        "shape": "holds",
    }


@pytest.mark.parametrize(
    ("scaling", "claimed"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, True),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, False),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "original_max_position_embeddings": 16,
                "rope_theta": 10000.0,
            },
            False,
        ),
    ],
    ids=lambda value: value.get("rope_type", "") if isinstance(value, dict) else "",
)
def test_rotations_that_switch_with_the_length_do_not_claim_relative_positions(scaling, claimed):
    pytest.importorskip("transformers")
    mend_torchvision()
    model = tiny("LlamaForCausalLM", rope_parameters=scaling)
    subject = adapt(model)
    assert ("relative-position" in subject.claims) == claimed
    verdict = check(model, only=["relative-position"], fast=True).verdicts[0]
    assert verdict.inferred == claimed
    if claimed:
        assert verdict.outcome == "holds"
    elif scaling["rope_type"] == "longrope":  # an explicit claim is checked all the same
        assert verdict.outcome == "broken"
