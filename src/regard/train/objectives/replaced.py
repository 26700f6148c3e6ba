r"""Replaced-token detection: some tokens are replaced, and every token is classified as original or replaced.

    loss = mean over tokens of  -y log sigmoid(x . w + b) - (1 - y) log(1 - sigmoid(x . w + b)),   y = 1: replaced

Source: Clark et al., ELECTRA (ICLR 2020), section 2. Where we differ: their replacements are drawn from a small masked
language model that is trained together with the detector; ours are drawn by the frequency of tokens in the corpus,
the "unigram" generator of their section 3.2. It has no weights, so that a batch is a function of the seed and the
step alone, and a step costs one forward pass of one model. The task is easier, and they find it less useful.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.train.objectives.masking import IGNORED, Masked


def replace_tokens(
    tokens: Tensor,
    *,
    generator: torch.Generator,
    frequencies: Tensor,
    special_tokens: Sequence[int],
    share: float = 0.15,
) -> Masked:
    """Replace a share of the tokens; targets are 1 where the input differs from the text, 0 where not.

    frequencies: of each token of the vocabulary; special_tokens are neither replaced nor drawn, and their target is
        `IGNORED`. A draw that happens to be the original token counts as original, as in ELECTRA.
    """
    specials = torch.tensor(list(special_tokens))
    weights = frequencies.double().index_fill(0, specials, 0.0)
    eligible = ~torch.isin(tokens, specials)
    chosen = eligible & (torch.rand(tokens.shape, generator=generator) < share)
    drawn = torch.multinomial(weights, tokens.numel(), replacement=True, generator=generator).view_as(tokens)
    replaced = torch.where(chosen, drawn, tokens)
    return Masked(replaced, torch.where(eligible, (replaced != tokens).long(), torch.tensor(IGNORED)))
