"""The token of the largest logit and its log-probability, in one pass over logits that were just computed."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.eager import is_plain_eager
from regard.kernels.library import OK, native


def find_greedy(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Tokens `(row,)`, the lowest of equals, and their log-probabilities, of plain float32 logits `(row, vocab)`.

    `None` for other tensors, and where a row has a NaN or no finite largest logit.
    """
    if native is None or logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_cpu:
        return None
    if not is_plain_eager(logits) or not logits.is_contiguous() or not logits.shape[1]:
        return None
    rows, count = logits.shape
    tokens, scores = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    status = native.regard_greedy(logits.data_ptr(), rows, count, tokens.data_ptr(), scores.data_ptr())
    return (tokens, scores) if status == OK else None
