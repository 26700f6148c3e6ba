"""Small checkpoints for tests of file formats, and checks of their error messages."""

from __future__ import annotations

from pathlib import Path

import torch

from regard.errors import CheckpointError

CONFIG = {"model_type": "regard.thing", "dim": 5}


def made(seed: int = 0) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=source),
        "b.c": torch.randn(7, generator=source, dtype=torch.float64),
        "half": torch.randn(11, generator=source).bfloat16(),
        "count": torch.tensor(13),
        "empty": torch.empty(0, 2),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def assert_four_parts(error: CheckpointError, *words: str) -> None:
    assert error.asked
    assert error.because
    assert error.instead
    for word in words:
        assert word in str(error)


def shards(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("model-*"))
