"""A user's files: text, JSON lines, tab-separated values, and parallel files; errors name the line or the byte."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from regard.errors import InputError
from regard.train.data.text.documents import Documents, LabelledPairs, LabelledTexts, TextPairs
from regard.train.data.text.pieces import PIECE, Piece, cut_document

BLOCK = 1 << 20
TEXT, LINES, TABLE = ".txt", ".jsonl", ".tsv"
SEPARATORS = (None, "blank_line", "line")
GOOD_JSON = {
    ("text",): '{"text": "..."}',
    ("text", "label"): '{"text": "...", "label": "..."}',
    ("source", "target"): '{"source": "...", "target": "..."}',
    ("first", "second", "label"): '{"first": "...", "second": "...", "label": "..."}',
}


# Documents


def read_documents(path: Path, separator: str | None = None) -> Documents:
    """The documents in a text file, a file of JSON lines, or all such files of a folder."""
    if separator not in SEPARATORS:
        raise InputError(
            f"Documents cannot be separated by {separator!r}.",
            asked=f"separator={separator!r}",
            because='None is one document in each file, "blank_line" and "line" are several',
            instead='separator="blank_line"',
        )
    files = list_files(path, (TEXT, LINES))

    def read() -> Iterator[Piece]:
        for file in files:
            yield from _read_file(file, separator)

    return Documents(path.name, read)


def _read_file(file: Path, separator: str | None) -> Iterator[Piece]:
    if find_format(file) == LINES:
        for (text,) in read_json_lines(file, ("text",)):
            yield from cut_document([text])
    elif separator is None:
        yield from cut_document(_check_not_empty(file, read_blocks(file)))
    else:
        yield from _separate(_check_not_empty(file, read_lines(file)), separator)


def _separate(lines: Iterator[str], separator: str) -> Iterator[Piece]:
    """Documents of one line each, or of the lines between blank ones."""
    if separator == "line":
        for line in lines:
            if line.strip():
                yield from cut_document([line])
        return
    pending: list[str] = []
    size = 0
    for line in lines:
        if line.strip():
            if size > PIECE:  # the document goes on
                yield Piece("\n".join(pending) + "\n", False, False)
                pending, size = [], 0
            pending.append(line)
            size += len(line)
        elif pending:
            yield Piece("\n".join(pending), True, True)
            pending, size = [], 0
    if pending:
        yield Piece("\n".join(pending), True, True)


# Labels and pairs


def read_labelled(path: Path) -> LabelledTexts:
    """Labelled texts: JSON lines with "text" and "label", a table of label and text, or a folder for each class."""
    if path.is_dir():
        classes = sorted(folder for folder in path.iterdir() if folder.is_dir())
        rows = [[text, folder.name] for folder in classes for text in read_documents(folder)]
        if not classes:
            raise _wrong_format(path, "a folder without folders in it", "a folder for each class, with .txt files")
    elif find_format(path) == LINES:
        rows = list(read_json_lines(path, ("text", "label")))
    elif find_format(path) == TABLE:
        rows = [[text, label] for label, text in read_table(path, ("label", "text"))]
    else:
        raise _wrong_format(path, f"a {path.suffix or 'nameless'} file", '.jsonl with "text" and "label", or .tsv')
    texts, labels = ([row[column] for row in rows] for column in (0, 1))
    names = sort_names(labels)
    return LabelledTexts(path.name, texts, [names.index(label) for label in labels], names)


def read_labelled_pairs(path: Path) -> LabelledPairs:
    """Labelled pairs: JSON lines with "first", "second" and "label", or a table of these three columns."""
    fields = ("first", "second", "label")
    if find_format(path) == LINES:
        rows = list(read_json_lines(path, fields))
    elif find_format(path) == TABLE:
        rows = list(read_table(path, fields))
    else:
        raise _wrong_format(
            path, f"a {path.suffix or 'nameless'} file", '.jsonl with "first", "second", "label", or .tsv'
        )
    firsts, seconds, labels = ([row[column] for row in rows] for column in range(3))
    names = sort_names(labels)
    return LabelledPairs(path.name, firsts, seconds, [names.index(label) for label in labels], names)


def read_pairs(path: Path, target: Path | None = None) -> TextPairs:
    """Pairs: two files with as many lines, JSON lines with "source" and "target", or a table of these columns."""
    if target is not None:
        return _read_parallel(path, target)
    if find_format(path) == LINES:
        rows = list(read_json_lines(path, ("source", "target")))
    elif find_format(path) == TABLE:
        rows = list(read_table(path, ("source", "target")))
    else:
        raise _wrong_format(
            path,
            "one text file",
            "the file of its translations beside it, or .jsonl with 'source' and 'target', or .tsv",
        )
    return TextPairs(path.name, [row[0] for row in rows], [row[1] for row in rows])


def _read_parallel(source: Path, target: Path) -> TextPairs:
    columns = [[line.strip() for line in _check_not_empty(file, read_lines(file))] for file in (source, target)]
    if len(columns[0]) != len(columns[1]):
        raise InputError(
            "The parallel files have different numbers of lines.",
            asked=f"{source} and {target}",
            found=f"{len(columns[0]):,} and {len(columns[1]):,} lines",
            because="line by line, one is the translation of the other",
            instead="two files with as many lines",
        )
    pairs = [pair for pair in zip(*columns, strict=True) if all(pair)]  # a line without translation is no pair
    if not pairs:
        raise _empty(source, "no line has text in both files")
    return TextPairs(f"{source.name}, {target.name}", [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def sort_names(labels: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes: in numerical order if all are numbers, else in alphabetical order."""
    names = set(labels)
    return tuple(sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names))


# Formats


def find_format(path: Path) -> str:
    """The ending that says the format; that before `.gz` for a compressed file."""
    return path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def list_files(path: Path, formats: Sequence[str]) -> list[Path]:
    """The files of these formats in a folder and its folders, in alphabetical order, or the one file."""
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and find_format(file) in formats)
        if not found:
            others = ", ".join(sorted(file.name for file in path.iterdir())[:6])
            raise _wrong_format(
                path, f"a folder with {others or 'nothing'}", f"a folder with {' or '.join(formats)} files"
            )
        return found
    check_exists(path)
    if find_format(path) not in formats:
        raise _wrong_format(
            path, f"a file that ends in {path.suffix!r}", f"a {' or '.join(formats)} file, or a folder of such"
        )
    return [path]


def check_exists(path: Path) -> None:
    """Refuse a path where nothing is."""
    if not path.exists():
        folder = path.parent
        present = ", ".join(sorted(file.name for file in folder.iterdir())[:6]) if folder.is_dir() else ""
        raise InputError(
            f"There is no {path.name}.",
            asked=str(path),
            found=f"in {folder}: {present or 'nothing'}" if folder.is_dir() else f"no folder {folder}",
            because="the file is not there",
            instead="the path of a file, or the name of a data set (`regard data` lists them)",
        )


def read_json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[list[str]]:
    """These fields of every line, as strings; labels may also be numbers."""
    check_exists(path)
    for number, line in enumerate(_check_not_empty(path, read_lines(path)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as failure:
            raise _bad_line(
                path, number, f"{failure}: {_shorten(line)}", "it is not JSON", GOOD_JSON[fields]
            ) from failure
        if not isinstance(row, dict):
            raise _bad_line(path, number, _shorten(line), "a line is a JSON object", GOOD_JSON[fields])
        values = []
        for field in fields:
            if field not in row:
                raise _bad_line(
                    path, number, f"fields {', '.join(row) or 'none'}", f"it has no {field!r}", GOOD_JSON[fields]
                )
            value = row[field]
            if field == "label" and isinstance(value, int | bool):
                value = str(value)
            if not isinstance(value, str):
                raise _bad_line(
                    path, number, f"{field!r} is {_shorten(str(value))}", f"{field!r} is a text", GOOD_JSON[fields]
                )
            values.append(value)
        yield values


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[list[str]]:
    """The columns of a tab-separated file; a first line with exactly these names is its header."""
    check_exists(path)
    for number, line in enumerate(_check_not_empty(path, read_lines(path)), 1):
        values = [value.strip() for value in line.split("\t")]
        if not line.strip() or (number == 1 and tuple(value.lower() for value in values) == columns):
            continue
        if len(values) != len(columns):
            because = f"a line has {len(columns)} columns, separated by tabs: {', '.join(columns)}"
            raise _bad_line(path, number, f"{len(values)} columns: {_shorten(line)}", because, "\\t".join(columns))
        yield values


# Lines and blocks of a file


def read_lines(path: Path) -> Iterator[str]:
    """The lines without their ends."""
    pending = ""
    for block in read_blocks(path):
        *lines, pending = (pending + block).split("\n")
        for line in lines:
            yield line.removesuffix("\r")
    if pending:
        yield pending.removesuffix("\r")


def read_blocks(path: Path) -> Iterator[str]:
    """The text of a file, plain or `.gz`, in blocks; a mark of UTF-8 at its beginning is left out."""
    check_exists(path)
    offset, pending = 0, b""
    try:
        with _open(path) as file:
            while raw := file.read(BLOCK):
                data = pending + raw
                text, used = _decode(path, data, offset, is_last=False)
                yield text.removeprefix("\ufeff") if offset == 0 else text
                offset, pending = offset + used, data[used:]
    except (OSError, EOFError, zlib.error) as failure:
        raise InputError(
            f"{path.name} cannot be read.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="it is damaged, or the system does not let this user read it",
            instead="a file that can be read",
        ) from failure
    _decode(path, pending, offset, is_last=True)


def _decode(path: Path, data: bytes, offset: int, *, is_last: bool) -> tuple[str, int]:
    try:
        return codecs.utf_8_decode(data, "strict", is_last)
    except UnicodeDecodeError as failure:
        raise InputError(
            f"{path.name} is not UTF-8.",
            asked=str(path),
            found=f"byte {offset + failure.start:,} is 0x{data[failure.start]:02x}: {failure.reason}",
            because="text is read as UTF-8",
            instead=f"iconv -f latin1 -t utf-8 {path.name} > utf8.txt, with the encoding that the file has",
        ) from failure


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _check_not_empty(path: Path, parts: Iterator[str]) -> Iterator[str]:
    has_text = False
    for part in parts:
        has_text = has_text or bool(part.strip())
        yield part
    if not has_text:
        raise _empty(path, "no text")


def _empty(path: Path, found: str) -> InputError:
    return InputError(
        f"{path.name} is empty.",
        asked=str(path),
        found=found,
        because="there is nothing to train on",
        instead="a file with text",
    )


def _wrong_format(path: Path, found: str, instead: str) -> InputError:
    check_exists(path)
    return InputError(
        f"{path.name} is of no known format.",
        asked=str(path),
        found=found,
        because="the ending of a file says how it is read",
        instead=instead,
    )


def _bad_line(path: Path, number: int, found: str, because: str, instead: str) -> InputError:
    return InputError(
        f"Line {number} of {path.name} cannot be read.",
        asked=f"{path}:{number}",
        found=found,
        because=because,
        instead=instead,
    )


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
