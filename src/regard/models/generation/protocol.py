"""The interface of models that generate text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["GenerativeModel", "HasCache", "find_device"]


class HasCache(Protocol):
    """The state of decoding: the caches of all layers, one row for each text."""

    @property
    def length(self) -> int:
        """How many tokens the longest row holds."""
        ...

    def reorder(self, index: Int[Tensor, "new"]) -> None:
        """Row b becomes what row `index[b]` was, in place; rows may repeat, and their number may change."""
        ...


class GenerativeModel(Protocol):
    """A model that returns the logits of the next token, one token at a time.

        logits, cache = prefill(prompts, lengths, capacity)  p(y_1 | prompt)           = softmax(logits)
        logits = decode_step(tokens, cache)                p(y_n | prompt, y_1..n-1) = softmax(logits)

    `Markov` is the smallest one. An encoder-decoder reads the prompts as the source, and `prefill` gives the
    logits after its start token.
    """

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; a token is a number from 0 to `vocab_size - 1`."""
        ...

    @property
    def context_length(self) -> int | None:
        """The most tokens the model can hold (an encoder-decoder: the most it can generate), None without limit."""
        ...

    @property
    def prompt_fills_context(self) -> bool:
        """Whether the prompt counts against the context length: True for a decoder-only model."""
        ...

    def prefill(
        self, prompts: Int[Tensor, "batch token"], lengths: Int[Tensor, "batch"] | None, capacity: int
    ) -> tuple[Float[Tensor, "batch vocabulary"], Any]:
        """Prefills a cache with the prompts, with room for `capacity` more tokens.

        The prompts are padded on the left: the last `lengths[b]` entries of row b are real, all of them where
        `lengths` is None. Returns the logits of each row's next token, and the cache.
        """
        ...

    def decode_step(self, tokens: Int[Tensor, "batch 1"], cache: Any) -> Float[Tensor, "batch vocabulary"]:
        """Reads one more token of each row, and returns the logits of the next."""
        ...


def find_device(model: object) -> torch.device:
    """The device that tokens have to be on."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")
