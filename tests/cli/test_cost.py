"""`regard cost`: output, files and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from regard.cli import main
from regard.cli.cost_questions import QUESTIONS

MODULE = """
from torch import nn

def layer():
    return nn.Linear(7, 11)

class Wide(nn.Module):
    def __init__(self, dim=13):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        return self.down(self.up(x).relu())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a module; its imports are undone afterwards."""
    (tmp_path / "a_module_with_costs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("a_module_with_costs", None)


def told(capsys, *words: str) -> str:
    """What it prints, where it ends well and says nothing else."""
    assert main(["cost", *words]) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out


def plain(capsys, *words: str) -> dict:
    return json.loads(told(capsys, *words, "--json", "-"))


def refused(capsys, *words: str) -> str:
    assert main(["cost", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("regard: ")
    return err


# Targets


def test_a_pattern_costs_its_pairs(capsys):
    words = ("Window(128, 0)", "--tokens", "4096", "--dim", "64", "--heads", "12")
    pairs = 129 * 4096 - 128 * 129 // 2
    found = plain(capsys, *words)["quantities"]
    assert found["pairs"]["value"] == 12 * pairs
    assert found["macs"]["value"] == 2 * 64 * 12 * pairs
    out = told(capsys, *words)
    assert f"{2 * 64 * 12 * pairs:,}" in out
    assert out.startswith("Attention(pattern=Window(128, 0))  forward, float32\n")


def test_linear_is_an_attention_too(capsys):
    softmax = plain(capsys, "Full()", "--tokens", "65", "--dim", "64")["quantities"]["macs"]["value"]
    assert softmax == 2 * 65**2 * 64
    assert plain(capsys, "elu1", "--tokens", "65", "--dim", "64")["quantities"]["macs"]["value"] == softmax


def test_a_module_is_followed(folder, capsys):
    found = plain(capsys, "a_module_with_costs:Wide", "--input", "2,5,13")
    assert found["quantities"]["parameters"]["value"] == 13 * 39 + 39 + 39 * 13 + 13
    assert found["quantities"]["macs"]["value"] == 2 * 5 * 2 * 13 * 39
    assert {"up", "down"} <= set(found["parts"])
    twice = plain(capsys, "a_module_with_costs.py:Wide(17)", "--input", "2,5,17", "--step", "training")
    # The input learns nothing, so that one of the two products backward falls away in the first layer.
    assert twice["quantities"]["macs"]["value"] in (2 * 5 * 17 * 51 * 5, 2 * 5 * 17 * 51 * 6)


def test_a_layer_without_sizes_has_formulas(capsys):
    out = told(capsys, "regard.layers:MultiHeadAttention(48, 4)")
    assert "2*B*D*N*(2*D + N)" in out
    assert "9,408" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("N ")] == ["-"]


def test_steps_backends_and_numbers_are_passed_on(capsys):
    words = ("Causal()", "--tokens", "37", "--dim", "8", "--heads", "3", "--batch", "2")
    forward = plain(capsys, *words)
    assert forward["quantities"]["macs"]["value"] == 2 * 3 * 8 * 37 * 38
    square = plain(capsys, *words, "--backend", "reference")
    assert square["quantities"]["macs"]["value"] == 2 * 2 * 3 * 8 * 37**2
    backward = plain(capsys, *words, "--step", "backward", "--dtype", "float16")
    assert backward["quantities"]["macs"]["value"] == 2 * 2 * 3 * 8 * 37 * 38
    assert backward["setting"]["dtype"] == "float16"
    decode = plain(capsys, *words, "--step", "decode")
    assert decode["quantities"]["macs"]["value"] == 2 * 2 * 3 * 8 * 38
    tree = plain(capsys, *words)["quantities"]["depth"]["value"]
    chain = plain(capsys, *words, "--serial")["quantities"]["depth"]["value"]
    unstable = plain(capsys, *words, "--plain")["quantities"]["depth"]["value"]
    assert unstable < tree < chain
    assert told(capsys, *words, "--depth").rstrip().splitlines()[-1].startswith("values")


def test_everything_goes_into_a_file(capsys, tmp_path):
    file = tmp_path / "cost.json"
    assert main(["cost", "Full()", "--tokens", "16", "--dim", "8", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "quantity" in out
    assert err == f"wrote {file}\n"
    assert json.loads(file.read_text())["quantities"]["macs"] == {"formula": "2*B*H*N**2*d", "value": 2 * 16**2 * 8}


def test_memory_and_time_are_printed_on_request(capsys, monkeypatch, tmp_path):
    from regard.cost_model import roofline
    from regard.cost_model.machine import Machine

    # Measuring this machine takes seconds, and what it finds is of no matter here.
    monkeypatch.setattr(roofline, "this_machine", lambda: Machine("slow", threads=1, peak=1e9, bandwidth=1e9))
    words = ("Full()", "--tokens", "16", "--dim", "8", "--memory", "--measure")
    out = told(capsys, *words)
    assert "peak training" in out
    assert "predicted  at least" in out
    assert "measured   " in out
    found = plain(capsys, *words)
    assert found["time"]["ratio"] > 0
    assert found["time"]["measured"]["repeats"] >= 3
    assert "memory" in found


def test_a_picture_of_one_target(capsys, tmp_path):
    file = tmp_path / "one.svg"
    told(capsys, "Full()", "--tokens", "16", "--dim", "8", "--picture", str(file), "--high", "1024")
    assert "Multiply-adds against tokens" in file.read_text()


def test_a_model_of_hugging_face_in_its_own_size_and_without_weights(capsys):
    pytest.importorskip("transformers")
    found = plain(capsys, "transformers:BertModel", "--tokens", "512")
    assert found["quantities"]["parameters"]["value"] == 109_482_240
    # 12 layers: 4 D^2 + 2 D F for each token, 2 N D for each pair of them; a pooler for one token.
    macs = 12 * (512 * (4 * 768**2 + 2 * 768 * 3072) + 2 * 512**2 * 768) + 768**2
    assert found["quantities"]["macs"]["value"] == macs == 48_318_971_904
    assert found["quantities"]["pairs"]["value"] == 12 * 12 * 512**2


@pytest.mark.slow
def test_a_model_of_timm(capsys):
    pytest.importorskip("timm")
    found = plain(capsys, "timm:vit_base_patch16_224")
    assert found["quantities"]["parameters"]["value"] == 86_567_656
    assert found["quantities"]["macs"]["value"] == 17_563_828_224


# Curves


def test_curves_cross_where_linear_attention_becomes_cheaper(capsys, tmp_path):
    file = tmp_path / "out.svg"
    words = ("curve", "Full()", "Window(128, 0)", "linear", "--dim", "64", "--high", "4096", "--picture", str(file))
    out = told(capsys, *words)
    assert "65: linear costs as much as Full(), and less beyond" in out
    assert "129: linear costs as much as Window(128, 0), and less beyond" in out
    assert "Window(128, 0)" in file.read_text()
    found = json.loads(told(capsys, *words, "--json", "-"))
    assert [crossing["length"] for crossing in found["crossings"]] == [65, 129]
    assert found["curves"]["Full()"][0] == [64, 2 * 64**2 * 64]


# Words that make no sense


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["no target was given", "because", "instead"]),
        (["nowhere"], ["'nowhere' is no target", "instead"]),
        (
            ["atention", "--tokens", "7"],
            ["'atention' is no target", "nor a question", "instead  regard cost attention --help"],
        ),
        (["gpt2", "--tokens", "7"], ["'gpt2' is no target", "published model", "instead  regard cost model gpt2"]),
        (["Full()", "--tokens", "many"], ["'many' is no size: sizes are whole numbers of at least 1"]),
        (["Full()", "--tokens", "0"], ["'0' is no size"]),
        (["Full()", "--image", "2by3"], ["'2by3' is no image: rows by columns, such as 224x160, or 224"]),
        (["Full()", "--input", "a,b"], ["'a,b' is no shape: whole numbers with commas, such as 2,5,7"]),
        (["Full()", "--step", "sideways"], ["invalid choice: 'sideways'"]),
        (["Full()", "--json", "no/such/folder.json"], ["cannot be written", "there is no folder"]),
        (["Window(", "--tokens", "5"], ["because", "instead"]),
        (["Nothing(3)", "--tokens", "5"], ["Nothing", "because", "instead"]),
        (["curve", "Full()", "--low", "9", "--high", "3"], ["No length lies between 9 and 3", "instead"]),
        (["curve"], ["required"]),
        (
            ["attention", "--tokens", "5"],
            ["the following arguments are required: --width", "regard cost attention --help"],
        ),
        (["attention", "--tokens", "5", "--width", "-3"], ["regard"]),
        (["davit", "--grid", "16", "--channels", "512"], ["expected 2 arguments"]),
        (
            ["parallel", "--J", "4", "--K", "2"],
            ["number of tokens is missing or given twice", "--T 1024, or --X 32 --Y 32"],
        ),
        (["parallel", "--T", "3", "--X", "5", "--J", "4", "--K", "2"], ["asked    T=3, X=5", "because", "instead"]),
        (["parallel", "--T", "3", "--J", "3", "--K", "2"], ["asked    J=3, K=2", "3 is no multiple of 2", "--U 2"]),
        (["model", "gpt5"], ["no model is called 'gpt5'", "because", "bert-base", "transformers:Name"]),
        (["linear", "--tokens", "5", "--width", "4", "--json", "no/such.json"], ["cannot be written"]),
        (["curve", "Full()", "--picture", "a.png"], ["cannot be written as .png", "a.svg or a.html"]),
    ],
)
def test_wrong_arguments_exit_with_two_and_the_reason(folder, capsys, words, said):
    err = refused(capsys, *words)
    for part in said:
        assert part in err


def test_help_has_every_word_and_examples(capsys):
    out = told(capsys, "--help")
    for part in ("transformers:BertModel --tokens 512", "--memory", "--picture", "regard cost curve", "Exit status: 0"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 120
    for word in QUESTIONS:
        assert f"\n  {word} " in out
        assert "usage: regard cost" in told(capsys, word, "--help")
    assert "--dim" in told(capsys, "curve", "--help")
    assert main(["--help"]) == 0
    assert "regard cost transformers:BertModel" in capsys.readouterr().out


# The shell


@pytest.mark.slow
def test_piped_it_is_plain_text_of_one_width():
    run = subprocess.run(
        [sys.executable, "-m", "regard", "cost", "Causal()", "--tokens", "512", "--dim", "64"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "TERM": "xterm-256color"},
        check=True,
    )
    assert run.stderr == ""
    assert "\x1b" not in run.stdout
    assert f"{64 * 512 * 513:,}" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100


def test_a_status_is_printed_to_a_terminal_only_and_erased(capsys, monkeypatch):
    from regard.cli.output import status

    with status("following", after=0.0):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with status("following", after=3600.0):
        pass
    assert capsys.readouterr().err == ""
    import time

    with status("following", after=0.0):
        time.sleep(0.2)
    assert capsys.readouterr().err == "following ...\r\x1b[K"


# Random arguments


STRANGE = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, a, b):
        return self.layer(a) + b

class Branching(Two):
    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(self.layer(x))

class Selecting(Two):
    def forward(self, x):
        return self.layer(x[x[:, 0] > 0])

class Failing(Two):
    def forward(self, x):
        raise RuntimeError("first line\\nsecond line")

class Picky(Two):
    def forward(self, x):
        assert x.shape[1] % 5 == 0, "five at a time"
        return self.layer(x)

number = 3
"""


@pytest.fixture
def strange(folder):
    (folder / "strange.py").write_text(STRANGE)
    (folder / "broken.py").write_text("def f(:\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("strange.py:Two", ["The inputs of Two cannot be inferred", "because", "--input 1,128,512"]),
        ("strange.py:Two --input 2,3,7", ["cannot be traced", "missing 1 required positional argument: 'b'"]),
        ("strange.py:Failing --input 2,3,7", ["RuntimeError: first line", "because", "instead"]),
        ("strange.py:Picky --tokens 11", ["AssertionError: five at a time", "forward with inputs (1, 11, 7)"]),
        ("strange.py:number", ["int is neither an Attention nor a module", "because", "instead"]),
        ("strange.py:absent", ["has no 'absent'", "found", "instead"]),
        ("strange.py:Two(1,2)", ["Two(1, 2) failed", "there is no target if its constructor fails"]),
        ("broken.py:f", ["SyntaxError", "python broken.py shows where"]),
        ("absent.py:f", ["there is no file absent.py"]),
        (" ", ["no target was given"]),
        ("patterns --grid 300 300 --channels 3", ["too large", "300 x 300 patches", "because", "instead"]),
        ("model gpt2 --tokens 1025", ["longer than the context", "because", "instead"]),
        ("model gpt2 --tokens 1024 --step decode", ["longer than the context", "because", "instead"]),
        ("model gpt2 --image 224", ["GPT reads nothing that has an image", "instead  tokens=..."]),
        ("model gpt2 --tokens 7 --dim 64", ["GPT has sizes of its own", "dim=64", "instead"]),
        (
            "Full() --tokens 7 --dim 4 --backend positional",
            ["'positional' cannot be counted", "it needs a positional bias"],
        ),
    ],
)
def test_random_arguments_give_a_result_or_a_reason(strange, capsys, words, said):
    err = refused(capsys, *(words.split(" ") if words.strip() else [words]))
    assert "Traceback" not in err
    for part in said:
        assert part in err


def test_value_dependent_modules_are_executed_and_a_note_tells_it(strange, capsys):
    branch = plain(capsys, "strange.py:Branching", "--input", "2,3,7")
    assert branch["quantities"]["macs"]["value"] == 2 * 2 * 3 * 7 * 7  # zeros take the second way
    assert any("executed on zeros" in note for note in branch["notes"])
    chosen = plain(capsys, "strange.py:Selecting", "--input", "6,7")
    assert any("executed on zeros" in note for note in chosen["notes"])


def test_formulas_without_numbers_are_json_too(capsys):
    found = plain(capsys, "Full()", "--dim", "8")
    assert found["quantities"]["macs"] == {"formula": "2*B*H*N**2*d", "value": None}
    assert found["quantities"]["parameters"]["value"] == 0
    assert found["letters"]["N"]["value"] is None


def test_no_size_is_too_large_for_a_formula(capsys):
    found = plain(capsys, "Full()", "--tokens", "999999999999999999999", "--dim", "64")
    assert found["quantities"]["macs"]["value"] == 2 * 999999999999999999999**2 * 64
