"""The padding of a batch of texts, from `lengths` or from an `attention_mask` as Hugging Face's tokenizers give it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import InputError
from regard.layers.cache import ModelCache
from regard.models.validation import check_lengths, check_tensor
from regard.patterns import Padding

Lengths = Sequence[int] | Tensor


def find_padding(
    tokens: Tensor,
    lengths: Lengths | None,
    attention_mask: Tensor | None,
    *,
    side: str,
    names: tuple[str, str] = ("lengths", "attention_mask"),
) -> Padding | None:
    """The padding of tokens `(batch, token)`; `None` where all are real.

    lengths: number of real tokens of each row; the padding is on the `side` that the model documents.
    attention_mask: `(batch, token)`, 1 or True for real tokens, padded on either side.
    names: of the two arguments, as the caller typed them.

    >>> find_padding(torch.zeros(2, 3), None, torch.tensor([[1, 1, 1], [0, 0, 1]]), side="right")
    Padding([3, 1], side='left')
    """
    if lengths is not None and attention_mask is not None:
        raise InputError(
            "The padding is given twice.",
            asked=f"{names[0]} and {names[1]}",
            because="both say which tokens are real",
            instead=f"{names[0]} or {names[1]}, not both",
        )
    if lengths is not None:
        check_lengths(lengths, tokens)
        return Padding(lengths, side=side) if tokens.ndim == 2 else None
    if attention_mask is None:
        return None
    real = _check_mask(attention_mask, names[1])
    if tokens.ndim != 2:
        return None  # no tokens, which `check_tokens` refuses
    if real.shape != tokens.shape:
        raise InputError(
            f"The {names[1]} does not fit the tokens.",
            asked=f"{names[1]} {tuple(real.shape)} for tokens {tuple(tokens.shape)}",
            because="it has an entry for each token",
            instead=f"a mask of shape {tuple(tokens.shape)}",
        )
    if bool(real.all()):
        return None
    counts = real.sum(1)
    place = torch.arange(real.shape[1], device=real.device)
    for found, expected in (("right", place < counts[:, None]), ("left", place >= real.shape[1] - counts[:, None])):
        if torch.equal(real, expected):
            return Padding(counts, side=found)
    raise InputError(
        f"The {names[1]} hides more than padding on one side.",
        asked=f"{names[1]}[{(row := _find_odd_row(real))}] = {real[row].int().tolist()}",
        because="the real tokens of a row are one run, and all rows are padded on the right or all on the left",
        instead="padding_side= of the tokenizer, or pattern=Mask(...) where the model takes a pattern",
    )


def check_cached_mask(attention_mask: Tensor, tokens: Tensor, cache: ModelCache) -> None:
    """Refuse a mask that differs from the padding in the cache: of all tokens so far, or of the new ones alone."""
    real = _check_mask(attention_mask, "attention_mask")
    new = tokens.shape[1]
    totals = cache.lengths if cache.lengths is not None else [cache.length] * len(tokens)
    if len(real) == len(tokens) and real.shape[1] >= new and bool(real[:, -new:].all()):
        counts = [new] * len(tokens) if real.shape[1] == new else [total + new for total in totals]
        place = torch.arange(real.shape[1], device=real.device)
        if torch.equal(real, place >= real.shape[1] - torch.tensor(counts, device=real.device)[:, None]):
            return
    raise InputError(
        "The attention_mask differs from the padding in the cache.",
        asked=f"attention_mask {tuple(real.shape)} for tokens {tuple(tokens.shape)}",
        found=f"a cache of rows with {totals} tokens",
        because="padding is fixed by the first call with a cache, and later tokens are all real",
        instead="the mask of the first call, extended by ones; or no mask after the first call",
    )


def _check_mask(attention_mask: Tensor, name: str) -> Tensor:
    """The mask as booleans; refuses what is not a 2-D mask of zeros and ones."""
    check_tensor(name, attention_mask, "torch.tensor([[1, 1, 0]])")
    real = attention_mask.bool()
    if attention_mask.ndim != 2 or not torch.equal(real.to(attention_mask.dtype), attention_mask):
        raise InputError(
            f"The {name} is not a mask of zeros and ones, (batch, token).",
            asked=f"{name} {tuple(attention_mask.shape)} of {attention_mask.dtype}",
            because="1 or True is a real token and 0 or False is padding",
            instead="the attention_mask of a tokenizer; pattern=Mask(...) for a (query, key) mask, where the model "
            "takes a pattern",
        )
    return real


def _find_odd_row(real: Tensor) -> int:
    """A row that is no run of real tokens at either edge; the last padded row where each alone is one."""
    edges = real.int().diff(dim=1).ne(0).sum(1)
    both = real[:, 0] & real[:, -1] & ~real.all(1)
    neither = ~real[:, 0] & ~real[:, -1] & real.any(1)
    odd = ((edges > 1) | both | neither).nonzero()
    return int(odd[0, 0]) if len(odd) else int((~real.all(1)).nonzero()[-1, 0])
