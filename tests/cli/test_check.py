"""`regard check`: output, files and exit status."""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from regard.cli import main
from regard.cli.arguments import read_option
from regard.errors import InputError
from regard.laws import LAWS
from regard.patterns import Window

MODULE = """
import math
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, ahead=1):
        super().__init__()
        self.ahead = ahead
        self.maps = nn.Linear(7, 21)

    def forward(self, x):
        query, key, value = self.maps(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(self.ahead)
        return (query @ key.mT).masked_fill(later, -math.inf).softmax(-1) @ value

def attend(query, key, value):
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value
"""
AHEAD = "a_module_to_check:Attention(2)"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a module; its imports are undone afterwards."""
    (tmp_path / "a_module_to_check.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("a_module_to_check", None)


def test_a_claim_that_holds_ends_with_zero(folder, capsys):
    assert main(["check", "a_module_to_check:Attention", "--claims", "causality,L12", "--fast"]) == 0
    out, err = capsys.readouterr()
    assert "Attention(ahead=1)  layer, seed 0: 2 hold" in out
    assert err == ""


def test_a_broken_claim_ends_with_one_and_its_replay_breaks_again(folder, capsys):
    assert main(["check", AHEAD, "--claims", "causality,determinism", "--seed", "7", "--fast"]) == 1
    first = capsys.readouterr().out
    assert "LawViolation: causality - a later token changed an earlier output." in first
    (replay,) = [line.split(maxsplit=1)[1] for line in first.splitlines() if line.startswith("  replay")]
    program, *words = shlex.split(replay)
    assert program == "regard"
    assert words[:2] == ["check", AHEAD]
    assert main(words) == 1
    again = capsys.readouterr().out
    said, _, _ = first[first.index("LawViolation") :].partition("\n\nnot checked")
    assert said == again[again.index("LawViolation") :].rstrip()
    assert "determinism" not in again.splitlines()[4:][0]


def test_one_or_several_laws_can_be_selected(folder, capsys):
    words = ["check", "a_module_to_check:attend", "--kind", "operator", "--fast", "--claims", "permutation"]
    assert main([*words, "--law", "determinism", "--law", "permutation,shape"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[4:]] == ["L9", "L12", "L23"]


def test_a_probe_reports_no_violations(folder, capsys):
    assert main(["check", AHEAD, "--probe", "--law", "causality", "--fast"]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 laws hold" in out
    assert "LawViolation" not in out


def test_reports_are_written_and_their_paths_printed(folder, capsys):
    words = ["check", AHEAD, "--claims", "causality", "--seed", "3", "--json", "a.json", "--html", "a.html"]
    assert main(words) == 1
    content = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert content["command"] == f"regard check '{AHEAD}' --claims causality"
    assert content["verdicts"][0]["replay"] == f"regard check '{AHEAD}' --claims causality --law causality --seed 3"
    assert content["options"]["claims"] == ["causality"]
    assert "a later token changed an earlier output" in Path("a.html").read_text(encoding="utf-8")
    assert capsys.readouterr().err == "wrote a.json\nwrote a.html\n"


def test_options_reach_the_subject(folder, capsys):
    words = ["check", "a_module_to_check:attend", "--claims", "determinism", "--fast", "--option"]
    assert main([*words, "heads=5"]) == 0
    assert main([*words, "hats=5"]) == 2
    assert "Unknown option 'hats'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("heads=3", 3),
        ("scale=0.5", 0.5),
        ("scale=-1e-3", -1e-3),
        ("mask=hide", "hide"),
        ("left=true", True),
        ("left=None", None),
        ("image_size=3,32,64", (3, 32, 64)),
        ("pattern=Window(3, 0)", Window(3, 0)),
    ],
)
def test_an_option_is_a_number_a_constant_a_pattern_or_a_word(text, value):
    name, found = read_option(text)
    assert name == text.split("=")[0]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["heads", "=3", "heads=", "a b=3"])
def test_what_is_no_option_is_refused(text):
    with pytest.raises(InputError, match="is not an option"):
        read_option(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check", "no target was given"),
        ("check nothing_of_this_name:f", "there is no module"),
        ("check a_module_to_check:attend --law tidiness", "there is no law 'tidiness'"),
        ("check a_module_to_check:attend --claims causality,tidiness", "there is no law 'tidiness'"),
        ("check a_module_to_check:attend --kind hat", "invalid choice: 'hat'"),
        ("check a_module_to_check:attend --kind model", "attend does not run as a"),
        ("check a_module_to_check:attend --seed x", "invalid int value"),
        ("check a_module_to_check:attend --option heads", "'heads' is not an option"),
        ("check a_module_to_check:attend --option 'pattern=Widow(3)'", "Widow"),
        ("check a_module_to_check:attend --json no/folder.json", "no/folder.json cannot be written"),
        ("check a_module_to_check:attend --html .", "it is a folder"),
        ("check a_module_to_check:attend --hat", "unrecognized arguments: --hat"),
        ("dance", "invalid choice: 'dance'"),
        ("", "the following arguments are required"),
    ],
)
def test_wrong_arguments_exit_with_two_and_without_a_traceback(folder, capsys, words, said):
    assert main(shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("regard: ")
    assert said in err
    assert "instead" in err
    assert "Traceback" not in err


def test_a_fault_of_the_checker_is_not_taken_for_a_broken_law(folder, capsys, monkeypatch):
    monkeypatch.setattr("regard.cli.targets.load_target", lambda text, seed: 1 / 0)
    assert main(["check", "a:b"]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_every_law_is_listed_with_its_equation(capsys):
    assert main(["laws"]) == 0
    out = capsys.readouterr().out
    for law in LAWS:
        assert f"{law.id:<4}{law.slug:<20}{law.equation}" in out


def test_the_laws_of_a_target_are_listed_without_a_search(folder, capsys):
    assert main(["check", AHEAD, "--list", "--law", "causality"]) == 0
    assert capsys.readouterr().out.startswith("L1  causality")
    assert main(["check", "--list"]) == 0
    assert "L23 shape" in capsys.readouterr().out


def test_help_and_version_are_no_failures(capsys):
    assert main(["--help"]) == 0
    assert "regard check transformers:GPT2LMHeadModel" in capsys.readouterr().out
    assert main(["check", "--help"]) == 0
    assert "TARGET is one of" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("regard ")


def test_the_installed_command_is_this_command(folder):
    program = Path(sys.executable).with_name("regard")
    done = subprocess.run([program, "check", "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("regard: 'nowhere' is no target.")


def test_the_package_run_as_a_program_is_this_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["regard", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("regard", run_name="__main__")
    assert capsys.readouterr().out.startswith("regard ")


def test_laws_that_were_not_checked_are_listed_and_can_be_added(folder, capsys):
    assert main(["check", AHEAD, "--fast"]) == 0
    assert "--also causality" in capsys.readouterr().out
    assert main(["check", AHEAD, "--fast", "--also", "causality"]) == 1
    out = capsys.readouterr().out
    assert "replay   regard check 'a_module_to_check:Attention(2)' --also causality --fast --law causality" in out
    assert main(["check", AHEAD, "--also", "causalty"]) == 2
    assert "there is no law 'causalty'" in capsys.readouterr().err
