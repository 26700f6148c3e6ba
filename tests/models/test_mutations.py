"""Thousands of damaged checkpoints: each is read, or refused in four parts, and none allocates absurd memory first."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import FORMATS, damage, write_checkpoint

from regard.errors import RegardError
from regard.models import DaViT, Transformer, ViT

# Cases of each format in every run, and in the slow one.
FEW, MANY = 16, 400
# Address space for one read, beyond what the process has: a broken size that is believed asks for far more.
SPARE = 4 << 30


@pytest.fixture
def little_memory():
    """Limit the address space, so that an allocation of an absurd size fails instead of swapping."""
    resource = pytest.importorskip("resource", reason="this system limits no memory")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def read_and_run(kind: type[Any], path: Path) -> None:
    """Read the model and use it once, as its first user does."""
    model = kind.from_pretrained(path)
    dtype = next(model.parameters()).dtype
    tokens = torch.zeros(1, 2).long()
    given: tuple[torch.Tensor, ...] = (tokens, tokens) if kind is Transformer else (tokens,)
    if kind in (ViT, DaViT):
        given = (torch.zeros(1, model.config.channels, *getattr(model.config, "image", (8, 8)), dtype=dtype),)
    with torch.no_grad():
        model(*given)


def run_cases(kind: str, folder: Path, cases: range) -> list[str]:
    """What ended in anything but a model or an error of ours."""
    raw = []
    reader, path = write_checkpoint(kind, folder / "whole")
    read_and_run(reader, path)  # without damage it is read
    for case in cases:
        rng = random.Random(f"{kind} {case}")
        place = folder / str(case)
        shutil.copytree(folder / "whole", place)
        what = damage(rng, kind, place)
        target = place if path.is_dir() else place / path.name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read_and_run(reader, target)
            except RegardError as error:
                if not ((error.asked or error.found) and error.because and error.instead):
                    raw.append(f"{kind} {case} ({what}): lacks a part: {error}")
            except BaseException as error:  # whatever it is, it is the finding
                first = (str(error).splitlines() or [""])[0]
                raw.append(f"{kind} {case} ({what}): {type(error).__name__}: {first[:100]}")
        shutil.rmtree(place)
    return raw


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_checkpoint_is_read_or_refused_in_four_parts(kind: str, tmp_path: Path):
    assert run_cases(kind, tmp_path, range(FEW)) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", FORMATS)
def test_many_damaged_checkpoints_are_read_or_refused_in_four_parts(kind: str, tmp_path: Path):
    assert run_cases(kind, tmp_path, range(FEW, FEW + MANY)) == []
