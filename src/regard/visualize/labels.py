"""The labels of a picture: layers and heads by their indices, weights in one format, readable tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from regard.errors import InputError

LONGEST = 18  # characters of a token beside a picture
LONGEST_NAME = 26  # characters of a module's name
RAW = ("\u0120", "\u010a", "\u2581")  # a space and a new line in byte-level BPE, a space in SentencePiece


def layer_titles(names: Sequence[str]) -> list[str]:
    """A title for each layer, with the index that selects it: `layer=3` is drawn as "layer 3".

    Where the modules are numbered otherwise, as in stages, or in an encoder with a decoder, the name is added in a
    second line.

        >>> from regard.visualize.labels import layer_titles
        >>> layer_titles(["blocks.0.attention", "blocks.1.attention"])
        ['layer 0', 'layer 1']
        >>> layer_titles(["encoder.0.self", "decoder.0.self"])
        ['layer 0\\nencoder.0.self', 'layer 1\\ndecoder.0.self']
    """
    numbers = [re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name) for name in names]
    if all(not name or own == [str(index)] for index, (name, own) in enumerate(zip(names, numbers, strict=True))):
        return [f"layer {index}" for index in range(len(names))]
    return [f"layer {index}\n{_truncate_name(name)}" if name else f"layer {index}" for index, name in enumerate(names)]


def head_title(head: int) -> str:
    """The title of a head: the index that selects it."""
    return f"head {head}"


def in_one_line(title: str) -> str:
    """A title without its line break, for a page."""
    return title.replace("\n", " · ")


def _truncate_name(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


class Percent:
    """One format for all weights of a picture: as many decimals as the largest needs for two digits.

    >>> from regard.visualize.labels import Percent
    >>> percent = Percent([0.14, 0.003, 0.0002])
    >>> [percent(weight) for weight in (0.14, 0.003, 0.0002, 0.0)]
    ['14.0%', '0.3%', '<0.1%', '0.0%']
    """

    def __init__(self, weights: Sequence[float]) -> None:
        largest = 100 * max((weight for weight in weights), default=1.0)
        self.decimals = 1
        while self.decimals < 6 and largest < 10 ** (1 - self.decimals) and largest > 0:
            self.decimals += 1

    def __call__(self, weight: float) -> str:
        least = 10.0**-self.decimals
        if 0 < 100 * weight < least / 2:
            return f"<{least:.{self.decimals}f}%"
        return f"{100 * weight:.{self.decimals}f}%"


def axis_end(weights: Sequence[float]) -> float:
    """The end of an axis for all of these weights: the first of 1, 2, 5, 10, 20, 50 and 100 % that holds them.

    >>> from regard.visualize.labels import axis_end
    >>> axis_end([0.14, 0.03]), axis_end([0.97]), axis_end([0.0004])
    (0.2, 1.0, 0.01)
    """
    largest = max(weights, default=1.0)
    return next((end for end in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if largest <= end), 1.0)


# Tokens


def read_words(words: Any, ids: Sequence[int] | None, lengths: Sequence[int]) -> list[str] | None:
    """The labels of the tokens: given one by one, or as the tokenizer that reads them; one for every key.

    ids: the tokens, for a tokenizer; None where the input is no list of token ids.
    lengths: how many keys each layer has.
    """
    if words is None:
        return None
    if hasattr(words, "decode") and not isinstance(words, bytes | str):
        if ids is None:
            raise InputError(
                "A tokenizer cannot label this input.",
                asked=f"words={type(words).__name__}(...)",
                because="it decodes token ids, and the input has none",
                instead="words=[...], a text for every token",
            )
        found = label_tokens(words, ids)
    elif isinstance(words, str | bytes) or not isinstance(words, Sequence):
        raise InputError(
            "Words are a list.",
            asked=f"words={words!r}"[:80],
            because="every token has one label",
            instead="words=['The', 'keys', 'to'], or the tokenizer: words=tokenizer",
        )
    else:
        found = clean_pieces([str(word) for word in words])
    unequal = sorted({length for length in lengths if length != len(found)})
    if unequal:
        raise InputError(
            "The words do not fit the tokens.",
            asked=f"{len(found)} words",
            found=f"layers with {' and '.join(map(str, sorted(set(lengths))))} keys",
            because="every token has a word, special tokens too",
            instead=f"{unequal[0]} words, or words=tokenizer, which labels the ids themselves"
            if len(set(lengths)) == 1
            else "layer=..., layers with the same keys",
        )
    return found


def label_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, through the tokenizer's own decoder.

    Byte-level BPE, SentencePiece and WordPiece mark tokens as `Ġkeys`, `▁keys`, `##ing`. Bytes that are not a whole
    character stay bytes: `\\xe2\\x82`.
    """
    return [make_visible(_decode_token(tokenizer, int(number))) for number in ids]


def _decode_token(tokenizer: Any, number: int) -> str:
    if hasattr(tokenizer, "piece"):  # ours, of llama2.c
        content = tokenizer.piece(number)
        return content.decode("utf-8", "backslashreplace") if content else _as_text(tokenizer.tokens[number])
    if hasattr(tokenizer, "find_word_starts"):  # ours, of a run
        text = tokenizer.decode([number], skip_special_tokens=False)
        return text if text and "\ufffd" not in text else f"[{number}]"
    name, special, decode = _read_tokenizer(tokenizer, number)
    if name is None:
        return f"[{number}]"  # a padded vocabulary has embeddings without a token
    if special:
        return name
    text = decode([number])
    if "\ufffd" in text:
        return _decode_bytes(name)
    # A decoder removes WordPiece's mark from all tokens but the first.
    return text[2:] if len(text) > 2 and text[:2] == "##" and decode([number, number]) == text + text[2:] else text


def _read_tokenizer(tokenizer: Any, number: int) -> tuple[str | None, bool, Any]:
    """The token's name, whether it is special, and the decoder: of the library tokenizers, or of transformers."""
    if hasattr(tokenizer, "id_to_token"):
        added = tokenizer.get_added_tokens_decoder().get(number)
        special = added is not None and added.special
        return tokenizer.id_to_token(number), special, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    try:
        name = tokenizer.convert_ids_to_tokens(number)
    except (IndexError, KeyError, OverflowError):
        name = None
    words = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return name, number in tokenizer.all_special_ids, lambda ids: tokenizer.decode(ids, **words)


def clean_pieces(pieces: Sequence[str]) -> list[str]:
    """Texts of tokens for a picture. Marks of tokenizers are removed."""
    if any(piece.startswith(RAW[:2]) for piece in pieces):
        pieces = [piece if piece.startswith("<|") else _decode_bytes(piece) for piece in pieces]
    elif any(piece.startswith(RAW[2]) for piece in pieces):
        pieces = [piece.replace(RAW[2], " ") for piece in pieces]
    elif any(re.match(r"##\w", piece) for piece in pieces) and not any(" " in piece for piece in pieces):
        pieces = [piece[2:] if re.match(r"##\S", piece) else piece for piece in pieces]
    return [make_visible(piece) for piece in pieces]


def make_visible(text: str) -> str:
    """A label for a token: control characters escaped, truncated, and a token of spaces made visible."""
    shown = text.strip(" ") or "␣" * max(len(text), 1)
    shown = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in shown)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _decode_bytes(name: str) -> str:
    """The text of a byte-level token; bytes that are not a character are escaped."""
    alphabet = _byte_alphabet()
    if not all(sign in alphabet for sign in name):
        return name
    return bytes(alphabet[sign] for sign in name).decode("utf-8", "backslashreplace")


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _as_text(token: Any) -> str:
    return token.decode("utf-8", "backslashreplace").strip() if isinstance(token, bytes) else str(token)
