"""Heads with different masks run as batch rows, which plans and kernels distinguish."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.backends.base import Request, accumulation_dtype
from regard.backends.reference import position_scores
from regard.biases.base import Bias
from regard.patterns.submatrix import SequencePart, list_tokens


def fold_heads(request: Request, part: SequencePart | None = None) -> Request:
    """The same attention with row `batch row * heads + head` for each head, where the pattern differs between heads.

    Keys and values that heads share are repeated for each of them, and a bias becomes a tensor of scores; the mask of
    such a pattern is as large. Where the queries are a part of a longer sequence, their scores are with all its keys.
    """
    pattern, batch, heads = request.pattern, request.batch, request.heads
    if pattern.heads is None:
        return request

    def by_head(tensor: Tensor, group: int) -> Tensor:
        return tensor.repeat_interleave(group, dim=1).reshape(batch * heads, 1, *tensor.shape[2:])

    bias = None
    if request.bias is not None:
        bias = position_scores(request) if part is None else _score_part(request, part)
        bias = bias.reshape(*(1,) * (4 - bias.ndim), *bias.shape)
        if bias.shape[0] > 1 or bias.shape[1] > 1:
            bias = bias.expand(batch, heads, -1, -1).reshape(batch * heads, 1, *bias.shape[2:])
    return replace(
        request,
        query=by_head(request.query, 1),
        key=by_head(request.key, request.group),
        value=by_head(request.value, request.group),
        pattern=pattern._with_folded_heads,
        bias=bias,
    )


def _score_part(request: Request, part: SequencePart) -> Tensor:
    """The bias of these queries and all keys of the sequence."""
    if not isinstance(request.bias, Bias):
        return position_scores(request)
    device = request.query.device
    i = torch.from_numpy(list_tokens(part.queries)).to(device) + part.whole.offset
    j = torch.arange(part.whole.keys, device=device)
    return request.bias.scores(i[:, None], j).to(accumulation_dtype(request))
