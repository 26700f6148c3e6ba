"""Every public name has a docstring, and its example runs."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import regard.calculus

MODULES = [f"regard.calculus.{module.name}" for module in pkgutil.iter_modules(regard.calculus.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_run(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("name", regard.calculus.__all__)
def test_every_public_name_is_documented(name):
    thing = getattr(regard.calculus, name)
    text = inspect.getdoc(thing)
    if inspect.isfunction(thing):
        assert all(part in text for part in ("Source:", "here we differ", ">>>")), name
    assert len(text.splitlines()[0]) < 110
