"""The search: rounding against logic, flakiness, shrinking, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain import slow
from torch import nn

from regard.adapters.rng import Rng
from regard.laws import check, search
from regard.laws.compare import compare
from regard.laws.law import Observation
from regard.laws.search import run_case
from regard.laws.verdict import Verdict, Verdicts


def visible(q, k):
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])


def causal(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible(q, k))


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4)])
def test_a_correct_operator_is_not_accused_at_any_seed(seed):
    assert check(causal, kind="operator", claims=["causality"], seed=seed, fast=True).ok


def test_the_counterexample_is_the_smallest_case():
    def leaks(q, k, v, mask=None):
        allowed = visible(q, k) | (torch.arange(k.shape[-2]) == 4)  # every query sees token 4
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    verdict = check(leaks, kind="operator", claims=["causality"]).verdicts["causality"]
    assert verdict.outcome == "broken"
    assert verdict.counterexample is not None
    assert verdict.counterexample.case["tokens"] == 5
    assert verdict.counterexample.case["batch"] == 1
    assert verdict.counterexample.remarks["batch"] == "fails at every size tried: 1, 2, 3"
    assert verdict.counterexample.remarks["tokens"].startswith("fails at 5")
    assert "holds at" in verdict.counterexample.remarks["tokens"]


def test_a_length_beyond_which_a_law_breaks_is_found_in_few_runs(monkeypatch):
    def leaks(q, k, v, mask=None):
        output = causal(q, k, v)
        return output if k.shape[-2] <= 517 else output + v.mean(2, keepdim=True)

    runs = []
    monkeypatch.setattr(search, "run_case", lambda *args: runs.append(args) or run_case(*args))
    verdict = check(leaks, kind="operator", claims=["causality"], fast=True).verdicts["causality"]
    assert verdict.counterexample is not None
    assert verdict.counterexample.case["tokens"] == 518
    after = [args for args in runs if args[2]["tokens"] > 517]
    assert len(after) < 40


def test_the_same_seed_finds_the_same_counterexample():
    reports = [check(lambda q, k, v: q + v.mean(2, keepdim=True), claims=["causality"], seed=7) for _ in range(2)]
    first, second = (report.verdicts[0].counterexample for report in reports)
    assert (first.moved, first.place, first.case) == (second.moved, second.place, second.case)


def test_rounding_that_float64_does_not_show_is_no_violation():
    # Early outputs move with later tokens by some roundings of single precision: the sum is taken off again.
    def noisy(q, k, v, mask=None):
        large = 30 * v.sum(2, keepdim=True)
        return (causal(q, k, v) + large) - large

    assert check(noisy, kind="operator", claims=["causality"]).ok


def test_a_leak_in_single_precision_alone_is_a_violation():
    def leaks(q, k, v, mask=None):
        output = causal(q, k, v)
        return output + v.mean(2, keepdim=True) if q.dtype == torch.float32 else output

    verdict = check(leaks, kind="operator", claims=["causality"]).verdicts[0]
    assert verdict.outcome == "broken"
    assert verdict.counterexample.precision == "float32"


def test_a_small_leak_shows_in_float64():
    def leaks(q, k, v, mask=None):
        return causal(q, k, v) + 1e-7 * v.mean(2, keepdim=True)

    assert "causality" in check(leaks, kind="operator", claims=["causality"]).failed


def test_a_subject_whose_equal_calls_differ_is_flaky_and_nothing_more():
    dropping = nn.Dropout(0.5).train()
    report = check(lambda q, k, v: dropping(causal(q, k, v)), kind="operator", claims=["causality"])
    assert report.verdicts[0].outcome == "flaky"
    assert not report.ok


def test_a_case_that_breaks_only_sometimes_is_flaky():
    calls = iter(range(10**6))

    def sometimes(q, k, v, mask=None):
        output = causal(q, k, v)
        # Not in the calls that look whether it is steady, and then in one of a few.
        return output + v.mean(2, keepdim=True) if next(calls) % 7 == 6 and q.shape[-2] > 5 else output

    assert check(sometimes, kind="operator", claims=["causality"]).verdicts[0].outcome == "flaky"


def test_a_subject_that_raises_in_every_case_does_not_obey():
    def fussy(q, k, v, mask=None):
        if q.shape[0] < 2 or q.shape[-2] != 5:
            raise RuntimeError("two rows of five tokens, please")
        return causal(q, k, v)

    verdict = check(fussy, kind="operator", claims=["causality"]).verdicts[0]
    assert verdict.outcome == "broken"
    assert "two rows" in verdict.reason


def test_a_subject_that_refuses_some_sizes_is_judged_by_the_others():
    def even(q, k, v, mask=None):
        if q.shape[-2] > 20:
            raise RuntimeError("at most twenty")
        return causal(q, k, v)

    verdict = check(even, kind="operator", claims=["causality"]).verdicts[0]
    assert verdict.outcome == "holds"
    assert "at most twenty" in verdict.reason


def test_random_numbers_outside_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check(causal, kind="operator", claims=["causality"], fast=True)
    assert torch.equal(torch.rand(2), expected)


def test_random_draws_depend_on_their_seed_words_alone():
    assert torch.equal(Rng(3, "a").normal(4), Rng(3, "a").normal(4))
    assert not torch.equal(Rng(3, "a").normal(4), Rng(3, "b").normal(4))
    assert not torch.equal(Rng(3, "a").normal(4), Rng(4, "a").normal(4))


def test_a_bound_grows_with_precision_reduction_and_scale():
    expected = torch.tensor([[1000.0, 1.0]])
    near = expected + torch.tensor([[0.0, 1e-3]])
    assert compare(Observation(expected, near), 1e-7, 64).ratio < 1
    assert compare(Observation(expected, near, scale=1.0), 1e-7, 64).ratio > 1
    assert compare(Observation(expected, near, scale=1.0, reduction=10**8), 1e-7, 64).ratio < 1
    assert compare(Observation(expected, near, exact=True), 1e-7, 64).ratio == float("inf")


def test_one_number_that_is_none_is_infinitely_far_and_two_are_equal():
    nan = torch.tensor([[float("nan"), 1.0]])
    assert compare(Observation(nan, nan), 1e-7, 64).ratio == 0
    finding = compare(Observation(torch.ones(1, 2), nan), 1e-7, 64)
    assert finding.ratio == float("inf")
    assert finding.place == "output[0, 0]"


def test_verdicts_are_found_by_slug_and_by_number():
    report = check(causal, kind="operator", claims=["L1"], fast=True)
    assert isinstance(report.verdicts, Verdicts)
    assert isinstance(report.verdicts["causality"], Verdict)
    assert report.verdicts["L1"] is report.verdicts[0]
    assert "causality" not in report.failed


def test_a_counterexample_is_shrunk_to_the_plainest_parameters():
    good = check(causal, kind="operator", claims=["causality"], fast=True)
    assert good.failed == []
    assert good.failed == ()
    bad = check(lambda q, k, v: v.mean(2, keepdim=True).expand_as(v), claims=["causality", "determinism"], fast=True)
    assert "causality" in bad.failed
    assert "determinism" not in bad.failed
    assert {verdict.law for verdict in bad.failed} == {"causality"}
    assert [str(verdict.law) for verdict in bad.failed] == ["causality"]
    assert bad.failed != good.failed


class TwoPaths(nn.Module):
    """Fused attention, or a softmax written out where weights are wanted: `soften` is that softmax."""

    def __init__(self, soften) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.qkv, self.soften = nn.Linear(8, 24), soften

    def forward(self, x, mask=None, need_weights=False):
        q, k, v = self.qkv(x).chunk(3, -1)
        key_mask = None if mask is None else mask[:, None]
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask)
        scores = q @ k.mT / 8**0.5
        weights = self.soften(scores if key_mask is None else scores.masked_fill(~key_mask, -torch.inf)).to(v.dtype)
        return weights @ v, weights


def test_a_path_through_float32_differs_by_rounding_in_float64_too():
    target = TwoPaths(lambda scores: scores.softmax(-1, dtype=torch.float32))
    assert check(target, kind="layer", claims=["paths"], fast=True).verdicts[0].outcome == "holds"


def test_a_path_through_float32_is_not_excused_for_more_than_its_rounding():
    target = TwoPaths(lambda scores: (1.0003 * scores).softmax(-1, dtype=torch.float32))
    assert check(target, kind="layer", claims=["paths"], fast=True).verdicts[0].outcome == "broken"


def test_a_path_through_fewer_digits_than_its_own_is_a_fault():
    target = TwoPaths(lambda scores: scores.bfloat16().softmax(-1))
    assert check(target, kind="layer", claims=["paths"], fast=True).verdicts[0].outcome == "broken"
