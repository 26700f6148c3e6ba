"""Attention with soft-capped scores or attention sinks, a few queries at a time.

    score[i, j] = cap tanh(scale query[i] . key[j] / cap) + bias[i, j]
    weight[i, j] = exp(score[i, j]) / (exp(sink) + sum over the visible j of exp(score[i, j]))

Soft-capping is from Gemma 2 (Gemma Team 2024, section 2), the sink, one learned logit of each head whose value is
zero, from gpt-oss. The kernels have neither; here a block of queries is computed in plain torch against the keys that
one of them may see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.patterns import Pattern

BLOCK = 256  # queries whose scores are held at once


def attend_dense_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output `(batch, head, query, value_dim)`, and the weights `(batch, head, query, key)` if they are needed."""
    queries, keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    outputs, rows = [], []
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        position = torch.arange(start, stop, device=query.device) + keys - queries
        visible = pattern.allows(position[:, None], torch.arange(keys, device=query.device), keys=keys)
        visible = visible if pattern.heads is not None else visible.unsqueeze(-3)
        seen = (
            torch.arange(keys, device=query.device) if need_weights else visible.flatten(0, -2).any(0).nonzero()[:, 0]
        )
        first, last = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, keys)
        visible = visible[..., first:last]
        scores = scale * query[:, :, start:stop] @ key[:, :, first:last].mT
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + (bias if bias.shape[-2] == 1 else bias[..., start:stop, :])[..., first:last]
        weights = _normalize(scores.masked_fill(~visible, -torch.inf), sinks)
        dropped = torch.nn.functional.dropout(weights, dropout) if dropout else weights
        outputs.append(dropped.to(value.dtype) @ value[:, :, first:last])
        rows.append(weights if need_weights else None)
    return torch.cat(outputs, 2), torch.cat(rows, 2) if need_weights else None  # type: ignore[arg-type]


def _normalize(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys and the sink; rows that see nothing are zero."""
    if sinks is None:
        largest = scores.amax(-1, keepdim=True)
        return torch.where(largest == -torch.inf, 0.0, scores.masked_fill(largest == -torch.inf, 0.0).softmax(-1))
    sink = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
