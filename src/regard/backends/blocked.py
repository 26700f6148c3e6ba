"""Tiles of plain torch: attention over a plan, forward and backward, with memory linear in the tokens.

For every tile of queries only the keys it needs are read, and a tile's scores live and die in the cache. The backward
pass recomputes them from the log-sum-exp (FlashAttention, Dao et al. 2022, algorithms 1 and 4, over a sparse plan).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.backends.base import Backend, Request, accumulation_dtype, bias_tensors
from regard.backends.limits import average_visible, find_winners
from regard.backends.scores import Tile, TileSettings
from regard.backends.tiles import Job, fold_batch, tile_height, unfold_batch
from regard.batching import map_one_by_one, merge_mapped_axis, split_mapped_axis
from regard.kernels.registration import refuse_second_gradient, save_nothing
from regard.nonfinite import find_nonfinite_rows, has_no_values, is_known_finite, zero_nonfinite


class Blocked(Backend):
    """Plain torch over the plan, on any device: the path without a compiler. It trains sparse patterns on a CPU."""

    name = "blocked"

    def refuse(self, request: Request) -> str | None:
        if request.feature_map is not None:
            return "its tiles compute a softmax, and a feature map replaces it"
        return None

    def is_opaque(self, request: Request) -> bool:
        return True

    def run(self, request: Request) -> Tensor:
        return _run(request)


def _run(request: Request) -> Tensor:
    if request.uniform and request.dropout is None:
        return average_visible(request)
    dtype = accumulation_dtype(request)
    rows = request.pattern.rows
    query, key, value = (fold_batch(tensor.to(dtype), rows) for tensor in (request.query, request.key, request.value))
    learned = bias_tensors(request.bias)
    by_row = rows is not None and isinstance(request.bias, Tensor) and len(request.bias) > 1
    if by_row:
        learned = (fold_batch(learned[0], rows),)
    seed = None if request.dropout is None else request.dropout.seed
    task = TileSettings(
        pattern=request.pattern,
        lengths=request.lengths,
        scale=request.scale,
        bias=None if isinstance(request.bias, Tensor) else request.bias,
        block=tile_height(request.pattern, request.lengths, request.group),
        group=request.group,
        bias_by_row=by_row,
        keeps_lse=request.needs_gradient or torch._C._are_functorch_transforms_active(),
        dropout=0.0 if request.dropout is None else request.dropout.probability,
    )
    if not request.hard:
        output = BlockedSoftmax.apply(query, key, value, None, seed, task, *learned)[0]
        return unfold_batch(output, rows).to(request.value.dtype)
    best, winner, count = find_winners(query, key, task, learned)
    if seed is not None:  # a winner may be dropped
        output = BlockedSoftmax.apply(query, key, value, best, seed, task, *learned)[0]
        return unfold_batch(torch.where(torch.isnan(best), torch.nan, output), rows).to(request.value.dtype)
    output = _gather_winners(value, winner, request.group)
    if not is_known_finite(output):
        output = torch.where(torch.isfinite(output), output, torch.nan)
    output = torch.where(count > 0, output, 0)
    # Without ties the output is a bitwise copy of the winner's value. Where values cannot be read, ties are assumed.
    if torch._C._are_functorch_transforms_active() or (not has_no_values() and bool((count > 1).any())):
        tied = BlockedSoftmax.apply(query, key, value, best, None, task, *learned)[0]
        output = torch.where(count > 1, tied, output)
    output = torch.where(torch.isnan(best), torch.nan, output)
    return unfold_batch(output, rows).to(request.value.dtype)


def _gather_winners(value: Tensor, winner: Tensor, group: int) -> Tensor:
    """The value of each query's winner: `(batch, head, query, value_dim)`."""
    if not value.shape[2]:
        return value.new_zeros(*winner.shape[:3], value.shape[3])
    repeated = value.repeat_interleave(group, dim=1) if group > 1 else value
    return repeated.gather(2, winner.expand(*winner.shape[:3], value.shape[3]))


def _scale_query(query: Tensor, scale: float) -> Tensor:
    if scale == 0:
        return torch.zeros_like(query)
    return query * (scale if abs(scale) != float("inf") else (1.0 if scale > 0 else -1.0))


class BlockedSoftmax(torch.autograd.Function):
    """All tiles forward; the log-sum-exp is saved for backward.

    With `best`, the softmax is over the winners only; with `seed`, weights are dropped.
    """

    @staticmethod
    def forward(query, key, value, best, seed, task, *learned):
        if is_known_finite(query, key, value):
            output, lse = _forward(query, key, value, best, seed, task, learned)
            if is_known_finite(output):
                return output, lse
            # Scores that overflowed: a row of minus infinities has weights of zero.
            return _forward(query, key, value, best, seed, task, learned, overflows=True)
        safe = zero_nonfinite(query), zero_nonfinite(key), zero_nonfinite(value)
        output, lse = _forward(*safe, best, seed, task, learned, overflows=True)
        return torch.where(_find_nan_outputs(query, key, value, best, task, learned), torch.nan, output), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, best, seed, task, *learned = inputs
        ctx.task = task
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, best, seed, *output, *learned)

    @staticmethod
    def backward(ctx, *gradients):
        grad_output, _ = gradients
        query, key, value, best, seed, output, lse, *learned = ctx.saved_tensors
        task = replace(ctx.task, learns=any(ctx.needs_input_grad[6:]))
        grads = BlockedSoftmaxBackward.apply(query, key, value, best, output, lse, grad_output, seed, task, *learned)
        return grads[0], grads[1], grads[2], None, None, None, *grads[3:]

    @staticmethod
    def vmap(info, in_dims, *arguments):
        size, (*tensors, seed, task) = info.batch_size, arguments[:6]
        learned = arguments[6:]
        # The mask of dropout depends on the batch row, which must not depend on the samples beside it.
        alone = seed is not None or any(dim is not None for dim in in_dims[6:])
        if alone or any(len(tensor) > 1 for tensor in learned if task.bias is None):
            results = map_one_by_one(size, in_dims, arguments, BlockedSoftmax.apply)
        else:
            results = split_mapped_axis(
                size, BlockedSoftmax.apply(*merge_mapped_axis(size, in_dims[:4], tensors), None, task, *learned)
            )
        return results, (0, 0)


class BlockedSoftmaxBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that vmap can batch it too."""

    @staticmethod
    def forward(query, key, value, best, output, lse, grad_output, seed, task, *learned):
        # Outputs that are NaN by a non-finite input send no gradient back.
        nan_marks = torch.isnan(output)
        grad_output, output = torch.where(nan_marks, 0, grad_output), torch.where(nan_marks, 0, output)
        if not is_known_finite(query, key, value):
            query, key, value = zero_nonfinite(query), zero_nonfinite(key), zero_nonfinite(value)
        given = query, key, value, best, output, lse, grad_output, seed, task, learned
        grads = _backward(*given)
        return grads if is_known_finite(*grads) else _backward(*given, overflows=True)

    setup_context = staticmethod(save_nothing)
    backward = staticmethod(refuse_second_gradient("blocked", "its scores are not kept after the first backward pass"))

    @staticmethod
    def vmap(info, in_dims, *arguments):
        size, tensors, (seed, task), learned = info.batch_size, arguments[:7], arguments[7:9], arguments[9:]
        if learned or seed is not None:
            # One sample's gradient of the bias must not be added to another's.
            results = map_one_by_one(size, in_dims, arguments, BlockedSoftmaxBackward.apply)
        else:
            results = split_mapped_axis(
                size, BlockedSoftmaxBackward.apply(*merge_mapped_axis(size, in_dims[:7], tensors), None, task)
            )
        return results, (0,) * len(results)


def _softmax_in_place(scores: Tensor) -> Tensor:
    """Overwrite scores with weights: a second buffer would evict the tile from the cache."""
    scores = scores.contiguous()  # the operator writes as if its output were dense
    return torch.ops.aten._softmax.out(scores, -1, False, out=scores)


def _write_product(job: Job, tile: Tile, output: Tensor, left: Tensor, right: Tensor) -> None:
    """Write a product over queries, or add it when other tiles touch the same queries."""
    part = tile.by_head(torch.bmm(left, right))
    if job.alone:
        job.query.put(output, part)
    else:
        job.query.add(output, part)


def _forward(
    query, key, value, best, seed, task: TileSettings, learned, overflows: bool = False
) -> tuple[Tensor, Tensor]:
    """Output `(batch, head, query, value_dim)` and log-sum-exp `(batch, head, query, 1)`.

    `overflows`: visible scores may be minus infinity, all those of a query even.
    """
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    lse = query.new_full((*query.shape[:3], 1), -torch.inf)
    scaled = _scale_query(query, task.scale)
    for job in task.jobs(query, key):
        tile = Tile(job, task, query, key, learned)
        scores = tile.compute(scaled, best, overflows=overflows)
        may_be_empty = job.may_be_empty or tile.biased or best is not None or overflows
        if job.alone and not task.keeps_lse and not may_be_empty:
            _write_product(job, tile, output, _drop(tile, seed, _softmax_in_place(scores)), tile.columns(value))
            continue
        largest = scores.amax(-1, keepdim=True)
        weight = _softmax_in_place(scores)
        # The largest weight is exp(largest - lse), so the log-sum-exp costs a maximum.
        tile_lse = largest - weight.amax(-1, keepdim=True).log()
        if may_be_empty:
            nothing = largest == -torch.inf
            weight, tile_lse = weight.masked_fill_(nothing, 0), tile_lse.masked_fill_(nothing, -torch.inf)
        tile_lse, weight = tile.by_head(tile_lse), _drop(tile, seed, weight)
        if job.alone:
            _write_product(job, tile, output, weight, tile.columns(value))
            job.query.put(lse, tile_lse)
            continue
        part = tile.by_head(torch.bmm(weight, tile.columns(value)))
        # Online softmax: the earlier output and this tile's are averaged by their log-sum-exps.
        before, old = job.query.take(lse), job.query.take(output)
        after = torch.logaddexp(before, tile_lse)
        shift = after.masked_fill(after == -torch.inf, 0)
        job.query.put(output, old * (before - shift).exp() + part * (tile_lse - shift).exp())
        job.query.put(lse, after)
    return output, lse


def _drop(tile: Tile, seed: Tensor | None, weight: Tensor) -> Tensor:
    """Overwrite weights with those after dropout."""
    return weight if seed is None else weight.mul_(tile.dropout_factors(seed))


def _backward(
    query, key, value, best, output, lse, grad_output, seed, task: TileSettings, learned, overflows: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and of the parameters of the bias.

    `overflows`: scores may be infinite, or a bias NaN. A row that has such a score has no weights.
    """
    delta = (output * grad_output).sum(-1, keepdim=True)
    nan_rows = ~(lse < torch.inf)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    scaled = _scale_query(query, task.scale)
    # Dense, whatever the strides of the inputs: `zeros_like` would keep those, and a view of it might be a copy.
    grads = [tensor.new_zeros(tensor.shape) for tensor in (query, key, value)]
    # Many small terms are added up: not in half precision.
    bias_grads = [
        tensor.new_zeros(tensor.shape, dtype=torch.promote_types(tensor.dtype, query.dtype)) for tensor in learned
    ]
    reads_content = best is None and task.scale != 0
    # What the bias itself sends back to the query is not scaled by scale, so it is added up apart.
    from_bias = query.new_zeros(query.shape) if learned else query
    for job in task.jobs(query, key):
        tile = Tile(job, task, query, key, learned)
        if overflows:
            # Scores as the forward pass had them, bit by bit: one of 1e30 is not reached again by another sum.
            weight = (tile.compute(scaled, best, overflows=True) - tile.queries(lse)).clamp_(max=0).exp_()
            weight = weight.masked_fill_(tile.queries(nan_rows), 0)
        else:
            weight = tile.compute(scaled, best, minus=lse).exp_()
        grad_tile, values = tile.queries(grad_output), tile.columns(value).transpose(1, 2)
        if seed is None:
            dropped = weight
            grad_scores = torch.baddbmm(tile.queries(delta), grad_tile, values, beta=-1).mul_(weight)
        else:
            factors = tile.dropout_factors(seed)
            dropped = weight * factors
            grad_scores = torch.bmm(grad_tile, values).mul_(factors).sub_(tile.queries(delta)).mul_(weight)
        job.key.add(grads[2], tile.by_column(torch.bmm(dropped.transpose(1, 2), grad_tile)))
        if tile.biased and (task.learns or (task.bias is not None and task.bias.needs_content)):
            tile.differentiate(grad_scores, bias_grads, from_bias, grads[1])
        if reads_content:
            _write_product(job, tile, grads[0], grad_scores, tile.key)
            job.key.add(grads[1], tile.by_column(torch.bmm(grad_scores.transpose(1, 2), tile.queries(scaled))))
    if reads_content:
        grads[0] *= task.scale
    if learned:
        grads[0] += from_bias
    return *grads, *(grad.to(tensor.dtype) for grad, tensor in zip(bias_grads, learned, strict=True))


def _find_nan_outputs(query, key, value, best, task: TileSettings, learned) -> Tensor:
    """Which outputs are NaN because the query, a visible key or value is not finite (see `regard.nonfinite`)."""
    bad_query, bad_key = (find_nonfinite_rows(tensor).to(query.dtype) * task.reads_content for tensor in (query, key))
    bad_value = (~torch.isfinite(value)).to(query.dtype)
    nan_marks = query.new_zeros(*query.shape[:3], value.shape[-1])
    query, key = zero_nonfinite(query), zero_nonfinite(key)
    scaled = _scale_query(query, task.scale)
    for job in task.jobs(query, key):
        tile = Tile(job, task, query, key, learned)
        height = job.query.index.shape[1] * task.group
        visible = tile.addend() != -torch.inf  # hidden by the pattern, or by a bias of minus infinity
        visible = visible.expand(len(tile.key), height, tile.key.shape[1]).to(query.dtype)
        harm = torch.bmm(visible, tile.columns(bad_key)) + visible.sum(-1, keepdim=True) * tile.queries(bad_query)
        if best is not None:  # only winners hand their value over
            visible = (tile.compute(scaled, best) > -torch.inf).to(query.dtype)
        job.query.add(nan_marks, tile.by_head(torch.bmm(visible, tile.columns(bad_value)) + harm))
    return nan_marks > 0
