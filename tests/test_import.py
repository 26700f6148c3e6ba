"""`import regard` loads what `attend` needs, and the rest when it is first used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import regard

SOURCES = Path(__file__).resolve().parent.parent / "src"
HEAVY = (
    "sympy",
    "torch._dynamo",
    "rich",
    "matplotlib",
    "regard.laws",
    "regard.cost_model",
    "regard.visualize",
    "regard.book",
    "regard.lab",
    "starlette",
    "anywidget",
    "IPython",
)


PACKAGES = {"cost": "cost_model", "plan": "planner", "show": "visualize", "check": "laws"}
# What is loaded, step by step, in one process: each step prints a line.
STEPS = f"""
import sys
sys.path.insert(0, {str(SOURCES)!r})
import torch, regard
x = torch.randn(1, 2, 5, 8)
regard.attend(x, x, x, pattern=regard.Causal() & regard.Window(2, 0), bias=regard.Alibi(2))
print([name for name in {HEAVY} if name in sys.modules])
import regard.laws
print("rich" in sys.modules)
regard.cost
print("sympy" in sys.modules)
import {", ".join(f"regard.{package}" for package in PACKAGES.values())}
print(all(callable(getattr(regard, name)) for name in {list(PACKAGES)}))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    return dict(zip(("attend", "laws", "cost", "packages"), done.stdout.splitlines(), strict=True))


def test_import_and_attend_load_nothing_heavy(loaded):
    assert loaded["attend"] == "[]"


def test_rich_is_not_imported_before_something_is_printed(loaded):
    assert loaded["laws"] == "False"


def test_the_probe_sees_what_is_loaded(loaded):
    assert loaded["cost"] == "True"


def test_a_public_function_stays_one_when_its_package_is_imported(loaded):
    assert loaded["packages"] == "True"


def test_no_package_has_the_name_of_a_public_function():
    packages = {file.parent.name for file in (SOURCES / "regard").glob("*/__init__.py")}
    functions = {name for name in regard.__all__ if callable(getattr(regard, name))}
    assert not packages & functions


def test_every_public_name_exists_and_an_unknown_one_is_refused():
    assert set(regard.__all__) <= set(dir(regard))
    for name in regard.__all__:
        assert getattr(regard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'chekc'"):
        regard.chekc  # noqa: B018
