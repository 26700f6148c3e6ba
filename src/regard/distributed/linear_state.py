"""Linear attention of a sequence that is cut over several processes: sums over keys travel, not keys.

A chunk of keys is known to the others by `sum_j phi(k_j) [v_j, 1]^T`, whose size does not depend on the number of its
tokens. Every process gathers these sums of all chunks; before its own queries it adds those of the chunks that they
see, all of them or, under a causal pattern, the earlier ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.backends import find
from regard.backends.base import Request, accumulation_dtype
from regard.backends.linear_attention import append_ones, compute_features
from regard.distributed.messages import Group, gather_all
from regard.distributed.sequence_layout import SequenceLayout
from regard.errors import BackendError
from regard.kernels.linear_attention import attention, compute_in_torch, is_supported, normalise
from regard.patterns import Lengths, Pattern
from regard.patterns.submatrix import Runs, list_tokens


class _GatherSums(torch.autograd.Function):
    """The sums of all processes; backward adds up what they send back."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: Group | None) -> Tensor:
        ctx.group = group
        return torch.stack(gather_all(sums, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rank = dist.get_rank(ctx.group)
        total = torch.zeros_like(gradients[0][rank])
        for part in gather_all(gradients[0].contiguous(), ctx.group):  # in the order of the ranks: the same bits
            total += part[rank]
        return total, None


def attend_linear(
    request: Request, layout: SequenceLayout, keys: SequenceLayout, rank: int, group: Group | None
) -> Tensor:
    """Linear attention of this process's queries over the keys of all."""
    if (reason := find("linear").refuse(request)) is not None:
        raise BackendError(
            "This linear attention is not computed over several processes.",
            asked=request.describe(),
            because=reason,
            instead="Full, Causal or Padding with a feature map; or attention without one, which takes every pattern",
        )
    patterns = request.pattern._split_intersection()
    causal = any(pattern.is_causal for pattern in patterns)
    if causal and layout != keys:
        raise BackendError(
            "Causal linear attention is of one sequence.",
            asked=f"queries of {layout} and keys of {keys}",
            because="a chunk of queries continues the sums of the keys before it",
            instead="the same layout for queries and keys",
        )
    dtype = accumulation_dtype(request)
    query, key, value = (tensor.to(dtype) for tensor in (request.query, request.key, request.value))
    hidden = [pattern for pattern in patterns if pattern.is_key_padding and not pattern.is_full]
    real = _find_real_keys(hidden, Lengths(layout.tokens, keys.tokens), keys.runs(rank), request)
    key, value = torch.where(real, key, 0), torch.where(real, value, 0)
    query, key, phi = compute_features(request, query, key, fused=False)
    key = torch.where(real, key, 0)  # phi(0) is rarely 0
    columns = append_ones(value)
    spans = _cut(keys.runs(rank))
    slots = 2 if keys.kind == "zigzag" else 1
    # A process without tokens has sums of none, which belong to the graph: in the backward pass the others wait for it.
    filled = [*spans, *[slice(0, 0)] * (slots - len(spans))]
    parts = [key[:, :, span].mT @ columns[:, :, span] for span in filled]
    every = _GatherSums.apply(torch.stack(parts), group).flatten(0, 1)  # (process * slot, batch, kv_head, feature, dim)
    if not causal:
        grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
        output = normalise(grouped @ every.sum(0)).reshape(*query.shape[:3], value.shape[3])
        return request.keep_graph(output.to(request.value.dtype))
    starts = [run[0] for process in range(keys.processes) for run in _pad(keys.runs(process), slots, keys.tokens)]
    product = attention if is_supported(query, key, value) else compute_in_torch
    outputs = []
    for span, (start, _) in zip(spans, keys.runs(rank), strict=True):
        earlier = torch.tensor([each < start for each in starts], dtype=every.dtype, device=every.device)
        before = torch.einsum("s,s...->...", earlier, every)
        sums, norm = before[..., :-1].contiguous(), before[..., -1].contiguous()
        outputs.append(product(query[:, :, span], key[:, :, span], value[:, :, span], sums, norm, phi)[0])
    output = torch.cat(outputs, 2) if outputs else every.sum() * value.new_zeros(*query.shape[:3], value.shape[3])
    return request.keep_graph(output.to(request.value.dtype))


def _cut(runs: Runs) -> list[slice]:
    """Where the runs lie in a process's tensors."""
    spans, at = [], 0
    for start, stop in runs:
        spans.append(slice(at, at + stop - start))
        at += stop - start
    return spans


def _pad(runs: Runs, slots: int, tokens: int) -> Runs:
    """As many runs on every process: empty ones begin after everything, where no query sees them."""
    return (*runs, *((tokens, tokens),) * (slots - len(runs)))


def _find_real_keys(paddings: list[Pattern], whole: Lengths, runs: Runs, request: Request) -> Tensor:
    """Which of this process's keys no padding hides: `(batch or 1, 1, key, 1)`."""
    device = request.query.device
    i, j = torch.zeros((), dtype=torch.long, device=device), torch.from_numpy(list_tokens(runs)).to(device)
    real = torch.ones_like(j, dtype=torch.bool)[None]
    for padding in paddings:
        row = torch.arange(padding.rows or 1, device=device)[:, None]
        real = real & request.by_row(padding._allows(i, j, row, whole).expand(len(row), len(j)))
    return real[:, None, :, None]
