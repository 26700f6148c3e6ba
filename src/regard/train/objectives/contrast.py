"""In-batch contrastive learning (InfoNCE)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def info_nce(
    first: Tensor,
    second: Tensor,
    *,
    temperature: float = 0.05,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    r"""The cross-entropy of finding the other view of each text among those of the whole batch.

        loss_i = -log( exp(cos(a_i, b_i) / T) / sum over j of exp(cos(a_i, b_j) / T) )

    first, second: `a` and `b`, two views of the same texts, `(text, dim)`; temperature: `T`.

    Sources: van den Oord et al. (2018), equation 4; Gao et al., SimCSE (2021), equation 1, where the two views are one
    sentence under two dropout masks.

    >>> round(info_nce(torch.eye(3), torch.eye(3), temperature=1.0).item(), 4)  # log(1 + 2 / e)
    0.5514
    """
    logits = compare_views(first, second) / temperature
    targets = torch.arange(len(first), device=first.device)
    return functional.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction=reduction)


def compare_views(first: Tensor, second: Tensor) -> Tensor:
    """The cosine of every pair of a first and a second view, `(text, text)`."""
    return functional.normalize(first, dim=-1) @ functional.normalize(second, dim=-1).T
