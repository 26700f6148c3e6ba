"""Pieces of text: how a document larger than memory is streamed, and how documents are divided into units."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Characters of a piece, and how many of them are searched for a place to cut.
PIECE, SEARCHED = 1 << 20, 1 << 16
# Where BPE and WordPiece give the same tokens with and without a cut: after a single newline, before a single space.
CUT = re.compile(r"(?<=\S)\n(?=\S)|(?<=\S)(?= \S)")
# A sentence ends with a full stop, a question mark or an exclamation mark, closing quotes and brackets, a space, and
# what can begin another sentence; or with a blank line.
SENTENCE_END = re.compile(
    r"\n[ \t\r]*\n\s*|(?<=[.!?…])(?P<quotes>[\"'”’)\]_]*)\s+(?=[\"'“‘(\[_`]*[A-Z0-9\u00C0-\u00DE])"
)
BLANK_LINES, LINE_BREAK = re.compile(r"\n[ \t\r]*\n\s*"), re.compile(r"\r?\n")
LAST_WORD = re.compile(r"([\w.]*)\.$")
# Words with a full stop that end no sentence.
ABBREVIATIONS = frozenset(
    (
        "mr", "mrs", "ms", "dr", "prof", "st", "rev", "hon", "gen", "col", "capt", "lt", "sgt", "maj", "jr", "sr", "vs",
        "etc", "e.g", "i.e", "cf", "no", "vol", "p", "pp", "ed", "inc", "ltd", "co",
    )
)  # fmt: skip


class Piece(NamedTuple):
    """A part of a document: `is_last` if it ends the document, `ends_unit` if it ends a unit of it."""

    text: str
    is_last: bool
    ends_unit: bool


def cut_document(blocks: Iterable[str]) -> Iterator[Piece]:
    """One document, given as consecutive strings of any size, in pieces of about a million characters."""
    pending, size = [], 0
    for block in blocks:
        pending.append(block)
        size += len(block)
        if size <= PIECE:
            continue
        text = "".join(pending)
        while len(text) > PIECE:
            cut = find_cut(text[:PIECE])
            yield Piece(text[:cut], False, False)
            text = text[cut:]
        pending, size = [text], len(text)
    yield Piece("".join(pending), True, True)


def find_cut(text: str) -> int:
    """The last place where a text can be cut without changing its tokens; its end if there is none nearby."""
    first = max(len(text) - SEARCHED, 0)
    places = [found.end() for found in CUT.finditer(text, first)]
    return places[-1] if places else len(text)


def split_units(pieces: Iterable[Piece], unit: str) -> Iterator[Piece]:
    """The same documents with the boundaries of units: "document", "paragraph", "line" or "sentence".

    Units are stripped of white space around them, and those without text are left out, except whole documents.
    """
    if unit == "document":
        yield from pieces
        return
    pending = ""
    for piece in pieces:
        text, start = pending + piece.text, 0
        for end, following in find_boundaries(text, unit):
            if text[start:end].strip():
                yield Piece(_clean(text[start:end], unit), False, True)
            start = following
        pending = text[start:]  # it may go on in the next piece
        if piece.is_last:
            yield Piece(_clean(pending, unit), True, True)
            pending = ""


def find_boundaries(text: str, unit: str) -> Iterator[tuple[int, int]]:
    """Where units end within a text, and where the following ones begin."""
    if unit == "sentence":
        yield from _find_sentence_ends(text)
    else:
        for found in (LINE_BREAK if unit == "line" else BLANK_LINES).finditer(text):
            yield found.span()


def _clean(text: str, unit: str) -> str:
    return " ".join(text.split()) if unit == "sentence" else text.strip()


def split_sentences(text: str) -> list[str]:
    """The sentences of a text; line breaks within a sentence become spaces.

        >>> split_sentences('"Stop!" said Mr. Hall. He had\\nseen it.  It was 3.5 feet long.')
        ['"Stop!" said Mr. Hall.', 'He had seen it.', 'It was 3.5 feet long.']

    A rule, not a model: a sentence ends with . ! or ?, not after a known abbreviation or a single letter, and the next
    one begins with a capital letter, a digit or a quotation mark. A blank line ends a sentence, too.
    """
    units = split_units([Piece(text, True, True)], "sentence")
    return [piece.text for piece in units if piece.text]


def _find_sentence_ends(text: str) -> Iterator[tuple[int, int]]:
    for found in SENTENCE_END.finditer(text):
        quotes = found.group("quotes")
        if quotes is None:  # a blank line
            yield found.span()
            continue
        if text[found.start() - 1] == "." and not quotes:
            word = LAST_WORD.search(text, max(found.start() - 32, 0), found.start())
            if word is not None and (word.group(1).lower() in ABBREVIATIONS or re.fullmatch("[A-Z]", word.group(1))):
                continue
        yield found.start() + len(quotes), found.end()
