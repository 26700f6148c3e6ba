"""A token store: the tokens of a corpus as a memory-mapped file, with the boundaries of its units and documents.

It is built by streaming, so that neither the corpus nor its tokens need to fit in memory, once for every pair of
text and tokenizer: the folder is named after the digest of both, and appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy

from regard.downloads.packages import download_folder
from regard.errors import ConfigError, InputError
from regard.models.io import atomic
from regard.train.data.text.pieces import Piece, cut_document, split_units
from regard.train.data.text.tokenizer import Tokenizer

UNITS = ("document", "paragraph", "line", "sentence")
TOKENS, STARTS, DOCUMENTS, META = "tokens.bin", "starts.bin", "documents.bin", "store.json"
# Changes whenever the same text would be stored otherwise.
VERSION = 1
# Characters that are encoded at once: enough for every core, and little memory.
CHARACTERS = 1 << 20


class TextSource(Protocol):
    """A corpus that can be streamed, and that has a digest."""

    @property
    def digest(self) -> str: ...

    def pieces(self) -> Iterator[Piece]: ...


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The tokens of a corpus, in units (documents, paragraphs, lines or sentences).

    Attributes:
        tokens: all tokens, one unit after the other, uint16 or uint32; a memory map.
        starts: where each unit begins, and after them where the last one ends, `(unit + 1,)`.
        document_starts: the first unit of each document, and after them the number of units, `(document + 1,)`.
        digest: a sha256 of the text, the tokenizer and the settings.
        path: the folder with the files.
    """

    tokens: numpy.ndarray
    starts: numpy.ndarray
    document_starts: numpy.ndarray
    digest: str
    path: Path

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, unit: int) -> numpy.ndarray:
        """The tokens of one unit."""
        if not -len(self) <= unit < len(self):
            raise IndexError(unit)
        unit %= len(self)
        return self.tokens[self.starts[unit] : self.starts[unit + 1]]

    @property
    def lengths(self) -> numpy.ndarray:
        """The number of tokens of every unit."""
        return numpy.diff(self.starts)

    def __repr__(self) -> str:
        documents = len(self.document_starts) - 1
        return f"TokenStore({len(self.tokens):,} tokens, {len(self):,} units, {documents:,} documents)"


def build_store(
    documents: TextSource | Sequence[str],
    tokenizer: Tokenizer,
    *,
    unit: str = "document",
    prefix: Sequence[int] = (),
    suffix: Sequence[int] = (),
    cache: str | Path | None = None,
) -> TokenStore:
    """The token store of a corpus, built now or opened if it was built before.

    documents: `Documents`, or texts in memory.
    unit: what `starts` are the boundaries of: "document", "paragraph" (separated by blank lines), "line" or "sentence".
        Every document is a unit, even one without text; the others are left out where they have none.
    prefix, suffix: ids that every unit begins and ends with.
    cache: the folder for stores; one in Python's environment if `None`.
    """
    if unit not in UNITS:
        raise ConfigError(
            f"A token store has no units called {unit!r}.",
            asked=f"unit={unit!r}",
            because=f"a unit is one of {', '.join(UNITS)}",
            instead='unit="document"',
        )
    source = TextList(documents) if isinstance(documents, Sequence) else documents
    key = [VERSION, source.digest, tokenizer.digest, unit, list(map(int, prefix)), list(map(int, suffix))]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    folder = download_folder() / "tokens" if cache is None else Path(cache).expanduser()
    place = folder / digest[:32]
    if not (place / META).is_file():
        _build(source, tokenizer, unit, (prefix, suffix), digest, place)
    return open_store(place)


def open_store(place: Path) -> TokenStore:
    """The token store in a folder."""
    meta = atomic.read_json(place / META)
    sizes = {TOKENS: (meta["dtype"], meta["tokens"]), STARTS: ("<i8", meta["units"] + 1)}
    sizes[DOCUMENTS] = ("<i8", meta["documents"] + 1)
    maps = {}
    for name, (dtype, count) in sizes.items():
        atomic.check_file(place / name)
        if (place / name).stat().st_size != count * numpy.dtype(dtype).itemsize:
            raise atomic.damage_error(place / name, f"not the size of {count:,} values", "it is cut short or damaged")
        maps[name] = numpy.memmap(place / name, dtype=dtype, mode="r", shape=(count,))
    return TokenStore(maps[TOKENS], maps[STARTS], maps[DOCUMENTS], meta["digest"], place)


class TextList:
    """Texts in memory as a source of a token store."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    @property
    def digest(self) -> str:
        total = hashlib.sha256()
        for text in self.texts:
            content = text.encode("utf-8")
            total.update(len(content).to_bytes(8, "little") + content)
        return total.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        for text in self.texts:
            yield from cut_document([text])


def _build(
    source: TextSource,
    tokenizer: Tokenizer,
    unit: str,
    ends: tuple[Sequence[int], Sequence[int]],
    digest: str,
    place: Path,
) -> None:
    def write(folder: Path) -> None:
        meta = _write_tokens(source, tokenizer, unit, ends, folder)
        atomic.write_and_sync(folder / META, atomic.make_json_writer({**meta, "unit": unit, "digest": digest}))

    try:
        atomic.write_folder_once(place, META, write)
    except OSError as failure:
        raise InputError(
            "The tokens cannot be stored.",
            asked=f"a token store in {place.parent}",
            found=f"{type(failure).__name__}: {failure}",
            because="the folder cannot be written to, or there is no room",
            instead="cache= with another folder; nothing incomplete was left",
        ) from failure


def _write_tokens(
    source: TextSource, tokenizer: Tokenizer, unit: str, ends: tuple[Sequence[int], Sequence[int]], folder: Path
) -> dict[str, int | str]:
    dtype = numpy.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    paths = [folder / name for name in (TOKENS, STARTS, DOCUMENTS)]
    with paths[0].open("wb") as tokens, paths[1].open("wb") as starts, paths[2].open("wb") as documents:
        writer = _TokenWriter(tokens, starts, documents, dtype, ends, keeps_empty=unit == "document")
        for pieces in _batch_pieces(split_units(source.pieces(), unit)):
            writer.write(pieces, tokenizer.encode_batch([piece.text for piece in pieces]))
        writer.finish()
    for path in paths:
        atomic.write_and_sync(path, lambda _: None)  # down to the disk
    if not writer.token_count:
        raise InputError(
            "The text has no tokens.",
            asked=f"the tokens of {getattr(source, 'name', 'the given texts')}",
            found="no text, or text that the tokenizer removes",
            because="there is nothing to train on",
            instead="a text",
        )
    return {
        "dtype": dtype.str, "tokens": writer.token_count, "units": writer.unit_count, "documents": writer.document_count
    }  # fmt: skip


class _TokenWriter:
    """Writes tokens and boundaries piece by piece; units without tokens are left out, unless they are documents."""

    def __init__(
        self,
        tokens: IO[bytes],
        starts: IO[bytes],
        documents: IO[bytes],
        dtype: numpy.dtype,
        ends: tuple[Sequence[int], Sequence[int]],
        *,
        keeps_empty: bool,
    ) -> None:
        self.tokens, self.starts, self.documents = tokens, starts, documents
        self.prefix, self.suffix = (numpy.array(list(each), dtype=dtype).tobytes() for each in ends)
        self.dtype, self.keeps_empty = dtype, keeps_empty
        self.token_count = self.unit_count = self.document_count = 0
        self.is_inside_unit = self.is_inside_document = False

    def write(self, pieces: Sequence[Piece], encoded: Sequence[numpy.ndarray]) -> None:
        starts, documents = array("q"), array("q")
        for piece, ids in zip(pieces, encoded, strict=True):
            if (len(ids) or self.keeps_empty) and not self.is_inside_unit:
                if not self.is_inside_document:
                    documents.append(self.unit_count)
                    self.document_count += 1
                starts.append(self.token_count)
                self.unit_count += 1
                self.is_inside_unit = self.is_inside_document = True
                self._write_bytes(self.prefix)
            self._write_bytes(ids.astype(self.dtype).tobytes())
            if piece.ends_unit:
                if self.is_inside_unit:
                    self._write_bytes(self.suffix)
                self.is_inside_unit = False
            if piece.is_last:
                self.is_inside_document = False
        self.starts.write(_to_bytes(starts))
        self.documents.write(_to_bytes(documents))

    def _write_bytes(self, content: bytes) -> None:
        self.tokens.write(content)
        self.token_count += len(content) // self.dtype.itemsize

    def finish(self) -> None:
        self.starts.write(_to_bytes(array("q", [self.token_count])))
        self.documents.write(_to_bytes(array("q", [self.unit_count])))


def _to_bytes(values: array) -> bytes:
    return numpy.array(values, dtype="<i8").tobytes()


def _batch_pieces(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces of about `CHARACTERS` characters together."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 16
        if size >= CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
