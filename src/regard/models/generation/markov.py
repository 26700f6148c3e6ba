"""The smallest language model: the next token depends on the last one alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from regard.errors import ShapeError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["Markov"]


class LengthCache:
    """The cache of a chain: the number of tokens so far."""

    def __init__(self, length: int) -> None:
        self.length = length

    def reorder(self, index: Tensor) -> None:
        """Nothing to move: the rows are alike."""


class Markov:
    """A Markov chain over tokens, a language model whose every probability can be written down.

        p(y_n = j | y_1 .. y_n-1) = softmax(logits[y_n-1])_j

    logits: a square table, a row for the last token, a column for the next; -inf forbids a pair.

    Source: Shannon, A Mathematical Theory of Communication (1948), section 3, where it writes English.

    >>> follows = torch.full((4, 4), -torch.inf)
    >>> follows[[0, 1, 2, 3], [1, 2, 3, 0]] = 0.0                        # 0 1 2 3 0 1 2 3 ...
    >>> from regard.models.generation import generate
    >>> generate(Markov(follows), [[2], [3, 0]], max_new_tokens=3).tokens
    [[3, 0, 1], [1, 2, 3]]
    """

    context_length = None
    prompt_fills_context = True

    def __init__(self, logits: Float[Tensor, "last next"]) -> None:
        if logits.ndim != 2 or logits.shape[0] != logits.shape[1]:
            raise ShapeError(
                "A Markov chain has a square table.",
                asked="Markov(logits)",
                found=f"logits {tuple(logits.shape)}",
                because="every token can be the last one, and every token can be the next",
                instead="logits of shape (vocabulary, vocabulary)",
            )
        self.logits = logits
        self.vocab_size = len(logits)

    def prefill(
        self, prompts: Int[Tensor, "batch token"], lengths: Int[Tensor, "batch"] | None, capacity: int
    ) -> tuple[Float[Tensor, "batch vocabulary"], LengthCache]:
        """The scores after the last token of each prompt."""
        return self.logits[prompts[:, -1]], LengthCache(prompts.shape[1])

    def decode_step(self, tokens: Int[Tensor, "batch 1"], cache: LengthCache) -> Float[Tensor, "batch vocabulary"]:
        """The scores after these tokens."""
        cache.length += 1
        return self.logits[tokens[:, 0]]
