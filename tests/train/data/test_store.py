"""Token stores: what is stored, that it is stored by streaming, and that it appears complete or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from agreement import refused

from regard.errors import CheckpointError, ConfigError, InputError
from regard.models.io import atomic
from regard.train.data import text
from regard.train.data.text import store as stores

DOCUMENTS = ["One. Two two.\n\nThree", "Four. Five.", "", "Six\n"]
BYTES = text.make_tokenizer("bytes")


def test_documents_are_units_even_without_text(tmp_path: Path):
    store = text.build_store(DOCUMENTS, BYTES, cache=tmp_path)
    assert len(store) == 4
    assert [bytes(store[number].astype(numpy.uint8)).decode() for number in range(4)] == DOCUMENTS
    assert store.document_starts.tolist() == [0, 1, 2, 3, 4]
    assert (store.tokens.dtype, store.lengths.tolist()) == (numpy.uint16, [20, 11, 0, 4])
    assert isinstance(store.tokens, numpy.memmap)
    assert not store.tokens.flags.writeable
    assert store[-1].tolist() == store[3].tolist()
    with pytest.raises(IndexError):
        store[4]


def test_sentences_with_prefix_and_suffix(tmp_path: Path):
    store = text.build_store(DOCUMENTS, BYTES, unit="sentence", prefix=[1], suffix=[2, 3], cache=tmp_path)
    found = [row.tolist() for row in (store[number] for number in range(len(store)))]
    assert [bytes(row[1:-2]).decode() for row in found] == ["One.", "Two two.", "Three", "Four.", "Five.", "Six"]
    assert all(row[0] == 1 and row[-2:] == [2, 3] for row in found)
    assert store.document_starts.tolist() == [0, 3, 5, 6]  # the document without text has no sentence


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path):
    letters = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    store = text.build_store([letters], text.make_tokenizer("characters", [letters]), cache=tmp_path)
    assert (store.tokens.dtype, int(store.tokens.max())) == (numpy.uint32, 70_000)


def test_a_store_is_built_once_for_text_tokenizer_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = text.build_store(DOCUMENTS, BYTES, cache=tmp_path)
    letters = text.make_tokenizer("characters", DOCUMENTS)
    others = [
        text.build_store(DOCUMENTS[:3], BYTES, cache=tmp_path),
        text.build_store(DOCUMENTS, letters, cache=tmp_path),
        text.build_store(DOCUMENTS, BYTES, unit="line", cache=tmp_path),
        text.build_store(DOCUMENTS, BYTES, suffix=[0], cache=tmp_path),
    ]
    assert len({store.digest for store in (first, *others)}) == 5
    assert len(list(tmp_path.iterdir())) == 5
    monkeypatch.setattr(stores, "_write_tokens", None)  # nothing is built again
    assert text.build_store(list(DOCUMENTS), BYTES, cache=tmp_path).path == first.path


class Interrupted:
    """A corpus whose reading ends in an error."""

    digest = "0" * 64

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure

    def pieces(self) -> Iterator[text.store.Piece]:
        for number in range(50):
            yield stores.Piece(f"document {number}", True, True)
        raise self.failure


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("cut")])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, failure: BaseException):
    with pytest.raises(type(failure)):
        text.build_store(Interrupted(failure), BYTES, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with refused(InputError, "there is no room", "cache="):
        text.build_store(Interrupted(OSError(errno.ENOSPC, "No space left on device")), BYTES, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_is_not_taken_for_a_store(tmp_path: Path):
    source = (
        "import os, sys\nfrom regard.train.data import text\nfrom regard.train.data.text import store\n"
        "class Corpus:\n    digest = '0' * 64\n    def pieces(self):\n"
        "        for number in range(60_000):\n            yield store.Piece('document', True, True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "text.build_store(Corpus(), text.make_tokenizer('bytes'), cache=sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", source, str(tmp_path)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(atomic.WORK)
    text.build_store(DOCUMENTS, BYTES, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # what was left is removed


@pytest.mark.parametrize("name", [stores.TOKENS, stores.STARTS, stores.DOCUMENTS])
def test_a_damaged_store_is_refused(tmp_path: Path, name: str):
    store = text.build_store(DOCUMENTS, BYTES, cache=tmp_path)
    with (store.path / name).open("rb+") as file:
        file.truncate(3)
    with refused(CheckpointError, f"{name} cannot be read"):
        text.build_store(DOCUMENTS, BYTES, cache=tmp_path)


@pytest.mark.slow
def test_a_corpus_larger_than_the_memory_is_stored(tmp_path: Path):
    """32 MB of text and 58 MB of tokens, in a process that may allocate 28 MB more than it has when it begins."""
    line = "The quick brown fox jumps over the lazy dog, and again. " * 10 + "Amen.\n"
    path = tmp_path / "large.txt"
    with path.open("w") as file:
        for _ in range(32):
            file.write(line * (1_000_000 // len(line)))
    source = (
        "import resource, sys\nfrom regard.train.data import text\n"
        "tokenizer = text.make_tokenizer('bytes')\n"
        "text.build_store(['warm up'], tokenizer, cache=sys.argv[2] + '/warm')\n"
        "used = [int(row.split()[1]) for row in open('/proc/self/status') if row.startswith('VmData')][0] << 10\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + (28 << 20),) * 2)\n"
        "documents = text.load_documents(sys.argv[1]).split().train\n"
        "store = text.build_store(documents, tokenizer, unit=sys.argv[3], cache=sys.argv[2])\n"
        "print(len(store.tokens), len(store))\n"
        "try:\n    bytearray(32 << 20); print('no limit')\nexcept MemoryError:\n    print('limited')\n"
    )
    size = path.stat().st_size
    for unit in ("document", "line"):
        command = [sys.executable, "-c", source, str(path), str(tmp_path / "cache"), unit]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        (tokens, units), limited = map(int, done.stdout.split()[:2]), done.stdout.split()[2]
        assert limited == "limited"
        assert abs(units - (1 if unit == "document" else size * 0.9 / len(line))) <= 1
        assert abs(tokens - (size * 0.9 if unit == "document" else size * 0.9 * (1 - 1 / len(line)))) <= len(line)


def test_wrong_settings_are_refused(tmp_path: Path):
    with refused(ConfigError, "unit='word'"):
        text.build_store(DOCUMENTS, BYTES, unit="word", cache=tmp_path)
    with refused(InputError, "The text has no tokens"):
        text.build_store(["", ""], BYTES, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
