"""An oracle for the operator: attention over the whole square, from the documented definitions and nothing else.

Patterns are predicates over integers, written again from docs/patterns.md; biases are formulas from docs/biases.md.
Only the draw of `Random` is taken from the pattern itself: it is defined by its generator. Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import (
    Alibi,
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    Gaussian,
    GridStride,
    GridWindow,
    Neighborhood,
    Padding,
    Pattern,
    Quadratic,
    Random,
    RelativeTable,
    RowColumn,
    Segments,
    Selected,
    Shift,
    Strided,
    TransformerXL,
    Where,
    Window,
)
from regard.patterns import And, Not, Or

# Patterns


def mask_of(pattern: Pattern, batch: int, queries: int, keys: int) -> Tensor:
    """The mask, `(batch, query, key)`: the last query is at the last key."""
    i = torch.arange(keys - queries, keys)[None, :, None]
    j = torch.arange(keys)[None, None, :]
    row = torch.arange(batch)[:, None, None]
    return _allows(pattern, i, j, row, keys).expand(batch, queries, keys)


def _allows(p: Pattern, i: Tensor, j: Tensor, row: Tensor, keys: int) -> Tensor:
    if isinstance(p, And):
        return _allows(p.left, i, j, row, keys) & _allows(p.right, i, j, row, keys)
    if isinstance(p, Or):
        return _allows(p.left, i, j, row, keys) | _allows(p.right, i, j, row, keys)
    if isinstance(p, Not):
        return ~_allows(p.pattern, i, j, row, keys)
    always = (i == i) & (j == j)
    if isinstance(p, Full):
        return always
    if isinstance(p, Causal):
        return j <= i
    if isinstance(p, Window):
        allowed = ~always
        for a in range(p.left + 1):
            allowed = allowed | (j == i - p.step * a)
        for b in range(1, p.right + 1):
            allowed = allowed | (j == i + p.step * b)
        return allowed
    if isinstance(p, Strided):
        return torch.remainder(i - j, p.step) == 0
    if isinstance(p, First):
        return (i < p.count) | (j < p.count)
    if isinstance(p, Selected):
        chosen = torch.tensor(p.indices)
        return torch.isin(i, chosen) | torch.isin(j, chosen)
    if isinstance(p, Blocks):
        return _floor(i, p.size) == _floor(j, p.size)
    if isinstance(p, Where):
        return p.predicate(i, j) & always
    if isinstance(p, Padding):
        count = torch.tensor(p.counts)[row]
        return (j < count if p.side == "right" else j >= keys - count) & always
    if isinstance(p, Segments):
        ids = torch.tensor(p.ids.tolist(), dtype=torch.long).reshape(p.ids.shape)
        if not ids.shape[1]:
            return ~always
        mine = torch.where(i >= 0, ids[row, i.clamp(min=0)], -1)
        return (mine >= 0) & (mine == ids[row, j])
    if isinstance(p, Random):
        return p.matrix(i.shape[1], keys)[None]
    return _on_grid(p, i, j)


def _on_grid(p: Pattern, i: Tensor, j: Tensor) -> Tensor:
    assert isinstance(p, Neighborhood | GridWindow | GridStride | Axial)
    rows, columns = p.grid
    at, to = i - p.start, j - p.start
    inside = (at >= 0) & (at < rows * columns) & (to >= 0) & (to < rows * columns)
    (r, c), (s, d) = (_floor(at, columns), at % columns), (_floor(to, columns), to % columns)
    if isinstance(p, Axial):
        return inside & ((r == s) | (c == d))
    if isinstance(p, GridStride):
        down, across = _both(p.step)
        return inside & (r % down == s % down) & (c % across == d % across)
    if isinstance(p, GridWindow):
        (high, wide), (down, across) = _both(p.window), _both(p.shift)
        same_rows = _floor(r - down, high) == _floor(s - down, high)
        return inside & same_rows & (_floor(c - across, wide) == _floor(d - across, wide))
    vertical, horizontal = _both(p.radius)
    near = _near(r, s, rows, vertical, p.step, p.edges) & _near(c, d, columns, horizontal, p.step, p.edges)
    return inside & near


def _near(at: Tensor, to: Tensor, size: int, radius: int, step: int, edges: str) -> Tensor:
    if edges == "clip":
        return ((to - at).abs() <= radius * step) & ((to - at) % step == 0)
    # Among the places of one residue the window is moved inwards until it is whole.
    count = _floor(size - at % step + step - 1, step)
    first = torch.minimum((_floor(at, step) - radius).clamp(min=0), count - 2 * radius - 1)
    place = _floor(to, step)
    return (to % step == at % step) & (place >= first) & (place <= first + 2 * radius)


def _both(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _floor(x: Tensor, by: int) -> Tensor:
    return torch.div(x, by, rounding_mode="floor")


# Biases


def scores_of(bias, parameters: dict[str, Tensor], queries: int, keys: int, query: Tensor, key: Tensor) -> Tensor:
    """The bias of every pair, `(..., head or 1, query, key)`, from its float64 parameters."""
    i, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    if isinstance(bias, Alibi):
        return -bias.slopes.double()[:, None, None] * (i - j).abs()
    grid, start = getattr(bias, "grid", None), getattr(bias, "start", 0)
    if isinstance(bias, Shift):
        return _shift_scores(bias, i, j)
    if grid is None:
        deltas, inside = [(j - i).double()], torch.ones(queries, keys, dtype=torch.bool)
    else:
        rows, columns = grid
        at, to = i - start, j - start
        inside = (at >= 0) & (at < rows * columns) & (to >= 0) & (to < rows * columns)
        vertical, horizontal = _floor(to, columns) - _floor(at, columns), to % columns - at % columns
        deltas = [torch.where(inside, d, 0).double() for d in (vertical, horizontal)]
    if isinstance(bias, RelativeTable):
        table = parameters["table"]
        if grid is None:
            distance = bias.distance
            return table[:, (j - i).clamp(-distance, distance) + distance]
        at = (deltas[0].long() + grid[0] - 1, deltas[1].long() + grid[1] - 1)
        return torch.where(inside, table[:, at[0], at[1]], 0.0)
    if isinstance(bias, RowColumn):
        row, column = parameters["row"], parameters["column"]
        total = row[:, deltas[0].long() + grid[0] - 1] + column[:, deltas[1].long() + grid[1] - 1]
        return torch.where(inside, total, 0.0)
    if isinstance(bias, Quadratic):
        alpha = bias.reference.double() * parameters["spread"] ** 2
        centre = parameters["centre"]
        square = sum((d - centre[:, axis, None, None]) ** 2 for axis, d in enumerate(deltas))
        return torch.where(inside, -alpha[:, None, None] * square, 0.0)
    if isinstance(bias, Gaussian):
        off = torch.stack([d - parameters["centre"][:, axis, None, None] for axis, d in enumerate(deltas)], -1)
        precision = parameters["root"] @ parameters["root"].mT
        return torch.where(inside, -0.5 * torch.einsum("hqka,hab,hqkb->hqk", off, precision, off), 0.0)
    assert isinstance(bias, TransformerXL)
    assert grid is None
    r = torch.einsum("hdf,qkf->hqkd", parameters["projection"], bias.encoding(j - i).double())
    toward = query + parameters["v"][:, None]
    return bias.scale * (
        torch.einsum("...hqd,hqkd->...hqk", toward, r)
        + torch.einsum("...hkd,hd->...hk", key, parameters["u"]).unsqueeze(-2)
    )


def _shift_scores(bias: Shift, i: Tensor, j: Tensor) -> Tensor:
    """Zero where a head looks, minus infinity elsewhere; `edges="zeros"` only."""
    steps = torch.as_tensor(bias.steps)
    if bias.grid is None:
        met = j == i + steps.reshape(-1, 1, 1)
    else:
        rows, columns = bias.grid
        row, column = (_floor(i, columns) + steps[:, 0, None, None], i % columns + steps[:, 1, None, None])
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        met = inside & (j == row * columns + column)
    return torch.where(met, 0.0, -math.inf).double()


# The operator


@dataclass
class Square:
    """What the definition says, and what a bound on rounding errors needs to know."""

    output: Tensor
    largest_score: float
    overflows: bool


def attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    beta: float,
    bias: Tensor | None = None,
    features: Callable[[Tensor], Tensor] | None = None,
    reads_content: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Square:
    """Tensors `(*batch, head, token, dim)` in float64, `mask` `(*batch, 1, query, key)`.

    `dtype` is what a backend computes in. The rule for what is not finite is that of `regard.nonfinite`.
    """
    heads, batch = query.shape[-3], torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    key, value = (x.repeat_interleave(heads // x.shape[-3], dim=-3) for x in (key, value))
    shape = (*batch, heads, query.shape[-2], key.shape[-2])
    shown = mask.expand(shape)
    position = torch.zeros(shape, dtype=torch.float64) if bias is None else bias.expand(shape)
    shown = shown & (position != -math.inf)
    clean_query, clean_key, clean_value = (torch.where(torch.isfinite(x), x, 0.0) for x in (query, key, value))
    bad_query, bad_key = ((~torch.isfinite(x)).any(-1) for x in (query, key))
    if features is None:
        content = _products(clean_query, clean_key) if beta != 0 else torch.zeros(shape, dtype=torch.float64)
        overflow = _overflow(clean_query, clean_key, dtype) if beta != 0 else torch.zeros(shape, dtype=torch.float64)
    else:
        content, overflow = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    overflow = overflow * (math.copysign(1, beta) if beta else 0)
    lost = shown & (~(position < math.inf) | torch.isnan(overflow) | (overflow > 0))
    if reads_content:
        lost = lost | (shown & (bad_query[..., :, None] | bad_key[..., None, :]))
    lost = lost.any(-1, keepdim=True)
    live = shown & ~lost & (overflow == 0)
    scale = 1.0 if math.isinf(beta) else abs(beta)
    finite = torch.where(torch.isfinite(position), position, 0.0)
    if features is not None:
        root = math.sqrt(abs(beta))
        read, met = features(clean_query * math.copysign(root, beta)), features(clean_key * root)
        kernel = _products(read, met) if beta != 0 else torch.ones(shape, dtype=torch.float64)
        kernel = torch.where(live, kernel, 0.0)
        total = kernel.sum(-1, keepdim=True)
        weight = kernel / torch.where(total == 0, 1.0, total)
        winners = shown
    elif math.isinf(beta):
        signed = torch.where(live, content * math.copysign(1, beta), -math.inf).detach()
        best = signed.amax(-1, keepdim=True) if shape[-1] else signed
        norm_query, norm_key = (x.detach().norm(dim=-1) for x in (clean_query, clean_key))
        eps = torch.finfo(dtype).eps
        slack = 2 * eps * query.shape[-1] * norm_query[..., :, None] * norm_key[..., None, :]
        winners = live & (signed + slack >= best)
        weight = _softmax(finite.expand(shape), winners)
    else:
        weight = _softmax(beta * content + finite if beta else finite.expand(shape), live)
        winners = shown
    output = weight @ clean_value
    touched = winners.double() @ (~torch.isfinite(value)).double() > 0
    output = torch.where(touched | lost, math.nan, output)
    size = [float(x.detach().abs().max()) if x.numel() else 0.0 for x in (content, finite)]
    return Square(output, scale * size[0] + size[1], bool((overflow != 0).any()))


def _products(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.transpose(-1, -2)


def _overflow(query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinity, minus infinity or NaN where a score overflows in `dtype`, else zero."""
    terms = query.detach()[..., :, None, :] * key.detach()[..., None, :, :]
    top = torch.finfo(dtype).max
    above, below = (terms > top).any(-1), (terms < -top).any(-1)
    return torch.where(
        above & below, math.nan, torch.where(above, math.inf, torch.where(below, -math.inf, 0.0))
    ).double()


def _softmax(scores: Tensor, live: Tensor) -> Tensor:
    if not scores.shape[-1]:
        return scores
    top = torch.where(live, scores, -math.inf).detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    raised = torch.where(live, torch.where(live, scores - top, 0.0).exp(), 0.0)
    total = raised.sum(-1, keepdim=True)
    return raised / torch.where(total == 0, 1.0, total)
