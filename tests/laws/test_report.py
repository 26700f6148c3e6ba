"""Tables, JSON and errors of a report."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import LawViolation, RegardError
from regard.laws import LAWS, Counterexample, Report, Verdict, Verdicts, assert_laws, check, probe
from regard.laws.report import violation


class Ahead(nn.Module):
    """Attention that sees one token too far."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.dim = dim
        self.maps = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.maps(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2)
        return (query @ key.mT).masked_fill(later, -math.inf).softmax(-1) @ value


def law(slug: str = "causality"):
    return next(law for law in LAWS if law.slug == slug)


def counterexample(**fields) -> Counterexample:
    given = {"case": {"batch": 1, "tokens": 2}, "changed": "input[0, 1]", "place": "output[0, 0]"}
    return Counterexample(**{**given, "moved": 3.1e-2, "bound": 1.2e-6, "precision": "float64", **fields})


def report(*verdicts: Verdict, **fields) -> Report:
    return Report("SelfAttention(dim=7, heads=1)", "layer", Verdicts(verdicts), 7, **fields)


def broken(slug: str = "causality", **fields) -> Verdict:
    remarks = {"batch": "fails at every size tried: 1, 2, 3"}
    return Verdict(
        law(slug), "broken", "SelfAttention(dim=7, heads=1)", counterexample=counterexample(remarks=remarks, **fields)
    )


# What a violation says


def test_a_violation_reads_as_the_specimen_does():
    said = violation(broken(), "regard check mymodule:attention --law causality --seed 7")
    assert str(said).split("\n") == [
        "causality - a later token changed an earlier output.",
        "  subject  SelfAttention(dim=7, heads=1)",
        "  smallest batch=1, tokens=2",
        "           # batch: fails at every size tried: 1, 2, 3",
        "  meaning  batch: batch size, tokens: sequence length",
        "  changed  input[0, 1]  ->  output[0, 0] moved by 3.1e-02, bound 1.2e-06",
        "  replay   regard check mymodule:attention --law causality --seed 7",
    ]


def test_a_violation_is_an_assertion_and_one_of_the_family():
    said = violation(broken())
    assert isinstance(said, AssertionError)
    assert isinstance(said, RegardError)
    assert said.law == "causality"
    assert str(pickle.loads(pickle.dumps(said))) == str(said)


def test_equal_remarks_are_merged():
    verdict = broken()
    assert verdict.counterexample is not None
    verdict.counterexample.remarks = {
        "batch": "fails at every size tried: 1, 2",
        "tokens": "fails at every size tried: 1, 2",
    }
    assert "# batch, tokens: fails at every size tried: 1, 2" in str(violation(verdict))


def test_a_precision_is_named_only_where_it_is_not_the_widest():
    assert "float64" not in str(violation(broken()))
    assert "  shows in float32" in str(violation(broken(precision="float32")))


def test_a_flaky_law_and_one_that_never_ran_say_why():
    flaky = Verdict(law(), "flaky", "f", "the same case broke the law 2 times out of 4", counterexample())
    assert "  flaky    the same case broke the law 2 times out of 4" in str(violation(flaky))
    refused = Verdict(law(), "broken", "f", "it refused every case: ValueError: no")
    assert "  because  it refused every case: ValueError: no" in str(violation(refused))
    assert "smallest" not in str(violation(refused))


# How to see it again


def test_a_replay_in_python_names_what_was_given_and_breaks_again():
    torch.manual_seed(3)
    target = Ahead()
    found = check(target, claims=["causality"], seed=7)
    (said,) = found.violations
    assert said.parts["replay"] == 'check(target, claims=["causality"], seed=7)'
    again = eval(said.parts["replay"], {"check": check, "target": target})
    assert [str(other) for other in again.violations] == [str(said)]


def test_a_replay_keeps_the_other_claims_in_view():
    found = report(broken(), asked={"kind": "layer", "claims": ["causality", "cache"], "channels": 5}, fast=True)
    assert found.replay(found.verdicts[0]) == (
        'check(target, kind="layer", channels=5, claims=["causality", "cache"], only=["causality"], seed=7, fast=True)'
    )
    assert report(broken()).replay(broken()) == 'check(target, only=["causality"], seed=7)'


def test_a_replay_of_the_shell_is_its_command():
    found = report(broken(), command="regard check mymodule:attention")
    assert found.replay(broken()) == "regard check mymodule:attention --law causality --seed 7"


def test_only_one_of_the_claims_is_checked():
    found = check(Ahead(), claims=["causality", "permutation"], only=["permutation"], fast=True)
    assert [verdict.slug for verdict in found.verdicts] == ["permutation"]


# Raising it


def test_assert_laws_raises_with_every_broken_law_and_returns_the_report_otherwise():
    with pytest.raises(LawViolation, match="causality - a later token") as caught:
        assert_laws(Ahead(), claims=["causality", "permutation"], seed=5)
    assert [other.law for other in caught.value.others] == ["permutation"]
    assert "\n\nLawViolation: permutation - " in str(caught.value)
    assert assert_laws(regard.attend, kind="operator", claims=["permutation"]).ok


def test_nothing_is_accused_by_a_probe():
    found = probe(Ahead(), laws=["causality"])
    assert not found.ok
    assert found.violations == []
    found.require()


# Output formats


def test_the_text_has_a_line_for_each_law_and_fits_its_width():
    holds = Verdict(law("permutation"), "holds", cases=29, tried=23)
    reason = "it has no cache " + "of any kind " * 20 + "but moved output[0, 3] by 1.234e-05, bound 6.789e-10"
    silent = Verdict(law("cache"), "not applicable", reason=reason)
    lines = str(report(broken(), silent, holds)).split("\n")
    assert lines[0] == "SelfAttention(dim=7, heads=1)  layer, seed 7: 1 broken, 1 holds, 1 does not apply"
    table = lines[2 : lines.index("LawViolation: causality - a later token changed an earlier output.") - 1]
    assert [line.split()[:3] for line in table[2:] if line.startswith("L")] == [
        ["L1", "causality", "broken"],
        ["L3", "cache", "not"],
        ["L9", "permutation", "holds"],
    ]
    assert max(len(line) for line in table) <= 100
    assert "..." not in "".join(table)
    assert " ".join(" ".join(line.split()) for line in table[4:-1]).endswith(" ".join(reason.split())[-200:])
    assert table[-1].split()[-1] == "23"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_and_no_index_is_cut_at_any_width(width):
    from regard.laws.table import text

    lines = text(report(broken(place="gradient of query[13, 141]"), broken("padding")), width).split("\n")
    for whole in ("query[13, 141]", "3.1e-02", "1.2e-06"):
        assert any(whole in line for line in lines[: lines.index("likeliest cause: causality")])


# Several broken laws


def test_the_likeliest_cause_comes_first_and_its_consequences_name_it():
    found = report(broken("padding"), broken("determinism"), broken("statelessness"))
    assert [said.law for said in found.violations] == ["statelessness", "determinism", "padding"]
    assert found.violations[0].parts["likely"] == "probably the cause; determinism, padding may follow from it"
    assert found.violations[1].parts["likely"] == "probably follows from statelessness"
    assert "likeliest cause: statelessness" in str(found)
    assert json.loads(found.to_json())["causes"][2] == {"law": "padding", "follows_from": "statelessness"}
    assert "Likeliest cause: statelessness" in found.to_html()
    with pytest.raises(LawViolation, match=r"^statelessness"):
        found.require()


def test_one_broken_law_has_no_cause_but_itself():
    found = report(broken())
    assert "likely" not in found.violations[0].parts
    assert "likeliest" not in str(found)


# What was not checked


def test_every_law_that_was_left_out_is_listed_with_why_and_what_would_check_it():
    found = check(Ahead(), fast=True)
    named = {verdict.slug for verdict in found.verdicts} | {left.slug for left in found.unchecked}
    assert named == {each.slug for each in LAWS} | {"reference"}
    (left,) = [left for left in found.unchecked if left.slug == "causality"]
    assert (left.flag, left.argument) == ("--also causality", 'also=["causality"]')
    (without,) = [left for left in found.unchecked if left.slug == "alignment"]
    assert without.reason == "does not apply: it is not an operator on queries, keys and values"
    assert without.flag == ""
    for shown in (str(found), found.to_html()):
        assert "causality" in shown
        assert "attention may look ahead" in " ".join(shown.split())
    assert "causality" in [left["law"] for left in json.loads(found.to_json())["unchecked"]]


def test_a_law_that_is_claimed_besides_is_checked():
    found = check(Ahead(), claims=["determinism"], also=["causality"], fast=True)
    assert [verdict.slug for verdict in found.verdicts] == ["causality", "determinism"]
    assert "causality" in found.failed
    assert "causality" not in [left.slug for left in found.unchecked]
    assert found.replay(found.verdicts["causality"]) == (
        'check(target, also=["causality"], claims=["determinism"], only=["causality"], fast=True)'
    )
    with pytest.raises(LawViolation, match=r"^causality"):
        assert_laws(Ahead(), claims=["determinism"], also=["causality"])


def test_checking_one_law_does_not_list_the_others():
    assert check(Ahead(), only=["causality"], fast=True).unchecked == []


def test_brackets_in_names_are_no_markup_and_nothing_is_coloured():
    found = report(broken(place="[bold]output[/bold][0, 0]"))
    found.subject = "[red]f[/red]"
    assert "[red]f[/red]" in str(found)
    assert str(found).count("[bold]output[/bold][0, 0] moved") == 2  # in the table, and below it
    assert "\x1b" not in str(found)


def test_a_report_without_laws():
    assert str(report()) == "SelfAttention(dim=7, heads=1)  layer, seed 7: no law was checked"


def test_a_probe_prints_measurements():
    verdict = Verdict(law("support"), "holds", cases=5, claimed=False, measured="window: 128 keys back")
    other = Verdict(law(), "broken", counterexample=counterexample(), cases=3, claimed=False)
    text = str(report(verdict, other, probing=True))
    assert "1 of 2 laws hold" in text
    assert "yes" in text
    assert "window: 128 keys back" in text
    assert "LawViolation" not in text


def test_what_is_shown_where_there_is_no_terminal_is_the_text(capsys):
    found = report(broken())
    found.show()
    assert capsys.readouterr().out == f"{found}\n"


# JSON


def test_json_comes_back_with_its_numbers(tmp_path):
    odd = broken(moved=math.inf, map=torch.tensor([[math.nan, 0.5]]), touched=torch.tensor([[False, True]]))
    found = report(odd, asked={"kind": None, "pattern": regard.Causal()})
    text = found.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == text
    content = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert content["options"] == {"kind": None, "pattern": "Causal()"}
    assert set(content["versions"]) == {"regard", "torch", "python"}
    assert (content["ok"], content["seed"]) == (False, 7)
    (verdict,) = content["verdicts"]
    assert (verdict["law"], verdict["id"], verdict["outcome"]) == ("causality", "L1", "broken")
    assert verdict["counterexample"]["moved"] == "inf"
    assert verdict["counterexample"]["bound"] == 1.2e-6
    assert verdict["counterexample"]["map"] == [["nan", 0.5]]
    assert verdict["counterexample"]["touched"] == [[False, True]]


def test_a_map_too_large_for_json_is_left_to_the_picture():
    content = json.loads(report(broken(map=torch.zeros(67, 71))).to_json())
    assert content["verdicts"][0]["counterexample"]["map"] is None
