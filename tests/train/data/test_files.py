"""A user's files: every format is read, and what is wrong with a file is said with its line or byte."""

from __future__ import annotations

import functools
import gzip
import json
import operator
from pathlib import Path

import pytest
from agreement import refused

from regard.errors import ConfigError, InputError
from regard.train.data import text
from regard.train.data.text import files
from regard.train.data.text.documents import assign_parts


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# Documents


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path):
    content = "One.\r\n\r\n  Two é\n\n\nThree"
    for name, raw in (("a.txt", content.encode()), ("b.txt", b"\xef\xbb\xbf" + content.encode())):
        documents = text.load_documents(write(tmp_path, name, raw))
        assert list(documents) == list(documents) == [content]
        assert (len(documents), documents.byte_count) == (1, len(content.encode()))


@pytest.mark.parametrize(
    ("separator", "found"),
    [("blank_line", ["One.\nand", "Two é", "Three"]), ("line", ["One.", "and", "  Two é", "Three"])],
)
def test_documents_separated_within_a_file(tmp_path: Path, separator: str, found: list[str]):
    path = write(tmp_path, "a.txt", "\n\nOne.\r\nand\r\n\r\n  Two é\n \n\nThree")
    documents = list(text.load_documents(path, separator=separator))
    assert [document.strip() for document in documents] == [document.strip() for document in found]


def test_a_large_document_ends_at_its_blank_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also if a piece of it was just complete there."""
    monkeypatch.setattr(files, "PIECE", 7)
    documents = ["aaaa\nbbbb", "cccccccc", "dd", "eeee\nffff\ngg", "hhhhhhhhh"]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    assert list(text.load_documents(tmp_path / "a.txt", separator="blank_line")) == documents


def test_blocks_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = "Fünf Äpfel\r\nkosten 3 €\n\n😀 und mehr\n"
    path = write(tmp_path, "a.txt", content)
    whole, lines = list(text.load_documents(path)), list(files.read_lines(path))
    for size in range(1, 9):
        monkeypatch.setattr(files, "BLOCK", size)
        assert list(text.load_documents(path)) == whole == [content]
        assert list(files.read_lines(path)) == lines == ["Fünf Äpfel", "kosten 3 €", "", "😀 und mehr"]


def test_a_folder_is_read_in_alphabetical_order(tmp_path: Path):
    write(tmp_path, "b.txt", "second")
    write(tmp_path, "a/z.txt", "first")
    write(tmp_path, "c.jsonl", '{"text": "third"}\n\n{"text": "fourth", "more": 1}\n')
    write(tmp_path, "d.txt.gz", gzip.compress(b"fifth"))
    write(tmp_path, "readme.md", "not read")
    assert list(text.load_documents(tmp_path)) == ["first", "second", "third", "fourth", "fifth"]


def test_the_digest_is_of_the_text_and_its_division(tmp_path: Path):
    def digest(*texts: str) -> str:
        return text.Documents.from_texts(texts).digest

    assert digest("ab", "c") == digest("ab", "c")
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("ab", "d")}) == 4
    path = write(tmp_path, "a.txt", "abc")
    assert text.load_documents(path).digest == digest("abc")


# Labels and pairs


def test_labels_are_names_or_numbers(tmp_path: Path):
    rows = [{"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}, {"text": "fine", "label": "yes"}]
    by_name = text.load_labelled(write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert (by_name.names, by_name.labels, by_name.texts) == (("no", "yes"), [1, 0, 1], ["good", "bad", "fine"])
    numbers = text.load_labelled(write(tmp_path, "b.tsv", "label\ttext\n10\tten\n9\tnine\n"))
    assert (numbers.names, numbers.labels, numbers.texts) == (("9", "10"), [1, 0], ["ten", "nine"])
    booleans = text.load_labelled(write(tmp_path, "c.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}'))
    assert (booleans.names, booleans.labels) == (("0", "1"), [1, 0])


def test_a_folder_for_each_class(tmp_path: Path):
    for name in ("sport/1.txt", "sport/2.txt", "art/1.txt"):
        write(tmp_path, name, f"about {name}")
    found = text.load_labelled(tmp_path)
    assert (found.names, found.labels) == (("art", "sport"), [0, 1, 1])
    assert found.texts[1] == "about sport/1.txt"


def test_labelled_pairs(tmp_path: Path):
    table = text.load_labelled_pairs(
        write(tmp_path, "a.tsv", "it rains\tit is wet\tentailment\nyes\tno\tcontradiction\n")
    )
    assert (table.firsts, table.seconds) == (["it rains", "yes"], ["it is wet", "no"])
    assert (table.names, table.labels) == (("contradiction", "entailment"), [1, 0])
    line = '{"first": "a", "second": "b", "label": 0}\n'
    assert text.load_labelled_pairs(write(tmp_path, "a.jsonl", line)).names == ("0",)


def test_parallel_files_and_their_other_forms(tmp_path: Path):
    source, target = write(tmp_path, "a.en", "one\r\ntwo\n\nfour\n"), write(tmp_path, "a.de", "eins\nzwei\ndrei\nvier")
    pairs = text.load_pairs(source, target)
    assert (pairs.sources, pairs.targets) == (["one", "two", "four"], ["eins", "zwei", "vier"])  # no source, no pair
    lines = "".join(
        json.dumps({"source": s, "target": t}) + "\n" for s, t in zip(pairs.sources, pairs.targets, strict=True)
    )
    assert text.load_pairs(write(tmp_path, "a.jsonl", lines)).digest == pairs.digest
    assert text.load_pairs(write(tmp_path, "a.tsv", "one\teins\ntwo\tzwei\nfour\tvier\n")).digest == pairs.digest
    assert pairs.swap().sources == pairs.targets


# Errors


@pytest.mark.parametrize("separator", [None, "line", "blank_line"])
@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str, separator: str | None):
    with refused(InputError, "a.txt is empty"):
        list(text.load_documents(write(tmp_path, "a.txt", content), separator=separator))


@pytest.mark.parametrize(("prefix", "offset"), [(b"", 5), (b"x" * 3000, 3005)])
def test_another_encoding_is_refused_with_the_byte(
    tmp_path: Path, prefix: bytes, offset: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "BLOCK", 1000)
    path = write(tmp_path, "a.txt", prefix + b"abc \xc3\xa9\xe9 d")
    with refused(InputError, f"byte {offset + 1:,} is 0xe9", "UTF-8", "iconv"):
        list(text.load_documents(path))


def test_a_character_cut_by_the_end_of_the_file_is_refused(tmp_path: Path):
    with refused(InputError, "byte 3 is 0xe2"):
        list(text.load_documents(write(tmp_path, "a.txt", b"abc\xe2\x82")))


def test_parallel_files_of_unequal_length_are_refused_with_both_counts(tmp_path: Path):
    source, target = write(tmp_path, "a", "1\n2\n3\n"), write(tmp_path, "b", "1\n2\n")
    with refused(InputError, "3 and 2 lines"):
        text.load_pairs(source, target)


def test_pairs_without_text_are_refused(tmp_path: Path):
    with refused(InputError, "no line has text in both"):
        text.load_pairs(write(tmp_path, "a", "1\n\n"), write(tmp_path, "b", "\n2\n"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', "not JSON"),
        ('["a"]', "JSON object"),
        ('{"txt": "a", "n": 1}', "fields txt, n"),
        ('{"text": 7}', "'text' is a text"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, words: str):
    path = write(tmp_path, "a.jsonl", '{"text": "good"}\n\n' + line + "\n")
    with refused(InputError, "Line 3 of a.jsonl", words, '{"text": "..."}'):
        list(text.load_documents(path))


def test_a_line_of_a_table_with_too_few_columns_is_refused(tmp_path: Path):
    with refused(InputError, "Line 2 of a.tsv", "1 columns"):
        text.load_labelled(write(tmp_path, "a.tsv", "yes\tgood\nno bad\n"))


def test_unknown_formats_are_refused(tmp_path: Path):
    pdf = write(tmp_path, "a.pdf", "x")
    for load in (text.load_documents, text.load_labelled, text.load_pairs, text.load_labelled_pairs):
        with refused(InputError, "a.pdf is of no known format"):
            load(pdf)
    with refused(InputError, "a folder with a.pdf"):
        text.load_documents(tmp_path)
    with refused(InputError, "separator='tab'"):
        text.load_documents(write(tmp_path, "a.txt", "x"), separator="tab")


def test_a_path_with_nothing_there_is_refused_with_the_names():
    with refused(InputError, "no file 'nonsense'", "shakespeare, enwik8"):
        text.load_documents("nonsense")
    with refused(InputError, "another kind", "kjv-luther, sentences-de"):
        text.load_pairs("bbc")


def test_a_data_set_that_is_not_here_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("regard.downloads.find", lambda name: None)
    with refused(InputError, "regard data kjv-luther", "2 MB"):
        text.load_pairs("kjv-luther")


def test_a_damaged_gz_is_refused(tmp_path: Path):
    path = write(tmp_path, "a.txt.gz", gzip.compress(b"text" * 999)[:-9])
    with refused(InputError, "a.txt.gz cannot be read"):
        list(text.load_documents(path))


# Splits


@pytest.mark.parametrize("count", [3, 10, 97, 1000])
def test_parts_are_evenly_spread_and_none_is_empty(count: int):
    parts = assign_parts(count, 0.05, 0.1)
    counts = [int((parts == number).sum()) for number in range(3)]
    assert counts[1:] == [max(round(0.05 * count), 1), max(round(0.1 * count), 1)]
    assert sum(counts) == count
    held = (parts > 0).nonzero()[0]
    assert held.max(initial=0) - held.min() >= count * (1 - 1 / len(held)) - 1


def test_a_split_of_documents_loses_none():
    documents = text.Documents.from_texts([f"document {number}" for number in range(41)])
    split = documents.split(0.1, 0.2)
    parts = [list(part) for part in split]
    assert [len(part) for part in split] == list(map(len, parts)) == [29, 4, 8]
    assert sorted(functools.reduce(operator.iadd, parts, [])) == sorted(documents)
    assert len({part.digest for part in (documents, *split)}) == 4
    again = split.train.split(0.1, 0.1)  # a part of a part
    assert sorted([*again.train, *again.validation, *again.test]) == sorted(parts[0])


@pytest.mark.parametrize("shares", [(0.1, 0.1), (0.2, 0.0), (0.0, 0.3)])
def test_one_document_is_divided_by_bytes_in_order(shares: tuple[float, float], tmp_path: Path):
    content = "äöü€😀 abc\n" * 50
    documents = text.load_documents(write(tmp_path, "a.txt", content))
    split = documents.split(*shares)
    parts = ["".join(part) for part in split]
    assert "".join(parts) == content
    total = len(content.encode())
    assert abs(len(parts[1].encode()) - shares[0] * total) <= 4
    assert abs(len(parts[2].encode()) - shares[1] * total) <= 4
    assert "".join("".join(part) for part in split.train.split()) == parts[0]


def test_a_split_of_labels_has_every_class_in_every_part():
    labelled = text.LabelledTexts("x", [str(n) for n in range(60)], [n % 3 // 2 for n in range(60)], ("a", "b"))
    split = labelled.split(0.1, 0.2)
    assert [[part.labels.count(label) for label in (0, 1)] for part in split] == [[28, 14], [4, 2], [8, 4]]
    assert sorted(functools.reduce(operator.iadd, (part.texts for part in split), [])) == sorted(labelled.texts)


def test_pairs_of_one_source_are_in_one_part():
    sources = [f"s{number // 2}" for number in range(80)]
    split = text.TextPairs("x", sources, [str(number) for number in range(80)]).split(0.1, 0.1)
    assert [len(part) for part in split] == [64, 8, 8]
    assert not set(split.train.sources) & set(split.test.sources)
    assert not set(split.validation.sources) & set(split.test.sources)


def test_shares_that_leave_nothing_are_refused():
    documents = text.Documents.from_texts(["a", "b", "c"])
    with refused(ConfigError, "validation=0.6, test=0.4"):
        documents.split(0.6, 0.4)
    with refused(InputError, "2 texts"):
        text.LabelledTexts("x", ["a", "b"], [0, 0], ("a",)).split()
