r"""Any score by relative position: attention as the ratio of two convolutions.

    output[q] = sum_k e^{s(q - k)} x[k] / sum_k e^{s(q - k)}

The denominator depends on the geometry alone and is summed without subtracting anything, so that it is exact to its
last digits even where it is tiny. The numerator has an error relative to the largest kernel, not to itself: where a
head's peak lies outside the image, what is left of it may be smaller than that error. Those rows are computed directly,
by the softmax over all their keys, in pieces of bounded size. By a transform, the error is also relative to the largest
value of a channel: where values of one image differ by many orders of magnitude, the small ones lose digits.

Memory is linear in the tokens: beside the output there are transforms of some channels at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.positional.layout import Layout, spread, windows
from regard.backends.positional.products import Band, Box, Slabs, Spectrum, transform_size
from regard.batching import map_one_by_one, merge_mapped_axis, split_mapped_axis
from regard.errors import BackendError

TRANSFORM_BUDGET = 1 << 17  # complex numbers of one transform of values
ROWS_BUDGET = 1 << 20  # scores of one piece of direct rows
SLABS_BUDGET = 1 << 22  # numbers of the matrix whose slabs rows of queries share
SPARE = 2.0**-13  # of a head's whole mass, times eps: what a band may leave out
SAFETY = 8.0  # errors of a transform, in units of eps and of the whole mass, stay below this: see `_least`
# Nanoseconds of one core, measured with float32 values and 64 channels (benchmarks/positional.py)
TAP, POINT, PAIR, PRODUCT = 0.12, 10.0, 5.0, 0.04


@dataclass(frozen=True)
class Task:
    """The layout, and how many heads of the output share one head of values."""

    layout: Layout
    group: int


class Ratio(torch.autograd.Function):
    """Output `(batch, head, query, channel)` of values `(batch, kv_head, key, channel)` and a table `(head, entry)`."""

    @staticmethod
    def forward(value, table, task):
        output = value.new_zeros(value.shape[0], len(table), math.prod(task.layout.queries), value.shape[-1])
        for kv_head in range(value.shape[1]):
            heads = slice(kv_head * task.group, (kv_head + 1) * task.group)
            _average(value[:, kv_head], table[heads], task.layout, output[:, heads])
        return output

    @staticmethod
    def setup_context(ctx, inputs, output):
        value, table, ctx.task = inputs
        ctx.save_for_backward(value, table, output)

    @staticmethod
    def backward(ctx, *gradients):
        grads = RatioGradient.apply(*ctx.saved_tensors, gradients[0], ctx.task, ctx.needs_input_grad[1])
        return *grads, None

    @staticmethod
    def vmap(info, in_dims, *arguments):
        value, table, task = arguments
        if in_dims[1] is not None:
            return map_one_by_one(info.batch_size, in_dims, (value, table, task), _as_tuple)[0], 0
        output = Ratio.apply(*merge_mapped_axis(info.batch_size, in_dims[:1], (value,)), table, task)
        return split_mapped_axis(info.batch_size, (output,))[0], 0


def _as_tuple(*arguments) -> tuple[Tensor]:
    return (Ratio.apply(*arguments),)


class RatioGradient(torch.autograd.Function):
    """The way back as an operation of its own, so that vmap can batch it too."""

    @staticmethod
    def forward(value, table, output, gradient, task, to_table):
        grads = torch.zeros_like(value), torch.zeros_like(table)
        for kv_head in range(value.shape[1]):
            heads = slice(kv_head * task.group, (kv_head + 1) * task.group)
            found = grads[0][:, kv_head], grads[1][heads]
            given = value[:, kv_head], table[heads], task.layout, output[:, heads], gradient[:, heads]
            _differentiate(*given, *found, to_table)
        return grads

    @staticmethod
    def setup_context(ctx, inputs, output):
        return None

    @staticmethod
    def backward(ctx, *gradients):
        raise BackendError(
            "'positional' differentiates a ratio of convolutions once, not twice.",
            asked="a gradient of a gradient",
            because="its transforms are gone after the first backward pass",
            instead='backend="reference" for second derivatives',
        )

    @staticmethod
    def vmap(info, in_dims, *arguments):
        # One sample's gradient of the table must not meet another's.
        return map_one_by_one(info.batch_size, in_dims, arguments, RatioGradient.apply), (0, 0)


class Ways:
    """How each row of some heads that share values is computed, found from their table alone.

    kernel `(head, *table)` is `e^{table - peak}`, and mass `(head, *queries)` its sum over the keys of each query, both
    in float64.
    """

    def __init__(self, table: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.scores = layout, table
        table = table.detach().double().unflatten(1, layout.table)
        peak = table.amax((1, 2), keepdim=True)
        hidden = table == -torch.inf
        self.kernel = torch.where(hidden, 0.0, (table - torch.where(peak == -torch.inf, 0.0, peak)).exp())
        self.mass = windows(self.kernel, layout)
        empty = windows((~hidden).double(), layout) == 0 if bool(hidden.any()) else None
        whole = self.kernel.sum((1, 2))
        box = _bounds(self.kernel, whole, torch.finfo(dtype).eps)
        # Of a row that each way serves, the work (for a channel) and the least mass.
        area = (box[1] - box[0] + 1) * (box[3] - box[2] + 1)
        queries, keys = max(1, math.prod(layout.queries)), math.prod(layout.keys)
        ways = {
            Band: (TAP * area, _left_out(self.kernel, box, dtype)),
            Spectrum: (
                POINT * math.prod(transform_size(layout)) / queries,
                _least(whole, layout, dtype, torch.float64),
            ),
        }
        if slabs_fit(layout, len(table)):
            ways[Slabs] = (PRODUCT * keys, torch.full_like(whole, _tiny(dtype)))
        costs = {
            way: work + PAIR * keys * int((~(self.mass >= least[:, None, None])).sum()) / len(table) / queries
            for way, (work, least) in ways.items()
        }
        way = min(costs, key=costs.__getitem__)
        least = ways[way][1]
        # Written so that NaN is not good enough, and is found by the direct softmax.
        self.good = self.mass >= least[:, None, None]
        self.good &= self.mass > 0
        self.direct = ~self.good if empty is None else ~self.good & ~empty
        if way is Band:
            self.product: Band | Slabs | Spectrum = Band(self.kernel, layout, box, dtype)
        elif way is Slabs:
            self.product = Slabs(self.kernel, layout, dtype)
        else:
            self.product = Spectrum(self.kernel, layout, self._precisions(whole, dtype))

    def _precisions(self, whole: Tensor, dtype: torch.dtype) -> list[torch.dtype | None]:
        """Single precision where it is enough for every row of a head."""
        enough = (self.mass >= _least(whole, self.layout, dtype, dtype)[:, None, None]).flatten(1).all(1).tolist()
        some = self.good.flatten(1).any(1).tolist()
        return [None if not any_ else dtype if all_ else torch.float64 for all_, any_ in zip(enough, some, strict=True)]

    @property
    def works(self) -> bool:
        return bool(self.good.any())

    def pieces(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The direct rows: head, queries, and for each pair the place of its score in the table."""
        query_code, key_code = self.layout.codes(self.scores.device)
        step = max(1, ROWS_BUDGET // max(1, len(key_code)))
        for head in self.direct.flatten(1).any(1).nonzero().flatten().tolist():
            for rows in self.direct[head].flatten().nonzero().flatten().split(step):
                yield head, rows, query_code[rows, None] - key_code

    def inverse(self) -> Tensor:
        """One over the mass of the good rows, 0 for the others: `(head, *queries)`."""
        return torch.where(self.good, 1 / torch.where(self.good, self.mass, 1.0), 0.0)

    def precision(self, head: int, dtype: torch.dtype) -> torch.dtype:
        return self.product.dtypes[head] or dtype if isinstance(self.product, Spectrum) else dtype

    def planes(self) -> int:
        """How many channels to take at once."""
        if isinstance(self.product, Slabs):
            return max(1, SLABS_BUDGET // (len(self.kernel) * math.prod(self.layout.queries)))
        return max(1, TRANSFORM_BUDGET // (math.prod(transform_size(self.layout)) // 2 + 1))


def slabs_fit(layout: Layout, heads: int) -> bool:
    """Whether the matrix of slabs is small enough to be made."""
    return heads * layout.table[0] * layout.keys[1] * layout.queries[1] <= SLABS_BUDGET


def _bounds(kernel: Tensor, whole: Tensor, eps: float) -> Box:
    """The part of the table outside which no head has anything that matters."""
    least = whole * (eps * SPARE / math.prod(kernel.shape[1:]))
    matters = (kernel > least[:, None, None]).any(0)
    rows, columns = (matters.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    return (rows[0], rows[-1], columns[0], columns[-1]) if rows else (0, 0, 0, 0)


def _left_out(kernel: Tensor, box: Box, dtype: torch.dtype) -> Tensor:
    """The least mass of a row that a band serves: what is left out stays below eps / 4, and nothing underflows."""
    top, bottom, left, right = box
    outside = kernel.clone()
    outside[:, top : bottom + 1, left : right + 1] = 0
    return (4 / torch.finfo(dtype).eps * outside.sum((1, 2))).clamp(min=_tiny(dtype))


def _tiny(dtype: torch.dtype) -> float:
    """The least mass of which no part that matters has underflowed."""
    return 1e-25 if dtype == torch.float32 else 1e-250


def _least(whole: Tensor, layout: Layout, dtype: torch.dtype, transform: torch.dtype) -> Tensor:
    """The least mass of a row that a transform serves.

    The error of a transform is spread evenly over its results: about `eps` times the root of their mean square (Higham,
    Accuracy and Stability, section 24.1), which is at most the whole mass times the largest value. Relative to a row's
    mass that may be as much as adding up its keys costs in any order: `eps sqrt(keys)`.
    """
    error = SAFETY * torch.finfo(transform).eps
    return whole * (error / (torch.finfo(dtype).eps * (SAFETY + math.sqrt(math.prod(layout.keys)))))


def _chunks(x: Tensor, planes: int) -> Iterator[tuple[slice, slice]]:
    """Batch rows and channels, so many that they are about `planes` together."""
    channels = x.shape[-1]
    rows, wide = max(1, planes // max(1, channels)), min(channels, planes)
    for row in range(0, len(x), rows):
        for channel in range(0, channels, wide):
            yield slice(row, row + rows), slice(channel, channel + wide)


def _planes(x: Tensor) -> Tensor:
    """`(batch, token, channel)` -> `(batch * channel, token)`, each channel of each batch row dense."""
    return x.mT.contiguous().flatten(0, 1)


def _put(target: Tensor, planes: Tensor) -> None:
    """Write planes `(batch * channel, token)` into `(batch, token, channel)`."""
    for row, part in zip(target, planes.flatten(1).unflatten(0, (len(target), -1)), strict=True):
        row.copy_(part.T)  # one by one: torch transposes matrices faster than stacks of them


def _average(x: Tensor, table: Tensor, layout: Layout, output: Tensor) -> None:
    """Write the means of all heads that share the values `x (batch, key, channel)`."""
    ways = Ways(table, layout, x.dtype)
    if ways.works:
        inverse = ways.inverse()
        for rows, channels in _chunks(x, ways.planes()):
            planes = _planes(x[rows, :, channels]).unflatten(1, layout.keys)
            for head, sums in ways.product.apply(planes):
                mean = (sums * inverse[head].to(sums.dtype)).to(x.dtype)
                _put(output[rows, head, :, channels], mean)
        if not bool(ways.good.all()):  # a product with zero is not zero where it overflowed
            output.masked_fill_(~ways.good.flatten(1)[..., None], 0)
    for head, rows, entry in ways.pieces():
        output[:, head, rows] = table[head][entry].softmax(-1) @ x


def _differentiate(x, table, layout, output, gradient, dx: Tensor, dtable: Tensor, to_table: bool) -> None:
    """Add the gradients of values `(batch, key, channel)` and of the table `(head, entry)`."""
    ways = Ways(table, layout, x.dtype)
    if ways.works:
        inverse = ways.inverse()
        for rows, channels in _chunks(x, ways.planes()):

            def divided(head: int, rows: slice = rows, channels: slice = channels) -> Tensor:
                grad_output = _planes(gradient[rows, head, :, channels]).unflatten(1, layout.queries)
                dtype = ways.precision(head, x.dtype)
                return grad_output.to(dtype) * inverse[head].to(dtype)

            planes = _planes(x[rows, :, channels]).unflatten(1, layout.keys)
            _put(dx[rows, :, channels], ways.product.back(planes, divided, to_table))
        if to_table:
            # What the mean itself takes away: the gradient of the denominator.
            fall = torch.stack(
                [(gradient[:, head].double() * output[:, head]).sum((0, -1)) for head in range(len(table))]
            )
            fall = fall.unflatten(1, layout.queries) * inverse
            found = ways.kernel * (ways.product.grad - spread(fall, layout))
            # A number added to all scores of a head changes nothing, so its gradients sum to zero. What rounding left
            # of the sum would be multiplied by the distance of a centre far away: it goes, by what each entry weighs.
            share = ways.kernel * spread(inverse, layout)
            rest = found.sum((1, 2), keepdim=True) / share.sum((1, 2), keepdim=True).clamp(min=1)
            dtable += (found - share * rest).flatten(1).to(dtable.dtype)
    for head, rows, entry in ways.pieces():
        weight, up = table[head][entry].softmax(-1), gradient[:, head, rows]
        dx += weight.mT @ up
        if to_table:
            grad = torch.einsum("bqc,bkc->qk", up, x)
            grad = weight * (grad - (weight * grad).sum(-1, keepdim=True))
            dtable[head].index_add_(0, entry.flatten(), grad.flatten())
