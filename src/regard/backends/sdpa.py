"""torch's own scaled dot-product attention, for the dense cases it runs well."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.backends.base import Backend, Request
from regard.nonfinite import find_nonfinite_rows, is_known_finite, is_known_nonfinite, zero_nan_bias, zero_nonfinite


class Sdpa(Backend):
    """Dense and causal attention by `torch.nn.functional.scaled_dot_product_attention`.

    torch aligns its causal mask with the first key, Regard with the last, so unequal causal lengths are refused.
    """

    name = "sdpa"

    def refuse(self, request: Request) -> str | None:
        if request.feature_map is not None:
            return "torch's SDPA has no feature maps"
        if request.dropout is not None:
            return "torch's SDPA draws a dropout mask of its own, which no other backend could repeat"
        if request.hard:
            return "torch's SDPA has no hard limit"
        if request.scale <= 0:
            return "torch's SDPA counts on a positive scale: it multiplies the minus infinity of hidden scores by it"
        if not request.dense and not request.pattern.is_causal:
            return "torch's SDPA skips nothing: a pattern would cost the whole square"
        if request.pattern.is_causal and request.lengths.queries != request.lengths.keys:
            return "torch aligns its causal mask with the first key; here the last query sits on the last key"
        if request.bias is not None and not isinstance(request.bias, Tensor):
            return "torch's SDPA takes a bias only as the whole square"
        if isinstance(request.bias, Tensor) and not request.dense:
            return "torch's SDPA takes either a causal mask or a bias"
        if isinstance(request.bias, Tensor) and torch.promote_types(request.bias.dtype, request.query.dtype) != (
            request.query.dtype
        ):
            return f"torch's SDPA would round the bias from {request.bias.dtype} to {request.query.dtype}"
        if 0 in (*request.lengths, request.batch, request.query.shape[-1], request.value.shape[-1]):
            return "torch's SDPA is not defined on nothing"
        if len({request.query.dtype, request.key.dtype, request.value.dtype}) > 1:
            return "torch's SDPA needs one dtype"
        return None

    def run(self, request: Request) -> Tensor:
        tensors = request.query, request.key, request.value
        bias = request.bias.to(request.query.dtype) if isinstance(request.bias, Tensor) else None
        nan_rows = None
        if not is_known_finite(*tensors) or (bias is not None and not is_known_finite(bias)):
            nan_rows = _find_nan_outputs(request, bias)
            tensors = zero_nonfinite(tensors[0]), zero_nonfinite(tensors[1]), zero_nonfinite(tensors[2])
            bias = None if bias is None else zero_nan_bias(bias)
        output = _run(request, *tensors, bias)
        if is_known_nonfinite(output):
            output = _attend_with_overflow(request, *tensors, bias)
        return output if nan_rows is None else torch.where(nan_rows, torch.nan, output)


def _run(request: Request, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    shared = request.group > 1
    causal = not request.dense
    return scaled_dot_product_attention(query, key, value, bias, 0.0, causal, scale=request.scale, enable_gqa=shared)


def _attend_with_overflow(request: Request, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """The same where finite scores overflow: torch's kernels add minus infinity to them, which is NaN."""
    key, value = (
        tensor.repeat_interleave(request.group, dim=1).to(torch.promote_types(tensor.dtype, torch.float32))
        for tensor in (key, value)
    )
    scores = request.scale * (query.to(key.dtype) @ key.mT)
    shown = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
    if bias is not None:
        scores, shown = scores + bias, shown & (bias != -torch.inf)
    shown = shown if request.dense else shown.tril()
    nan_rows = (shown & ~(scores < torch.inf)).any(-1, keepdim=True)
    live = shown & ~nan_rows & (scores > -torch.inf)
    top = torch.where(live, scores, -torch.inf).detach().amax(-1, keepdim=True)
    weight = torch.where(live, torch.where(live, scores - top, 0).exp(), 0)
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    return torch.where(nan_rows, torch.nan, weight @ value).to(request.value.dtype)


def _find_nan_outputs(request: Request, bias: Tensor | None) -> Tensor:
    """Which outputs are NaN by the rule of `regard.nonfinite`: `(batch, head, query or 1, value_dim)`."""
    nonfinite = ~torch.isfinite(request.value) | find_nonfinite_rows(request.key)
    causal = not request.dense
    if bias is None:
        marked = nonfinite.cummax(2).values if causal else nonfinite.any(2, keepdim=True)
        return marked.repeat_interleave(request.group, dim=1) | find_nonfinite_rows(request.query)
    shown = (bias != -torch.inf).expand(-1, -1, *request.lengths)
    marked = shown.to(torch.float32) @ nonfinite.repeat_interleave(request.group, dim=1).to(torch.float32) > 0
    bad_bias = (~(bias < torch.inf)).any(-1, keepdim=True)
    return marked | bad_bias | (find_nonfinite_rows(request.query) & shown.any(-1, keepdim=True))
