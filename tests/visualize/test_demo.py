"""The demo as a program: interruption, and damaged folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from regard.errors import CheckpointError
from regard.train import checkpoint

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
two_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core trains one after the other")


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    return demo


def wait_until(true, seconds=90):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def learned(folder) -> int:
    """Epochs that are written down."""
    path = folder / "history.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else -1


def is_free(folder) -> bool:
    try:
        with checkpoint.lock_folder(folder):
            return True
    except CheckpointError:
        return False


@two_cores
@pytest.mark.slow
def test_the_other_process_keeps_what_it_has_when_this_one_is_interrupted(demo, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()

    def interrupted():
        with demo.train_beside("vit", folder):
            wait_until(lambda: learned(folder / "vit") >= 0)
            assert not is_free(folder / "vit")
            with pytest.raises(CheckpointError, match="in use by another"):
                demo.discard_training(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert is_free(folder / "vit")
    (newest,) = checkpoint.find_checkpoints(folder / "vit")
    assert checkpoint.read_position(newest).step > 0  # it was stopped within an epoch, and lost no step of it
    assert not (folder / "vit" / "model").exists()


PROGRAM = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import demo
with demo.train_beside("vit", pathlib.Path(sys.argv[2])):
    time.sleep(600)
"""


@two_cores
@pytest.mark.slow
def test_the_other_process_stops_when_this_one_is_killed(demo, tmp_path):
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(EXAMPLES), str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: learned(tmp_path / "vit") >= 0)
    finally:
        program.kill()
    assert program.wait() == -signal.SIGKILL
    wait_until(lambda: is_free(tmp_path / "vit"), 20)
    epochs = learned(tmp_path / "vit")
    assert epochs < demo.VIT.epochs
    time.sleep(0.5)
    assert learned(tmp_path / "vit") == epochs


@pytest.mark.slow
@two_cores
def test_a_failed_subprocess_is_repeated_in_the_foreground(demo, tmp_path):
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "thesis.txt").write_text("years of work")
    with demo.train_beside("vit", tmp_path):
        pass
    with pytest.raises(CheckpointError, match="not empty"):
        demo.train_model("vit", tmp_path)
    assert [path.name for path in (tmp_path / "vit").iterdir()] == ["thesis.txt"]


def test_a_damaged_cnn_is_trained_anew(demo, tmp_path, capsys):
    from demo_parts import convolution

    file, few = tmp_path / "cnn.safetensors", demo.select_digits()
    network, _ = convolution.learned(few, file, 1)
    whole = file.read_bytes()
    assert list(tmp_path.iterdir()) == [file]
    for harm in (lambda: file.write_bytes(whole[:500]), lambda: save_file({"a": network[0].weight.detach()}, file)):
        harm()
        again, _ = convolution.learned(few, file, 1)
        assert "trained anew" in capsys.readouterr().out
        assert all((a == b).all() for a, b in zip(network.parameters(), again.parameters(), strict=True))
    convolution.learned(few, file, 1)
    assert capsys.readouterr().out == ""


def test_a_folder_without_write_permission_is_reported(demo, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("a letter")
    for words in ([], ["--fresh"]):
        monkeypatch.setattr(sys, "argv", ["demo.py", "--quick", *words, "--out", str(tmp_path / "file")])
        assert demo.main() == 2
        assert "--out" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "a letter"
