"""Fashion-MNIST's package: classes in files of their own, empty rows, and a split of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import torch
from agreement import refused

from regard.errors import InputError
from regard.train.data import fashion_mnist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draws = numpy.random.default_rng(0)
    for label in range(10):
        rows = draws.integers(0, 256, (15, 784)).tolist()
        if label == 0:
            rows = [*rows[:4], [], *rows[4:], []]  # as in the package
        (tmp_path / f"{label}.json").write_text(json.dumps({"data": rows}, separators=(",", ":")))
    return tmp_path


def test_each_seventh_image_of_a_class_is_tested_and_empty_rows_are_no_images(folder: Path):
    images = fashion_mnist(folder)
    assert (len(images.train), len(images.test), images.shape) == (130, 20, (1, 28, 28))
    assert images.test.labels.bincount().tolist() == [2] * 10
    for label in (0, 7):
        rows = [row for row in json.loads((folder / f"{label}.json").read_text())["data"] if row]
        wanted = torch.tensor([rows[6], rows[13]], dtype=torch.uint8).reshape(2, 1, 28, 28)
        assert torch.equal(images.test.pixels[images.test.labels == label], wanted)
        kept = [row for number, row in enumerate(rows) if number % 7 != 6]
        assert images.train.pixels[images.train.labels == label].flatten(1).tolist() == kept


@pytest.mark.parametrize(
    "content", [b"", b'{"data":[[1,2,3]]}', b'{"data":[["x"]]}', b"[[1]]", b'{"data":[[256' + b",0" * 783 + b"]]}"]
)
def test_a_damaged_file_is_refused(folder: Path, content: bytes):
    (folder / "3.json").write_bytes(content)
    with refused(InputError, "3.json", "regard data fashion-mnist"):
        fashion_mnist(folder)


def test_a_missing_file_is_refused(folder: Path):
    (folder / "9.json").unlink()
    with refused(InputError, "9.json"):
        fashion_mnist(folder)
