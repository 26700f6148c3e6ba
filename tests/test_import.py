"""`import regard` loads what `attend` needs, and the rest when it is first used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import regard

SOURCES = Path(__file__).resolve().parent.parent / "src"
HEAVY = ("sympy", "torch._dynamo", "rich", "matplotlib", "regard.laws", "regard.cost_model", "regard.visualize")


def run_python(code: str) -> str:
    program = f"import sys\nsys.path.insert(0, {str(SOURCES)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_import_and_attend_load_nothing_heavy():
    code = f"""
import torch, regard
x = torch.randn(1, 2, 5, 8)
regard.attend(x, x, x, pattern=regard.Causal() & regard.Window(2, 0), bias=regard.Alibi(2))
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert run_python(code) == "[]"


def test_the_probe_sees_what_is_loaded():
    assert run_python(f"import regard; regard.cost; print([n for n in {HEAVY} if n in sys.modules][:1])") == "['sympy']"


def test_a_public_function_stays_one_when_its_package_is_imported():
    packages = {"cost": "cost_model", "plan": "planner", "show": "visualize", "check": "laws"}
    imports = "\n".join(f"import regard.{package}" for package in packages.values())
    assert run_python(f"{imports}\nprint([callable(getattr(regard, n)) for n in {list(packages)}])") == str([True] * 4)


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
