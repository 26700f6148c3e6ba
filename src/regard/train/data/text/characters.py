"""Bytes and characters as tokens; neither needs the package tokenizers, which can read both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy

from regard.models.io import atomic
from regard.train.data.text.tokenizer import FILE, ROLES_FILE, Tokenizer, make_roles_file, no_training_text

UNKNOWN = "\ufffd"


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8; no text is unknown, and there are no special tokens."""

    kind: ClassVar[str] = "bytes"
    vocab_size = 256

    def __init__(self) -> None:
        super().__init__({})

    def encode_batch(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        return [numpy.frombuffer(text.encode("utf-8"), dtype=numpy.uint8) for text in texts]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(int(each) for each in ids).decode("utf-8", errors="replace")

    def find_word_starts(self, ids: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        values = numpy.asarray(ids, dtype=numpy.uint8)
        # Bytes of characters beyond ASCII count as letters.
        return _find_word_starts(numpy.array([value >= 128 or chr(value).isalnum() for value in values], dtype=bool))

    def to_json(self) -> dict[str, Any]:
        """A byte-level BPE without merges, in the form of the package tokenizers."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        vocabulary = {character: byte for byte, character in enumerate(_name_bytes())}
        return _make_json(vocabulary, pre_tokenizer=level, decoder=level, unknown=None)

    def to_files(self) -> dict[str, bytes]:
        return {FILE: atomic.format_json(self.to_json()).encode(), ROLES_FILE: make_roles_file({})}


class CharacterTokenizer(Tokenizer):
    """The characters of a training text in the order of their code points; id 0 stands for all others, as U+FFFD.

    characters: every known character once, after U+FFFD.
    """

    kind: ClassVar[str] = "characters"

    def __init__(self, characters: str) -> None:
        super().__init__({"unk": 0})
        assert characters.startswith(UNKNOWN)
        assert len(set(characters)) == len(characters)
        self.characters = characters
        self.vocab_size = len(characters)
        codes = numpy.array([ord(character) for character in characters])
        self._order = numpy.argsort(codes)
        self._sorted = codes[self._order]

    @classmethod
    def train(cls, documents: Iterable[str]) -> CharacterTokenizer:
        found: set[str] = set()
        for document in documents:
            found.update(document)
        if not found:
            raise no_training_text("characters")
        return cls(UNKNOWN + "".join(sorted(found - {UNKNOWN})))

    def encode_batch(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> numpy.ndarray:
        codes = numpy.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(numpy.int64)
        place = numpy.searchsorted(self._sorted, codes).clip(max=len(self._sorted) - 1)
        return numpy.where(self._sorted[place] == codes, self._order[place], 0)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.characters[int(each)] for each in ids)

    def find_word_starts(self, ids: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        return _find_word_starts(numpy.array([self.characters[int(each)].isalnum() for each in ids], dtype=bool))

    def to_json(self) -> dict[str, Any]:
        """A BPE without merges, in the form of the package tokenizers."""
        vocabulary = {character: number for number, character in enumerate(self.characters)}
        return _make_json(vocabulary, pre_tokenizer=None, decoder={"type": "Fuse"}, unknown=UNKNOWN)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CharacterTokenizer | None:
        """The tokenizer of a `to_json`; `None` for any other."""
        vocabulary = value.get("model", {}).get("vocab") if isinstance(value.get("model"), dict) else None
        if not isinstance(vocabulary, dict) or not all(len(name) == 1 for name in vocabulary):
            return None
        characters = "".join(sorted(vocabulary, key=lambda name: vocabulary[name]))
        made = cls(characters) if characters.startswith(UNKNOWN) else None
        return made if made is not None and made.to_json() == value else None

    def to_files(self) -> dict[str, bytes]:
        return {FILE: atomic.format_json(self.to_json()).encode(), ROLES_FILE: make_roles_file({"unk": UNKNOWN})}


def _make_json(vocabulary: dict[str, int], *, pre_tokenizer: Any, decoder: Any, unknown: str | None) -> dict[str, Any]:
    model = {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip


def _name_bytes() -> list[str]:
    """GPT-2's printable character for every byte: itself where it is printable, else one from U+0100 on."""
    names, shifted = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            names.append(chr(byte))
        else:
            names.append(chr(256 + shifted))
            shifted += 1
    return names


def _find_word_starts(in_word: numpy.ndarray) -> numpy.ndarray:
    """A token begins a word unless it and the one before it are letters or digits."""
    starts = numpy.ones(len(in_word), dtype=bool)
    starts[1:] = ~(in_word[1:] & in_word[:-1])
    return starts
