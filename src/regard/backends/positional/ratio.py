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

import torch
from torch import Tensor

from regard.backends.positional.products import Band, Slabs, Spectrum, TableBox, transform_size
from regard.backends.positional.relative_layout import RelativeLayout, sum_windows, sum_windows_transposed
from regard.batching import map_one_by_one, merge_mapped_axis, split_mapped_axis
from regard.kernels.registration import refuse_second_gradient, save_nothing
from regard.nonfinite import has_no_values

TRANSFORM_BUDGET = 1 << 17  # complex numbers of one transform of values
ROWS_BUDGET = 1 << 20  # scores of one piece of direct rows
SLABS_BUDGET = 1 << 22  # numbers of the matrix whose slabs rows of queries share
SPARE = 2.0**-13  # of a head's whole mass, times eps: what a band may leave out
SAFETY = 8.0  # errors of a transform, in units of eps and of the whole mass, stay below this
# Nanoseconds of one core, measured with float32 values and 64 channels (benchmarks/positional.py)
TAP, POINT, PAIR, PRODUCT = 0.12, 10.0, 5.0, 0.04


class Ratio(torch.autograd.Function):
    """Output `(batch, head, query, channel)` of values `(batch, kv_head, key, channel)` and a table `(head, entry)`.

    `group` heads of the output share one head of values.
    """

    @staticmethod
    def forward(value, table, layout, group):
        output = value.new_zeros(value.shape[0], len(table), math.prod(layout.queries), value.shape[-1])
        if has_no_values():  # the method depends on those of the table
            return output
        for kv_head in range(value.shape[1]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            _average(value[:, kv_head], table[heads], layout, output[:, heads])
        return output

    @staticmethod
    def setup_context(ctx, inputs, output):
        value, table, ctx.layout, ctx.group = inputs
        ctx.save_for_backward(value, table, output)

    @staticmethod
    def backward(ctx, *gradients):
        settings = ctx.layout, ctx.group, ctx.needs_input_grad[1]
        return *RatioGradient.apply(*ctx.saved_tensors, gradients[0], *settings), None, None

    @staticmethod
    def vmap(info, in_dims, *arguments):
        if in_dims[1] is not None:
            return map_one_by_one(info.batch_size, in_dims, arguments, _as_tuple)[0], 0
        output = Ratio.apply(*merge_mapped_axis(info.batch_size, in_dims[:1], arguments[:1]), *arguments[1:])
        return split_mapped_axis(info.batch_size, (output,))[0], 0


def _as_tuple(*arguments) -> tuple[Tensor]:
    return (Ratio.apply(*arguments),)


class RatioGradient(torch.autograd.Function):
    """The backward pass as a function of its own, so that vmap can batch it too."""

    @staticmethod
    def forward(value, table, output, gradient, layout, group, to_table):
        grads = torch.zeros_like(value), torch.zeros_like(table)
        if has_no_values():
            return grads
        for kv_head in range(value.shape[1]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            found = grads[0][:, kv_head], grads[1][heads]
            given = value[:, kv_head], table[heads], layout, output[:, heads], gradient[:, heads]
            _differentiate(*given, *found, to_table)
        return grads

    setup_context = staticmethod(save_nothing)
    backward = staticmethod(refuse_second_gradient("positional", "its transforms are not kept after backward"))

    @staticmethod
    def vmap(info, in_dims, *arguments):
        # One sample's gradient of the table must not be added to another's.
        return map_one_by_one(info.batch_size, in_dims, arguments, RatioGradient.apply), (0, 0)


class RatioPlan:
    """How each row of some heads that share values is computed, chosen from their table alone.

    kernel `(head, *table)` is `e^{table - peak}`, and mass `(head, *queries)` its sum over the keys of each query, both
    in float64.
    """

    def __init__(self, table: Tensor, layout: RelativeLayout, dtype: torch.dtype) -> None:
        self.layout, self.scores = layout, table
        table = table.detach().double().unflatten(1, layout.table)
        peak = table.amax((1, 2), keepdim=True)
        hidden = table == -torch.inf
        self.kernel = torch.where(hidden, 0.0, (table - torch.where(peak == -torch.inf, 0.0, peak)).exp())
        self.mass = sum_windows(self.kernel, layout)
        empty = sum_windows((~hidden).double(), layout) == 0 if bool(hidden.any()) else None
        whole = self.kernel.sum((1, 2))
        box = _find_bounds(self.kernel, whole, torch.finfo(dtype).eps)
        # For each method the time of a row and channel, and the least mass of a row that it computes accurately.
        area = (box[1] - box[0] + 1) * (box[3] - box[2] + 1)
        queries, keys = max(1, math.prod(layout.queries)), math.prod(layout.keys)
        methods = {
            Band: (TAP * area, _least_band_mass(self.kernel, box, dtype)),
            Spectrum: (
                POINT * math.prod(transform_size(layout)) / queries,
                _least_transform_mass(whole, layout, dtype, torch.float64),
            ),
        }
        if slabs_fit(layout, len(table)):
            methods[Slabs] = (PRODUCT * keys, torch.full_like(whole, _least_normal_mass(dtype)))
        costs = {
            method: work + PAIR * keys * int((~(self.mass >= least[:, None, None])).sum()) / len(table) / queries
            for method, (work, least) in methods.items()
        }
        method = min(costs, key=costs.__getitem__)
        least = methods[method][1]
        # Written so that NaN is not accurate, and is left to the direct softmax.
        self.accurate = self.mass >= least[:, None, None]
        self.accurate &= self.mass > 0
        self.direct = ~self.accurate if empty is None else ~self.accurate & ~empty
        if method is Band:
            self.product: Band | Slabs | Spectrum = Band(self.kernel, layout, box, dtype)
        elif method is Slabs:
            self.product = Slabs(self.kernel, layout, dtype)
        else:
            self.product = Spectrum(self.kernel, layout, self._precisions(whole, dtype))

    def _precisions(self, whole: Tensor, dtype: torch.dtype) -> list[torch.dtype | None]:
        """Single precision where it is enough for every row of a head."""
        enough = (
            (self.mass >= _least_transform_mass(whole, self.layout, dtype, dtype)[:, None, None])
            .flatten(1)
            .all(1)
            .tolist()
        )
        some = self.accurate.flatten(1).any(1).tolist()
        return [None if not any_ else dtype if all_ else torch.float64 for all_, any_ in zip(enough, some, strict=True)]

    def pieces(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The direct rows: head, queries, and for each pair the index of its score in the table."""
        query_code, key_code = self.layout.make_codes(self.scores.device)
        step = max(1, ROWS_BUDGET // max(1, len(key_code)))
        for head in self.direct.flatten(1).any(1).nonzero().flatten().tolist():
            for rows in self.direct[head].flatten().nonzero().flatten().split(step):
                yield head, rows, query_code[rows, None] - key_code

    def inverse(self) -> Tensor:
        """One over the mass of the good rows, 0 for the others: `(head, *queries)`."""
        return torch.where(self.accurate, 1 / torch.where(self.accurate, self.mass, 1.0), 0.0)

    def precision(self, head: int, dtype: torch.dtype) -> torch.dtype:
        return self.product.dtypes[head] or dtype if isinstance(self.product, Spectrum) else dtype

    def planes(self) -> int:
        """How many channels to take at once."""
        if isinstance(self.product, Slabs):
            return max(1, SLABS_BUDGET // (len(self.kernel) * math.prod(self.layout.queries)))
        return max(1, TRANSFORM_BUDGET // (math.prod(transform_size(self.layout)) // 2 + 1))


def slabs_fit(layout: RelativeLayout, heads: int) -> bool:
    """Whether the matrix of slabs is small enough to be made."""
    return heads * layout.table[0] * layout.keys[1] * layout.queries[1] <= SLABS_BUDGET


def _find_bounds(kernel: Tensor, whole: Tensor, eps: float) -> TableBox:
    """The part of the table outside which the kernel of every head is negligible."""
    least = whole * (eps * SPARE / math.prod(kernel.shape[1:]))
    matters = (kernel > least[:, None, None]).any(0)
    rows, columns = (matters.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    return (rows[0], rows[-1], columns[0], columns[-1]) if rows else (0, 0, 0, 0)


def _least_band_mass(kernel: Tensor, box: TableBox, dtype: torch.dtype) -> Tensor:
    """The least mass of a row in a band: what is left out stays below eps / 4, and nothing underflows."""
    top, bottom, left, right = box
    outside = kernel.clone()
    outside[:, top : bottom + 1, left : right + 1] = 0
    return (4 / torch.finfo(dtype).eps * outside.sum((1, 2))).clamp(min=_least_normal_mass(dtype))


def _least_normal_mass(dtype: torch.dtype) -> float:
    """The least mass in which no significant part has underflowed."""
    return 1e-25 if dtype == torch.float32 else 1e-250


def _least_transform_mass(whole: Tensor, layout: RelativeLayout, dtype: torch.dtype, transform: torch.dtype) -> Tensor:
    """The least mass of a row that a transform computes accurately.

    The error of a transform is spread evenly over its results: about `eps` times the root of their mean square (Higham,
    Accuracy and Stability, section 24.1), which is at most the whole mass times the largest value. Relative to a row's
    mass that may be as much as adding up its keys costs in any order: `eps sqrt(keys)`.
    """
    error = SAFETY * torch.finfo(transform).eps
    return whole * (error / (torch.finfo(dtype).eps * (SAFETY + math.sqrt(math.prod(layout.keys)))))


def _split_planes(x: Tensor, planes: int) -> Iterator[tuple[slice, slice]]:
    """Batch rows and channels, so many that they are about `planes` together."""
    channels = x.shape[-1]
    rows, wide = max(1, planes // max(1, channels)), min(channels, planes)
    for row in range(0, len(x), rows):
        for channel in range(0, channels, wide):
            yield slice(row, row + rows), slice(channel, channel + wide)


def _to_planes(x: Tensor) -> Tensor:
    """`(batch, token, channel)` -> `(batch * channel, token)`, each channel of each batch row dense."""
    return x.mT.contiguous().flatten(0, 1)


def _write_planes(target: Tensor, planes: Tensor) -> None:
    """Write planes `(batch * channel, token)` into `(batch, token, channel)`."""
    for row, part in zip(target, planes.flatten(1).unflatten(0, (len(target), -1)), strict=True):
        row.copy_(part.T)  # one by one: torch transposes matrices faster than stacks of them


def _average(x: Tensor, table: Tensor, layout: RelativeLayout, output: Tensor) -> None:
    """Write the means of all heads that share the values `x (batch, key, channel)`."""
    plan = RatioPlan(table, layout, x.dtype)
    if bool(plan.accurate.any()):
        inverse = plan.inverse()
        for rows, channels in _split_planes(x, plan.planes()):
            planes = _to_planes(x[rows, :, channels]).unflatten(1, layout.keys)
            for head, sums in plan.product.apply(planes):
                mean = (sums * inverse[head].to(sums.dtype)).to(x.dtype)
                _write_planes(output[rows, head, :, channels], mean)
        if not bool(plan.accurate.all()):  # a product with zero is not zero where it overflowed
            output.masked_fill_(~plan.accurate.flatten(1)[..., None], 0)
    for head, rows, entry in plan.pieces():
        output[:, head, rows] = table[head][entry].softmax(-1) @ x


def _differentiate(x, table, layout, output, gradient, dx: Tensor, dtable: Tensor, to_table: bool) -> None:
    """Add the gradients of values `(batch, key, channel)` and of the table `(head, entry)`."""
    plan = RatioPlan(table, layout, x.dtype)
    if bool(plan.accurate.any()):
        inverse = plan.inverse()
        for rows, channels in _split_planes(x, plan.planes()):

            def divided(head: int, rows: slice = rows, channels: slice = channels) -> Tensor:
                grad_output = _to_planes(gradient[rows, head, :, channels]).unflatten(1, layout.queries)
                dtype = plan.precision(head, x.dtype)
                return grad_output.to(dtype) * inverse[head].to(dtype)

            planes = _to_planes(x[rows, :, channels]).unflatten(1, layout.keys)
            _write_planes(dx[rows, :, channels], plan.product.backward(planes, divided, to_table))
        if to_table:
            # The gradient of the denominator.
            fall = torch.stack(
                [(gradient[:, head].double() * output[:, head]).sum((0, -1)) for head in range(len(table))]
            )
            fall = fall.unflatten(1, layout.queries) * inverse
            found = plan.kernel * (plan.product.grad - sum_windows_transposed(fall, layout))
            # A number added to all scores of a head changes nothing, so its gradients sum to zero. What rounding left
            # of the sum would be multiplied by the distance of a centre far away: it goes, by what each entry weighs.
            share = plan.kernel * sum_windows_transposed(inverse, layout)
            rest = found.sum((1, 2), keepdim=True) / share.sum((1, 2), keepdim=True).clamp(min=1)
            dtable += (found - share * rest).flatten(1).to(dtable.dtype)
    for head, rows, entry in plan.pieces():
        weight, up = table[head][entry].softmax(-1), gradient[:, head, rows]
        dx += weight.mT @ up
        if to_table:
            grad = torch.einsum("bqc,bkc->qk", up, x)
            grad = weight * (grad - (weight * grad).sum(-1, keepdim=True))
            dtable[head].index_add_(0, entry.flatten(), grad.flatten())
