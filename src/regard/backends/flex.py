"""torch's FlexAttention, from the same plan and bias as every other backend."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.backends.base import Backend, Request
from regard.caching import lru_cache_bytes
from regard.nonfinite import find_nonfinite_rows, is_known_finite, zero_nonfinite
from regard.patterns import Lengths, Pattern
from regard.patterns.box import Array
from regard.planner import plan

if TYPE_CHECKING:  # importing FlexAttention loads Dynamo, which takes seconds
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries and keys of one block of FlexAttention


class Flex(Backend):
    """Sparse attention on a GPU by `torch.nn.attention.flex_attention`.

    The pattern's plan becomes a block mask: blocks of 128 x 128 pairs that are skipped, computed whole, or
    computed with the pattern as a mask. The bias is added pair by pair inside the kernel, so neither mask nor
    bias is ever stored.

    Source: Dong et al., Flex Attention (2024).

        >>> x = torch.randn(1, 2, 5, 8)
        >>> attend(x, x, x, pattern=Causal(), bias=Alibi(2), backend="flex").shape
        torch.Size([1, 2, 5, 8])
    """

    name = "flex"

    def refuse(self, request: Request) -> str | None:
        query, value = request.query, request.value
        if request.feature_map is not None:
            return "FlexAttention computes a softmax, and a feature map replaces it"
        if request.dropout is not None:
            return "FlexAttention changes scores before its softmax, and dropout changes weights after it"
        if request.hard:
            return "FlexAttention has no hard limit"
        if isinstance(request.bias, Tensor) and request.bias.dtype.itemsize > request.query.dtype.itemsize:
            return f"FlexAttention would round the bias from {request.bias.dtype} to {request.query.dtype}"
        if isinstance(request.bias, torch.nn.Module) and request.bias.needs_content:
            return "FlexAttention adds a bias to one score at a time and cannot hand it the query and key"
        if 0 in (*request.lengths, request.batch, query.shape[-1], value.shape[-1]):
            return "FlexAttention is not defined on nothing"
        if len({query.dtype, request.key.dtype, value.dtype}) > 1:
            return "FlexAttention needs one dtype"
        if torch._C._are_functorch_transforms_active():
            return "FlexAttention does not run inside the transforms of torch.func"
        if query.device.type == "cpu" and request.needs_gradient:
            return "FlexAttention has no backward pass on a CPU"
        if query.device.type != "cpu" and query.dtype == torch.float64:
            return "FlexAttention's kernels for GPUs have no double precision"
        if query.device.type != "cpu" and not is_pointwise(request.pattern, request.lengths, query.device):
            return (
                "FlexAttention's kernels see one pair at a time, and the pattern gathers several numbers for "
                "one pair, which they would compile to a wrong mask"
            )
        return None

    def reluctance(self, request: Request) -> str | None:
        if request.query.device.type != "cuda":
            return "FlexAttention is for GPUs; elsewhere it runs without its kernel and forms the whole square"
        return None

    def is_opaque(self, request: Request) -> bool:
        return True

    def run(self, request: Request) -> Tensor:
        return run_with(request, _run_eager if request.query.device.type == "cpu" else _run_compiled)


def run_with(request: Request, flex: Callable[..., Tensor]) -> Tensor:
    """The output of a request, by `flex_attention` itself or by a compiled one."""
    query, key, value = request.query, request.key, request.value
    if query.device.type == "cpu":  # it refuses tensors that require grad, even where grad is disabled
        query, key, value = query.detach(), key.detach(), value.detach()
    if request.scale == 0:
        query = torch.zeros_like(query)
    mask = block_mask(request.pattern, request.lengths, query.device, request.batch)
    nonfinite, nan_rows = None, torch.zeros((), dtype=torch.bool, device=query.device)
    if not is_known_finite(query, key, value):
        nonfinite = ~torch.isfinite(value)
        if request.scale != 0:
            nonfinite, nan_rows = nonfinite | find_nonfinite_rows(key), find_nonfinite_rows(query)
        query, key, value = zero_nonfinite(query), zero_nonfinite(key), zero_nonfinite(value)
    flex = functools.partial(flex, block_mask=mask, enable_gqa=request.group > 1)
    output = flex(query, key, value, score_mod=_make_score_mod(request), scale=request.scale)
    if nonfinite is None:
        return output
    # The uniform mean of these marks is positive exactly where a non-finite key or value is visible, that of the ones
    # where anything is.
    equal = torch.zeros_like(query).float(), torch.zeros_like(key).float()
    marks = torch.cat((nonfinite.float(), torch.ones_like(nonfinite[..., :1]).float()), -1)
    share = flex(*equal, marks, score_mod=_make_hiding_score_mod(request), scale=1.0) > 0
    return torch.where(share[..., :-1] | (nan_rows & share[..., -1:]), torch.nan, output)


def _run_eager(*arguments, **options) -> Tensor:
    with warnings.catch_warnings():
        # On a CPU, backend="flex" explicitly requests the dense computation.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(*arguments, **options)


def _run_compiled(*arguments, **options) -> Tensor:
    # Every pattern and length compiles anew; beyond the default limit of 8 torch falls back to the dense computation.
    with torch._dynamo.config.patch(recompile_limit=256):
        return _compile_flex()(*arguments, **options)


@functools.cache
def _compile_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _make_hiding_score_mod(request: Request) -> Callable[..., Tensor] | None:
    """Equal scores, except that a bias of minus infinity hides a pair."""
    biased = _make_score_mod(request)
    if biased is None:
        return None

    def hide(score: Tensor, *place: Tensor) -> Tensor:
        return torch.where(biased(score, *place) == -torch.inf, -torch.inf, score)

    return hide


def _make_score_mod(request: Request) -> Callable[..., Tensor] | None:
    """The `score_mod` of FlexAttention that adds the bias."""
    bias, offset = request.bias, request.lengths.offset
    if bias is None:
        return None
    if not isinstance(bias, Tensor):

        def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + bias.score(head, query + offset, key).to(score.dtype)

        return add_bias
    axes = [axis for axis, size in enumerate(bias.shape) if size > 1]
    table = bias.detach().squeeze() if bias.device.type == "cpu" else bias.squeeze()

    def add_tensor(score: Tensor, *place: Tensor) -> Tensor:
        number = table[tuple(place[axis] for axis in axes)] if axes else table
        return score + number.to(score.dtype)

    return add_tensor


@dataclass(frozen=True, eq=False)
class KeyBlocks:
    """Which blocks of keys each block of queries needs; each array is `(row, query block, ...)`.

    Attributes:
        partial_count, partial: how many key blocks need the mask, and which, in the leading places.
        full_count, full: how many key blocks are seen whole, and which.
    """

    partial_count: Array
    partial: Array
    full_count: Array
    full: Array


def find_key_blocks(pattern: Pattern, lengths: Lengths) -> KeyBlocks:
    """The tiles of a plan cut at multiples of 128, whatever tiles it has. A short last block counts as partial."""
    (part,) = plan(pattern, *lengths, block=BLOCK, sort=False).parts
    rows, down, across = pattern.rows or 1, -(-lengths.queries // BLOCK), -(-lengths.keys // BLOCK)
    # Queries of every tile, counted by block: one piece for each tile and block that intersect.
    tile, place = _number_members(part.query_stop - part.query_start)
    query = part.query_index[part.query_start[tile] + place]
    piece, height = np.unique(tile * down + query // BLOCK, return_counts=True)
    tile, above = piece // down, piece % down
    # Keys of every run, cut at the edges of blocks; runs are sorted by tile and so are their cuts.
    first = part.run_start // BLOCK
    run, place = _number_members((part.run_stop - 1) // BLOCK - first + 1)
    left = first[run] + place
    width = np.minimum(part.run_stop[run], (left + 1) * BLOCK) - np.maximum(part.run_start[run], left * BLOCK)
    pointer = np.searchsorted(run, part.run_pointer)
    # Every piece is paired with every cut of its tile, and a block is full when whole runs cover all of its pairs.
    piece, place = _number_members(np.diff(pointer)[tile])
    cut = pointer[tile[piece]] + place
    code = ((part.row[tile] * down + above)[piece]) * across + left[cut]
    named, which = np.unique(code, return_inverse=True)
    pairs = height[piece] * (width * part.run_whole[run])[cut]
    full = np.bincount(which.reshape(-1), weights=pairs, minlength=named.size) == BLOCK * BLOCK

    def table(chosen: Array) -> tuple[Array, Array]:
        owner, block = chosen // across, chosen % across
        count = np.bincount(owner, minlength=rows * down)
        index = np.zeros((rows * down, across), dtype=np.int32)
        index[_number_members(count)] = block
        return count.astype(np.int32).reshape(rows, down), index.reshape(rows, down, across)

    return KeyBlocks(*table(named[~full]), *table(named[full]))


def _number_members(count: Array) -> tuple[Array, Array]:
    """Owner and place of every member when owner `n` has `count[n]` of them: 2, 0, 3 -> 0 0 2 2 2, 0 1 0 1 2."""
    owner = np.repeat(np.arange(count.size), count)
    return owner, np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)


def _count_bytes(holder: object) -> int:
    """Bytes of the tensors that are attributes of a block mask or of a graph."""
    return sum(value.nbytes for value in vars(holder).values() if isinstance(value, Tensor))


@lru_cache_bytes(_count_bytes)
def block_mask(pattern: Pattern, lengths: Lengths, device: torch.device, batch: int) -> BlockMask:
    """The pattern as a `BlockMask`; rows that share a mask share its blocks."""
    found, allows = find_key_blocks(pattern, lengths), trace_pattern(pattern, lengths, device)
    arrays = (found.partial_count, found.partial, found.full_count, found.full)
    rows = pattern.rows or 1
    times = 1 if rows == 1 else batch // rows  # folded heads, for each batch row

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return allows(batch if times == 1 else batch % rows, query, key)

    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        *(torch.from_numpy(np.concatenate([array] * times)).to(device).unsqueeze(1) for array in arrays),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(lengths.queries, lengths.keys),
    )


@lru_cache_bytes(_count_bytes)
def trace_pattern(pattern: Pattern, lengths: Lengths, device: torch.device) -> torch.fx.GraphModule:
    """The pattern at one pair as a graph of torch operations with its tables as constants.

    `torch.compile` cannot trace the caches and the numpy code that make those tables.
    """
    # Imports Dynamo, which takes longer than importing Regard.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    def allows(batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return pattern._allows(query + lengths.offset, key, batch, lengths)

    places = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(3)]
    allows(*places)  # fills the caches with ordinary tensors
    with TransformGetItemToIndex():  # indexing a table with a traced number is a lookup
        from torch.fx.experimental.proxy_tensor import make_fx

        return make_fx(allows)(*places)


def is_pointwise(pattern: Pattern, lengths: Lengths, device: torch.device) -> bool:
    """Whether the pattern computes nothing but single numbers for a pair, as a compiled kernel needs.

    torch 2.13 compiles a mask that reduces a row of numbers, such as `(table[i] == j).any(-1)`, without
    complaint and gives wrong numbers.
    """
    steps = (node for node in trace_pattern(pattern, lengths, device).graph.nodes if node.op == "call_function")
    return all(step.meta["val"].ndim == 0 for step in steps)
