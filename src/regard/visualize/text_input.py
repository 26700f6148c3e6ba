"""Texts for the command line: the tokenizer of a model on disk, and the token ids of a text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from regard.adapters.third_party_imports import import_quietly
from regard.errors import InputError, RegardError

NEEDED = "tokenizer.json, or the files that transformers' AutoTokenizer reads; inside a .gguf, or a .data of llama2.c"


def find_tokenizer(target: str) -> Any:
    """The tokenizer of a model on disk: in its folder, beside its file, or inside it."""
    path = Path(target).expanduser()
    if not path.exists():
        raise InputError(
            "A text needs a tokenizer.",
            asked=f"--text for {target}",
            because="a model that is built from a name or a class has none",
            instead="--ids 5,3,8, or the folder of a model with its tokenizer",
        )
    if path.suffix.lower() == ".gguf":
        from regard.models.io.gguf import read_tokenizer

        return read_tokenizer(path)
    if path.suffix.lower() in (".data", ".bin") and not (path.parent / "tokenizer.json").is_file():
        return _read_llama2c(path)
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer.json").is_file():
        return _read_json(folder / "tokenizer.json")
    return _read_transformers(folder, target)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text, with the special tokens that the tokenizer adds."""
    encoded = tokenizer.encode(text)
    ids = [int(number) for number in (encoded if isinstance(encoded, list) else encoded.ids)]
    if not ids:
        raise InputError(
            "The text has no tokens.",
            asked=f"--text {text!r}",
            because="there is no attention without tokens",
            instead='--text "The keys to the cabinet"',
        )
    return ids


def _read_json(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as failure:
        raise InputError(
            f"{path.name} needs the package tokenizers.",
            asked=f"--text for {path.parent}",
            because="it is not installed",
            instead="pip install tokenizers",
        ) from failure
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as failure:  # the library raises plain Exception
        raise InputError(
            f"{path} cannot be read.",
            asked=f"--text for {path.parent}",
            found=f"{type(failure).__name__}: {failure}",
            because="it is not a file of the package tokenizers",
            instead="the file that the tokenizer's save_pretrained wrote, or --ids 5,3,8",
        ) from failure
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_llama2c(path: Path) -> Any:
    from regard.models.io.llama2c import read_tokenizer

    beside = path.with_name("tokenizer.bin")
    try:
        return read_tokenizer(beside if beside.is_file() else path)
    except RegardError as failure:
        raise _missing_tokenizer(str(path), f"{failure.headline}") from failure


def _read_transformers(folder: Path, target: str) -> Any:
    files = sorted(
        file.name for file in folder.iterdir() if file.name.startswith(("vocab", "tokenizer", "merges", "spiece"))
    )
    if not files:
        raise _missing_tokenizer(target, f"no tokenizer in {folder}")
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        reader = import_quietly("transformers").AutoTokenizer
        logger.setLevel(logging.ERROR)  # it warns about configurations of other libraries
        return reader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as failure:  # an import or a reader may fail with anything
        first = (str(failure).strip().splitlines() or [""])[0]
        raise _missing_tokenizer(target, f"{', '.join(files)}; {type(failure).__name__}: {first}") from failure
    finally:
        logger.setLevel(level)


def _missing_tokenizer(target: str, found: str) -> InputError:
    return InputError(
        "A text needs a tokenizer.",
        asked=f"--text for {target}",
        found=found,
        because=f"a text is encoded by the model's own tokenizer: {NEEDED}",
        instead="--ids 5,3,8, or the folder with its tokenizer",
    )
