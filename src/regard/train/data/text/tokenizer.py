"""The interface of all tokenizers, and the files that they are saved as."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy

from regard.errors import InputError
from regard.models.io import atomic

FILE, ROLES_FILE = "tokenizer.json", "tokenizer_config.json"
ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        kind: "bytes", "characters", "bpe", "wordpiece", or "other" for a file of another kind.
        vocab_size: number of distinct ids.
        pad_token_id, bos_token_id, eos_token_id, unk_token_id, mask_token_id, cls_token_id, sep_token_id: ids of the
            special tokens; `None` where there is none.
    """

    kind: ClassVar[str] = "other"
    vocab_size: int

    def __init__(self, roles: Mapping[str, int]) -> None:
        self.pad_token_id = roles.get("pad")
        self.bos_token_id = roles.get("bos")
        self.eos_token_id = roles.get("eos")
        self.unk_token_id = roles.get("unk")
        self.mask_token_id = roles.get("mask")
        self.cls_token_id = roles.get("cls")
        self.sep_token_id = roles.get("sep")
        self.special_ids = frozenset(roles.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind}, vocab_size={self.vocab_size})"

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens are neither added nor recognised in it."""
        return self.encode_batch([text])[0].tolist()

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        """The ids of each text, as arrays."""

    @abstractmethod
    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these ids."""

    @abstractmethod
    def find_word_starts(self, ids: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        """Whether each token of a text begins a word, for masking whole words."""

    @abstractmethod
    def to_files(self) -> dict[str, bytes]:
        """The files that lie beside a model, for its `companions`."""

    def save(self, folder: str | Path) -> None:
        """Write the files to a folder, for `read_tokenizer`."""
        for name, content in self.to_files().items():
            atomic.write_atomically(Path(folder) / name, lambda path, content=content: _write_bytes(path, content))

    @cached_property
    def digest(self) -> str:
        """A sha256 of the tokenizer."""
        return hashlib.sha256(self.to_files()[FILE]).hexdigest()


def make_roles_file(names: Mapping[str, str]) -> bytes:
    """A `tokenizer_config.json` by which transformers reads the `tokenizer.json` beside it."""
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return atomic.format_json(content | {f"{role}_token": names[role] for role in ROLES if role in names}).encode()


def read_role_names(path: Path) -> dict[str, str]:
    """The names of special tokens by role, from the file that Hugging Face's tokenizers write."""
    if not path.is_file():
        return {}
    found, content = {}, atomic.read_json(path)
    for role in ROLES:
        name = content.get(f"{role}_token")
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str):
            found[role] = name
    return found


def no_training_text(kind: str) -> InputError:
    return InputError(
        f"There is no text to train a tokenizer of {kind} on.",
        asked=f"tokenizer={kind!r}",
        found="no documents, or documents without text",
        because="its vocabulary is taken from the training text",
        instead="the training documents, or tokenizer='bytes'",
    )


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
