"""Matrices of answers: read from .csv, .npy, .json or as text, and compared entry by entry."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy

from regard.book.questions.base import Question, Sizes
from regard.book.verdict import Verdict
from regard.errors import AnswerError

MOST_BYTES = 10_000_000
MOST_NUMBERS = 1_000_000
SUFFIXES = (".csv", ".npy", ".json")


def is_matrix_file(text: str) -> bool:
    """Whether an answer names a file of a matrix."""
    return len(text) < 4_096 and text.strip().lower().endswith(SUFFIXES)


def read_matrix(text: str) -> numpy.ndarray:
    """The matrix in a file, or in brackets as `[[1, 2], [3, 4]]`; pickled data is refused."""
    try:
        if is_matrix_file(text):
            found = _read_file(Path(text.strip()))
        elif len(text) > MOST_BYTES:
            raise ValueError(f"it has {len(text):,} characters")
        else:
            found = numpy.array(json.loads(text), dtype=numpy.float64)
    except (OSError, ValueError, TypeError, RecursionError, OverflowError) as failure:
        raise AnswerError(
            "The matrix cannot be read.",
            asked=repr(text if len(text) <= 60 else f"{text[:57]}..."),
            because=str(failure).split("\n")[0][:160] or type(failure).__name__,
            instead="a file of numbers, answer.csv, answer.npy or answer.json, or [[1, 2], [3, 4]]",
        ) from failure
    return found


def _read_file(path: Path) -> numpy.ndarray:
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"the file has {size:,} bytes, at most {MOST_BYTES:,} are read")
    if path.suffix.lower() == ".npy":
        with path.open("rb") as file:
            numpy.lib.format.read_magic(file)
            shape, _, dtype = numpy.lib.format.read_array_header_1_0(file)
        # The header alone may claim any size.
        if math.prod(shape) > MOST_NUMBERS or dtype.kind not in "fiub":
            raise ValueError(f"it is not a matrix of at most {MOST_NUMBERS:,} real numbers")
        return numpy.load(path, allow_pickle=False).astype(numpy.float64)
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".json":
        return numpy.array(json.loads(text), dtype=numpy.float64)
    rows = [line.replace(";", ",").split(",") for line in text.splitlines() if line.strip()]
    return numpy.array([[float(cell) for cell in row] for row in rows])


def grade_matrix(question: Question, found: numpy.ndarray, sizes: Sizes) -> Verdict:
    """The verdict on a matrix for given sizes."""
    assert question.solve is not None
    expected = as_array(question.solve(sizes))
    return compare_arrays(
        question, found, expected, {name: as_array(solve(sizes)) for name, solve in question.conventions.items()}
    )


def compare_arrays(
    question: Question,
    found: numpy.ndarray,
    expected: numpy.ndarray,
    conventions: dict[str, numpy.ndarray],
    where: str = "",
) -> Verdict:
    """The verdict on an array; rows for columns is a convention, unless the question names it otherwise."""
    if are_close(found, expected, question.tolerance):
        return Verdict("right", f"all {expected.size} numbers")
    for name, other in conventions.items():
        if are_close(found, other, question.tolerance):
            return Verdict("convention", name)
    if expected.ndim == 2 and are_close(found, expected.T, question.tolerance):
        return Verdict("convention", "rows and columns are exchanged")
    squeezed = numpy.squeeze(found)
    if squeezed.shape != numpy.squeeze(expected).shape:
        return Verdict("wrong", "the shape differs", where or "shape", str(expected.shape), str(found.shape))
    wrong = ~_close(
        numpy.broadcast_to(found, expected.shape) if found.shape == expected.shape else found.reshape(expected.shape),
        expected,
        question.tolerance,
    )
    index = tuple(int(part) for part in numpy.argwhere(wrong)[0])
    place = f"entry {', '.join(str(part + 1) for part in index)}"
    share = f"{int(wrong.sum())} of {expected.size} numbers differ"
    flat = found.reshape(expected.shape)
    return Verdict(
        "wrong", share, f"{where}, {place}" if where else place, f"{expected[index]:.8g}", f"{flat[index]:.8g}"
    )


def as_array(value: Any) -> numpy.ndarray:
    return numpy.asarray(value, dtype=numpy.float64)


def are_close(found: numpy.ndarray, expected: numpy.ndarray, tolerance: float) -> bool:
    """Equal shapes but for axes of length one, and every entry within a relative tolerance."""
    if numpy.squeeze(found).shape != numpy.squeeze(expected).shape:
        return False
    return bool(_close(found.reshape(expected.shape), expected, tolerance).all())


def _close(found: numpy.ndarray, expected: numpy.ndarray, tolerance: float) -> numpy.ndarray:
    # Each entry on its own scale: 1e-45 is not 0. A tiny allowance for entries that are 0 in exact arithmetic.
    return numpy.isfinite(found) & (numpy.abs(found - expected) <= tolerance * numpy.abs(expected) + 1e-300)
