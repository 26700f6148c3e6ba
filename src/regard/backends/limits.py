"""The two limits of temperature, exactly: the mean of the visible values (scale 0) and hard attention (scale inf).

Requirements of both: no approximation by a very small or very large scale, and memory linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from regard.backends.base import Request, accumulation_dtype
from regard.backends.scores import Tile, TileSettings
from regard.backends.tiles import fold_batch, unfold_batch
from regard.batching import map_one_by_one, merge_mapped_axis, split_mapped_axis
from regard.caching import lru_cache_bytes
from regard.nonfinite import find_nonfinite_rows, is_known_finite, zero_nonfinite
from regard.patterns import Lengths, Pattern
from regard.patterns.box import Array
from regard.planner import PlanPart, plan
from regard.planner.ragged import stack_by_shape

BLOCK = 64


def find_winners(
    query: Tensor, key: Tensor, task: TileSettings, learned: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """For each query the best content score, the first key that reaches it and how many may: `(batch, head, query, 1)`.

    A query that sees nothing has count zero; one whose output is NaN (see `regard.nonfinite`) has a best score of NaN.
    """
    return Winners.apply(query.detach(), key.detach(), task, *(tensor.detach() for tensor in learned))


class Winners(torch.autograd.Function):
    """Choosing is piecewise constant: there is no gradient."""

    @staticmethod
    def forward(query, key, task, *learned):
        nonfinite = None
        if not is_known_finite(query, key):
            nonfinite = find_nonfinite_rows(query).to(query.dtype), find_nonfinite_rows(key).to(key.dtype)
            query, key = zero_nonfinite(query), zero_nonfinite(key)
        best = query.new_full((*query.shape[:3], 1), -torch.inf)
        winner = torch.zeros(best.shape, dtype=torch.long, device=query.device)
        count = torch.zeros_like(winner)
        nan_marks = torch.zeros_like(best)
        signed = query if task.scale > 0 else -query
        for job in task.jobs(query, key):
            tile = Tile(job, task, query, key, learned)
            scores = tile.content(signed)
            top, place = scores.max(-1, keepdim=True)
            slack = tile.rounding()
            ties = ((scores + slack >= top) & (scores > -torch.inf)).sum(-1, keepdim=True)
            slack = slack.amax(-1, keepdim=True)
            # A row with an overflowed score is NaN; of non-finite biases, minus infinity only hides.
            nan_rows = ~(top < torch.inf)
            if tile.biased:
                nan_rows = nan_rows | (~(tile.addend() < torch.inf)).any(-1, keepdim=True)
            job.query.add(nan_marks, tile.by_head(nan_rows.to(scores.dtype)))
            number = job.key.index.expand(tile.batch * tile.kv_heads, -1, -1).flatten(0, 1)
            found = number.gather(1, place.squeeze(-1)).unsqueeze(-1)
            _keep_best(job, [best, winner, count], [tile.by_head(part) for part in (top, found, ties, slack)])
            if nonfinite is not None:
                visible = (tile.addend() != -torch.inf).expand(scores.shape).to(scores.dtype)
                harm = torch.bmm(visible, tile.columns(nonfinite[1]))
                job.query.add(
                    nan_marks, tile.by_head(harm + visible.sum(-1, keepdim=True) * tile.queries(nonfinite[0]))
                )
        return torch.where(nan_marks > 0, torch.nan, best), winner, count

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx, *gradients):
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        query, key, task, *learned = arguments
        if learned:
            return map_one_by_one(info.batch_size, in_dims, (query, key, task, *learned), Winners.apply), (0, 0, 0)
        folded = merge_mapped_axis(info.batch_size, in_dims[:2], (query, key))
        return split_mapped_axis(info.batch_size, Winners.apply(*folded, task)), (0, 0, 0)


def _keep_best(job, state: list[Tensor], found: list[Tensor]) -> None:
    best, winner, count = (job.query.take(tensor) for tensor in state)
    top, place, ties, slack = found
    better = top > best
    # Overcounting is harmless: more than one only means that a second pass resolves ties.
    near = ((top - best).abs() <= slack) & (ties > 0)
    job.query.put(state[0], torch.where(better, top, best))
    job.query.put(state[1], torch.where(better, place, winner))
    job.query.put(state[2], torch.where(near, count + ties, torch.where(better, ties, count)))


def average_visible(request: Request) -> Tensor:
    """The mean of the visible values, in time linear in the tokens.

    Keys that a whole tile of queries sees enter as sums over 1, 2, 4, ... neighbours, so a run costs the logarithm of
    its length and a hidden value is in no sum (differences of running sums would let a hidden NaN through).
    """
    dtype, rows = accumulation_dtype(request), request.pattern.rows
    laid = fold_batch(request.value.to(dtype), rows)
    # Tokens first: heads are columns of one product, and its matrix of ones is not repeated for each of them.
    value = laid.permute(2, 0, 1, 3).flatten(1)
    clean = is_known_finite(value)
    layers = [value] if clean else [zero_nonfinite(value), (~torch.isfinite(value)).to(dtype)]
    queries = request.lengths.queries * (rows or 1)
    sums = [value.new_zeros(queries, value.shape[1]) for _ in layers]
    count = value.new_zeros(queries, 1)
    for step in _plan_means(request.pattern, request.lengths):
        weight, query, node, order = (
            tensor.to(value.device) for tensor in (step.weight, step.query, step.node, step.key_index)
        )
        visible = (weight > 0).to(dtype)
        for number, layer in enumerate(layers):
            taken = _build_tree(layer[order]).index_select(0, node.reshape(-1)).unflatten(0, node.shape)
            sums[number] = sums[number].index_add(0, query.reshape(-1), torch.bmm(visible, taken).flatten(0, 1))
        count = count.index_add(0, query.reshape(-1), weight.sum(-1).to(dtype).reshape(-1, 1))
    output = sums[0] / count.clamp(min=1)
    if not clean:
        output = torch.where(sums[1] > 0, torch.nan, output)
    output = unfold_batch(output.unflatten(1, (*laid.shape[:2], laid.shape[3])).permute(1, 2, 0, 3), rows)
    output = output.repeat_interleave(request.group, dim=1) if request.group > 1 else output
    return output.to(request.value.dtype)


def _build_tree(value: Tensor) -> Tensor:
    """Sums over 1, 2, 4, ... neighbours, one level after the other, along the tokens."""
    levels = [value]
    while len(levels[-1]) > 1:
        last = levels[-1]
        if len(last) % 2:
            last = torch.cat([last, last.new_zeros(1, last.shape[1])])
        levels.append(last[0::2] + last[1::2])
    return torch.cat(levels)


class _TreeReads:
    """Tiles of one shape: queries, the tree's nodes they read, and how many keys each node holds for each query."""

    def __init__(self, key_index: Tensor, query: Tensor, node: Tensor, weight: Tensor) -> None:
        self.key_index, self.query, self.node, self.weight = key_index, query, node, weight
        self.size = key_index.nbytes + query.nbytes + node.nbytes + weight.nbytes


@lru_cache_bytes(lambda steps: sum(step.size for step in steps))
def _plan_means(pattern: Pattern, lengths: Lengths) -> tuple[_TreeReads, ...]:
    steps = []
    rows = pattern.rows or 1
    for part in plan(pattern, *lengths, block=BLOCK).parts:
        order = np.concatenate([part.key_index + row * lengths.keys for row in range(rows)])
        for _, arrays in stack_by_shape(_list_tiles(part, lengths, rows)):
            steps.append(_TreeReads(torch.from_numpy(order), *map(torch.from_numpy, arrays)))
    return tuple(steps)


def _list_tiles(part: PlanPart, lengths: Lengths, rows: int) -> Iterator[tuple[tuple, tuple[Array, ...]]]:
    """Shape of each tile; its queries, the tree's nodes they read, and how many keys each node holds for each query."""
    offsets = _level_offsets(rows * lengths.keys)
    for tile in range(part.tiles):
        query = part.queries(tile)
        for row in part.batch_rows(tile, rows):
            nodes, sizes, ragged = _find_nodes(part, tile, row * lengths.keys, offsets)
            if not len(nodes) and not len(ragged):
                continue
            mask = part.mask(query, part.key_index[ragged - row * lengths.keys], row).numpy().astype(np.int64)
            width = -(-(len(nodes) + len(ragged)) // 32) * 32
            fill = width - len(nodes) - len(ragged)
            weight = np.concatenate([np.repeat(sizes[None], len(query), 0), mask], 1)
            weight = np.pad(weight, ((0, 0), (0, fill)))
            node = np.pad(np.concatenate([nodes, ragged]), (0, fill))
            yield (len(query), width), (query + row * lengths.queries, node, weight)


def _level_offsets(keys: int) -> list[int]:
    """Where each level of the tree starts."""
    offsets, width = [0], keys
    while width > 1:
        offsets.append(offsets[-1] + width)
        width = -(-width // 2)
    return offsets


def _find_nodes(
    part: PlanPart, tile: int, before: int, offsets: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tree nodes that make up the whole runs, how many keys each holds, and the places of the ragged keys.

    `before` keys of other batch rows come first.
    """
    nodes: list[int] = []
    sizes: list[int] = []
    ragged: list[np.ndarray] = []
    for run in range(part.run_pointer[tile], part.run_pointer[tile + 1]):
        start, stop = before + int(part.run_start[run]), before + int(part.run_stop[run])
        if not part.run_whole[run]:
            ragged.append(np.arange(start, stop))
            continue
        while start < stop:
            level = min((start & -start).bit_length() - 1 if start else 64, (stop - start).bit_length() - 1)
            nodes.append(offsets[level] + (start >> level))
            sizes.append(1 << level)
            start += 1 << level
    places = np.concatenate(ragged) if ragged else np.zeros(0, dtype=np.int64)
    return np.array(nodes, dtype=np.int64), np.array(sizes, dtype=np.int64), places
