"""Texts as tokens and back, for any tokenizer; a model without one reads numbers of tokens, or bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from regard.errors import InputError
from regard.visualize.labels import label_tokens

MOST_CHARACTERS = 400_000  # of a text
MASKS = ("[MASK]", "<mask>", "<MASK>")
ENDS = ("</s>", "<|endoftext|>", "<|im_end|>", "<eos>", "[SEP]")


class Words:
    """The tokenizer of a model, of whichever library.

    Attributes:
        mask: the id of the token that stands for a hidden one; None without one.
        ends: ids that end a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.mask = self._find_mask()
        self.ends = self._find_ends()

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, with the special tokens that the tokenizer adds."""
        check_text(text)
        encoded = self.tokenizer.encode(text)
        ids = getattr(encoded, "ids", encoded)
        return [int(number) for number in ids]

    def label(self, ids: Sequence[int]) -> list[str]:
        """A label for each token."""
        known: dict[int, str] = {}
        for number in ids:
            if number not in known:
                known[number] = label_tokens(self.tokenizer, [number])[0]
        return [known[number] for number in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens."""
        return str(self.tokenizer.decode([int(number) for number in ids]))

    def is_special(self, number: int) -> bool:
        """Whether a token is none of the text's own."""
        special = getattr(self.tokenizer, "all_special_ids", None) or getattr(self.tokenizer, "special_ids", None)
        if special is not None:
            return number in special
        if hasattr(self.tokenizer, "get_added_tokens_decoder"):
            added = self.tokenizer.get_added_tokens_decoder().get(number)
            return added is not None and added.special
        return number in (1, 2)  # of SentencePiece: the beginning and the end

    def _find(self, names: Sequence[str]) -> list[int]:
        if hasattr(self.tokenizer, "token_to_id"):
            found = [self.tokenizer.token_to_id(name) for name in names]
        elif hasattr(self.tokenizer, "get_vocab"):
            vocabulary = self.tokenizer.get_vocab()
            found = [vocabulary.get(name) for name in names]
        else:
            tokens = getattr(self.tokenizer, "tokens", [])[:300]
            wanted = [name.encode() for name in names]
            found = [tokens.index(name) if name in tokens else None for name in wanted]
        return [int(number) for number in found if number is not None]

    def _find_mask(self) -> int | None:
        own = getattr(self.tokenizer, "mask_token_id", None)
        return int(own) if own is not None else next(iter(self._find(MASKS)), None)

    def _find_ends(self) -> frozenset[int]:
        own = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset({int(own)} if own is not None else self._find(ENDS))


class NumberWords(Words):
    """Numbers of tokens instead of a text: `5 3 8`. Any other text is read as its bytes, if the vocabulary has them."""

    def __init__(self, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = None, vocab_size
        self.mask, self.ends = None, frozenset()

    def encode(self, text: str) -> list[int]:
        check_text(text)
        if re.fullmatch(r"[\s,]*(\d{1,9}[\s,]+)*\d{1,9}[\s,]*", text):
            ids = [int(part) for part in re.findall(r"\d+", text)]
        else:
            ids = list(text.encode())
        wrong = [number for number in ids if number >= self.vocab_size]
        if wrong:
            raise InputError(
                f"There is no token {wrong[0]}.",
                asked=text[:80],
                found=f"a vocabulary of {self.vocab_size:,}, and no tokenizer beside the model",
                because="numbers are token ids, counted from 0, and any other text is read byte by byte",
                instead=f"numbers from 0 to {self.vocab_size - 1}: 5 3 8",
            )
        return ids

    def label(self, ids: Sequence[int]) -> list[str]:
        return [str(number) for number in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def is_special(self, number: int) -> bool:
        return False


def check_text(text: str) -> None:
    """Refuse an empty text, and one that is beyond any model here."""
    if not text.strip() or len(text) > MOST_CHARACTERS:
        raise InputError(
            "The text is too long." if text.strip() else "The text is empty.",
            asked=f"{len(text):,} characters",
            because=f"a text has at most {MOST_CHARACTERS:,} characters" if text.strip() else "there are no tokens",
            instead="a part of it" if text.strip() else "a sentence, such as: The keys to the cabinet are here",
        )
