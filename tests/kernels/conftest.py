"""Every test here needs the compiled library, except those of a library that is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from general_plans import general_plans

from regard.kernels import library
from regard.kernels.program import best_plan, program

__all__ = ["general_plans"]  # small sizes are planned as large ones are


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    if request.path.name != "test_missing.py" and (reason := library.missing()) is not None:
        pytest.skip(f"there are no native kernels: {reason}")


def _runs_here() -> list[str]:
    """The vector kernels of this machine, best first."""
    if library.missing() is not None:
        return ["plain"]
    best, found = library.name(), []
    for name in ("avx512vnni", "avx512", "avx2", "plain"):
        if name == "avx512" and "avx512vnni" in found:  # the same code, but for products of bytes
            continue
        with contextlib.suppress(ValueError):
            library.use(name)
            found.append(name)
    library.use(best)
    return found


@contextlib.contextmanager
def _using(name: str) -> Iterator[str]:
    best = library.name()
    library.use(name)
    try:
        yield name
    finally:
        library.use(best)


@pytest.fixture
def using() -> Callable:
    """`with using(name):` runs the kernels of one instruction set, then returns to the best of this machine."""
    return _using


@pytest.fixture(params=_runs_here())
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set of vector kernels that runs on this machine."""
    with _using(request.param) as name:
        yield name


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, and puts the old one back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@contextlib.contextmanager
def _small_segments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.kernels.program.SEGMENT_AREA", 64)
        patch.setattr("regard.kernels.program.SEGMENT_DEPTH", 0)
        program.cache_clear()
        best_plan.cache_clear()
        try:
            yield
        finally:
            program.cache_clear()
            best_plan.cache_clear()


@pytest.fixture
def small_segments() -> Callable:
    """`with small_segments():` cuts the backward pass into many segments, as only very long sequences have them."""
    return _small_segments


@pytest.fixture(params=["one segment", "many segments"])
def segments(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backward pass in one segment for each head, then in many."""
    if request.param == "one segment":
        yield request.param
    else:
        with _small_segments():
            yield request.param
