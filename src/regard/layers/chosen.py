"""What some of the queries see, without asking for the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.attention import Attention
from regard.patterns import Lengths, Pattern


def seen_from(described: Attention, places: Tensor, query: Tensor, key: Tensor, first: int = 0) -> Attention:
    """The description for some queries `(*batch, head, place, dim)` over all keys.

    `places` are their absolute positions, and `first` is the position of the first query there is: with `n` queries
    and `m` keys it is `m - n`.
    """
    pattern, bias = described.pattern, described.bias
    if pattern is not None:
        pattern = Chosen(pattern, tuple(places.tolist()))
    if isinstance(bias, Tensor):
        bias = bias[..., places - first, :] if bias.ndim > 1 and bias.shape[-2] > 1 else bias
    elif bias is not None and bias.needs_content:
        keys = torch.arange(key.shape[-2], device=key.device)
        bias = bias.content_scores(places, keys, query, key.repeat_interleave(query.shape[-3] // key.shape[-3], -3))
    elif bias is not None:
        bias = bias.scores(places[:, None], torch.arange(key.shape[-2], device=key.device)).to(query.dtype)
    return dataclasses.replace(described, pattern=pattern, bias=bias)


@dataclass(frozen=True, repr=False)
class Chosen(Pattern):
    """What some queries of a pattern see: the n-th query of the attention is the one at `places[n]`."""

    pattern: Pattern
    places: tuple[int, ...]

    @property
    def rows(self) -> int | None:
        return self.pattern.rows

    @cached_property
    def _index(self) -> Tensor:
        return torch.tensor(self.places, dtype=torch.long, device="cpu")

    @property
    def _opaque(self) -> bool:
        return True

    @property
    def _needs_keys(self) -> bool:
        return True

    def _check(self, lengths: Lengths) -> None:
        self.pattern._check(Lengths(lengths.keys, lengths.keys))

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        place = self._index.to(i.device)[i - lengths.offset]
        return self.pattern._allows(place, j, row, Lengths(lengths.keys, lengths.keys))
