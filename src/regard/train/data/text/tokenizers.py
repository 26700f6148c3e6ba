"""Tokenizers: bytes, characters, BPE, WordPiece, and any `tokenizer.json`, behind one interface.

Each is saved as a `tokenizer.json` of the package tokenizers, which other libraries read as well. Bytes and characters
are a BPE without merges there; they are read back and run without that package.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy

from regard.errors import CheckpointError, ConfigError, InputError
from regard.models.io import atomic
from regard.train.data.text.documents import Documents

FILE, ROLES_FILE = "tokenizer.json", "tokenizer_config.json"
KINDS = ("bytes", "characters", "bpe", "wordpiece")
ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")
# What tokens of these roles are called, in tokenizers that come without a tokenizer_config.json.
USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "bos": ("<s>", "<|begin_of_text|>", "<|im_start|>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"),
    "unk": ("[UNK]", "<unk>", "\ufffd"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
}
BPE_SPECIAL = ("<|endoftext|>", "<|pad|>")
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNKNOWN = "\ufffd"


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


def make_tokenizer(
    kind: str | Path,
    documents: Documents | Iterable[str] = (),
    vocab_size: int | None = None,
    special_tokens: Sequence[str] = (),
) -> Tokenizer:
    """A tokenizer of this kind, trained on these documents, or read from a file.

    kind: "bytes", "characters", "bpe" (byte-level), "wordpiece" (BERT's), or the path of a `tokenizer.json`, or of a
        folder with one.
    documents: the training texts; bytes need none.
    vocab_size: of BPE and WordPiece, 4,096 if not given.
    special_tokens: of BPE, beside `<|endoftext|>` and `<|pad|>`.

        >>> make_tokenizer("bytes").encode("né")
        [110, 195, 169]
        >>> tokenizer = make_tokenizer("characters", ["seven", "stars"])
        >>> tokenizer.decode(tokenizer.encode("vase?"))
        'vase�'
    """
    texts = documents.blocks() if isinstance(documents, Documents) else documents
    size = 4096 if vocab_size is None else vocab_size
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "characters":
        return CharacterTokenizer.train(texts)
    if kind == "bpe":
        return train_bpe(texts, size, special_tokens)
    if kind == "wordpiece":
        return train_wordpiece(texts, size)
    if not Path(kind).expanduser().exists():
        raise ConfigError(
            f"There is no tokenizer {str(kind)!r}.",
            asked=f"tokenizer={str(kind)!r}",
            because=f"it is one of {', '.join(KINDS)}, and there is no such file or folder in {Path.cwd()}",
            instead='tokenizer="bpe", or the path of a tokenizer.json',
        )
    return read_tokenizer(kind)


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a model's folder, or in a `tokenizer.json`."""
    place = Path(path).expanduser()
    file = place / FILE if place.is_dir() else place
    atomic.check_file(file)
    value, text = atomic.read_json(file), file.read_text(encoding="utf-8")
    if value == ByteTokenizer().to_json():
        return ByteTokenizer()
    if (characters := CharacterTokenizer.from_json(value)) is not None:
        return characters
    names = _read_role_names(file.with_name(ROLES_FILE))
    return SubwordTokenizer(text, names, str(file))


# Bytes and characters


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
        return {FILE: atomic.json_text(self.to_json()).encode(), ROLES_FILE: _make_roles_file({})}


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
            raise _no_training_text("characters")
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
        return {FILE: atomic.json_text(self.to_json()).encode(), ROLES_FILE: _make_roles_file({"unk": UNKNOWN})}


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


# Subwords, by the package tokenizers


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the package tokenizers.

    text: the contents of its `tokenizer.json`.
    role_names: names of its special tokens by role, "pad" and so on; found by their usual names where not given.
    source: where it was read, for errors.
    """

    def __init__(self, text: str, role_names: Mapping[str, str] | None = None, source: str = "tokenizer.json") -> None:
        try:
            self.backend = _import_tokenizers().Tokenizer.from_str(text)
        except ConfigError:
            raise
        except Exception as failure:  # the package raises plain exceptions
            raise CheckpointError(
                "The tokenizer cannot be read.",
                asked=source,
                found=f"{type(failure).__name__}: {failure}",
                because="it is not a file of the package tokenizers",
                instead="the tokenizer.json that save_pretrained of a tokenizer wrote",
            ) from failure
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # the name of a special token in a text is text
        self.text = text
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.role_names = dict(role_names) if role_names else self._find_usual_roles()
        found = {role: self.backend.token_to_id(name) for role, name in self.role_names.items()}
        super().__init__({role: number for role, number in found.items() if number is not None})
        self.special_ids |= {
            number for number, token in self.backend.get_added_tokens_decoder().items() if token.special
        }
        model = json.loads(text)["model"].get("type")
        self.kind = {"BPE": "bpe", "WordPiece": "wordpiece"}.get(model, "other")  # pyright: ignore[reportAttributeAccessIssue]

    def _find_usual_roles(self) -> dict[str, str]:
        found = {}
        for role, names in USUAL_NAMES.items():
            known = [name for name in names if self.backend.token_to_id(name) is not None]
            if known:
                found[role] = known[0]
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [numpy.array(each.ids, dtype=numpy.uint32) for each in encoded]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode([int(each) for each in ids], skip_special_tokens=skip_special_tokens)

    def find_word_starts(self, ids: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        starts = self._word_starts[numpy.asarray(ids, dtype=numpy.int64)]
        starts[:1] = True
        return starts

    @cached_property
    def _word_starts(self) -> numpy.ndarray:
        """Of every id: continuing pieces have ## (WordPiece), first pieces have a space (Ġ or Ċ in bytes, or ▁)."""
        starts = numpy.zeros(self.vocab_size, dtype=bool)
        for name, number in self.backend.get_vocab(with_added_tokens=True).items():
            if self.kind == "wordpiece":
                starts[number] = not name.startswith("##")
            else:
                starts[number] = name[:1] in "ĠĊĉ▁" or not name[:1].isalnum()
        starts[list(self.special_ids)] = True
        return starts

    def to_files(self) -> dict[str, bytes]:
        return {FILE: self.text.encode("utf-8"), ROLES_FILE: _make_roles_file(self.role_names)}


def train_bpe(documents: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> SubwordTokenizer:
    """A byte-level BPE, as GPT-2's: no text is unknown.

    Source: Sennrich, Haddow and Birch, Neural Machine Translation of Rare Words with Subword Units (ACL 2016).
    """
    special = (*BPE_SPECIAL, *special_tokens)
    _check_vocab_size("bpe", vocab_size, 256 + len(special))
    package = _import_tokenizers()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_check_texts("bpe", documents), trainer)
    names = {"pad": "<|pad|>", "bos": "<|endoftext|>", "eos": "<|endoftext|>"}
    usual = {role: name for role, choices in USUAL_NAMES.items() for name in special_tokens if name in choices}
    return SubwordTokenizer(tokenizer.to_str(pretty=True), names | usual)


def train_wordpiece(documents: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """A WordPiece tokenizer with BERT's lower-casing normaliser, punctuation rules and special tokens.

    At most a quarter of the vocabulary are characters, the most frequent ones; rarer ones are unknown.

    Source: Devlin et al., BERT (NAACL 2019), after Schuster and Nakajima (2012).
    """
    _check_vocab_size("wordpiece", vocab_size, 4 * len(WORDPIECE_SPECIAL))
    package = _import_tokenizers()
    normaliser = package.normalizers.BertNormalizer(lowercase=True)
    texts = [normaliser.normalize_str(text) for text in _check_texts("wordpiece", documents)]
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    # Chosen here: among characters of equal frequency the trainer chooses at random. Each may become two tokens, c
    # and ##c.
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    rare = {ord(character): " " for character in ranked[vocab_size // 8 :]}
    tokenizer = package.Tokenizer(package.models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normaliser
    tokenizer.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = package.decoders.WordPiece(prefix="##")
    trainer = package.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(WORDPIECE_SPECIAL),
        continuing_subword_prefix="##",
        limit_alphabet=len(ranked) + 1,
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.translate(rare) for text in texts), trainer)
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = package.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return SubwordTokenizer(tokenizer.to_str(pretty=True), names)


# Checks and files


def _import_tokenizers() -> Any:
    try:
        import tokenizers  # an extra, and slow to import
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
        import tokenizers.trainers
    except ImportError as failure:
        raise ConfigError(
            "BPE and WordPiece need the package tokenizers.",
            asked="a tokenizer of subwords",
            found=f"{type(failure).__name__}: {failure}",
            because="it trains and runs them",
            instead="pip install 'regard[text]', or tokenizer='bytes' or 'characters', which need no package",
        ) from failure
    return tokenizers


def _check_vocab_size(kind: str, vocab_size: int, least: int) -> None:
    if vocab_size < least:
        raise ConfigError(
            f"A {kind} tokenizer cannot have {vocab_size} tokens.",
            asked=f"vocab_size={vocab_size}",
            because=f"its characters and special tokens alone are {least}",
            instead="vocab_size=4096",
        )


def _check_texts(kind: str, documents: Iterable[str]) -> Iterator[str]:
    count = 0
    for document in documents:
        count += bool(document.strip())
        yield document
    if not count:
        raise _no_training_text(kind)


def _no_training_text(kind: str) -> InputError:
    return InputError(
        f"There is no text to train a tokenizer of {kind} on.",
        asked=f"tokenizer={kind!r}",
        found="no documents, or documents without text",
        because="its vocabulary is taken from the training text",
        instead="the training documents, or tokenizer='bytes'",
    )


def _make_roles_file(names: Mapping[str, str]) -> bytes:
    """A `tokenizer_config.json` by which transformers reads the `tokenizer.json` beside it."""
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return atomic.json_text(content | {f"{role}_token": names[role] for role in ROLES if role in names}).encode()


def _read_role_names(path: Path) -> dict[str, str]:
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


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
