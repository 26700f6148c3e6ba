"""The heads of one attention in one run: any rows of their weights, without the square of all pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.attention import Attention
from regard.attention import weights as attention_weights
from regard.errors import InputError
from regard.layers.row_subset import restrict_to_queries

STRIP_PAIRS = 1 << 20  # weights that are computed at once


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """One attention layer on one input.

    Attributes:
        name: of the module.
        stream: `"self"`, or in an encoder-decoder `"encoder"`, `"decoder"` or `"cross"`.
        heads, queries, keys: how many there are.
        all_rows: from places of queries to the weights of all heads, `(head, place, key)`.
        one_head_rows: the same for one head, `(1, place, key)`, where that needs less work.
        value: `(key_head, key, dim)`, where it is known; query heads share it group by group.
        output: the matrix that mixes the heads, `(channel, head * dim)`, where it is known.
        grid: rows and columns of the tokens, for layers on a grid of their own.
        causal: whether no query sees a later key, so that these need not be computed.
        tensors: what is held in memory for this layer.
    """

    name: str
    stream: str
    heads: int
    queries: int
    keys: int
    all_rows: Callable[[Sequence[int]], Tensor]
    one_head_rows: Callable[[Sequence[int], int], Tensor] | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    grid: tuple[int, int] | None = None
    causal: bool = False
    tensors: tuple[Tensor, ...] = field(default=(), repr=False)

    @property
    def bytes(self) -> int:
        """The memory of what is held, each storage once."""
        held = (*self.tensors, *(part for part in (self.value,) if part is not None))
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in held}
        return sum(storages.values())

    @torch.no_grad()
    def rows(self, places: Sequence[int], head: int | None = None) -> Tensor:
        """The weights of some queries, `(head, place, key)`; of one head only, if one is named."""
        if head is None:
            return self.all_rows(places)
        if self.one_head_rows is not None:
            return self.one_head_rows(places, head)
        return self.all_rows(places)[head : head + 1]

    def strips(
        self, head: int | None = None, first: int = 0, last: int | None = None, step: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Strips of consecutive rows, each of a bounded number of weights, with the place of the first."""
        last = self.queries if last is None else last
        # A layer without rows of single heads computes all of them.
        width = self.keys * (self.heads if head is None or self.one_head_rows is None else 1)
        count = max(STRIP_PAIRS // max(width, 1), 1) if step is None else step
        for start in range(first, last, count):
            yield start, self.rows(range(start, min(start + count, last)), head)

    @torch.no_grad()
    def key_factors(self, head: int, weighting: str) -> Tensor | None:
        """What the weights of each key are multiplied by, `(key,)`: None for the weights themselves.

            value    |v_j|          how long the value is that the weight multiplies
            output   |v_j W_h^o|    how long its share of the layer's output is: Kobayashi et al. 2020, equation 5

        The sum over keys of `weight[i, j] v_j W_h^o` is head h's summand of the output, as `head_contributions` gives.
        """
        if weighting == "weights":
            return None
        if self.value is None or (weighting == "output" and self.output is None):
            raise InputError(
                f"{self.name or 'this layer'} has no {weighting} weighting.",
                asked=f"weighting {weighting!r}",
                because="the values of its heads, or the matrix that mixes them, are not known",
                instead="weighting 'weights'",
            )
        value = self.value[head * self.value.shape[0] // self.heads]
        if weighting == "output":
            assert self.output is not None
            dim = self.output.shape[1] // self.heads
            value = value @ self.output[:, head * dim : (head + 1) * dim].detach().to(value).T
        return value.norm(dim=-1)


class DescribedHeads:
    """Rows of weights from the queries and keys of one of our layers and its description of attention."""

    def __init__(self, query: Tensor, key: Tensor, described: Attention) -> None:
        self.query, self.key, self.described = query, key, described  # (head, query, dim), (key_head, key, dim)
        self.group = query.shape[0] // key.shape[0]
        pattern, scale = described.pattern, described.scale
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        # A bias or a pattern may differ from head to head; a feature map and the hard limit are no softmax of scores.
        self.is_plain = described.bias is None and described.feature_map is None and math.isfinite(self.scale)
        self.is_plain &= pattern is None or pattern.heads is None
        self.is_causal = pattern is not None and (pattern.is_causal or pattern.supports_kv_cache)

    def all_rows(self, places: Sequence[int]) -> Tensor:
        if self.is_plain:
            return self._softmax(places, self.query, self.key.repeat_interleave(self.group, 0))
        chosen, first = torch.as_tensor(places), self.key.shape[-2] - self.query.shape[-2]
        query = self.query[None, :, chosen]
        described = restrict_to_queries(self.described, chosen + first, query, self.key[None], first)
        return attention_weights(query, self.key[None], described)[0]

    def one_head_rows(self, places: Sequence[int], head: int) -> Tensor:
        if not self.is_plain:
            return self.all_rows(places)[head : head + 1]
        key_head = head // self.group
        return self._softmax(places, self.query[head : head + 1], self.key[key_head : key_head + 1])

    def _softmax(self, places: Sequence[int], query: Tensor, key: Tensor) -> Tensor:
        """The softmax of the visible scores; a causal strip computes the keys up to its last query."""
        chosen, keys = torch.as_tensor(places), key.shape[-2]
        first = keys - query.shape[-2]
        seen = min(int(chosen.max()) + first + 1, keys) if self.is_causal else keys
        scores = (query[:, chosen] * self.scale) @ key[:, :seen].mT
        pattern = self.described.pattern
        if pattern is not None:
            lengths = pattern.lengths(query.shape[-2], keys)
            shown = pattern._evaluate_pairs((chosen + first)[:, None], torch.arange(seen), lengths)
            shown = shown[0] if shown.ndim == 3 else shown  # a batch of one row
            blind = ~shown.any(-1, keepdim=True)
            scores = scores.masked_fill_(~shown, -torch.inf).masked_fill_(blind, 0)
            scores = scores.softmax(-1).masked_fill_(blind, 0)
        else:
            scores = scores.softmax(-1)
        return torch.nn.functional.pad(scores, (0, keys - seen)) if seen < keys else scores
