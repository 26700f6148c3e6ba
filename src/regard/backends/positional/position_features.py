"""A Gaussian bias added to content, as more features of query and key: ordinary attention without a bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.backends.base import Request, accumulation_dtype
from regard.biases import features_of, has_features
from regard.biases.base import Bias
from regard.kernels import library
from regard.kernels.constant_program import get_program
from regard.kernels.softmax import Score, attention
from regard.nonfinite import find_nonfinite_rows, is_known_finite, zero_nonfinite


def find_content_refusal(request: Request) -> str | None:
    """Why content plus bias is not an inner product, or `None` if it is."""
    bias = request.bias
    if request.feature_map is not None:
        return "it has no feature maps"
    if bias is None:
        return "it needs a positional bias, and there is none"
    if isinstance(bias, Tensor):
        return (
            "content is in the scores (scale is not 0), and a tensor bias is not an inner product of position features"
        )
    if not has_features(bias, request.lengths):
        name = type(bias).__name__
        return f"content is in the scores (scale is not 0), and {name} is not an inner product of position features"
    if not request.dense:
        return "with content it takes no pattern: positions become features, which see all pairs"
    return None


def attend_with_features(request: Request) -> Tensor:
    """`softmax(scale q . k + bias) v` as the attention of `[scale q, features]` over `[k, features]`."""
    assert isinstance(request.bias, Bias)
    features = features_of(request.bias, request.lengths)
    assert features is not None
    dtype = accumulation_dtype(request)
    of_query, of_key = (part.to(dtype) for part in features)
    shape = request.batch, request.heads, request.kv_heads
    query = torch.cat((request.query.to(dtype) * request.scale, of_query.expand(shape[0], shape[1], -1, -1)), -1)
    key = torch.cat((request.key.to(dtype), of_key.expand(shape[0], shape[2], -1, -1)), -1)
    value = request.value.to(dtype)
    output = (
        _attend_native(query, key, value, request)
        if _has_kernels(query)
        else _attend_sdpa(query, key, value, request.group)
    )
    return output.to(request.value.dtype)


def _has_kernels(query: Tensor) -> bool:
    return library.missing() is None and query.device.type == "cpu"


def _attend_native(query: Tensor, key: Tensor, value: Tensor, request: Request) -> Tensor:
    words, masks = get_program(request.pattern, request.lengths, library.lanes(value.dtype))
    return attention(query, key, value, Score(None, None, None, None, words, masks, 1.0))[0]


def _attend_sdpa(query: Tensor, key: Tensor, value: Tensor, group: int) -> Tensor:
    if is_known_finite(query, key, value):
        return scaled_dot_product_attention(query, key, value, scale=1.0, enable_gqa=group > 1)
    nonfinite = (~torch.isfinite(value) | find_nonfinite_rows(key)).any(2, keepdim=True)
    safe = zero_nonfinite(query), zero_nonfinite(key), zero_nonfinite(value)
    output = scaled_dot_product_attention(*safe, scale=1.0, enable_gqa=group > 1)
    nan_rows = nonfinite.repeat_interleave(group, dim=1) | find_nonfinite_rows(query)
    return torch.where(nan_rows, torch.nan, output)
