"""Texts to train on: documents that are streamed, labelled texts, and pairs; each with a deterministic split."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

import numpy

from regard.caching import lazy_property
from regard.errors import ConfigError, InputError
from regard.train.data.text.pieces import Piece

AnyTexts = TypeVar("AnyTexts")
TRAIN, VALIDATION, TEST = range(3)


class Splits(NamedTuple, Generic[AnyTexts]):
    """The three parts of a data set."""

    train: AnyTexts
    validation: AnyTexts
    test: AnyTexts


class Survey(NamedTuple):
    """What one pass over a corpus finds out."""

    digest: str
    documents: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Documents:
    """A corpus of documents, read from its files whenever it is iterated.

        >>> from regard.train.data.text import Documents
        >>> corpus = Documents.from_texts(["one", "two", "three", "four"])
        >>> list(corpus.split(validation=0.25, test=0.25).train)
        ['one', 'three']

    Attributes:
        name: of the data set or the file.
        read: begins to stream the whole corpus.
        licence: as declared, empty for files of your own.
        part: which documents these are, 0, 1 or 2 for each document of the whole corpus, and which of the numbers is
            meant; `None` for all.
        share: the range of bytes that these are, for a corpus of one document; `None` for all.
    """

    name: str
    read: Callable[[], Iterator[Piece]]
    licence: str = ""
    part: tuple[numpy.ndarray, int] | None = None
    share: tuple[int, int] | None = None

    @classmethod
    def from_texts(cls, texts: Sequence[str], name: str = "texts") -> Documents:
        """Texts in memory."""
        return cls(name, lambda: (Piece(text, True, True) for text in texts))

    def __repr__(self) -> str:
        return f"Documents({self.name!r}, {len(self):,} documents, {self.byte_count:,} bytes)"

    def pieces(self) -> Iterator[Piece]:
        """The documents in pieces that fit in memory."""
        if self.share is not None:
            yield from _cut_share(self.read(), *self.share)
        elif self.part is None:
            yield from self.read()
        else:
            number, (parts, wanted) = 0, self.part
            for piece in self.read():
                if parts[number] == wanted:
                    yield piece
                number += piece.is_last

    def __iter__(self) -> Iterator[str]:
        """The documents, each as one string."""
        pending = []
        for piece in self.pieces():
            pending.append(piece.text)
            if piece.is_last:
                yield "".join(pending)
                pending = []

    def blocks(self) -> Iterator[str]:
        """All text in strings of at most about a million characters, for training a tokenizer."""
        return (piece.text for piece in self.pieces())

    @lazy_property
    def _survey(self) -> Survey:
        total, documents, size = hashlib.sha256(), 0, 0
        for piece in self.pieces():
            content = piece.text.encode("utf-8")
            total.update(content)
            size += len(content)
            if piece.is_last:
                documents += 1
                total.update(size.to_bytes(8, "little"))
        return Survey(total.hexdigest(), documents, size)

    def __len__(self) -> int:
        return self._survey.documents

    @property
    def byte_count(self) -> int:
        """Bytes of the text in UTF-8."""
        return self._survey.bytes

    @property
    def digest(self) -> str:
        """A sha256 of the text and of its division into documents."""
        return self._survey.digest

    def split(self, validation: float = 0.05, test: float = 0.05) -> Splits[Documents]:
        """Three parts: of whole documents, evenly spread, or of bytes, if there are fewer than three documents.

        Bytes are divided in order, training text first, at the beginning of a character: 90, 5 and 5 million bytes of
        enwik8, as in the literature.
        """
        check_shares(validation, test)
        if len(self) >= 3:
            assigned = assign_parts(len(self), validation, test)
            if self.part is not None:  # a part is divided further
                parts, wanted = self.part
                whole = numpy.full(len(parts), -1)
                whole[parts == wanted] = assigned
                assigned = whole
            return Splits(*(self._take(number, part=(assigned, number)) for number in (TRAIN, VALIDATION, TEST)))
        first, _ = (0, 0) if self.share is None else self.share
        cuts = [
            0,
            round(self.byte_count * (1 - validation - test)),
            round(self.byte_count * (1 - test)),
            self.byte_count,
        ]
        ranges = [(first + start, first + stop) for start, stop in itertools.pairwise(cuts)]
        return Splits(*(self._take(number, share=ranges[number]) for number in (TRAIN, VALIDATION, TEST)))

    def _take(self, number: int, **changes: object) -> Documents:
        name = f"{self.name}, {('training', 'validation', 'test')[number]} part"
        return dataclasses.replace(self, name=name, **changes)


def _cut_share(pieces: Iterator[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The text from byte `start` to byte `stop`, both moved on to the beginning of a character."""
    offset, is_open = 0, False
    for piece in pieces:
        content = piece.text.encode("utf-8")
        ends = [_find_character(content, place - offset) for place in (start, stop)]
        offset += len(content)
        text = content[ends[0] : ends[1]].decode("utf-8")
        is_last = piece.is_last or offset >= stop
        if text or (is_open and is_last):
            yield Piece(text, is_last, is_last)
            is_open = not is_last
        if offset >= stop:
            return


def _find_character(content: bytes, place: int) -> int:
    place = min(max(place, 0), len(content))
    while place < len(content) and content[place] & 0xC0 == 0x80:
        place += 1
    return place


# In memory


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Texts with a class each.

    Attributes:
        texts, labels: as many of each; a label is an index into `names`.
        names: of the classes.
    """

    name: str
    texts: list[str]
    labels: list[int]
    names: tuple[str, ...]
    licence: str = ""

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"LabelledTexts({self.name!r}, {len(self):,} texts, {len(self.names)} classes)"

    @lazy_property
    def digest(self) -> str:
        """A sha256 of texts, labels and names."""
        return digest_rows([self.names], zip(self.texts, map(str, self.labels), strict=True))

    def split(self, validation: float = 0.1, test: float = 0.1) -> Splits[Self]:
        """Three parts with the same share of every class, evenly spread over its texts."""
        check_shares(validation, test)
        parts = assign_parts_by_label(self.labels, validation, test)
        return Splits(*(self._take(numpy.flatnonzero(parts == number)) for number in (TRAIN, VALIDATION, TEST)))

    def _take(self, chosen: numpy.ndarray) -> Self:
        texts, labels = ([values[index] for index in chosen] for values in (self.texts, self.labels))
        return dataclasses.replace(self, texts=texts, labels=labels)


@dataclass(frozen=True, eq=False)
class TextPairs:
    """Texts and their translations.

    Attributes:
        sources, targets: as many of each.
    """

    name: str
    sources: list[str]
    targets: list[str]
    licence: str = ""

    def __len__(self) -> int:
        return len(self.sources)

    def __repr__(self) -> str:
        return f"TextPairs({self.name!r}, {len(self):,} pairs)"

    @lazy_property
    def digest(self) -> str:
        """A sha256 of all pairs."""
        return digest_rows([], zip(self.sources, self.targets, strict=True))

    def swap(self) -> TextPairs:
        """The same pairs in the other direction."""
        return dataclasses.replace(self, sources=self.targets, targets=self.sources)

    def split(self, validation: float = 0.02, test: float = 0.02) -> Splits[TextPairs]:
        """Three parts, evenly spread; pairs of the same source are always in one part."""
        check_shares(validation, test)
        numbers: dict[str, int] = {}
        group = numpy.array([numbers.setdefault(source, len(numbers)) for source in self.sources], dtype=numpy.int64)
        parts = assign_parts(len(numbers), validation, test)[group] if len(group) else group
        return Splits(*(self._take(numpy.flatnonzero(parts == number)) for number in (TRAIN, VALIDATION, TEST)))

    def _take(self, chosen: numpy.ndarray) -> TextPairs:
        sources, targets = ([values[index] for index in chosen] for values in (self.sources, self.targets))
        return dataclasses.replace(self, sources=sources, targets=targets)


@dataclass(frozen=True, eq=False)
class LabelledPairs:
    """Pairs of texts with a class each, such as entailment.

    Attributes:
        firsts, seconds, labels: as many of each; a label is an index into `names`.
        names: of the classes.
    """

    name: str
    firsts: list[str]
    seconds: list[str]
    labels: list[int]
    names: tuple[str, ...]
    licence: str = ""

    def __len__(self) -> int:
        return len(self.firsts)

    def __repr__(self) -> str:
        return f"LabelledPairs({self.name!r}, {len(self):,} pairs, {len(self.names)} classes)"

    @lazy_property
    def digest(self) -> str:
        """A sha256 of pairs, labels and names."""
        return digest_rows([self.names], zip(self.firsts, self.seconds, map(str, self.labels), strict=True))

    def split(self, validation: float = 0.1, test: float = 0.1) -> Splits[LabelledPairs]:
        """Three parts with the same share of every class, evenly spread over its pairs."""
        check_shares(validation, test)
        parts = assign_parts_by_label(self.labels, validation, test)
        return Splits(*(self._take(numpy.flatnonzero(parts == number)) for number in (TRAIN, VALIDATION, TEST)))

    def _take(self, chosen: numpy.ndarray) -> LabelledPairs:
        columns = ([values[index] for index in chosen] for values in (self.firsts, self.seconds, self.labels))
        firsts, seconds, labels = columns
        return dataclasses.replace(self, firsts=firsts, seconds=seconds, labels=labels)


# Splitting


def check_shares(validation: float, test: float) -> None:
    """Refuse shares that leave nothing to train on."""
    if not (0 <= validation < 1 and 0 <= test < 1 and validation + test < 1):
        raise ConfigError(
            "A data set cannot be split so.",
            asked=f"validation={validation}, test={test}",
            because="both are shares of the whole, and something must be left to train on",
            instead="validation=0.05, test=0.05",
        )


def assign_parts(count: int, validation: float, test: float) -> numpy.ndarray:
    """0, 1 or 2 for training, validation and test, evenly spread; at least one of each that has a share.

    >>> assign_parts(10, 0.2, 0.2).tolist()
    [0, 1, 0, 2, 0, 0, 1, 0, 2, 0]
    """
    held = [max(round(count * share), 1) if share else 0 for share in (validation, test)]
    parts, total = numpy.zeros(count, dtype=numpy.int64), sum(held)
    if not total:
        return parts
    if count <= total:
        raise InputError(
            "There are too few texts to split.",
            asked=f"validation={validation}, test={test}",
            found=f"{count} text{'' if count == 1 else 's'}",
            because="each part needs at least one, and something must be left to train on",
            instead="more texts",
        )
    places = (2 * numpy.arange(total) + 1) * count // (2 * total)
    is_test = (numpy.arange(1, total + 1) * held[1]) // total > (numpy.arange(total) * held[1]) // total
    parts[places] = numpy.where(is_test, TEST, VALIDATION)
    return parts


def assign_parts_by_label(labels: Sequence[int], validation: float, test: float) -> numpy.ndarray:
    """The same within every class."""
    values = numpy.array(labels)
    parts = numpy.zeros(len(values), dtype=numpy.int64)
    for label in numpy.unique(values):
        chosen = numpy.flatnonzero(values == label)
        parts[chosen] = assign_parts(len(chosen), validation, test)
    return parts


def digest_rows(heads: Sequence[Sequence[str]], rows: Iterator[Sequence[str]] | zip) -> str:
    """A sha256 of rows of strings."""
    total = hashlib.sha256()
    for row in (*heads, *rows):
        for value in row:
            content = value.encode("utf-8")
            total.update(len(content).to_bytes(8, "little") + content)
        total.update(b"\xff")
    return total.hexdigest()
