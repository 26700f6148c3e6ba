"""The reference: attention as the textbooks write it, for every request. It is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.base import Backend, Request, accumulation_dtype
from regard.dropout import KEYS_AT_ONCE
from regard.features import scaled_features
from regard.nonfinite import find_nonfinite_rows, zero_nonfinite


class Reference(Backend):
    """Plain torch over the whole square `(query, key)`.

    `weights = softmax(scale * query . key + bias)` over the visible keys, `output = weights . value`. A query that
    sees nothing has weights of zero. Every backend has to agree with this one.
    """

    name = "reference"

    def refuse(self, request: Request) -> str | None:
        return None

    def run(self, request: Request) -> Tensor:
        value = _repeat_heads(request.value, request.group).to(accumulation_dtype(request))
        weight, shown, nan_rows = compute_weights(request, position_scores(request))
        output = drop_weights(request, weight) @ zero_nonfinite(value)
        nan_outputs = _sees_marked(shown, ~torch.isfinite(value)) | nan_rows
        return torch.where(nan_outputs, torch.nan, output).to(request.value.dtype)


def drop_weights(request: Request, weight: Tensor) -> Tensor:
    """The attention weights `(batch, head, query, key)` after dropout, or as they are where there is none."""
    if request.dropout is None:
        return weight
    batch, heads, queries, keys = weight.shape
    row, query, block = (
        torch.arange(count, device=weight.device) for count in (batch * heads, queries, -(-keys // KEYS_AT_ONCE))
    )
    row = row.view(batch, heads, 1, 1)
    return weight * request.dropout.factors(row, query[:, None], block, weight.dtype).flatten(-2)[..., :keys]


def _sees_marked(visible: Tensor, nonfinite: Tensor) -> Tensor:
    """Whether any visible key is marked, per channel."""
    return visible.float() @ nonfinite.float() > 0


def compute_weights(request: Request, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The attention weights, the pairs that count, both `(batch, head, query, key)`, and which rows are NaN.

    A pair counts if it is visible; in the hard limit, if its key is also among the winners, whatever its weight.
    Each row of weights sums to one, or to zero if it sees nothing. A row `(batch, head, query, 1)` is NaN if it has a
    score that is NaN or plus infinity, or sees a non-finite key (see `regard.nonfinite`); its weights here are zero.
    """
    shape = (request.batch, request.heads, *request.lengths)
    shown = _make_mask(request).expand(shape)
    if request.uniform:
        nothing_lost = torch.zeros(*shape[:3], 1, dtype=torch.bool, device=shown.device)
        return _normalize_rows(shown.to(accumulation_dtype(request))), shown, nothing_lost
    if request.bias is not None:  # minus infinity hides a pair
        shown = shown & (position.detach() != -torch.inf)
    nonfinite = _find_nonfinite_pairs(request, position.detach())
    if request.feature_map is not None:
        nan_rows = (shown & nonfinite).any(-1, keepdim=True)
        return _feature_weights(request, shown & ~nan_rows), shown, nan_rows
    content = content_scores(request)
    if request.hard:
        # The limit of softmax(scale * s + b) for growing scale: all mass on the largest s, shared between ties by b.
        signed = (content if request.scale > 0 else -content).detach()
        nan_rows = _find_nan_rows(shown, nonfinite, signed)
        mask = shown & ~nan_rows & (signed > -torch.inf)
        signed = torch.where(mask, signed, -torch.inf)
        best = signed.amax(-1, keepdim=True) if signed.shape[-1] else signed
        winners = (signed + tie_tolerance(request) >= best) & mask
        scores = torch.where(winners, position, -torch.inf)
        shown = winners | (shown & nan_rows)
    else:
        scores = request.scale * content + position if request.scale else position.expand(shape)
        nan_rows = _find_nan_rows(shown, nonfinite, scores.detach())
        scores = torch.where(shown & ~nan_rows, scores, -torch.inf)
    return _softmax(scores.expand(shape)), shown, nan_rows


def _find_nonfinite_pairs(request: Request, position: Tensor) -> Tensor:
    """Pairs that make their row NaN if visible: their query, key or bias is not finite."""
    nonfinite = ~(position < torch.inf)
    if not request.reads_content:
        return nonfinite
    return (
        nonfinite
        | find_nonfinite_rows(request.query)
        | find_nonfinite_rows(_repeat_heads(request.key, request.group)).transpose(-1, -2)
    )


def _find_nan_rows(shown: Tensor, nonfinite: Tensor, scores: Tensor) -> Tensor:
    """Which rows see a non-finite pair or have a score that is NaN or plus infinity."""
    return (shown & (nonfinite | ~(scores < torch.inf))).any(-1, keepdim=True)


def _make_mask(request: Request) -> Tensor:
    mask = request.pattern.matrix(*request.lengths, device=request.query.device)
    return request.by_row(mask)[:, None] if mask.ndim == 3 else mask


def tie_tolerance(request: Request) -> Tensor:
    """How far apart two equal dot products may come out, for every pair: `2 eps dim |query| |key|`.

    Products of equal keys differ in the last bits, depending on their position in the matrix; they count as ties.
    """
    dtype = accumulation_dtype(request)
    query = zero_nonfinite(request.query.detach().to(dtype))
    key = zero_nonfinite(_repeat_heads(request.key.detach(), request.group).to(dtype))
    norms = query.norm(dim=-1)[..., :, None] * key.norm(dim=-1)[..., None, :]
    return 2 * torch.finfo(dtype).eps * query.shape[-1] * norms


def content_scores(request: Request) -> Tensor:
    """`query . key` for every pair; non-finite entries count as zero here and make rows NaN at the end."""
    dtype = accumulation_dtype(request)
    key = _repeat_heads(request.key, request.group).to(dtype)
    return zero_nonfinite(request.query.to(dtype)) @ zero_nonfinite(key).transpose(-1, -2)


def position_scores(request: Request) -> Tensor:
    """The bias of every pair, or zero."""
    bias, dtype = request.bias, accumulation_dtype(request)
    if bias is None:
        return torch.zeros((), dtype=dtype, device=request.query.device)
    if isinstance(bias, Tensor):
        return bias.to(dtype)
    device = request.query.device
    i = torch.arange(request.lengths.queries, device=device) + request.lengths.offset
    j = torch.arange(request.lengths.keys, device=device)
    if bias.needs_content:
        key = zero_nonfinite(_repeat_heads(request.key, request.group).to(dtype))
        return bias.content_scores(i, j, zero_nonfinite(request.query.to(dtype)), key)
    return bias.scores(i[:, None], j).to(dtype)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the visible keys; rows without any are zero, and so is their gradient."""
    if not scores.shape[-1]:
        return scores
    largest = scores.detach().amax(-1, keepdim=True)
    shift = torch.where(torch.isinf(largest), 0, largest)
    # Hidden scores are lifted out of -inf first: exp and its gradient then never meet inf - inf.
    raised = torch.where(scores == -torch.inf, 0, scores - shift).exp()
    return _normalize_rows(torch.where(scores == -torch.inf, 0, raised))


def _feature_weights(request: Request, mask: Tensor) -> Tensor:
    assert request.feature_map is not None
    dtype = accumulation_dtype(request)
    key = zero_nonfinite(_repeat_heads(request.key, request.group).to(dtype))
    query, key = scaled_features(request.feature_map, request.scale, zero_nonfinite(request.query.to(dtype)), key)
    return _normalize_rows(torch.where(mask, query @ key.transpose(-1, -2), 0))


def _normalize_rows(kernel: Tensor) -> Tensor:
    total = kernel.sum(-1, keepdim=True)
    return kernel / torch.where(total == 0, 1, total)


def _repeat_heads(tensor: Tensor, group: int) -> Tensor:
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)
