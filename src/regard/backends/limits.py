"""The two limits of temperature, exactly: the mean of what is visible, and the best of it.

Requirements of both: no approximation by a very small or very large beta, and memory linear in the tokens.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from regard.backends.base import Request, accumulation_dtype
from regard.backends.finite import cleaned, known_finite
from regard.backends.folding import fold, one_by_one, unfold
from regard.backends.scores import Task, Tile
from regard.patterns import Lengths, Pattern
from regard.plan import Part, plan

BLOCK = 64


def winners(query: Tensor, key: Tensor, task: Task, learned: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """For each query the best content score, the first key that reaches it and how many do: `(batch, head, query, 1)`.

    A query that sees nothing has count zero; one that sees a key which is not finite has a best score of NaN.
    """
    return Winners.apply(query.detach(), key.detach(), task, *(tensor.detach() for tensor in learned))


class Winners(torch.autograd.Function):
    """Choosing is piecewise constant: there is no gradient."""

    @staticmethod
    def forward(query, key, task, *learned):
        clean = known_finite(key)
        safe, broken = (key, None) if clean else (cleaned(key), ~torch.isfinite(key).all(-1, keepdim=True))
        best = query.new_full((*query.shape[:3], 1), -torch.inf)
        winner = torch.zeros(best.shape, dtype=torch.long, device=query.device)
        count = torch.zeros_like(winner)
        spoiled = torch.zeros_like(best)
        signed = query if task.beta > 0 else -query
        for job in task.jobs(query.shape[0], key.shape[1], query.device):
            q, s, k, *state = task.rows(job, query, signed, safe, best, winner, count, spoiled)
            tile = Tile(job, task, q, k, learned)
            scores = tile.content(s)
            top, place = scores.max(-1, keepdim=True)
            ties = ((scores == top) & (top > -torch.inf)).sum(-1, keepdim=True)
            number = job.key.index.expand(tile.batch * tile.kv_heads, -1, -1).flatten(0, 1)
            found = number.gather(1, place.squeeze(-1)).unsqueeze(-1)
            _keep_best(job, state[:3], [tile.by_head(part) for part in (top, found, ties)])
            if broken is not None:
                bad = tile.columns(*task.rows(job, broken)).to(scores.dtype)
                seen = (scores > -torch.inf).to(scores.dtype)
                job.query.add(state[3], tile.by_head(torch.bmm(seen, bad)))
        return torch.where(spoiled > 0, torch.nan, best), winner, count

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
            return one_by_one(info.batch_size, in_dims, (query, key, task, *learned), Winners.apply), (0, 0, 0)
        folded = fold(info.batch_size, in_dims[:2], (query, key))
        return unfold(info.batch_size, Winners.apply(*folded, task)), (0, 0, 0)


def _keep_best(job, state: list[Tensor], found: list[Tensor]) -> None:
    best, winner, count = (job.query.take(tensor) for tensor in state)
    top, place, ties = found
    better, equal = top > best, (top == best) & (ties > 0)
    job.query.put(state[0], torch.where(better, top, best))
    job.query.put(state[1], torch.where(better, place, winner))
    job.query.put(state[2], torch.where(better, ties, count + torch.where(equal, ties, 0)))


def uniform(request: Request) -> Tensor:
    """The mean of the visible values, in time linear in the tokens.

    Keys that a whole tile of queries sees enter as sums over 1, 2, 4, ... neighbours, so a run costs the logarithm of
    its length and a value that nobody sees is in no sum (differences of running sums would let a hidden NaN through).
    """
    dtype = accumulation_dtype(request)
    value = request.value.to(dtype)
    clean = known_finite(value)
    layers = [cleaned(value)] if not clean else [value]
    if not clean:
        layers.append((~torch.isfinite(value)).to(dtype))
    shape = (request.batch, request.kv_heads, request.lengths.queries)
    sums = [value.new_zeros(*shape, value.shape[-1]) for _ in layers]
    count = value.new_zeros(request.batch, 1, shape[2], 1)
    for step in _steps(request.pattern, request.lengths):
        mine = slice(None) if step.row is None else slice(step.row, None, request.pattern.rows)
        weight, query, node = (tensor.to(value.device) for tensor in (step.weight, step.query, step.node))
        seen = (weight > 0).to(dtype)
        rows = torch.zeros(request.batch, dtype=torch.bool, device=value.device)
        rows[mine] = True
        chosen = rows[:, None, None, None]
        for number, layer in enumerate(layers):
            tree = _tree(layer[:, :, step.key_index.to(value.device)])
            taken = tree.index_select(2, node.reshape(-1)).unflatten(2, node.shape)
            part = (seen @ taken).flatten(2, 3)
            full = value.new_zeros(*part.shape[:2], shape[2], part.shape[-1]).index_add(2, query.reshape(-1), part)
            sums[number] = sums[number] + torch.where(chosen, full, 0)
        here = weight.sum(-1).to(dtype).reshape(1, 1, -1, 1)
        full = value.new_zeros(1, 1, shape[2], 1).index_add(2, query.reshape(-1), here)
        count = count + torch.where(chosen, full, 0)
    output = sums[0] / count.clamp(min=1)
    if not clean:
        output = torch.where(sums[1] > 0, torch.nan, output)
    output = output.repeat_interleave(request.group, dim=1) if request.group > 1 else output
    return output.to(request.value.dtype)


def _tree(value: Tensor) -> Tensor:
    """Sums over 1, 2, 4, ... neighbours, one level after the other, along the tokens."""
    levels = [value]
    while levels[-1].shape[2] > 1:
        last = levels[-1]
        if last.shape[2] % 2:
            last = torch.cat([last, last.new_zeros(*last.shape[:2], 1, last.shape[3])], dim=2)
        levels.append(last[:, :, 0::2] + last[:, :, 1::2])
    return torch.cat(levels, dim=2)


class _Step:
    """Tiles of one shape: queries, the tree's nodes they read, and how many keys each node holds for each query."""

    def __init__(self, row: int | None, key_index: Tensor, query: Tensor, node: Tensor, weight: Tensor) -> None:
        self.row, self.key_index, self.query, self.node, self.weight = row, key_index, query, node, weight


@functools.lru_cache(maxsize=64)
def _steps(pattern: Pattern, lengths: Lengths) -> tuple[_Step, ...]:
    steps = []
    for part in plan(pattern, *lengths, block=BLOCK).parts:
        offsets = _level_offsets(lengths.keys)
        shapes: dict[tuple, list[tuple]] = {}
        for tile in range(part.tiles):
            nodes, sizes, ragged = _nodes(part, tile, offsets)
            if not len(nodes) and not len(ragged):
                continue
            query = part.queries(tile)
            weight = np.repeat(sizes[None], len(query), 0)
            looked = part.mask(query, part.key_index[ragged], int(part.row[tile])).numpy().astype(np.int64)
            width = -(-(len(nodes) + len(ragged)) // 32) * 32
            fill = width - len(nodes) - len(ragged)
            weight = np.pad(np.concatenate([weight, looked], 1), ((0, 0), (0, fill)))
            row = int(part.row[tile]) if part.pattern.rows else None
            member = (query, np.pad(np.concatenate([nodes, ragged]), (0, fill)), weight)
            shapes.setdefault((row, len(query), width), []).append(member)
        for (row, _, _), members in shapes.items():
            query, node, weight = (torch.from_numpy(np.stack(column)) for column in zip(*members, strict=True))
            steps.append(_Step(row, torch.from_numpy(part.key_index.copy()), query, node, weight))
    return tuple(steps)


def _level_offsets(keys: int) -> list[int]:
    """Where each level of the tree starts."""
    offsets, width = [0], keys
    while width > 1:
        offsets.append(offsets[-1] + width)
        width = -(-width // 2)
    return offsets


def _nodes(part: Part, tile: int, offsets: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tree nodes that make up the whole runs, how many keys each holds, and the places of the ragged keys."""
    nodes: list[int] = []
    sizes: list[int] = []
    ragged: list[np.ndarray] = []
    for run in range(part.run_pointer[tile], part.run_pointer[tile + 1]):
        start, stop = int(part.run_start[run]), int(part.run_stop[run])
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
