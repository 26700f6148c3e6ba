"""Tiles of plain torch: attention over a plan, forward and backward, with memory linear in the tokens.

For every tile of queries only the keys it needs are read, and a tile's scores live and die in the cache. The backward
pass recomputes them from the log-sum-exp (FlashAttention, Dao et al. 2022, algorithms 1 and 4, over a sparse plan).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regard.backends.base import Backend, Request, accumulation_dtype, bias_tensors
from regard.backends.limits import uniform, winners
from regard.backends.scores import Task, Tile
from regard.backends.tiles import Job, lay_out, stand_up, tile_height
from regard.errors import BackendError
from regard.finite import cleaned, known_finite
from regard.folding import fold, one_by_one, unfold


class Blocked(Backend):
    """Plain torch over the plan, on any device: the path without a compiler. It trains sparse patterns on a CPU."""

    name = "blocked"

    def refuse(self, request: Request) -> str | None:
        if request.feature_map is not None:
            return "its tiles compute a softmax, and a feature map replaces it"
        return None

    def run(self, request: Request) -> Tensor:
        # A plan is Python: to torch.compile the whole backend is one step it does not look into.
        return _run_opaquely(request) if torch.compiler.is_compiling() else _run(request)


def _run(request: Request) -> Tensor:
    if request.uniform:
        return uniform(request)
    dtype = accumulation_dtype(request)
    rows = request.pattern.rows
    query, key, value = (lay_out(tensor.to(dtype), rows) for tensor in (request.query, request.key, request.value))
    learned = bias_tensors(request.bias)
    by_row = rows is not None and isinstance(request.bias, Tensor) and len(request.bias) > 1
    if by_row:
        learned = (lay_out(learned[0], rows),)
    task = Task(
        pattern=request.pattern,
        lengths=request.lengths,
        beta=request.beta,
        bias=None if isinstance(request.bias, Tensor) else request.bias,
        block=tile_height(request.pattern, request.lengths, request.group),
        group=request.group,
        bias_by_row=by_row,
        keeps_sums=request.needs_gradient or torch._C._are_functorch_transforms_active(),
    )
    if not request.hard:
        return stand_up(Softmax.apply(query, key, value, None, task, *learned)[0], rows).to(request.value.dtype)
    best, winner, count = winners(query, key, task, learned)
    output = _gather(value, winner, request.group)
    output = torch.where(count > 0, output, 0)
    # Without ties the winner's value is the output: a copy, bit by bit. Where that cannot be asked, ties are assumed.
    if torch._C._are_functorch_transforms_active() or bool((count > 1).any()):
        tied = Softmax.apply(query, key, value, best, task, *learned)[0]
        output = torch.where(count > 1, tied, output)
    output = torch.where(torch.isnan(best), torch.nan, output)
    return stand_up(output, rows).to(request.value.dtype)


_run_opaquely: Callable[[Request], Tensor] = torch.compiler.disable(_run)  # type: ignore[assignment]


def _gather(value: Tensor, winner: Tensor, group: int) -> Tensor:
    """The value of each query's winner: `(batch, head, query, value_dim)`."""
    if not value.shape[2]:
        return value.new_zeros(*winner.shape[:3], value.shape[3])
    repeated = value.repeat_interleave(group, dim=1) if group > 1 else value
    return repeated.gather(2, winner.expand(*winner.shape[:3], value.shape[3]))


def _scaled(query: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return torch.zeros_like(query)
    return query * (beta if abs(beta) != float("inf") else (1.0 if beta > 0 else -1.0))


class Softmax(torch.autograd.Function):
    """All tiles forward; the log-sum-exp is kept for the way back. With `best` the softmax is over the winners only."""

    @staticmethod
    def forward(query, key, value, best, task, *learned):
        clean = known_finite(key, value)
        safe_key, safe_value = (key, value) if clean else (cleaned(key), cleaned(value))
        output, total = _forward(query, safe_key, safe_value, best, task, learned)
        if not clean:
            output = torch.where(_touched(query, key, value, best, task, learned), torch.nan, output)
        return output, total

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, best, task, *learned = inputs
        ctx.task, ctx.has_best = task, best is not None
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, *((best,) if ctx.has_best else ()), *output, *learned)

    @staticmethod
    def backward(ctx, *gradients):
        gradient, _ = gradients
        query, key, value, *rest = ctx.saved_tensors
        best = rest.pop(0) if ctx.has_best else None
        output, total, *learned = rest
        task = replace(ctx.task, learns=any(ctx.needs_input_grad[5:]))
        grads = SoftmaxGradient.apply(query, key, value, best, output, total, gradient, task, *learned)
        return grads[0], grads[1], grads[2], None, None, *grads[3:]

    @staticmethod
    def vmap(info, in_dims, *arguments):
        size, (*tensors, task) = info.batch_size, arguments[:5]
        learned = arguments[5:]
        if any(dim is not None for dim in in_dims[5:]) or any(
            len(tensor) > 1 for tensor in learned if task.bias is None
        ):
            results = one_by_one(size, in_dims, arguments, Softmax.apply)
        else:
            results = unfold(size, Softmax.apply(*fold(size, in_dims[:4], tensors), task, *learned))
        return results, (0, 0)


class SoftmaxGradient(torch.autograd.Function):
    """The way back as an operation of its own, so that vmap can batch it too."""

    @staticmethod
    def forward(query, key, value, best, output, total, gradient, task, *learned):
        # Outputs that were spoiled by something not finite carry no gradient.
        spoiled = torch.isnan(output)
        gradient, output = torch.where(spoiled, 0, gradient), torch.where(spoiled, 0, output)
        if not known_finite(key, value):
            key, value = cleaned(key), cleaned(value)
        return _backward(query, key, value, best, output, total, gradient, task, learned)

    @staticmethod
    def setup_context(ctx, inputs, output):
        return None

    @staticmethod
    def backward(ctx, *gradients):
        raise BackendError(
            "'blocked' differentiates once, not twice.",
            asked="a gradient of a gradient",
            because="its scores are gone after the first backward pass",
            instead='backend="reference" for second derivatives',
        )

    @staticmethod
    def vmap(info, in_dims, *arguments):
        size, tensors, task, learned = info.batch_size, arguments[:7], arguments[7], arguments[8:]
        if learned:
            # One sample's gradient of the bias must not meet another's.
            results = one_by_one(size, in_dims, arguments, SoftmaxGradient.apply)
        else:
            results = unfold(size, SoftmaxGradient.apply(*fold(size, in_dims[:7], tensors), task))
        return results, (0,) * len(results)


def _softmax_in_place(scores: Tensor) -> Tensor:
    """Scores become weights where they stand: a second tile would push the first out of the cache."""
    return torch.ops.aten._softmax.out(scores, -1, False, out=scores)


def _put(job: Job, tile: Tile, total: Tensor, left: Tensor, right: Tensor) -> None:
    """Write a product over queries, or add it when other tiles touch the same queries."""
    part = tile.by_head(torch.bmm(left, right))
    if job.alone:
        job.query.put(total, part)
    else:
        job.query.add(total, part)


def _forward(query, key, value, best, task: Task, learned) -> tuple[Tensor, Tensor]:
    """Output `(batch, head, query, value_dim)` and log-sum-exp `(batch, head, query, 1)`."""
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    total = query.new_full((*query.shape[:3], 1), -torch.inf)
    scaled = _scaled(query, task.beta)
    for job in task.jobs(query, key):
        tile = Tile(job, task, query, key, learned)
        scores = tile.compute(scaled, best)
        may_be_empty = job.may_be_empty or tile.biased or best is not None
        if job.alone and not task.keeps_sums and not may_be_empty:
            _put(job, tile, output, _softmax_in_place(scores), tile.columns(value))
            continue
        largest = scores.amax(-1, keepdim=True)
        weight = _softmax_in_place(scores)
        # The largest weight is exp(largest - lse), so the log-sum-exp costs a maximum.
        summed = largest - weight.amax(-1, keepdim=True).log()
        if may_be_empty:
            nothing = largest == -torch.inf
            weight, summed = weight.masked_fill_(nothing, 0), summed.masked_fill_(nothing, -torch.inf)
        summed = tile.by_head(summed)
        if job.alone:
            _put(job, tile, output, weight, tile.columns(value))
            job.query.put(total, summed)
            continue
        part = tile.by_head(torch.bmm(weight, tile.columns(value)))
        # What these queries saw before and what they see now are averaged by their sums (online softmax).
        before, old = job.query.take(total), job.query.take(output)
        after = torch.logaddexp(before, summed)
        shift = after.masked_fill(after == -torch.inf, 0)
        job.query.put(output, old * (before - shift).exp() + part * (summed - shift).exp())
        job.query.put(total, after)
    return output, total


def _backward(query, key, value, best, output, total, gradient, task: Task, learned) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and of what the bias has learned."""
    delta = (output * gradient).sum(-1, keepdim=True)
    total = total.masked_fill(total == -torch.inf, 0)
    scaled = _scaled(query, task.beta)
    sums = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    bias_sums = [torch.zeros_like(tensor) for tensor in learned]
    reads_content = best is None and task.beta != 0
    # What the bias itself sends back to the query is not scaled by beta, so it is added up apart.
    from_bias = torch.zeros_like(query) if learned else query
    for job in task.jobs(query, key):
        tile = Tile(job, task, query, key, learned)
        weight = tile.compute(scaled, best, minus=total).exp_()
        above = tile.queries(gradient)
        job.key.add(sums[2], tile.by_column(torch.bmm(weight.transpose(1, 2), above)))
        slope = torch.baddbmm(tile.queries(delta), above, tile.columns(value).transpose(1, 2), beta=-1).mul_(weight)
        if tile.biased and (task.learns or (task.bias is not None and task.bias.needs_content)):
            tile.differentiate(slope, bias_sums, from_bias, sums[1])
        if reads_content:
            _put(job, tile, sums[0], slope, tile.key)
            job.key.add(sums[1], tile.by_column(torch.bmm(slope.transpose(1, 2), tile.queries(scaled))))
    if reads_content:
        sums[0] *= task.beta
    if learned:
        sums[0] += from_bias
    return *sums, *bias_sums


def _touched(query, key, value, best, task: Task, learned) -> Tensor:
    """Which outputs saw a key or value that is not finite: `(batch, head, query, value_dim)`."""
    bad_key = (~torch.isfinite(key)).any(-1, keepdim=True).to(query.dtype)
    bad_value = (~torch.isfinite(value)).to(query.dtype)
    touched = query.new_zeros(*query.shape[:3], value.shape[-1])
    safe = cleaned(key)
    scaled = _scaled(query, task.beta)
    for job in task.jobs(query, key):
        tile = Tile(job, task, query, safe, learned)
        height = job.query.index.shape[1] * task.group
        seen = tile.addend() != -torch.inf  # hidden by the pattern, or by a bias of minus infinity
        seen = seen.expand(len(tile.key), height, tile.key.shape[1]).to(query.dtype)
        harm = torch.bmm(seen, tile.columns(bad_key))
        if best is not None:  # only winners hand their value over
            seen = (tile.compute(scaled, best) > -torch.inf).to(query.dtype)
        job.query.add(touched, tile.by_head(torch.bmm(seen, tile.columns(bad_value)) + harm))
    return touched > 0
