"""The header of a GGUF file: named values, then a table of tensors, then their bytes.

    "GGUF"  version  number of tensors  number of values
    values      key, type, value            strings and arrays carry their length before them
    tensors     name, axes, type, offset    axes from the fastest to the slowest
    bytes       from the next multiple of `general.alignment`, 32 if it is not said

The package `gguf` has a reader too, which makes several arrays for each of the hundred thousand strings of a vocabulary
and takes seconds; this one takes a tenth.

Source: the GGUF specification of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
ALIGNMENT = 32
# The codes of struct for the numbers, by their type in the file.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# More axes than any tensor has: a larger number is a sign of damage.
MOST_AXES = 8
# More than a page of any machine, and deeper than any list of lists.
MOST_ALIGNMENT = 1 << 20
MOST_NESTING = 8


class TensorInfo(NamedTuple):
    """One row of the table of tensors: its shape slowest axis first, as numpy has it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself; `start` is counted from the beginning of the file."""

    values: dict[str, Any]
    tensors: list[TensorInfo]


def read_header(path: Path) -> Header:
    """Parse everything but the tensors; ValueError or struct.error where the file is damaged."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _HeaderReader(content).header()


class _HeaderReader:
    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = 0

    def header(self) -> Header:
        if self.bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.number("I")
        if version not in (2, 3):
            raise ValueError(
                f"it is of version {version & 0xFFFF}, or of a machine that writes bytes the other way round"
            )
        tensors, values = self.number("Q"), self.number("Q")
        found = {}
        for _ in range(values):
            key = self.string()
            found[key] = self.value(self.number("I"))
        rows = [self.tensor_info() for _ in range(tensors)]
        alignment = found.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT:
            raise ValueError(f"tensors would begin at multiples of {alignment!r}")
        data = -(-self.at // alignment) * alignment
        return Header(found, [row._replace(start=row.start + data) for row in rows])

    def tensor_info(self) -> TensorInfo:
        name, axes = self.string(), self.number("I")
        if axes > MOST_AXES:
            raise ValueError(f"{name!r} would have {axes} axes")
        shape = [self.number("Q") for _ in range(axes)]
        return TensorInfo(name, tuple(reversed(shape)), self.number("I"), self.number("Q"))

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            kind, length = self.number("I"), self.number("Q")
            if kind in NUMBERS:
                size = struct.calcsize(f"<{NUMBERS[kind]}")
                return list(struct.unpack(f"<{length}{NUMBERS[kind]}", self.bytes(size * length)))
            if depth >= MOST_NESTING:
                raise ValueError(f"arrays would lie in arrays, more than {MOST_NESTING} deep")
            return [self.value(kind, depth + 1) for _ in range(self.check_remaining(length))]
        if kind not in NUMBERS:
            raise ValueError(f"there is no type {kind}")
        return self.number(NUMBERS[kind])

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8")

    def number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self.bytes(size))[0]

    def bytes(self, count: int) -> bytes:
        start = self.at
        self.at += self.check_remaining(count)
        return self.content[start : self.at]

    def check_remaining(self, count: int) -> int:
        """A number of things that follow, each of at least a byte."""
        if count > len(self.content) - self.at:
            raise ValueError(f"it ends before {count:,} bytes that should follow byte {self.at:,}")
        return count
