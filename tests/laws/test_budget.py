"""The number of cases that are tried before a law is said to hold: a budget of cases, never of seconds."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

from regard.adapters import adapt
from regard.errors import LawViolation
from regard.laws import LAWS, assert_laws, check, probe
from regard.laws.budget import BUDGET, RunWork, measure_work, select_cases
from regard.laws.checking import find_laws
from regard.laws.law import Law, discard, expect_equal
from regard.laws.search import examine
from regard.laws.verdict import Verdict
from regard.models import GPT, GPTConfig

SIZES = {"dim": 8, "layers": 1, "heads": 2}


class Padded(nn.Module):
    """Attention over tokens; from `faulty_from` tokens on its padding mask is dropped."""

    def __init__(self, faulty_from: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.faulty_from = faulty_from
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, mask=None):
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.mT / 8**0.5
        if mask is not None and (self.faulty_from is None or x.shape[1] < self.faulty_from):
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return scores.softmax(-1) @ value


class Counted(Law):
    """A law about nothing, whose cases are written in the test."""

    id, slug, title, headline = "L0", "counted", "Counted", "it was counted wrongly."
    statement = equation = catches = "-"
    offered: tuple[str, ...] = ()
    minimum = 5

    def cases(self, subject, fast):
        return [{"number": number, "kind": kind} for number, kind in enumerate(self.offered)]

    def observe(self, subject, case, rng):
        if case["kind"] == "refuse":
            raise RuntimeError("not this one")
        if case["kind"] == "discard":
            discard("a kink")
        if case["kind"] != "vacuous":
            yield expect_equal(torch.zeros(1), torch.full((1,), float(case["kind"] == "break")))


def run_kinds(*kinds: str, **how) -> Verdict:
    law = Counted()
    law.offered = kinds
    return examine(law, adapt(Padded(), "layer"), **how)


@pytest.fixture
def slow_clock(monkeypatch):
    """Every look at a clock finds a minute gone by, as on a machine that does everything else first."""
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time"):
        minutes = itertools.count()
        monkeypatch.setattr(time, name, lambda minutes=minutes: 60.0 * next(minutes))


@pytest.mark.parametrize("fast", [True, False])
def test_a_padding_fault_is_found_however_slow_the_machine_is(slow_clock, fast):
    report = check(Padded(faulty_from=60), kind="layer", claims=["padding"], fast=fast)
    assert report.verdicts["padding"].outcome == "broken"


@pytest.mark.slow
def test_verdicts_do_not_depend_on_the_clock(monkeypatch, slow_clock):
    claims = ["padding", "gradients", "shape"]
    slow = check(Padded(), kind="layer", claims=claims, fast=True)
    monkeypatch.undo()
    quick = check(Padded(), kind="layer", claims=claims, fast=True)
    assert [(v.slug, v.outcome, v.tried) for v in slow.verdicts] == [
        (v.slug, v.outcome, v.tried) for v in quick.verdicts
    ]


def test_a_limit_of_time_leads_to_undecided_and_never_to_holds():
    report = check(Padded(faulty_from=60), kind="layer", claims=["padding"], seconds=0.0)
    verdict = report.verdicts["padding"]
    assert verdict.outcome == "undecided"
    assert "seconds=0" in verdict.reason
    assert not report.ok
    assert "padding" in report.failed
    with pytest.raises(LawViolation, match="too few cases were tried"):
        assert_laws(Padded(), kind="layer", claims=["padding"], seconds=0.0)


def test_a_limit_of_time_that_is_not_reached_changes_nothing():
    assert check(Padded(), kind="layer", claims=["padding"], fast=True, seconds=600.0).ok


def test_too_few_cases_that_ran_are_undecided():
    verdict = run_kinds("fine", "fine", *["refuse"] * 9)
    assert (verdict.outcome, verdict.cases, verdict.tried, verdict.refused) == ("undecided", 11, 2, 9)
    assert "2 of the 5 cases" in verdict.reason
    assert "not this one" in verdict.reason
    verdict = run_kinds("fine", "fine", *["discard"] * 9)
    assert (verdict.outcome, verdict.tried, verdict.discarded) == ("undecided", 2, 9)
    assert "a kink" in verdict.reason


def test_enough_cases_that_ran_hold_whatever_else_was_refused():
    verdict = run_kinds(*["fine"] * 5, *["refuse"] * 9)
    assert (verdict.outcome, verdict.tried) == ("holds", 5)


def test_a_law_with_fewer_cases_than_its_minimum_holds_when_all_of_them_ran():
    assert run_kinds("fine", "fine").outcome == "holds"
    assert run_kinds("fine", "refuse").outcome == "undecided"
    assert run_kinds("fine", "discard").outcome == "undecided"


def test_a_case_with_nothing_to_compare_is_not_a_case_that_holds():
    assert run_kinds("fine", "vacuous", "vacuous").tried == 1
    verdict = run_kinds("vacuous", "vacuous")
    assert (verdict.outcome, verdict.tried) == ("not applicable", 0)


def test_a_law_that_was_claimed_and_refused_in_every_case_is_undecided():
    assert run_kinds("refuse", "refuse", explicit=True).outcome == "undecided"
    assert run_kinds("refuse", "refuse").outcome == "not applicable"


def test_a_case_after_discarded_ones_still_breaks_the_law():
    assert run_kinds("discard", "refuse", "fine", "break").outcome == "broken"


def test_the_budget_is_made_up_for_where_cases_were_refused():
    verdict = run_kinds(*["refuse"] * 9, *["fine"] * 9, budget=1)
    assert (verdict.outcome, verdict.tried) == ("holds", 5)


class CountedKinds(Counted):
    kinds = ("place",)
    minimum = 3

    def cases(self, subject, fast):
        return [{"number": n, "kind": kind, "place": place} for n, (kind, place) in enumerate(self.places)]


def judge_kinds(*places: tuple[str, str], **how) -> Verdict:
    law = CountedKinds()
    law.places = places
    return examine(law, adapt(Padded(), "layer"), **how)


def test_many_cases_of_too_few_kinds_are_undecided():
    left, right = ("fine", "left"), ("fine", "right")
    refused = [("refuse", f"place {number}") for number in range(4)]
    verdict = judge_kinds(*[left] * 9, *refused, right)
    assert (verdict.outcome, verdict.tried) == ("undecided", 10)
    assert "only 2 of the 3 kinds of case (place)" in verdict.reason
    assert "not this one" in verdict.reason
    assert judge_kinds(*[left] * 9, *[("discard", place) for _, place in refused], right).outcome == "undecided"
    assert judge_kinds(*[left] * 9, *refused, right, ("fine", "place 3")).outcome == "holds"
    assert judge_kinds(*[left] * 9, *[("vacuous", place) for _, place in refused], right).outcome == "holds"


def test_of_few_kinds_half_are_enough():
    left, middle = ("fine", "left"), ("refuse", "middle")
    assert judge_kinds(*[left] * 9, middle).outcome == "holds"
    assert judge_kinds(*[left] * 9, middle, ("refuse", "right")).outcome == "undecided"
    assert judge_kinds(*[left] * 9, middle, ("fine", "right")).outcome == "holds"


def test_the_first_case_of_each_kind_runs_whatever_the_budget():
    places = [("fine", "left")] * 20 + [("fine", "middle")] * 20 + [("fine", "right")]
    assert judge_kinds(*places, budget=1).outcome == "holds"
    assert judge_kinds(*places[:-1], ("break", "right"), budget=1).outcome == "broken"
    made_up_for = judge_kinds(*places[:20], ("refuse", "middle"), *places[21:], budget=1)
    assert made_up_for.outcome == "holds"
    assert made_up_for.cases < 10


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_every_law_declares_its_minimum_of_case_kinds(law: Law):
    own = vars(type(law))
    assert own["minimum"] >= 3
    assert own["kinds"]


def select_minimum(slug: str, subject, name: str) -> set:
    """The values of one parameter among the cases that run whatever the budget."""
    (law,) = find_laws([slug])
    offered = list(law.cases(subject, True))
    return {case.get(name) for case in select_cases(offered, RunWork(10**9, 0), 1, law.minimum, law.kind_of)}


def test_no_law_holds_by_one_kind_of_case_alone():
    layer, decoder = adapt(Padded(), "layer"), adapt(GPT(GPTConfig(vocab_size=11, context_length=16, **SIZES)))
    for subject in (layer, decoder):
        assert {"left", "right", "random"} <= select_minimum("padding", subject, "side")
        assert {"ones", "content", "removal"} <= select_minimum("padding", subject, "comparison")
    assert select_minimum("causality", decoder, "kept") >= {1, 2, 3, 4, 5, 6}
    assert {"ones", "halves", "first", "last"} <= select_minimum("cache", decoder, "split")
    assert {"alone", "others"} <= select_minimum("batch-independence", layer, "comparison")
    assert {"other", "longer", "shorter", "thread"} <= select_minimum("statelessness", layer, "between")


def test_a_layer_that_takes_padding_on_the_right_only_is_decided():
    class RightOnly(Padded):
        def forward(self, x, mask=None):
            if mask is not None and bool((~mask[:, :-1] & mask[:, 1:]).any()):
                raise ValueError("padding belongs on the right")
            return super().forward(x, mask)

    verdict = check(RightOnly(), kind="layer", claims=["padding"], fast=True).verdicts["padding"]
    assert verdict.outcome == "holds"
    assert "padding belongs on the right" in verdict.reason


def test_small_subjects_try_every_case_of_a_fast_search():
    subject = adapt(Padded(), "layer")
    for law in find_laws([law.slug for law in LAWS]):
        if law.applies(subject) is None:
            offered = list({tuple(case.items()): case for case in law.cases(subject, True)}.values())
            assert select_cases(offered, measure_work(subject), BUDGET[True], law.minimum, law.kind_of) == offered


def test_a_small_budget_takes_the_first_cases_and_some_of_the_others():
    cases = [{"number": number, "tokens": 5} for number in range(100)]
    chosen = [int(case["number"]) for case in select_cases(cases, RunWork(50, 0), 1_000, 8)]
    assert len(chosen) == 20
    assert chosen[:10] == list(range(10))
    assert max(chosen) > 90
    assert chosen == sorted(set(chosen))


def test_the_minimum_runs_whatever_the_budget():
    cases = [{"number": number, "tokens": 5 + 600 * (number % 3 == 2)} for number in range(100)]
    chosen = select_cases(cases, RunWork(50, 10**9), 1_000, 8)
    assert len(chosen) == 8
    assert sum(int(case["tokens"]) > 5 for case in chosen) <= 2  # the dear ones only where they come first


def test_work_is_the_same_at_every_measurement_and_grows_with_the_subject():
    deep = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4).eval()
    small, large = (measure_work(adapt(target, "layer")) for target in (Padded(), deep))
    assert measure_work(adapt(Padded(), "layer")) == small
    assert large.operations > 4 * small.operations


def test_probing_reports_undecided_and_no_violations():
    report = probe(Padded(), kind="layer", laws=["padding"], seconds=0.0)
    assert report.verdicts["padding"].outcome == "undecided"
    assert "undecided" in str(report)
    assert not report.violations


def test_every_form_of_a_report_shows_undecided():
    report = check(Padded(), kind="layer", claims=["padding"], seconds=0.0)
    assert "1 undecided" in str(report)
    assert "too few cases were tried" in str(report)
    assert '"outcome": "undecided"' in report.to_json()
    assert "undecided" in report.to_html()
