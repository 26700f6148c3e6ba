"""A Sphinx extension: docstrings of this package, plain text with code as in Markdown, as reStructuredText.

`name`, fenced and indented blocks are code; sections such as `Args:` and lines `name: what it is` become lists.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$")
TITLES = {"Args": "Arguments", "Example": "", "Examples": ""}
FENCE = re.compile(r"^\s*```")
ITEM = re.compile(r"^(?P<names>\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*):\s+(?P<text>\S.*)$")
# Code between backticks, emphasis, or a sign that reStructuredText would take for markup.
INLINE = re.compile(
    r"(?P<ticks>`+)(?P<code>.+?)(?P=ticks)(?=(?P<after>\w?))|(?P<kept>(?<![\w*])\*\w[^*\n]*\w\*(?![\w*]))|(?P<sign>[*|\\])|(?P<name>\b\w*_)(?!\w)",
    re.DOTALL,
)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def process(app: Any, kind: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    summary = next((index for index, line in enumerate(lines) if not line.strip()), len(lines))
    lines[:] = [*escape("\n".join(lines[:summary])).split("\n"), "", *to_restructured_text(lines[summary:])]


def to_restructured_text(lines: list[str]) -> list[str]:
    """The lines of a docstring below its first sentence, block by block, each with an empty line after it."""
    made: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if not line.strip():
            index += 1
            continue
        if FENCE.match(line):
            end = next((i for i in range(index + 1, len(lines)) if FENCE.match(lines[i])), len(lines))
            made += make_literal(lines[index + 1 : end])
            index = end + 1
        elif is_doctest(line):
            end = find_end(lines, index, lambda text: not text.strip())
            made += [*textwrap.dedent("\n".join(lines[index:end])).split("\n"), ""]
            index = end
        elif match := SECTION.match(line):
            end = find_end(lines, index + 1, lambda text: bool(text[:1].strip()) or is_doctest(text))
            title = TITLES.get(match[1], match[1])
            made += [f"**{title}**", ""] if title else []
            made += to_restructured_text(textwrap.dedent("\n".join(lines[index + 1 : end])).split("\n"))
            index = end
        elif ITEM.match(line) and (end := find_end_of_items(lines, index)):
            made += make_items(lines[index:end])
            index = end
        elif line[:1] == " ":
            end = find_end(lines, index, lambda text: bool(text[:1].strip()) or is_doctest(text))
            made += make_literal(lines[index:end])
            index = end
        else:
            end = find_end(
                lines, index + 1, lambda text: not text.strip() or text[:1] == " " or bool(FENCE.match(text))
            )
            made += [*escape("\n".join(lines[index:end])).split("\n"), ""]
            index = end
    return made


def find_end(lines: list[str], start: int, is_end: Callable[[str], bool]) -> int:
    """The index of the first line after `start` that does not belong to the block any more."""
    return next((index for index in range(start, len(lines)) if is_end(lines[index])), len(lines))


def find_end_of_items(lines: list[str], start: int) -> int:
    """The index after a list of `name: text` with indented continuations; 0 if a line makes it a paragraph."""
    end = find_end(lines, start, lambda text: not text.strip())
    return end if all(ITEM.match(line) or line[:1] == " " for line in lines[start:end]) else 0


def is_doctest(line: str) -> bool:
    return line.lstrip().startswith(">>>")


def make_literal(lines: list[str]) -> list[str]:
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    return ["::", "", *(f"    {line}" for line in text.split("\n")), ""] if text.strip() else []


def make_items(lines: list[str]) -> list[str]:
    """`name: text` with indented continuations as a list."""
    made: list[str] = []
    for line in lines:
        match = ITEM.match(line)
        if match is not None:
            names = ", ".join(f"``{name.strip()}``" for name in match["names"].split(","))
            made.append(f"- {names}: {match['text']}")
        else:
            made[-1] += f"\n{line.strip()}"
    return [part for item in made for part in (escape_item(item)).split("\n")] + [""]


def escape_item(item: str) -> str:
    head, colon, text = item.partition("``: ")
    return f"{head}{colon}{escape(text)}".replace("\n", "\n  ")


def escape(text: str) -> str:
    """Prose: `code` as ``code``, and signs that are markup elsewhere escaped."""

    def replace(match: re.Match[str]) -> str:
        if match["code"] is not None:
            code = " ".join(match["code"].split())
            before = "\\ " if match.start() and text[match.start() - 1].isalnum() else ""
            return f"{before}``{code}``" + ("\\ " if match["after"] else "")
        if match["kept"]:
            return match["kept"]
        return f"\\{match['sign']}" if match["sign"] else f"{match['name'][:-1]}\\_"

    return INLINE.sub(replace, text)
