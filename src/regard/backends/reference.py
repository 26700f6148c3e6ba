"""The reference: attention as the textbooks write it, for every request. It is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.base import Backend, Request, accumulation_dtype
from regard.features import scaled_features
from regard.finite import cleaned


class Reference(Backend):
    """Plain torch over the whole square `(query, key)`.

    `weights = softmax(beta * query . key + bias)` over the visible keys, `output = weights . value`. A query that
    sees nothing has weights of zero. Every backend has to agree with this one.
    """

    name = "reference"

    def refuse(self, request: Request) -> str | None:
        return None

    def run(self, request: Request) -> Tensor:
        value = _repeat(request.value, request.group).to(accumulation_dtype(request))
        position = position_scores(request)
        weight = weights(request, position)
        output = weight @ cleaned(value)
        # Hard attention hands over the winner itself: a loser's weight is exactly zero, whatever its value.
        shown = visible(request, position)
        seen = weight > 0 if request.hard else shown.expand(weight.shape)
        touched = _meets(seen, ~torch.isfinite(value)) | spoiled_rows(request, shown)
        return torch.where(touched, torch.nan, output).to(request.value.dtype)


def spoiled_rows(request: Request, shown: Tensor) -> Tensor:
    """Which queries see a key that is not finite: `(batch, head, query, 1)`. Uniform attention reads no key."""
    broken = ~torch.isfinite(_repeat(request.key, request.group)).all(-1, keepdim=True)
    seen = shown.expand(request.batch, request.heads, *request.lengths)
    spoiled = _meets(seen, broken & (not request.uniform))
    if request.hard:  # a softmax passes on scores that are not finite, a choice has to be told
        spoiled = spoiled | (seen & ~torch.isfinite(content_scores(request))).any(-1, keepdim=True)
    return spoiled


def _meets(seen: Tensor, broken: Tensor) -> Tensor:
    """Whether any seen key is broken, channel by channel."""
    return seen.float() @ broken.float() > 0


def visible(request: Request, position: Tensor) -> Tensor:
    """Who sees whom, a mask that broadcasts to `(batch, head, query, key)`; a bias of minus infinity hides a pair."""
    mask = _by_pattern(request)
    return mask if request.bias is None else mask & (position.detach() != -torch.inf)


def _by_pattern(request: Request) -> Tensor:
    mask = request.pattern.matrix(*request.lengths, device=request.query.device)
    return mask[:, None] if mask.ndim == 3 else mask


def weights(request: Request, position: Tensor) -> Tensor:
    """The attention weights `(batch, head, query, key)`; each row sums to one, or to zero if it sees nothing."""
    mask = _by_pattern(request)
    shape = (request.batch, request.heads, *request.lengths)
    if request.uniform:
        return _normalised(mask.to(accumulation_dtype(request)).expand(shape))
    if request.feature_map is not None:
        return _kernel_weights(request, mask)
    content = content_scores(request)
    if request.hard:
        # The limit of softmax(beta * s + b) for growing beta: all mass on the largest s, shared between ties by b.
        mask = mask & (position > -torch.inf)
        signed = torch.where(mask, content if request.beta > 0 else -content, -torch.inf).detach()
        best = signed.amax(-1, keepdim=True) if signed.shape[-1] else signed
        scores = torch.where((signed + rounding(request) >= best) & mask, position, -torch.inf)
    else:
        content = request.beta * content if request.beta else torch.zeros_like(content)
        scores = torch.where(mask, content + position, -torch.inf)
    return _softmax(scores.expand(shape))


def rounding(request: Request) -> Tensor:
    """How far apart two equal dot products may come out, for every pair: `2 eps dim |query| |key|`.

    Equal keys get products that differ in the last bits, by where they stand in the matrix. They are ties all the same.
    """
    dtype = accumulation_dtype(request)
    query, key = request.query.detach().to(dtype), cleaned(_repeat(request.key.detach(), request.group).to(dtype))
    norms = query.norm(dim=-1)[..., :, None] * key.norm(dim=-1)[..., None, :]
    return 2 * torch.finfo(dtype).eps * query.shape[-1] * norms


def content_scores(request: Request) -> Tensor:
    """`query . key` for every pair; what is not finite in a key counts as zero here and spoils its rows at the end."""
    dtype = accumulation_dtype(request)
    key = _repeat(request.key, request.group).to(dtype)
    return request.query.to(dtype) @ cleaned(key).transpose(-1, -2)


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
        key = cleaned(_repeat(request.key, request.group).to(dtype))
        return bias.content_scores(i, j, request.query.to(dtype), key)
    return bias.scores(i[:, None], j).to(dtype)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the visible keys; rows without any are zero, and so is their gradient."""
    if not scores.shape[-1]:
        return scores
    largest = scores.detach().amax(-1, keepdim=True)
    shift = torch.where(torch.isinf(largest), 0, largest)
    # Hidden scores are lifted out of -inf first: exp and its gradient then never meet inf - inf.
    raised = torch.where(scores == -torch.inf, 0, scores - shift).exp()
    return _normalised(torch.where(scores == -torch.inf, 0, raised))


def _kernel_weights(request: Request, mask: Tensor) -> Tensor:
    assert request.feature_map is not None
    dtype = accumulation_dtype(request)
    key = cleaned(_repeat(request.key, request.group).to(dtype))
    query, key = scaled_features(request.feature_map, request.beta, request.query.to(dtype), key)
    return _normalised(torch.where(mask, query @ key.transpose(-1, -2), 0))


def _normalised(kernel: Tensor) -> Tensor:
    total = kernel.sum(-1, keepdim=True)
    return kernel / torch.where(total == 0, 1, total)


def _repeat(tensor: Tensor, group: int) -> Tensor:
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)
