"""Attention of one head on matrices, tokens in rows."""

from __future__ import annotations

from torch import Tensor

from regard.attention import attend
from regard.patterns import Pattern


def attend_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, pattern: Pattern | None = None) -> Tensor:
    """`attend` on matrices `(token, dim)`, without an axis for heads."""
    return attend(query[None], key[None], value[None], scale=scale, pattern=pattern)[0]
