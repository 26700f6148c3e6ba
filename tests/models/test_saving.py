"""A crash while saving destroys nothing, and concurrent readers see complete checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIG, assert_same, made
from safetensors import SafetensorError

from regard.errors import CheckpointError
from regard.models import GPT, GPTConfig
from regard.models.io import atomic, read_checkpoint, read_safetensors, tensors, write_folder
from regard.models.io.tensors import SINGLE, write_safetensors

# Crashes


class Crash(BaseException):
    """The power goes; nothing below may handle it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Let the process die before its `moment`-th step that changes the disk, and leave the rest undone."""
    steps = [0]

    def watched(target: object, name: str) -> None:
        act = getattr(target, name)

        def step(*arguments, **words):
            steps[0] += 1
            if steps[0] >= moment:
                raise Crash(name)
            return act(*arguments, **words)

        monkeypatch.setattr(target, name, step)

    watched(os, "replace")
    watched(os, "fsync")
    watched(tensors, "save_file")
    watched(Path, "unlink")
    watched(Path, "write_text")
    watched(shutil, "rmtree")


SAVES = {"one file": 10_000, "shards": 60}


@pytest.mark.parametrize("before", SAVES)
@pytest.mark.parametrize("after", SAVES)
def test_whenever_a_save_dies_the_old_or_the_new_checkpoint_is_there_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
):
    old, new = (CONFIG, made(1)), ({**CONFIG, "dim": 11}, made(2))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of saves need not reach the disk
    seen = set()
    for moment in range(1, 100):
        folder = tmp_path / f"{moment}"
        write_folder(folder, *old, shard_bytes=SAVES[before])
        finished = True
        with monkeypatch.context() as patch:
            crash_at(patch, moment)
            try:
                write_folder(folder, *new, shard_bytes=SAVES[after])
            except Crash:
                finished = False
        config, state = read_checkpoint(folder)
        seen.add(config["dim"])
        assert_same(state, new[1] if config["dim"] == 11 else old[1])
        # and the next save clears up, whatever was left, even if it dies soon itself
        for later in range(1, 6):
            with monkeypatch.context() as patch:
                crash_at(patch, later)
                with pytest.raises(Crash):
                    write_folder(folder, {**CONFIG, "dim": 13}, made(3), shard_bytes=SAVES[before])
            again, state = read_checkpoint(folder)
            assert again == config
            assert_same(state, new[1] if config["dim"] == 11 else old[1])
        write_folder(folder, {**CONFIG, "dim": 13}, made(3), shard_bytes=SAVES[before])
        assert not [file.name for file in folder.iterdir() if file.name.startswith(".")]
        assert read_checkpoint(folder)[0]["dim"] == 13
        assert_same(read_checkpoint(folder)[1], made(3))
        if finished:
            break
    assert finished
    assert seen == {5, 11}


def test_the_crashes_above_would_destroy_a_file_that_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_safetensors(tmp_path / SINGLE, made(1))
    monkeypatch.setattr(atomic, "write_and_sync", lambda path, write: write(tmp_path / path.name) or path)
    crash_at(monkeypatch, 2)  # the new content is written, and not yet moved
    with pytest.raises(Crash):
        write_safetensors(tmp_path / SINGLE, made(2))
    assert not (tmp_path / SINGLE).exists() or not torch.equal(read_safetensors(tmp_path / SINGLE)["a"], made(1)["a"])


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space left")

    (tmp_path / "x").write_text("old")
    with pytest.raises(OSError, match="no space"):
        atomic.write_atomically(tmp_path / "x", fail)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
@pytest.mark.parametrize("limit", SAVES.values())
def test_files_have_the_default_permissions(tmp_path: Path, mask: int, limit: int):
    before = os.umask(mask)
    try:
        write_folder(tmp_path, CONFIG, made(), shard_bytes=limit)
        write_safetensors(tmp_path / "x.safetensors", made())
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o666 & ~mask}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("limit", SAVES.values())
def test_what_a_killed_save_left_is_gone_after_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int):
    """Killed by the system while the library writes, the way it writes: to a name of its own beside its target."""
    write_folder(tmp_path, CONFIG, made(1), shard_bytes=limit)
    (tmp_path / ".mine.partial").write_text("a user's")
    (tmp_path / "model-best-of-all.safetensors").write_text("a user's")

    def killed(state: object, path: Path, metadata: object) -> None:
        (path.parent / ".tmpAbCdEf").write_bytes(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        monkeypatch.setattr(tensors, "save_file", killed)
        write_folder(tmp_path, {**CONFIG, "dim": 11}, made(2), shard_bytes=limit)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    left = atomic.find_temporary_folders(tmp_path)
    assert [file.name for file in left[0].iterdir()].count(".tmpAbCdEf") == 1
    assert_same(read_checkpoint(tmp_path)[1], made(1))
    write_folder(tmp_path, CONFIG, made(3), shard_bytes=limit)
    hidden = [name for name in names(tmp_path) if name.startswith(".")]
    assert hidden == [".mine.partial"]
    assert (tmp_path / "model-best-of-all.safetensors").exists()


def test_a_workplace_is_left_alone_while_nothing_can_be_locked_unless_it_is_old(tmp_path: Path):
    young, old = (atomic.make_temporary_folder(tmp_path) for _ in range(2))
    os.utime(old, (0, 0))
    atomic.remove_stale_folders(tmp_path, alone=False)
    assert atomic.find_temporary_folders(tmp_path) == [young]


# As the library of the format says it, and as the system does.
FULL = {
    "safetensors": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    "system": OSError(28, "No space left on device"),
}


@pytest.mark.parametrize(
    ("fails_at", "kind"), [("save_file", "safetensors"), ("save_file", "system"), ("_remove_shards", "system")]
)
def test_a_save_that_fails_leaves_no_mark_and_the_right_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str, kind: str
):
    write_folder(tmp_path, CONFIG, made(1))
    edited = {**CONFIG, "note": "by hand"}
    (tmp_path / "config.json").write_text(json.dumps(edited))

    def fail(*_: object, **__: object) -> None:
        raise FULL[kind]

    with monkeypatch.context() as patch:
        patch.setattr(tensors, fails_at, fail)
        with pytest.raises(CheckpointError, match="No space left"):
            write_folder(tmp_path, {**CONFIG, "dim": 11}, made(2))
    assert names(tmp_path) == ["config.json", SINGLE]
    config, state = read_checkpoint(tmp_path)
    switched = fails_at == "_remove_shards"  # the tensors were the new ones already
    assert config == ({**CONFIG, "dim": 11} if switched else edited)
    assert_same(state, made(2 if switched else 1))


def test_an_edited_configuration_counts_although_a_killed_save_left_its_mark(tmp_path: Path):
    write_folder(tmp_path, CONFIG, made())
    (atomic.make_temporary_folder(tmp_path) / "config.json").write_text(json.dumps({**CONFIG, "dim": 11}))
    (atomic.make_temporary_folder(tmp_path) / "config.json").write_text('{"dim": ')  # killed while it made the mark
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "dim": 7}))
    assert read_checkpoint(tmp_path)[0]["dim"] == 7
    write_safetensors(tmp_path / SINGLE, made(), {"config": "[not JSON"})
    assert read_checkpoint(tmp_path)[0]["dim"] == 7


# Saves and reads at the same time


def test_a_folder_that_is_saved_to_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path, CONFIG, made(1))
    read, times = tensors.read_with_metadata, []

    def late(path: Path):
        times.append(path)
        if len(times) == 1:  # config.json has been read, the tensors have not
            write_folder(tmp_path, {**CONFIG, "dim": 11}, made(2))
        return read(path)

    monkeypatch.setattr(tensors, "read_with_metadata", late)
    config, state = read_checkpoint(tmp_path)
    assert config["dim"] == 11
    assert_same(state, made(2))
    assert len(times) == 2


def test_readers_and_writers_at_once_see_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    write_folder(tmp_path, CONFIG, made(5))
    failures: list[BaseException] = []
    end = time.monotonic() + 1.5

    def writing(seed: int) -> None:
        try:
            while time.monotonic() < end:
                write_folder(tmp_path, {**CONFIG, "dim": seed}, made(seed), shard_bytes=60 if seed == 7 else 10_000)
        except BaseException as failure:
            failures.append(failure)

    writers = [threading.Thread(target=writing, args=(seed,)) for seed in (5, 7)]
    for writer in writers:
        writer.start()
    seen = set()
    while time.monotonic() < end:
        config, state = read_checkpoint(tmp_path)
        seen.add(config["dim"])
        assert_same(state, made(config["dim"]))
    for writer in writers:
        writer.join()
    assert not failures
    assert seen <= {5, 7}
    assert not atomic.find_temporary_folders(tmp_path)


# The tokenizer that lies beside a model


def small_gpt(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=7, context_length=5, dim=6, layers=1, heads=2))


def test_the_tokenizer_that_a_model_came_with_is_saved_with_it(tmp_path: Path):
    files = {"tokenizer.json": b'{"a": 1}', "vocab.txt": b"a\nb\n", "tokenizer.model": bytes(range(256))}
    small_gpt(1).save_pretrained(tmp_path / "a")
    for name, content in files.items():
        (tmp_path / "a" / name).write_bytes(content)
    (tmp_path / "a" / "README.md").write_text("not the model's")
    model = GPT.from_pretrained(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")  # by now it may be gone
    for layout in ("regard", "huggingface"):
        model.save_pretrained(tmp_path / layout, layout=layout)
        assert names(tmp_path / layout) == sorted(["config.json", SINGLE, *files])
        assert all((tmp_path / layout / name).read_bytes() == content for name, content in files.items())
    again = GPT.from_pretrained(tmp_path / "huggingface")
    again.save_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "vocab.txt").read_bytes() == files["vocab.txt"]


@pytest.mark.parametrize("fails_at", ["tokenizer.json", SINGLE])
def test_a_save_that_fails_keeps_the_tokenizer_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
):
    first, second = small_gpt(1), small_gpt(2)
    first.companions, second.companions = {"tokenizer.json": b"first"}, {"tokenizer.json": b"second"}
    first.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    stage = atomic.write_and_sync

    def fail(path: Path, write) -> Path:
        if path.name == fails_at:
            raise OSError(28, "No space left on device")
        return stage(path, write)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_and_sync", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            second.save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
