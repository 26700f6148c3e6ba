"""Numbers for every head of a layer: how spread out it is, how far it looks, and what it looks at."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.lab.layer_heads import LayerHeads
from regard.lab.maps import THUMBNAIL, Check, make_thumbnail_pooling

PUNCTUATION = set(string.punctuation) | set("«»“”‘’„–—…¿¡、。")


@dataclass(frozen=True)
class Tokens:
    """The tokens of one side of an attention.

    Attributes:
        labels: a text for each.
        special: which of them the tokenizer added; none for images.
        grid: rows and columns, for the patches of an image.
        start: how many tokens come before the grid.
    """

    labels: tuple[str, ...]
    special: frozenset[int] = frozenset()
    grid: tuple[int, int] | None = None
    start: int = 0

    def find_delimiters(self) -> list[int]:
        """Special tokens and punctuation."""
        marks = (place for place, label in enumerate(self.labels) if label and set(label) <= PUNCTUATION)
        return sorted({*self.special, *marks})

    def find_words(self) -> list[str]:
        """What is compared to find the same word again."""
        return [label.casefold() for label in self.labels]

    def positions(self) -> Tensor:
        """`(token, 1)` along a text, `(token, 2)` rows and columns of a grid."""
        if self.grid is None:
            return torch.arange(len(self.labels))[:, None].float()
        place = torch.cartesian_prod(torch.arange(self.grid[0]), torch.arange(self.grid[1])).float()
        return torch.cat((torch.zeros(self.start, 2), place))


def summarize_heads(
    layer: LayerHeads, queries: Tokens, keys: Tokens, check: Check = lambda: None
) -> tuple[Tensor, list[dict[str, float]]]:
    """Thumbnails `(head, row, column)` from 0 to 255, each with its own largest, and numbers of each head.

    All of them are means over the queries, in one pass over strips of rows:

        entropy      -sum_j w_ij log w_ij, in nats
        distance     sum_j w_ij |i - j|; on a grid between patches, as a share of the weight that falls on patches
        self         w_ii                   previous     w_i,i-1            next      w_i,i+1
        first        w_i0                   delimiter    the weight of punctuation and special tokens
        same_word    the weight of the same word elsewhere, over the queries that can see one
    """
    own = layer.stream != "cross" and layer.queries == layer.keys
    totals = _Totals(layer, queries, keys, own)
    columns = make_thumbnail_pooling(layer.keys)
    rows = make_thumbnail_pooling(layer.queries)
    picture = torch.zeros(layer.heads, rows.shape[1], columns.shape[1])
    for start, strip in layer.strips():
        check()
        stop = start + strip.shape[1]
        seen = min(stop, layer.keys) if layer.causal else layer.keys
        strip = strip[..., :seen].float()
        totals.add(start, strip)
        picture += rows[start:stop].T @ (strip @ columns[:seen])
    largest = picture.amax((1, 2), keepdim=True).clamp(min=1e-30)
    shown = (255 * picture / largest).round().to(torch.uint8)
    assert max(shown.shape[1:]) <= THUMBNAIL
    return shown, totals.means()


class _Totals:
    """Sums over queries of what is measured, `(head,)` each, and how many queries they are over."""

    def __init__(self, layer: LayerHeads, queries: Tokens, keys: Tokens, own: bool) -> None:
        self.layer, self.own, self.keys = layer, own, keys
        self.on_grid = own and keys.grid is not None
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor | int] = {}
        self.place = keys.positions()
        self.delimiters = torch.tensor(keys.find_delimiters(), dtype=torch.long)
        self.words = None if keys.grid is not None else _number_words(queries.find_words(), keys.find_words())

    def add(self, start: int, strip: Tensor) -> None:
        count, seen = strip.shape[1:]
        place = torch.arange(start, start + count)
        self._add("entropy", torch.special.entr(strip).sum((1, 2)), count)
        if self.own:
            self._add_distances(place, strip)
            for name, offset in (("self", 0), ("previous", -1), ("next", 1)):
                key = place + offset
                inside = (key >= 0) & (key < self.layer.keys)
                hit = inside & (key < seen)  # later keys of a causal strip have no weight
                self._add(name, strip[:, hit, key[hit]].sum(1), int(inside.sum()))
        if self.on_grid and self.keys.start == 0:
            return
        self._add("first", strip[:, :, 0].sum(1), count)
        if self.words is not None:
            self._add("delimiter", strip[:, :, self.delimiters[self.delimiters < seen]].sum((1, 2)), count)
            self._add_same_words(place, strip)

    def means(self) -> list[dict[str, float]]:
        # Of distances on a grid the count is the weight that falls on patches: weights on class tokens have none.
        found = {name: total / torch.as_tensor(self.counts[name]).clamp(min=1e-30) for name, total in self.sums.items()}
        return [{name: float(values[head]) for name, values in found.items()} for head in range(self.layer.heads)]

    def _add(self, name: str, total: Tensor, count: Tensor | int) -> None:
        self.sums[name] = self.sums.get(name, torch.zeros(self.layer.heads)) + total
        self.counts[name] = self.counts.get(name, 0) + count

    def _add_distances(self, place: Tensor, strip: Tensor) -> None:
        seen, first = strip.shape[2], self.keys.start if self.on_grid else 0
        kept = place[place >= first] - place[0]
        if not len(kept) or seen <= first:
            self._add("distance", torch.zeros(self.layer.heads), 0)
            return
        distance = torch.cdist(
            self.place[place[kept]], self.place[first:seen], compute_mode="donot_use_mm_for_euclid_dist"
        )
        part = strip[:, kept, first:]
        total = torch.einsum("hqk,qk->h", part, distance)
        self._add("distance", total, part.sum((1, 2)) if self.on_grid else len(kept))

    def _add_same_words(self, place: Tensor, strip: Tensor) -> None:
        assert self.words is not None
        query, key = self.words
        seen = strip.shape[2]
        same = query[place][:, None] == key[None, :seen]
        if self.own:
            same &= place[:, None] != torch.arange(seen)
        if self.layer.causal:
            same &= torch.arange(seen) <= place[:, None]
        pair = same.nonzero(as_tuple=True)
        self._add("same_word", strip[:, pair[0], pair[1]].sum(1), int(same.any(1).sum()))


def _number_words(queries: Sequence[str], keys: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The same number for the same word on both sides."""
    numbers: dict[str, int] = {}
    found = [[numbers.setdefault(word, len(numbers)) for word in words] for words in (queries, keys)]
    return torch.tensor(found[0]), torch.tensor(found[1])
