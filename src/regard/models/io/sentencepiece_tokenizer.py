"""A tokenizer that merges by score: the SentencePiece BPE of LLaMA 1 and 2, as llama2.c runs it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from regard.errors import InputError

UNKNOWN, BEGIN, END = 0, 1, 2
# After the three come the 256 bytes, for characters that the vocabulary lacks.
FIRST_BYTE = 3
FIRST_TEXT = FIRST_BYTE + 256


class SentencePieceTokenizer:
    """Text to token ids and back; what the vocabulary lacks is written byte by byte, so nothing is lost.

    A text begins with a space, which belongs to the first word, and is cut into characters. Then the two neighbours
    whose union is the token of the highest score are joined, the leftmost of equals, again and again until no union
    is a token.

    llama2.c compares all neighbours before every merge; here they wait in a queue, which gives the same tokens in
    n log n steps. And a text that spells a sign, such as "<s>", stays text here; there it becomes the sign.

    Source: Kudo and Richardson 2018, SentencePiece; Karpathy's llama2.c, `encode` and `decode` of run.c.

    >>> signs = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    >>> tokens = [*signs, b" ", b"a", b"b", b"ab", b" ab"]
    >>> tokenizer = SentencePieceTokenizer(tokens, [0.0] * 262 + [-1.0, -2.0])
    >>> tokenizer.encode("abé")
    [1, 263, 198, 172]
    >>> tokenizer.decode([1, 263, 198, 172])
    'abé'
    """

    def __init__(self, tokens: Sequence[bytes], scores: Sequence[float]) -> None:
        if len(tokens) != len(scores) or len(tokens) < FIRST_TEXT:
            raise InputError(
                "These tokens and scores make no tokenizer.",
                found=f"{len(tokens)} tokens, {len(scores)} scores",
                because="there must be one score for each token, and the first 259 are three signs and the bytes",
                instead="read them from a tokenizer.bin of llama2.c",
            )
        self.tokens = list(tokens)
        self.scores = list(scores)
        # The number of a text; the signs and the bytes are no text, and of equal texts the first has it.
        self._numbers: dict[bytes, int] = {}
        for number, token in enumerate(self.tokens[FIRST_TEXT:], FIRST_TEXT):
            self._numbers.setdefault(token, number)

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str, *, begin: bool = True, end: bool = False) -> list[int]:
        """Token numbers, between the signs for the beginning and the end where asked."""
        numbers: list[int] = []
        for character in f" {text}" if text else "":
            encoded = character.encode("utf-8", errors="replace")
            known = self._numbers.get(encoded)
            numbers.extend([byte + FIRST_BYTE for byte in encoded] if known is None else [known])
        return [BEGIN] * begin + self._merge_pairs(numbers) + [END] * end

    def _merge_pairs(self, numbers: list[int]) -> list[int]:
        """Join neighbours, best first. A place is emptied when it joins the one before it."""
        current: list[int | None] = list(numbers)
        after = list(range(1, len(numbers) + 1))
        before = list(range(-1, len(numbers) - 1))
        waiting: list[tuple[float, int, int, int, int]] = []

        def push_pair(left: int, right: int) -> None:
            if left < 0 or right >= len(current):
                return
            first, second = current[left], current[right]
            if first is None or second is None or min(first, second) < FIRST_TEXT:  # bytes stay bytes
                return
            union = self._numbers.get(self.tokens[first] + self.tokens[second])
            if union is not None:
                heapq.heappush(waiting, (-self.scores[union], left, first, second, union))

        for left in range(len(numbers) - 1):
            push_pair(left, left + 1)
        while waiting:
            _, left, first, second, union = heapq.heappop(waiting)
            right = after[left]
            if current[left] != first or right >= len(current) or current[right] != second:
                continue  # one of the two has been joined to another since
            current[left], current[right] = union, None
            after[left] = after[right]
            if after[left] < len(current):
                before[after[left]] = left
            push_pair(before[left], left)
            push_pair(left, after[left])
        return [number for number in current if number is not None]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text of token ids; signs are left out, and so is the space that begins every text."""
        content = b"".join(map(self.piece, numbers))
        return content.decode("utf-8", errors="replace").removeprefix(" ")

    def piece(self, number: int) -> bytes:
        """What one token adds to the text."""
        if not 0 <= number < len(self.tokens):
            raise InputError(
                f"There is no token {number}.",
                asked=f"token {number}",
                found=f"a vocabulary of {len(self.tokens)}",
                because="token ids count from 0",
                instead=f"numbers from 0 to {len(self.tokens) - 1}",
            )
        if number < FIRST_BYTE:
            return b""
        return bytes([number - FIRST_BYTE]) if number < FIRST_TEXT else self.tokens[number]
