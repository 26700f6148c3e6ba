"""What models check before they read tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import InputError


def check_tokens(tokens: Tensor, vocabulary: int, context: int | None = None, past: int = 0) -> None:
    """Refuse what is not a batch of token ids, ids that no row of the embedding belongs to, and texts too long."""
    if tokens.ndim != 2 or tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
        raise InputError(
            "These are no tokens.",
            asked=f"a tensor {tuple(tokens.shape)} of {tokens.dtype}",
            because="tokens are whole numbers, (batch, token)",
            instead="torch.tensor([[464, 3290]]), with two brackets for one text",
        )
    if context is not None and past + tokens.shape[1] > context:
        raise InputError(
            "The text is longer than the context.",
            asked=f"{tokens.shape[1]} tokens" + (f" after {past}" if past else ""),
            found=f"a model for at most {context} tokens",
            because="there are no positions beyond the last one it has learned",
            instead=f"the last {max(context - past, 0)} tokens, or a model with a longer context",
        )
    if not tokens.numel() or tokens.device.type == "meta" or torch.compiler.is_compiling():
        return
    smallest, largest = (int(edge) for edge in tokens.aminmax())
    if smallest < 0 or largest >= vocabulary:
        wrong = smallest if smallest < 0 else largest
        row, column = (int(place) for place in (tokens == wrong).nonzero()[0])
        raise InputError(
            f"Token {wrong} is not in the vocabulary.",
            asked=f"tokens[{row}, {column}] = {wrong}",
            found=f"a vocabulary of {vocabulary} tokens, 0 to {vocabulary - 1}",
            because="every id is a row of the embedding",
            instead="the tokenizer that belongs to this model; lengths or patterns for padding, not an id of its own",
        )


def check_segments(segments: Tensor, tokens: Tensor, kinds: int) -> None:
    """Refuse segments that do not belong to the tokens one by one, and kinds that have no row of their own."""
    because = ""
    if segments.shape != tokens.shape or segments.dtype.is_floating_point or segments.dtype == torch.bool:
        because = "every token has one whole number, which says what sentence it belongs to"
    elif segments.numel() and segments.device.type != "meta" and not torch.compiler.is_compiling():
        smallest, largest = (int(edge) for edge in segments.aminmax())
        if smallest < 0 or largest >= kinds:
            because = f"there is no sentence {smallest if smallest < 0 else largest}"
    if because:
        raise InputError(
            "These segments do not fit.",
            asked=f"segments {tuple(segments.shape)} of {segments.dtype} for tokens {tuple(tokens.shape)}",
            found=f"a model of {kinds} kinds of sentences, 0 to {kinds - 1}",
            because=because,
            instead="0 for each token of the first sentence, 1 for each of the second",
        )
