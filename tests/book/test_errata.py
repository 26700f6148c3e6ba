"""Errata: each wrong claim fails when it is run, and each correction holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from regard.book.errata import Trial, find_erratum, list_errata
from regard.book.errata.erratum import Undefined, is_equal
from regard.book.errata.report import format_entry
from regard.cli import main
from regard.errors import InputError

ENTRIES = {entry.id: entry for entry in list_errata()}


@pytest.mark.parametrize("id", ENTRIES)
def test_the_claim_fails_and_the_correction_holds(id: str) -> None:
    outcome = ENTRIES[id].run()
    assert outcome.counterexample is not None, "the claim held in every case"
    assert outcome.correction_failure is None


def test_there_are_48_entries_of_five_sources() -> None:
    assert len(ENTRIES) == 48
    assert {id.split("-")[0] for id in ENTRIES} == {"bis", "udl", "nyu", "ttic", "eth"}


def test_the_counterexample_is_the_first_case_that_fails() -> None:
    outcome = find_erratum("udl-12.1:biases").run()
    assert [trial.claim_fails for trial in outcome.trials] == [False, True, True, True]
    assert outcome.counterexample is outcome.trials[1]


def test_a_claim_that_is_true_and_a_correction_that_is_not_are_reported() -> None:
    entry = find_erratum("udl-12.1:biases")
    swapped = dataclasses.replace(
        entry, trials=lambda: [Trial(t.case, t.corrected, t.computed, t.claimed) for t in entry.trials()]
    )
    outcome = swapped.run()
    assert outcome.counterexample is None
    assert outcome.correction_failure is not None
    assert not outcome.is_proved
    text = format_entry(swapped, outcome)
    assert "no counterexample" in text
    assert "the correction gives 3 for D = 2" in text


def test_running_leaves_the_random_generator_as_it_was() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    find_erratum("udl-12.3:cancelled-permutation").run()
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1.0, 1.0 + 1e-12, True),
        (1.0, 1.001, False),
        (1, 1, True),
        (True, 1, False),
        ((1, 2), (1, 2), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2) * (1 + 1e-12), True),
        (torch.tensor([float("nan")]), torch.ones(1), False),
        (Undefined("shapes"), torch.ones(1), False),
        (Undefined("shapes"), Undefined("others"), True),
    ],
)
def test_values_are_equal_up_to_rounding(left: object, right: object, equal: bool) -> None:
    assert is_equal(left, right, 1e-9) is equal


class TestCommand:
    def test_without_an_id_it_lists_every_entry(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["errata"]) == 0
        printed = capsys.readouterr().out
        assert all(id in printed for id in ENTRIES)

    def test_a_problem_shows_its_entries_with_their_counterexamples(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["errata", "UDL-12.1"]) == 0
        printed = capsys.readouterr().out
        assert "udl-12.1:biases" in printed
        assert "N = 1, D = 2" in printed
        assert "2 of 2: the claim fails and the correction holds" in printed

    def test_an_unknown_id_is_refused_with_a_near_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["errata", "udl-12.1:bias"]) == 2
        assert "udl-12.1:biases" in capsys.readouterr().err

    def test_a_problem_is_not_one_entry(self) -> None:
        with pytest.raises(InputError, match="names 2 errata"):
            find_erratum("udl-12.1")
