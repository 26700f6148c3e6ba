"""Remarks on other sizes beside the smallest counterexample agree with what was tried."""

from __future__ import annotations

from regard.laws import LAWS
from regard.laws.other_sizes import describe_sizes

CAUSALITY = next(law for law in LAWS if law.slug == "causality")
CASE = {"batch": 1, "tokens": 5, "kept": 1}


def test_a_size_that_always_fails_lists_the_sizes_tried():
    said = describe_sizes(CAUSALITY, CASE, lambda case: True)
    assert said["batch"] == "fails at every size tried: 1, 2, 3"
    assert said["tokens"] == "fails at every size tried: 2, 4, 5, 6, 7"


def test_smaller_and_larger_sizes_that_hold_are_listed():
    said = describe_sizes(CAUSALITY, CASE, lambda case: case["tokens"] >= 5)
    assert said["tokens"] == "fails at 5, 6, 7; holds at 2, 4"
    said = describe_sizes(CAUSALITY, CASE, lambda case: case["tokens"] % 2 == 1)
    assert said["tokens"] == "fails at 5, 7; holds at 2, 4, 6"


def test_what_is_refused_or_impossible_is_neither():
    said = describe_sizes(CAUSALITY, CASE, lambda case: None if case["tokens"] > 5 else True)
    assert said["tokens"] == "fails at every size tried: 2, 4, 5"
    assert "kept" not in describe_sizes(CAUSALITY, {"batch": 1, "tokens": 2, "kept": 1}, lambda case: True)


def test_the_case_itself_is_not_run_again():
    runs = []
    describe_sizes(CAUSALITY, CASE, lambda case: bool(runs.append(dict(case))))
    assert CASE not in runs
