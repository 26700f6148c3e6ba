"""One or few queries against a long cache, as an operator of torch: `regard::decode`.

    output_n = sum_j softmax_j(beta query_n . key_j) value_j      over start[n] <= j < stop[n]

Tensors are `(batch, head, token, dim)`, intervals `(batch or 1, query)`. Keys and values are read once, whatever the
number of queries and heads that share them, so that memory is the only limit. It has no gradient: a cache is not
trained. Keys outside an interval are never read; inside it, what is not finite makes outputs NaN as everywhere in
Regard: a key all of them, a value its own channel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from regard.errors import BackendError
from regard.finite import cleaned
from regard.folding import fold, one_by_one, unfold
from regard.kernels.library import DECODE, NO_MEMORY, NOT_FINITE, NUMBERS, last_axis_dense, native, placed
from regard.kernels.watched import unwatched


def run_decode(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Output `(batch, head, query, value_dim)` and log-sum-exp `(batch, head, query)`, float32 for half precision."""
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in (query, key, value)
    ):
        _no_gradient(None)
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if not learns and unwatched(query, key, value, start, stop):
        return _decode(query, key, value, start, stop, beta)
    return torch.ops.regard.decode(query, key, value, start, stop, beta)


def _decode(query, key, value, start, stop, beta) -> tuple[Tensor, Tensor]:
    query, key, value = last_axis_dense(query), last_axis_dense(key), last_axis_dense(value)
    rows = (query.shape[0], query.shape[2])
    # Clamped here, for the kernel believes its intervals and would read beyond the cache.
    start, stop = (edge.clamp(0, key.shape[2]).expand(rows).contiguous() for edge in (start, stop))
    output, sums, finite = _run(query, key, value, start, stop, beta)
    if finite:
        return output, sums
    broken = ~torch.isfinite(value)
    if beta != 0:  # the plain mean reads no key
        broken = broken | ~torch.isfinite(key).all(-1, keepdim=True)
    if beta != 0 and not bool(broken.any()):
        return output, sums
    output, sums, _ = _run(query, cleaned(key), cleaned(value), start, stop, beta)
    # Who sees something broken? The plain mean of marks is positive for those who do.
    mean, _, _ = _run(torch.zeros_like(query), torch.zeros_like(key), broken.to(value.dtype), start, stop, 0.0)
    return torch.where(mean > 0, torch.nan, output), sums


def run_prepared(query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, beta: float) -> Tensor | None:
    """The bare kernel: plain float32 or float64 tensors with dense last axes, intervals `(batch, query)` in the cache.

    `None` where something is not finite and wants more care.
    """
    assert len(query) == len(key) == len(value) == len(start) == len(stop)
    output, _, finite = _run(query, key, value, start, stop, beta)
    return output if finite else None


def _run(query, key, value, start, stop, beta) -> tuple[Tensor, Tensor, bool]:
    assert native is not None
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, queries, dim = query.shape
    output = torch.empty(batch, heads, queries, value.shape[3], dtype=dtype, device="cpu")
    sums = torch.empty(batch, heads, queries, dtype=dtype, device="cpu")
    shape = (batch, heads, key.shape[1], queries, key.shape[2], dim, value.shape[3])
    places = (*placed(query), *placed(key), *placed(value))
    addresses = [tensor.data_ptr() for tensor in (output, sums, start, stop)]
    answer = native.regard_decode(
        DECODE.pack(NUMBERS[query.dtype], torch.get_num_threads(), *shape, beta, *places, *addresses)
    )
    if answer == NO_MEMORY:
        raise MemoryError("the native kernels found no memory to decode with")
    return output, sums, answer != NOT_FINITE


_library = torch.library.Library("regard", "FRAGMENT")
_library.define(
    "decode(Tensor query, Tensor key, Tensor value, Tensor start, Tensor stop, float beta) -> (Tensor, Tensor)"
)
_library.impl("decode", _decode, "CPU")


@torch.library.register_fake("regard::decode", lib=_library)
def _fake(query, key, value, start, stop, beta):
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = query.shape[:3]
    return query.new_empty((*shape, value.shape[3]), dtype=dtype), query.new_empty(shape, dtype=dtype)


def _no_gradient(ctx, *gradients):
    raise BackendError(
        "A step of decoding has no gradient.",
        asked="a gradient of regard::decode",
        because="it reads a cache once and keeps nothing to go back with",
        instead="attend(...), whose backends differentiate, or torch.no_grad() while decoding",
    )


torch.library.register_autograd("regard::decode", _no_gradient, lib=_library)


def _vmap(info, in_dims, query, key, value, start, stop, beta):
    """The mapped axis joins the batch, unless the intervals are mapped too."""
    if in_dims[3] is not None or in_dims[4] is not None:
        arguments = (query, key, value, start, stop, beta)
        return one_by_one(info.batch_size, in_dims, arguments, torch.ops.regard.decode), (0, 0)
    size = info.batch_size
    edges = [edge if len(edge) == 1 else edge.repeat(size, 1) for edge in (start, stop)]
    made = torch.ops.regard.decode(*fold(size, in_dims[:3], (query, key, value)), *edges, beta)
    return unfold(size, made), (0, 0)


torch.library.register_vmap("regard::decode", _vmap, lib=_library)


@register_flop_formula(torch.ops.regard.decode, get_raw=True)
def _flops(query, key, value, start, stop, beta, **_) -> int:
    batch, heads, queries, dim = query.shape
    try:
        seen = int((stop - start).clamp(min=0).sum()) * (batch // max(1, len(start)))
    except RuntimeError:  # tensors without numbers: all keys then
        seen = batch * queries * key.shape[2]
    return 2 * heads * seen * (dim + value.shape[3])
