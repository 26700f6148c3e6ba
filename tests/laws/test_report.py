"""What is printed, written and raised when a law breaks."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import LawViolation, RegardError
from regard.laws import LAWS, Report, Verdict, Verdicts, Witness, assert_laws, check, probe
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


def witness(**fields) -> Witness:
    given = {"case": {"batch": 1, "tokens": 2}, "changed": "input[0, 1]", "place": "output[0, 0]"}
    return Witness(**{**given, "moved": 3.1e-2, "bound": 1.2e-6, "precision": "float64", **fields})


def report(*verdicts: Verdict, **fields) -> Report:
    return Report("SelfAttention(dim=7, heads=1)", "layer", Verdicts(verdicts), 7, **fields)


def broken(slug: str = "causality", **fields) -> Verdict:
    remarks = {"batch": "any size fails"}
    return Verdict(law(slug), "broken", "SelfAttention(dim=7, heads=1)", witness=witness(remarks=remarks, **fields))


# What a violation says


def test_a_violation_reads_as_the_specimen_does():
    said = violation(broken(), "regard check mymodule:attention --law causality --seed 7")
    assert str(said).split("\n") == [
        "causality - a later token changed an earlier output.",
        "  subject  SelfAttention(dim=7, heads=1)",
        "  smallest batch=1, tokens=2                           # batch: any size fails",
        "  changed  input[0, 1]  ->  output[0, 0] moved by 3.1e-02, bound 1.2e-06",
        "  replay   regard check mymodule:attention --law causality --seed 7",
    ]


def test_a_violation_is_an_assertion_and_one_of_the_family():
    said = violation(broken())
    assert isinstance(said, AssertionError)
    assert isinstance(said, RegardError)
    assert said.law == "causality"
    assert str(pickle.loads(pickle.dumps(said))) == str(said)


def test_remarks_that_say_the_same_are_said_once():
    verdict = broken()
    assert verdict.witness is not None
    verdict.witness.remarks = {"batch": "any size fails", "tokens": "any size fails"}
    assert "# batch, tokens: any size fails" in str(violation(verdict))


def test_a_precision_is_named_only_where_it_is_not_the_widest():
    assert "float64" not in str(violation(broken()))
    assert "  shows in float32" in str(violation(broken(precision="float32")))


def test_a_flaky_law_and_one_that_never_ran_say_why():
    flaky = Verdict(law(), "flaky", "f", "the same case broke the law 2 times out of 4", witness())
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


def test_only_one_of_the_claims_is_looked_at():
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


# Looking at it


def test_the_text_has_a_line_for_each_law_and_fits_its_width():
    holds = Verdict(law("permutation"), "holds", cases=23)
    silent = Verdict(law("cache"), "not applicable", reason="it has no cache " + "of any kind " * 20)
    lines = str(report(broken(), silent, holds)).split("\n")
    assert lines[0] == "SelfAttention(dim=7, heads=1)  layer, seed 7: 1 broken, 1 holds, 1 does not apply"
    table = lines[2 : lines.index("LawViolation: causality - a later token changed an earlier output.") - 1]
    assert [line.split()[:3] for line in table[2:]] == [
        ["L1", "causality", "broken"],
        ["L3", "cache", "not"],
        ["L9", "permutation", "holds"],
    ]
    assert max(len(line) for line in table) <= 100
    assert table[3].endswith("...")
    assert "23" in table[4]


def test_brackets_in_names_are_no_markup_and_nothing_is_coloured():
    found = report(broken(place="[bold]output[/bold][0, 0]"))
    found.subject = "[red]f[/red]"
    assert "[red]f[/red]" in str(found)
    assert str(found).count("[bold]output[/bold][0, 0] moved") == 2  # in the table, and below it
    assert "\x1b" not in str(found)


def test_a_report_without_a_law_says_so():
    assert str(report()) == "SelfAttention(dim=7, heads=1)  layer, seed 7: no law was asked"


def test_a_probe_says_what_was_measured():
    verdict = Verdict(law("support"), "holds", cases=5, claimed=False, measured="window: 128 keys back")
    other = Verdict(law(), "broken", witness=witness(), cases=3, claimed=False)
    text = str(report(verdict, other, probing=True))
    assert "1 of 2 laws hold" in text
    assert "yes" in text
    assert "window: 128 keys back" in text
    assert "LawViolation" not in text


def test_what_is_shown_where_there_is_no_terminal_is_the_text(capsys):
    found = report(broken())
    found.show()
    assert capsys.readouterr().out == f"{found}\n"


def test_rich_is_not_imported_before_something_is_printed():
    program = "import sys, regard, regard.laws; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


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
    assert verdict["witness"]["moved"] == "inf"
    assert verdict["witness"]["bound"] == 1.2e-6
    assert verdict["witness"]["map"] == [["nan", 0.5]]
    assert verdict["witness"]["touched"] == [[False, True]]


def test_a_map_too_large_for_json_is_left_to_the_picture():
    content = json.loads(report(broken(map=torch.zeros(67, 71))).to_json())
    assert content["verdicts"][0]["witness"]["map"] is None
