"""A page of the book: front matter, prose and code blocks, parsed from Markdown.

---
id: udl-12.1
title: Parameters of self-attention
topic: counts
source: Prince, Understanding Deep Learning, problem 12.1
---
There are $3D^2$ weights, for $D = 4$ that is {{ weights }}.

```python
weights = 3 * 4**2
```

```python check
assert weights == 48
```
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from regard.errors import PageError

REQUIRED = ("id", "title", "topic", "source")
OPTIONAL = ("slow",)
IDENTIFIER = re.compile(r"[a-z]+-[a-zA-Z0-9.]+")
FENCE = re.compile(r"^(`{3,}|~{3,})\s*([^`]*)$")


class Prose(NamedTuple):
    """Markdown between code blocks, and the line of the file where it begins."""

    text: str
    line: int


class Code(NamedTuple):
    """A code block, the line of its first statement, and whether the rendered page leaves it out."""

    source: str
    line: int
    hidden: bool = False


@dataclass(frozen=True)
class Page:
    """A parsed page.

    Attributes:
        id: the problem, such as `udl-12.1`.
        topic: a word by which the list of problems is grouped.
        source: the book or course, and the number of the problem there.
        slow: whether it takes seconds.
        path: the file, for messages.
    """

    id: str
    title: str
    topic: str
    source: str
    slow: bool = False
    parts: tuple[Prose | Code, ...] = field(default=(), repr=False)
    path: str = field(default="<page>", repr=False)


def parse_page(text: str, path: str = "<page>") -> Page:
    """The page of a Markdown text; `path` is named in messages."""
    lines = text.split("\n")
    fields, first = _read_front_matter(lines, path)
    return Page(
        id=fields["id"],
        title=fields["title"],
        topic=fields["topic"],
        source=fields["source"],
        slow=fields.get("slow") == "true",
        parts=tuple(_split_parts(lines, first, path)),
        path=path,
    )


def _read_front_matter(lines: list[str], path: str) -> tuple[dict[str, str], int]:
    """The fields between the two `---` lines, and the index of the line after them."""
    end = next((index for index, line in enumerate(lines) if index and line.rstrip() == "---"), None)
    if lines[0].rstrip() != "---" or end is None:
        raise _refuse(path, 1, "the file does not begin with fields between two lines ---", "---\nid: udl-12.1\n---")
    fields: dict[str, str] = {}
    for number, line in enumerate(lines[1:end], 2):
        name, colon, value = line.partition(":")
        name, value = name.strip(), _remove_quotes(value.strip())
        if not line.strip():
            continue
        if not colon or name not in REQUIRED + OPTIONAL or name in fields or not value:
            names = ", ".join(REQUIRED + OPTIONAL)
            raise _refuse(path, number, f"{line.strip()!r} is not one of the fields {names}, each once", "title: ...")
        fields[name] = value
    for name in REQUIRED:
        if name not in fields:
            raise _refuse(path, 1, f"the field {name} is missing", f"{name}: ...")
    if not IDENTIFIER.fullmatch(fields["id"]) or fields.get("slow") not in (None, "true", "false"):
        raise _refuse(path, 1, "an id is lower-case, slow is true or false", "id: udl-12.1")
    return fields, end + 1


def _split_parts(lines: list[str], first: int, path: str) -> list[Prose | Code]:
    """Prose and Python blocks in turn; blocks of other languages stay in the prose."""
    parts: list[Prose | Code] = []
    prose: list[str] = []
    start = index = first
    while index < len(lines):
        opened = FENCE.match(lines[index])
        if opened is None:
            prose.append(lines[index])
            index += 1
            continue
        close = _find_close(lines, index, opened[1])
        if close is None:
            raise _refuse(path, index + 1, "the code block is not closed", f"a line {opened[1]}")
        info = opened[2].split()
        if info[:1] != ["python"]:
            prose += lines[index : close + 1]
        elif info not in (["python"], ["python", "check"]):
            raise _refuse(path, index + 1, f"{' '.join(info)!r} is not a kind of block", "```python or ```python check")
        else:
            parts += _as_prose(prose, start)
            prose, start = [], close + 1
            parts.append(Code("\n".join(lines[index + 1 : close]), index + 2, hidden="check" in info))
        index = close + 1
    return parts + _as_prose(prose, start)


def _find_close(lines: list[str], index: int, fence: str) -> int | None:
    """The index of the line that closes the block that is opened at `index`."""
    for later in range(index + 1, len(lines)):
        line = lines[later].rstrip()
        if line.startswith(fence) and not line.strip(fence[0]):
            return later
    return None


def _as_prose(lines: list[str], start: int) -> list[Prose | Code]:
    return [Prose("\n".join(lines).strip("\n"), start + 1)] if any(line.strip() for line in lines) else []


def _remove_quotes(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _refuse(path: str, line: int, because: str, instead: str) -> PageError:
    return PageError("The page cannot be parsed.", found=f"{path}:{line}", because=because, instead=instead)
