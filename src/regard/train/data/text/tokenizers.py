"""Tokenizers: bytes, characters, BPE, WordPiece, and any `tokenizer.json`, behind one interface.

Each is saved as a `tokenizer.json` of the package tokenizers, which other libraries read as well. Bytes and characters
are a BPE without merges there; they are read back and run without that package.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from regard.downloads.packages import download_folder
from regard.errors import ConfigError
from regard.models.io import atomic
from regard.train.data.text.characters import ByteTokenizer, CharacterTokenizer
from regard.train.data.text.documents import Documents
from regard.train.data.text.store import TextList
from regard.train.data.text.subwords import SubwordTokenizer, train_bpe, train_wordpiece
from regard.train.data.text.tokenizer import FILE, ROLES_FILE, Tokenizer, read_role_names

KINDS = ("bytes", "characters", "bpe", "wordpiece")
TRAINED_ONCE = ("bpe", "wordpiece")
# Changes whenever the same text would train another tokenizer.
VERSION = 2


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


def build_tokenizer(
    kind: str | Path,
    documents: Documents | Sequence[str] = (),
    vocab_size: int | None = None,
    *,
    cache: str | Path | None = None,
) -> Tokenizer:
    """`make_tokenizer`, trained now or read if it was trained before on the same text with the same settings.

    cache: the folder for trained tokenizers; one beside the token stores if `None`. A folder that cannot be written to
        costs the training alone.
    """
    if kind not in TRAINED_ONCE:
        return make_tokenizer(kind, documents, vocab_size)
    folder = download_folder() / "tokenizers" if cache is None else Path(cache).expanduser()
    place = folder / _digest_settings(str(kind), documents, vocab_size)[:32]
    if not (place / FILE).is_file():
        tokenizer = make_tokenizer(kind, documents, vocab_size)
        with contextlib.suppress(OSError):
            atomic.write_folder_once(place, FILE, tokenizer.save)
        return tokenizer
    return read_tokenizer(place)


def _digest_settings(kind: str, documents: Documents | Sequence[str], vocab_size: int | None) -> str:
    """A sha256 of all that a trained tokenizer depends on: text, settings, and the package that trains it."""
    source = documents if isinstance(documents, Documents) else TextList(documents)
    try:
        package = metadata.version("tokenizers")
    except metadata.PackageNotFoundError:  # training says so
        package = ""
    key = [VERSION, kind, vocab_size, source.digest, package]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


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
    names = read_role_names(file.with_name(ROLES_FILE))
    return SubwordTokenizer(text, names, str(file))
