"""Every fault of the zoo is caught by its law, and no twin is falsely reported."""

from __future__ import annotations

import pytest
from zoo.catalogue import EXHIBITS
from zoo.exhibit import Exhibit, twins

from regard.laws import check
from regard.laws.catalog import LAWS

SEEDS = (1,)  # `python tests/zoo/scoreboard.py --seeds 20` tries more
TWINS = twins(EXHIBITS)
# The fast tests check one fault of each law; tests/laws/catalog has what must not be reported. The slow ones check
# all faults, and all claims of one twin of each law; the long ones all claims of all twins, and other seeds.
FIRST = list({exhibit.law[0]: exhibit for exhibit in reversed(EXHIBITS)}.values())
FAST = {exhibit.id for exhibit in FIRST}
every_fault = pytest.mark.parametrize("exhibit", EXHIBITS, ids=[exhibit.id for exhibit in EXHIBITS])
fast_and_slow_faults = pytest.mark.parametrize(
    "exhibit",
    [pytest.param(each, id=each.id, marks=[] if each.id in FAST else pytest.mark.slow) for each in EXHIBITS],
)
slow_and_long_twins = pytest.mark.parametrize(
    "exhibit", [pytest.param(each, id=each.id, marks=[] if each in FIRST else pytest.mark.long) for each in TWINS]
)


def report_on(exhibit: Exhibit, which: str, claims: tuple[str, ...], seed: int = 0):
    return check(exhibit.build(which), kind=exhibit.kind, claims=claims, seed=seed, fast=True, **exhibit.options)


def assert_caught(exhibit: Exhibit, law: str, seed: int = 0) -> None:
    verdict = report_on(exhibit, "faulty", (law,), seed).verdicts[law]
    assert verdict.outcome == "broken", f"seed {seed}: {verdict}"


def assert_acquitted(exhibit: Exhibit, claims: tuple[str, ...], seed: int = 0) -> None:
    report = report_on(exhibit, "twin", claims, seed)
    assert report.ok, f"seed {seed}: {'; '.join(map(str, report.failed))}"
    for law in exhibit.law:  # the law that catches the fault has something to say about the twin as well
        assert report.verdicts[law].outcome == "holds", f"seed {seed}: {report.verdicts[law]}"


@fast_and_slow_faults
def test_a_fault_is_caught_by_its_law(exhibit: Exhibit):
    for law in exhibit.law:
        assert_caught(exhibit, law)


def test_no_two_exhibits_have_one_name():
    names = [exhibit.id for exhibit in EXHIBITS]
    assert len(names) == len(set(names))


def test_every_law_has_an_exhibit():
    assert {law.slug for law in LAWS} <= {law for exhibit in EXHIBITS for law in exhibit.law}


@pytest.mark.slow
@pytest.mark.long
@every_fault
def test_a_fault_is_caught_at_other_seeds(exhibit: Exhibit):
    for law in exhibit.law:
        for seed in SEEDS:
            assert_caught(exhibit, law, seed)


@pytest.mark.slow
@slow_and_long_twins
def test_every_corrected_twin_keeps_all_that_it_claims(exhibit: Exhibit):
    assert_acquitted(exhibit, exhibit.claims)
    for seed in SEEDS:
        assert_acquitted(exhibit, exhibit.law, seed)
