"""The scores of a tile, and how they depend on the bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from regard.backends.tiles import Job, TokenIndex, group_tiles
from regard.biases.base import Bias
from regard.dropout import Dropout
from regard.patterns import Lengths, Pattern


@dataclass(frozen=True, eq=False)
class TileSettings:
    """The settings of an attention over tiles.

    `learned` tensors are passed separately, for autograd: the parameters of `bias`, or one plain tensor.
    """

    pattern: Pattern
    lengths: Lengths
    scale: float
    bias: Bias | None
    block: int
    group: int  # query heads per key head
    keeps_lse: bool = True  # whether a backward pass will need the log-sum-exp
    learns: bool = True  # whether gradients of the bias are wanted
    bias_by_row: bool = False  # whether a plain tensor differs between batch rows that the pattern distinguishes
    dropout: float = 0.0
    numbers: tuple[Tensor, Tensor] | None = None  # of queries and keys that are some of a longer sequence ...
    whole: Lengths | None = None  # ... and its lengths

    @property
    def reads_content(self) -> bool:
        """Whether queries and keys enter the scores: at `scale=0` only a bias may read them."""
        return self.scale != 0 or (self.bias is not None and self.bias.needs_content)

    def jobs(self, query: Tensor, key: Tensor) -> Iterator[Job]:
        """All tiles of the pattern, in pieces that fit the cache."""
        for group in group_tiles(self.pattern, self.lengths, self.block):
            yield from group.jobs(query.shape[0] * key.shape[1] * self.group, query.device)


class Tile:
    """The products of one job: `(batch * kv_head * tile, group * query, key)`."""

    def __init__(self, job: Job, task: TileSettings, query: Tensor, key: Tensor, learned: tuple[Tensor, ...]) -> None:
        self.job, self.task, self.learned = job, task, learned
        self.batch, self.kv_heads, self.tiles = query.shape[0], key.shape[1], job.query.index.shape[0]
        self.whole_query, self.whole_key = query, key
        self.biased = task.bias is not None or bool(learned)
        self.key = self.columns(key)

    # Between tensors over tokens and products over tiles

    def queries(self, tensor: Tensor) -> Tensor:
        """`(batch, head, query, dim)` -> `(batch * kv_head * tile, group * query', dim)`."""
        taken = self.job.query.take(tensor)
        if self.task.group == 1:
            return taken.flatten(0, 2)
        return taken.unflatten(1, (self.kv_heads, -1)).transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def columns(self, tensor: Tensor) -> Tensor:
        """`(batch, kv_head, key, dim)` -> `(batch * kv_head * tile, key', dim)`."""
        return self.job.key.take(tensor).flatten(0, 2)

    def by_head(self, product: Tensor) -> Tensor:
        """`(batch * kv_head * tile, group * query', x)` -> `(batch, head, tile, query', x)`."""
        apart = product.unflatten(0, (self.batch, self.kv_heads, self.tiles))
        if self.task.group == 1:
            return apart
        return apart.unflatten(3, (self.task.group, -1)).transpose(2, 3).flatten(1, 2)

    def by_column(self, product: Tensor) -> Tensor:
        return product.unflatten(0, (self.batch, self.kv_heads, self.tiles))

    def joined(self, scores: Tensor) -> Tensor:
        """`(batch or 1, head, tile, query', key')` -> one matrix for each product."""
        scores = scores.expand(self.batch, self.kv_heads * self.task.group, -1, -1, -1)
        if self.task.group > 1:
            scores = scores.unflatten(1, (self.kv_heads, -1)).transpose(2, 3).flatten(3, 4)
        return scores.flatten(0, 2)

    # Scores

    def compute(
        self, scaled_query: Tensor, best: Tensor | None, minus: Tensor | None = None, overflows: bool = False
    ) -> Tensor:
        """Scores with `-inf` where hidden, less `minus` for each query.

        With `best`, only content scores that reach it stay: hard attention. `overflows`: content may be infinite, and
        adding minus infinity would not hide it.
        """
        addend = self.addend()
        start = addend if minus is None else addend - self.queries(minus)
        if best is not None:
            reached = self.content(scaled_query) + self.rounding() >= self.queries(best)
            return torch.where(reached, start, -torch.inf)
        rows, keys = self.queries(scaled_query), self.key.transpose(1, 2)
        if not start.ndim:
            return torch.bmm(rows, keys)
        scores = torch.baddbmm(start, rows, keys)
        return torch.where(addend != -torch.inf, scores, -torch.inf) if overflows else scores

    def content(self, scaled_query: Tensor) -> Tensor:
        """Content scores alone, with `-inf` where a pair is hidden, be it by the pattern or by the bias."""
        scores = torch.bmm(self.queries(scaled_query), self.key.transpose(1, 2))
        return torch.where(self.addend() != -torch.inf, scores, -torch.inf)

    def rounding(self) -> Tensor:
        """How far apart equal dot products may come out; nearer than this is a tie (see the reference)."""
        eps = 2 * torch.finfo(self.key.dtype).eps * self.key.shape[-1]
        norm = self.queries(self.whole_query).norm(dim=-1, keepdim=True)
        return eps * norm * self.key.norm(dim=-1).unsqueeze(1)

    def addend(self) -> Tensor:
        """What is added to the content: the bias where visible, `-inf` where hidden; broadcasts to the scores."""
        if self.biased:
            return torch.where(self.visible(), self.bias(), -torch.inf) if self.job.group.ragged else self.bias()
        hidden = self.job.additive_mask(self.key.dtype)
        if hidden is None:
            return torch.zeros((), dtype=self.key.dtype, device=self.key.device)
        hidden = hidden.repeat(1, self.task.group, 1) if self.task.group > 1 else hidden
        if len(hidden) == 1:
            return hidden
        return hidden.expand(self.batch * self.kv_heads, -1, -1, -1).flatten(0, 1)

    def visible(self) -> Tensor:
        """The job's mask, broadcast to its products."""
        mask = self.job.mask
        if mask is None:
            return torch.ones((), dtype=torch.bool, device=self.key.device)
        return self.joined(mask[None, None].expand(-1, -1, self.tiles, -1, -1))

    def dropout_factors(self, seed: Tensor) -> Tensor:
        """What the weights are multiplied with, 0 or `1 / (1 - p)`: one matrix for each product."""
        lengths, heads, rows = self.task.lengths, self.kv_heads * self.task.group, self.task.pattern.rows or 1
        numbers = None if self.task.numbers is None else self.task.numbers[1]
        query, (block, place) = self.job.query.index, self.job.key_blocks(lengths.keys, numbers)
        batch_row = torch.arange(self.batch, device=query.device)[:, None] * rows
        batch_row = batch_row + torch.div(query[:, 0], max(lengths.queries, 1), rounding_mode="floor")
        head = torch.arange(heads, device=query.device)[:, None]
        row = (batch_row[:, None] * heads + head)[..., None, None]  # (batch, head, tile, 1, 1)
        dropout = Dropout(self.task.dropout, seed)
        factors = dropout.factors(row, self._number(self.job.query, 0)[:, :, None], block[:, None, :], self.key.dtype)
        factors = factors.flatten(-2)  # (batch, head, tile, query', 8 * block)
        return self.joined(factors.gather(-1, place[:, None].expand(*factors.shape[:-1], -1)))

    def bias(self) -> Tensor:
        with torch.no_grad():
            return self.joined(self._bias(self.learned, *self._content()).to(self.key.dtype))

    def _content(self) -> tuple[Tensor, ...]:
        bias = self.task.bias
        if bias is None or not bias.needs_content:
            return ()
        keys = self.job.key.take(self.whole_key).repeat_interleave(self.task.group, dim=1)
        return self.job.query.take(self.whole_query), keys

    def _bias(self, learned: tuple[Tensor, ...], *content: Tensor) -> Tensor:
        """The bias as `(batch or 1, head or 1, tile, query', key')`."""
        bias = self.task.bias
        if bias is None:
            return self._take_tensor_tile(learned[0])
        offset = (self.task.whole or self.task.lengths).offset
        i, j = self._number(self.job.query, 0) + offset, self._number(self.job.key, 1)
        names = [name for name, _ in bias.named_parameters()]
        parameters = dict(zip(names, learned, strict=True))
        if content:
            return functional_call(bias, parameters, (i, j, *content))
        return functional_call(bias, parameters, (i[:, :, None], j[:, None, :])).unsqueeze(0)

    def _local(self, places: TokenIndex, axis: int) -> Tensor:
        """Token numbers inside their own batch row."""
        return places.index if self.task.pattern.rows is None else places.index % self.task.lengths[axis]

    def _number(self, places: TokenIndex, axis: int) -> Tensor:
        """Token numbers in the whole sequence, which biases and dropout depend on."""
        local = self._local(places, axis)
        return local if self.task.numbers is None else self.task.numbers[axis][local]

    def _locate_pairs(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Where a plain tensor `(batch or 1, head or 1, query or 1, key or 1)` keeps the pairs of this tile."""
        rows = self.task.pattern.rows if self.task.bias_by_row and self.task.pattern.rows else 1
        i = self.job.query.index if self.task.bias_by_row else self._local(self.job.query, 0)
        if tensor.shape[2] == rows:  # the same for all queries of a row
            i = (
                torch.div(i, max(self.task.lengths.queries, 1), rounding_mode="floor")
                if rows > 1
                else torch.zeros_like(i)
            )
        j = torch.zeros_like(self.job.key.index) if tensor.shape[3] == 1 else self._local(self.job.key, 1)
        return i[:, :, None], j[:, None, :]

    def _take_tensor_tile(self, tensor: Tensor) -> Tensor:
        i, j = self._locate_pairs(tensor)
        return tensor[:, :, i, j]

    # Gradients

    def differentiate(self, grad_scores: Tensor, learned: list[Tensor], query: Tensor, key: Tensor) -> None:
        """Add the gradient of the scores to those of the bias parameters and, if it reads them, of query and key."""
        by_head = self.by_head(grad_scores)
        if self.task.bias is None:
            self._differentiate_tensor(by_head, learned[0])
            return
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in self.learned]
            content = [tensor.detach().requires_grad_() for tensor in self._content()]
            scores = self._bias(tuple(inputs), *content)
        grad_output = by_head.sum_to_size(*scores.shape).to(scores.dtype)
        grads = torch.autograd.grad(scores, [*inputs, *content], grad_output, allow_unused=True)
        for total, part in zip(learned, grads, strict=False):
            if part is not None:
                total += part
        if content and grads[-2] is not None and grads[-1] is not None:
            self.job.query.add(query, grads[-2])
            self.job.key.add(key, grads[-1].unflatten(1, (self.kv_heads, -1)).sum(2))

    def _differentiate_tensor(self, by_head: Tensor, total: Tensor) -> None:
        i, j = self._locate_pairs(total)
        part = by_head.sum_to_size(len(total), total.shape[1], *by_head.shape[2:]).to(total.dtype)
        # A bias that broadcasts over queries or keys sums their gradients.
        pairs = (i * total.shape[3] + j).expand(part.shape[2:]).reshape(-1)
        # A view: `flatten` would copy a tensor that is not dense, and additions to the copy would be discarded.
        total.view(*total.shape[:2], total.shape[2] * total.shape[3]).index_add_(2, pairs, part.flatten(2))
