"""torch's own scaled dot-product attention, for the dense cases it runs well."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.backends.base import Backend, Request
from regard.finite import cleaned, known_finite
from regard.patterns import Causal


class Sdpa(Backend):
    """Dense and causal attention by `torch.nn.functional.scaled_dot_product_attention`.

    torch aligns its causal mask with the first key, Regard with the last, so unequal causal lengths are refused.
    """

    name = "sdpa"

    def refuse(self, request: Request) -> str | None:
        if request.feature_map is not None:
            return "torch's SDPA has no feature maps"
        if request.hard:
            return "torch's SDPA has no hard limit"
        if request.beta <= 0:
            return "torch's SDPA counts on a positive scale: it multiplies the minus infinity of hidden scores by it"
        if not request.dense and not isinstance(request.pattern, Causal):
            return "torch's SDPA skips nothing: a pattern would cost the whole square"
        if isinstance(request.pattern, Causal) and request.lengths.queries != request.lengths.keys:
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
            return "torch's SDPA wants one dtype"
        return None

    def run(self, request: Request) -> Tensor:
        query, key, value = request.query, request.key, request.value
        causal = not request.dense
        bias = request.bias.to(query.dtype) if isinstance(request.bias, Tensor) else None
        broken = None
        if not known_finite(key, value):
            broken = ~torch.isfinite(value) | ~torch.isfinite(key).all(-1, keepdim=True)
            key, value = cleaned(key), cleaned(value)
        output = scaled_dot_product_attention(
            query, key, value, bias, is_causal=causal, scale=request.beta, enable_gqa=request.group > 1
        )
        if broken is not None:
            seen = broken.cummax(2).values if causal else broken.any(2, keepdim=True)
            seen = seen.repeat_interleave(request.group, dim=1)
            if bias is not None:  # minus infinity hides a pair
                broken = broken.repeat_interleave(request.group, dim=1).to(query.dtype)
                shown = (bias != -torch.inf).to(query.dtype).expand(-1, -1, *request.lengths)
                seen = shown @ broken > 0
            output = torch.where(seen, torch.nan, output)
        if not known_finite(query):
            # torch's CPU kernel answers zero to a query that is NaN.
            output = torch.where(torch.isfinite(query).all(-1, keepdim=True), output, torch.nan)
        return output
