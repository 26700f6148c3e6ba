"""The named data sets, out of the packages that `regard data NAME` fetched."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from regard import downloads
from regard.errors import InputError
from regard.train.data.text import files
from regard.train.data.text.documents import Documents, LabelledPairs, LabelledTexts, TextPairs
from regard.train.data.text.pieces import Piece, cut_document

AnyTexts = TypeVar("AnyTexts", Documents, LabelledTexts, TextPairs)
# Genres of the Brown corpus by the letter in a file's name; the names are those of NLTK.
GENRES = {
    "a": "news", "b": "editorial", "c": "reviews", "d": "religion", "e": "hobbies", "f": "lore",
    "g": "belles_lettres", "h": "government", "j": "learned", "k": "fiction", "l": "mystery",
    "m": "science_fiction", "n": "adventure", "p": "romance", "r": "humor",
}  # fmt: skip
BRACKETS = {ord("["): None, ord("]"): None}
# Punctuation that follows a word without a space, or is followed by one without, in text out of separate words.
CLOSING, OPENING = re.compile(r" ([,.;:?!)\]}]|''|'(?= |$)|%)"), re.compile(r"([(\[{$]|``) ")


def load_documents(data: str | Path | Sequence[str] | Documents, *, separator: str | None = None) -> Documents:
    """The documents of a named data set, or of files: `.txt`, `.jsonl` with "text", or a folder of such; or a list.

    separator: for `.txt`, `None` if a file is one document, "blank_line" or "line" for documents separated so.
    """
    if isinstance(data, list | tuple):
        return Documents.from_texts(data)
    if isinstance(data, Documents):
        return data
    assert isinstance(data, str | Path)
    return _load(data, DOCUMENTS, functools.partial(files.read_documents, separator=separator))


def load_labelled(data: str | Path) -> LabelledTexts:
    """The labelled texts of a named data set, or of a file: `.jsonl` with "text" and "label", `.tsv` with a label and
    a text in a line, or a folder with a folder of `.txt` for each class.
    """
    return _load(data, LABELLED, files.read_labelled)


def load_pairs(data: str | Path, target: str | Path | None = None) -> TextPairs:
    """The pairs of a named data set, or of files: `.jsonl` with "source" and "target", `.tsv`, two parallel files."""
    if target is not None:
        if data in PAIRS and not Path(data).exists():
            raise InputError(
                f"{data} has its own translations.",
                asked=f"data={str(data)!r}, with the translations {str(target)!r}",
                because="a named data set is of pairs",
                instead=f"{data} alone, or two text files",
            )
        return files.read_pairs(Path(data).expanduser(), Path(target).expanduser())
    return _load(data, PAIRS, files.read_pairs)


def load_labelled_pairs(data: str | Path) -> LabelledPairs:
    """The labelled pairs of a file: `.jsonl` with "first", "second" and "label", or `.tsv` with these columns."""
    path = Path(data).expanduser()
    files.check_exists(path)
    return files.read_labelled_pairs(path)


def _load(data: str | Path, named: dict[str, Callable[[], AnyTexts]], read: Callable[[Path], AnyTexts]) -> AnyTexts:
    if isinstance(data, str) and data in named:
        return named[data]()
    path = Path(data).expanduser()
    if not path.exists():
        elsewhere = data in downloads.DATASETS or data in downloads.COLLECTIONS
        raise InputError(
            f"{data} is a data set of another kind."
            if elsewhere
            else f"There is no data set and no file {str(data)!r}.",
            asked=f"data={str(data)!r}",
            found="" if elsewhere else f"no such file or folder in {Path.cwd()}",
            because=f"the data sets for this task are {', '.join(named)}",
            instead="one of these, or the path of a file of your own",
        )
    return read(path)


def _find(dataset: str) -> tuple[list[Path], str]:
    """The folders of the packages of a data set, and its licence."""
    folders, licences = [], []
    for name in downloads.list_packages(dataset):
        if (folder := downloads.find(name)) is None:
            sizes = sum(downloads.DATASETS[each].megabytes for each in downloads.list_packages(dataset))
            raise InputError(
                f"{dataset} is not downloaded.",
                asked=f"data={dataset!r}",
                found=f"no {downloads.find_target(name)}",
                because=f"it is {sizes} MB, and downloads only start on an explicit command",
                instead=f"regard data {dataset}, or the path of a file of your own",
            )
        folders.append(folder)
        licences.append(downloads.DATASETS[name].licence)
    return folders, "; ".join(dict.fromkeys(licences))


# Documents


def read_text_folder(name: str) -> Documents:
    """One document in each text file."""
    (folder,), licence = _find(name)
    return Documents(name, files.read_documents(folder).read, licence)


def read_enwik8() -> Documents:
    """The first 100,000,000 bytes of an English Wikipedia dump, one document, markup included.

    Source: M. Mahoney, Large Text Compression Benchmark (2006).
    """
    (folder,), licence = _find("enwik8")
    return Documents("enwik8", lambda: cut_document(files.read_blocks(folder / "enwik8.gz")), licence)


def read_gutenberg() -> Documents:
    """Seventeen books, each one document. The package has no line breaks: paragraphs are separated by two spaces."""
    (folder,), licence = _find("gutenberg")

    def read() -> Iterator[Piece]:
        for line in files.read_lines(folder / "corpus.txt"):
            if text := "\n\n".join(part for part in re.split(" {2,}", line.strip()) if part):
                yield from cut_document([text])

    return Documents("gutenberg", read, licence)


def read_brown() -> LabelledTexts:
    """The 500 texts of the Brown corpus with their genres, one sentence in a line, without the tags.

    Source: W. N. Francis and H. Kučera, A Standard Corpus of Present-Day Edited American English (1964).
    """
    (folder,), licence = _find("brown")
    names, texts, labels = tuple(GENRES.values()), [], []
    for file in sorted(folder.iterdir()):
        sentences = (strip_tags(line) for line in files.read_lines(file))
        texts.append("\n".join(sentence for sentence in sentences if sentence))
        labels.append(names.index(GENRES[file.name[1]]))
    return LabelledTexts("brown", texts, labels, names, licence)


def strip_tags(line: str) -> str:
    """The text of a tagged sentence, with punctuation where it belongs.

    >>> strip_tags("``/`` No/at ,/, Mr./np Smith's/np$ ''/'' said/vbd he/pps (/( 3/cd )/) ./.")
    '"No, Mr. Smith\\'s" said he (3).'
    """
    text = " ".join(word.rpartition("/")[0] for word in line.split())
    text = OPENING.sub(r"\1", CLOSING.sub(r"\1", text))
    return text.replace("``", '"').replace("''", '"')


def read_bbc() -> LabelledTexts:
    """2,225 articles of the BBC of 2004 and 2005: business, entertainment, politics, sport, tech.

    Source: D. Greene and P. Cunningham, Practical Solutions to the Problem of Diagonal Dominance (ICML 2006).
    """
    (folder,), licence = _find("bbc")
    names = tuple(sorted(each.name for each in folder.iterdir() if each.is_dir()))
    texts, labels = [], []
    for label, name in enumerate(names):
        for file in sorted((folder / name).glob("*.txt")):
            raw = file.read_bytes()
            try:
                texts.append(raw.decode("utf-8"))
            except UnicodeDecodeError:  # one article has pound signs of Latin-1
                texts.append(raw.decode("latin1"))
            labels.append(label)
    return LabelledTexts("bbc", texts, labels, names, licence)


def _as_documents(read: Callable[[], LabelledTexts]) -> Documents:
    labelled = read()
    made = Documents.from_texts(labelled.texts, labelled.name)
    return Documents(made.name, made.read, labelled.licence)


# Pairs


def read_kjv_luther() -> TextPairs:
    """The verses that the King James Version and Luther's Bible of 1912 both have, by book, chapter and number.

    Without the brackets that mark words added by the English translators, which are italics in print.
    """
    (english, german), licence = _find("kjv-luther")
    sources, targets = _read_verses(english), _read_verses(german)
    common = [verse for verse in sources if verse in targets]
    return TextPairs("kjv-luther", [sources[verse] for verse in common], [targets[verse] for verse in common], licence)


def _read_verses(folder: Path) -> dict[tuple[int, int, int], str]:
    """The verses of a Bible by book, chapter and number, in order."""
    verses = {}
    for file in folder.glob("*.xml"):
        for book in ElementTree.parse(file).getroot().iter("BIBLEBOOK"):
            for chapter in book.iter("CHAPTER"):
                for verse in chapter.iter("VERS"):
                    place = tuple(
                        int(part)
                        for part in (book.attrib["bnumber"], chapter.attrib["cnumber"], verse.attrib["vnumber"])
                    )
                    if text := " ".join("".join(verse.itertext()).translate(BRACKETS).split()):
                        verses[place] = text
    return dict(sorted(verses.items()))


def read_sentences_de() -> TextPairs:
    """English sentences with machine translations into German, which name their sentence by its md5; each once."""
    (english, german), licence = _find("sentences-de")
    sources: dict[str, str] = {}
    for row in _read_rows(english):
        sources[hashlib.md5(row.encode("utf-8"), usedforsecurity=False).hexdigest()] = row
    translations: dict[str, str] = {}
    for text, digest in _read_rows(german):
        if digest in sources:
            translations.setdefault(digest, text)
    pairs = [(sources[digest].strip(), text.strip()) for digest, text in translations.items()]
    pairs = [pair for pair in pairs if all(pair)]
    return TextPairs("sentences-de", [pair[0] for pair in pairs], [pair[1] for pair in pairs], licence)


def _read_rows(folder: Path) -> Iterator[Any]:
    for number in range(len(list(folder.glob("doc-*.json")))):
        yield from json.loads((folder / f"doc-{number}.json").read_text(encoding="utf-8"))


DOCUMENTS: dict[str, Callable[[], Documents]] = {
    "shakespeare": functools.partial(read_text_folder, "shakespeare"),
    "enwik8": read_enwik8,
    "gutenberg": read_gutenberg,
    "moby-dick": functools.partial(read_text_folder, "moby-dick"),
    "brown": functools.partial(_as_documents, read_brown),
    "bbc": functools.partial(_as_documents, read_bbc),
}
LABELLED: dict[str, Callable[[], LabelledTexts]] = {"bbc": read_bbc, "brown": read_brown}
PAIRS: dict[str, Callable[[], TextPairs]] = {"kjv-luther": read_kjv_luther, "sentences-de": read_sentences_de}
