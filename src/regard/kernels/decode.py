"""One or few queries against a long KV cache, as a torch operator: `regard::decode`.

    output_n = sum_j softmax_j(scale query_n . key_j) value_j      over start[n] <= j < stop[n]

Tensors are `(batch, head, token, dim)`, intervals `(batch or 1, query)`. Keys and values are read once, whatever the
number of queries and heads that share them: decoding is bound by memory bandwidth. Inference only, there is no
gradient. Keys outside an interval are never read; inside it, NaN and infinities follow `regard.nonfinite`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.batching import map_one_by_one, merge_mapped_axis, split_mapped_axis
from regard.kernels.library import (
    DECODE,
    DTYPE_CODES,
    NO_MEMORY,
    NOT_FINITE,
    address_and_strides,
    last_axis_dense,
    native,
    num_threads,
)
from regard.kernels.registration import can_call_kernel, refuse_gradient, register_operator
from regard.nonfinite import find_nonfinite_rows, zero_nonfinite

MAX_QUERIES = 4  # for which keys are better read row by row than in tiles


def run_decode(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `(batch, head, query, value_dim)` and log-sum-exp `(batch, head, query)`, float32 for half precision."""
    if can_call_kernel(_refuse_gradient, query, key, value, start, stop):
        return _decode(query, key, value, start, stop, scale)
    return torch.ops.regard.decode(query, key, value, start, stop, scale)


def _decode(query, key, value, start, stop, scale) -> tuple[Tensor, Tensor]:
    query, key, value = last_axis_dense(query), last_axis_dense(key), last_axis_dense(value)
    rows = (query.shape[0], query.shape[2])
    # Clamped here: the kernel does not check its intervals and would read beyond the cache.
    start, stop = (edge.clamp(0, key.shape[2]).expand(rows).contiguous() for edge in (start, stop))
    output, lse, finite = _run(query, key, value, start, stop, scale)
    if finite:
        return output, lse
    bad_value, bad_query = ~torch.isfinite(value), torch.zeros((), dtype=torch.bool)
    if scale == 0:  # neither queries nor keys are read
        query = torch.zeros_like(query)
    else:
        bad_value, bad_query = bad_value | find_nonfinite_rows(key), find_nonfinite_rows(query)
        if not bool(bad_value.any()) and not bool(bad_query.any()):
            return output, lse  # scores that overflowed: the kernel follows the rule
    output, lse, _ = _run(zero_nonfinite(query), zero_nonfinite(key), zero_nonfinite(value), start, stop, scale)
    # The plain mean of the marks is positive for queries that see a non-finite key or value.
    mean, _, _ = _run(torch.zeros_like(query), torch.zeros_like(key), bad_value.to(value.dtype), start, stop, 0.0)
    sees_any = (start < stop)[:, None, :, None]
    return torch.where((mean > 0) | (bad_query & sees_any), torch.nan, output), lse


def run_prepared(query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, scale: float) -> Tensor | None:
    """The bare kernel: plain float32 or float64 tensors with dense last axes, intervals `(batch, query)` in the cache.

    `None` where the output is not finite: `run_decode` follows the rules for NaN and infinities.
    """
    assert len(query) == len(key) == len(value) == len(start) == len(stop)
    output, _, finite = _run(query, key, value, start, stop, scale)
    return output if finite else None


def _run(query, key, value, start, stop, scale) -> tuple[Tensor, Tensor, bool]:
    """Output, log-sum-exp, and whether they are finite."""
    assert native is not None
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, queries, dim = query.shape
    output = torch.empty(batch, heads, queries, value.shape[3], dtype=dtype, device="cpu")
    lse = torch.empty(batch, heads, queries, dtype=dtype, device="cpu")
    shape = (batch, heads, key.shape[1], queries, key.shape[2], dim, value.shape[3])
    inputs = (*address_and_strides(query), *address_and_strides(key), *address_and_strides(value))
    addresses = [tensor.data_ptr() for tensor in (output, lse, start, stop)]
    fields = DECODE.pack(DTYPE_CODES[query.dtype], num_threads(), *shape, scale, *inputs, *addresses, 0, 0)
    status = native.regard_decode(fields)
    if status == NO_MEMORY:
        raise MemoryError("the native kernels found no memory to decode with")
    return output, lse, status != NOT_FINITE


# The operator


def _make_fake(query, key, value, start, stop, scale):
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = query.shape[:3]
    return query.new_empty((*shape, value.shape[3]), dtype=dtype), query.new_empty(shape, dtype=dtype)


def _batch(call, info, in_dims, query, key, value, start, stop, scale):
    """The mapped axis joins the batch, unless the intervals are mapped too."""
    size = info.batch_size
    if in_dims[3] is not None or in_dims[4] is not None:
        return map_one_by_one(size, in_dims, (query, key, value, start, stop, scale), call), (0, 0)
    edges = [edge if len(edge) == 1 else edge.repeat(size, 1) for edge in (start, stop)]
    results = call(*merge_mapped_axis(size, in_dims[:3], (query, key, value)), *edges, scale)
    return split_mapped_axis(size, results), (0, 0)


def _count_flops(query, key, value, start, stop, scale, **_) -> int:
    batch, heads, queries, dim = query.shape
    try:
        pairs = int((stop - start).clamp(min=0).sum()) * (batch // max(1, len(start)))
    except RuntimeError:  # fake tensors hold no values: all keys then
        pairs = batch * queries * key.shape[2]
    return 2 * heads * pairs * (dim + value.shape[3])


_refuse_gradient = refuse_gradient(
    "decode",
    because="it reads a KV cache once and saves nothing for backward",
    instead="attend(...), whose backends differentiate, or torch.no_grad() while decoding",
)
register_operator(
    "decode(Tensor query, Tensor key, Tensor value, Tensor start, Tensor stop, float scale) -> (Tensor, Tensor)",
    _decode,
    fake=_make_fake,
    backward=_refuse_gradient,
    vmap=_batch,
    flops=_count_flops,
)
