"""A torchvision that does not fit the installed torch is made importable; any other is left as it is."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "mend_torchvision.py"
MARK, mend_installation = (runpy.run_path(str(TOOL))[name] for name in ("MARK", "mend_installation"))

# As in the real package: the compiled library is looked for, and an operator that only it declares gets a fake version.
EXTENSION = "import torch\n\n\ndef _has_ops():\n    return False\n"
NEEDS_OPERATORS = """
import torch
from torchvision import extension

for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}", lambda dets, scores, iou_threshold: None)
"""

# What of torch these files use, without the seconds that its import takes.
QUICK_TORCH = """
declared = set()


class library:
    class Library:
        def __init__(self, name, kind):
            self.name = name

        def define(self, schema):
            declared.add(f"{self.name}::{schema.partition('(')[0]}")

    @staticmethod
    def register_fake(name, function):
        if name not in declared:
            raise RuntimeError(f"operator {name} does not exist")
"""

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package called torchvision, of these two files, before the installed one; return its extension.py."""

    def write(package: str, extension: str) -> Path:
        folder = tmp_path / "torchvision"
        folder.mkdir()
        (folder / "__init__.py").write_text(package)
        (folder / "extension.py").write_text(extension)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delitem(sys.modules, "torchvision", raising=False)
        return folder / "extension.py"

    return write


@pytest.mark.parametrize("torch", [QUICK_TORCH, pytest.param("", marks=pytest.mark.slow)], ids=["quick", "torch"])
def test_a_torchvision_without_its_operators_is_mended_once(install: Install, torch: str):
    extension = install(NEEDS_OPERATORS, EXTENSION)
    if torch:
        extension.parent.with_name("torch.py").write_text(torch)
    linked = extension.with_name("another_environment.py")
    os.link(extension, linked)  # as installers do that keep one copy for all environments
    files = sorted(file.name for file in extension.parent.glob("*.py*"))
    assert "two operators are declared" in mend_installation()
    mended = extension.read_text()
    assert mended.startswith(EXTENSION)
    assert mended.count(MARK) == 1
    assert linked.read_text() == EXTENSION
    assert "can be imported; nothing was changed" in mend_installation()
    assert extension.read_text() == mended
    assert sorted(file.name for file in extension.parent.glob("*.py*")) == files


@pytest.mark.slow
def test_a_declared_operator_raises_when_it_is_called(install: Install):
    install(NEEDS_OPERATORS, EXTENSION)
    mend_installation()
    call = "import torch, torchvision; torch.ops.torchvision.nms(torch.ones(1, 4), torch.ones(1), 0.5)"
    called = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
    assert called.returncode != 0
    assert "NotImplementedError" in called.stderr, called.stderr


def test_a_mend_that_does_not_help_is_reported_and_not_repeated(install: Install):
    package = "raise RuntimeError('operator torchvision::roi_align does not exist')\n"
    extension = install(package, EXTENSION)
    for _ in range(2):
        assert mend_installation().startswith("torchvision still cannot be imported")
    assert extension.read_text().count(MARK) == 1


@pytest.mark.parametrize(
    ("package", "words"),
    [("", "can be imported"), ("raise ImportError('libcudart.so.12: no such file')", "not mended here: ImportError")],
)
def test_a_torchvision_that_works_or_fails_otherwise_is_left_alone(install: Install, package: str, words: str):
    extension = install(package, EXTENSION)
    before = extension.stat()
    assert words in mend_installation()
    assert extension.read_text() == EXTENSION
    after = extension.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_without_torchvision_nothing_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in mend_installation()
