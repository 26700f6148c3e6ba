"""Counterexamples as scripts in plain torch: they fail without Regard, and pass once the fault is mended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zoo.catalogue import HOUSES
from zoo.exhibit import Exhibit

from regard.adapters.deepcopy import deepcopy
from regard.cli import main
from regard.laws import check
from regard.laws.recording import Recording, Ref

HOUSE = {exhibit.id: house.__name__.removeprefix("zoo.") for house in HOUSES for exhibit in house.EXHIBITS}
EXHIBITS = [exhibit for house in HOUSES for exhibit in house.EXHIBITS]
# Operators and layers, a cache, gradients, state, masks; and more of each, random numbers, shapes, code paths.
SAMPLE = ("AL1", "CA8", "L13-scale")
MORE = ("AL1", "PA1", "L22-running", "CA7", "L12-functional", "L23-longest", "SM1", "PA8", "KV7")
# Comparisons that are not of outputs of calls, with what is said instead.
WITHOUT = {
    "cost": "weights inside, of counts or of statistics",
    "table-precision": "weights inside, of counts or of statistics",
    "threads": "calls from several threads",
    "parameters": "replaces the parameters",
    "weights": "weights inside, of counts or of statistics",
    "history": "a new instance does not show it: it depends on earlier calls",
}

RUNNER = """
import contextlib, io, json, runpy, sys, types

class Inert:
    def __init__(self, *args, **kwargs): pass
    def __and__(self, other): return self
    __or__ = __and__
    def __invert__(self): return self

# Regard cannot be imported; its patterns, which some exhibits name as options, are nothing.
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "regard":
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
patterns = types.ModuleType("regard.patterns")
for name in ("Blocks", "Causal", "Segments", "Where", "Window"):
    setattr(patterns, name, Inert)
sys.modules["regard.patterns"] = patterns
sys.modules["regard"] = types.ModuleType("regard")
codes = {}
for path in sys.argv[1:]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except Exception as failure:
        code = f"{type(failure).__name__}: {failure}"
    codes[path] = [code, said.getvalue()]
assert not [name for name in sys.modules if name.startswith("regard.") and name != "regard.patterns"]
print(json.dumps(codes))
"""


def run_without_regard(folder: Path, scripts: dict[str, str]) -> dict[str, list]:
    """Each script's exit code and output, in one process that has never seen Regard."""
    for name, text in scripts.items():
        (folder / name).write_text(text)
    paths = [str(folder / name) for name in scripts]
    done = subprocess.run([sys.executable, "-c", RUNNER, *paths], capture_output=True, text=True, check=True)
    return {Path(path).name: said for path, said in json.loads(done.stdout.splitlines()[-1]).items()}


def scripts_of(exhibits: list[Exhibit]) -> tuple[dict[str, str], dict[str, str]]:
    """The scripts of every law that an exhibit breaks, faulty and mended; and what is said where there is none."""
    scripts, refusals = {}, {}
    for exhibit in exhibits:
        for law in exhibit.law:
            report = check(
                exhibit.build("faulty"), kind=exhibit.kind, claims=[law], only=[law], fast=True, **exhibit.options
            )
            house = HOUSE[exhibit.id]
            text = report.script(target=f'zoo.built:build("{house}", "{exhibit.id}", "faulty")')
            if text.startswith("# "):
                refusals[f"{exhibit.id} {law}"] = text
            else:
                assert '"faulty"' in text
                scripts[f"{exhibit.id}.{law}.faulty.py"] = text
                scripts[f"{exhibit.id}.{law}.twin.py"] = text.replace('"faulty"', '"twin"')
    return scripts, refusals


def assert_reproduced(codes: dict[str, list]) -> None:
    wrong = {name: said for name, said in codes.items() if said[0] != (1 if ".faulty." in name else 0)}
    assert wrong == {}


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(MORE, marks=pytest.mark.slow)], ids=["sample", "more"])
def test_counterexamples_break_without_regard_and_hold_once_mended(tmp_path, names):
    scripts, refusals = scripts_of([exhibit for exhibit in EXHIBITS if exhibit.id in names])
    assert refusals == {}
    codes = run_without_regard(tmp_path, scripts)
    assert_reproduced(codes)
    said = codes["AL1.alignment.faulty.py"][1]
    assert said.startswith("output[")
    assert "differ by" in said


@pytest.mark.slow
@pytest.mark.long
def test_every_counterexample_of_the_zoo_is_a_script_or_a_reason(tmp_path):
    scripts, refusals = scripts_of(EXHIBITS)
    assert_reproduced(run_without_regard(tmp_path, scripts))
    for name, text in refusals.items():
        assert text.count("\n") == 1
        assert any(words in text for words in WITHOUT.values()), (name, text)
    assert len(refusals) < 0.2 * len(scripts)


def test_the_command_writes_a_script(tmp_path, monkeypatch, capsys):
    module = """
        import torch
        from torch import nn

        class Attention(nn.Module):
            def __init__(self, ahead=1):
                super().__init__()
                self.ahead, self.maps = ahead, nn.Linear(7, 21)

            def forward(self, x):
                query, key, value = self.maps(x).chunk(3, -1)
                later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(self.ahead)
                return (query @ key.mT).masked_fill(later, -torch.inf).softmax(-1) @ value
    """
    lines = [line.removeprefix("        ") for line in module.splitlines()]
    (tmp_path / "ahead_of_its_script.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    words = ["check", "ahead_of_its_script.py:Attention(2)", "--claims", "causality", "--fast", "--script", "shown.py"]
    assert main(words) == 1
    assert "wrote shown.py" in capsys.readouterr().err
    text = (tmp_path / "shown.py").read_text()
    assert "import regard" not in text
    assert "ahead_of_its_script" in text
    mended = text.replace("Attention(2)", "Attention(1)")
    codes = run_without_regard(tmp_path, {"shown.py": text, "mended.py": mended})
    assert (codes["shown.py"][0], codes["mended.py"][0]) == (1, 0)


def test_missing_imports_and_unbroken_laws_give_one_line():
    def local(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    report = check(local, kind="operator", claims=["causality"], fast=True)
    assert report.script() == (
        "# causality: there is no script, because the target is a lambda or a local function, which a script cannot "
        "import; script(target='module:name')\n"
    )
    assert report.verdicts[0].script() == report.script()
    sound = check(local, kind="operator", claims=["permutation"], fast=True)
    assert sound.script() == "# there is no script, because no law is broken\n"


@pytest.mark.slow
def test_a_module_without_a_name_is_put_into_its_script_with_its_weights(tmp_path):
    layer = torch.nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
    text = check(layer, claims=["causality"], only=["causality"], fast=True).script(tmp_path / "encoder.py")
    assert "torch.load" in text
    assert run_without_regard(tmp_path, {"encoder.py": text})["encoder.py"][0] == 1


def test_recording_leaves_nothing_behind():
    import copy

    before = torch.nn.Module.__call__, copy.deepcopy, torch.autograd.backward, torch.manual_seed
    exhibit = next(exhibit for exhibit in EXHIBITS if exhibit.id == "CA8")
    method = type(exhibit.build("faulty")).forward
    check(exhibit.build("faulty"), kind=exhibit.kind, claims=["cache"], fast=True, **exhibit.options).script()
    assert (torch.nn.Module.__call__, copy.deepcopy, torch.autograd.backward, torch.manual_seed) == before
    assert type(exhibit.build("faulty")).forward is method


def test_a_copy_made_by_an_adapter_is_recorded():
    layer, recording = torch.nn.Linear(2, 3), Recording()
    recording.register(layer, Ref(0))
    with recording.active():
        other = deepcopy(layer)
    assert [step.kind for step in recording.steps] == ["copy"]
    assert recording.find(other) is not None
