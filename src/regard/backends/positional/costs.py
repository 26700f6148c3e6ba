"""Estimated times of the methods of positional attention, and when computing all pairs is cheaper."""

from __future__ import annotations

import math

import torch

from regard.backends.base import Request
from regard.backends.positional.products import transform_size
from regard.backends.positional.ratio import POINT, PRODUCT, TAP, slabs_fit
from regard.backends.positional.relative_layout import RelativeLayout
from regard.backends.positional.relative_scores import make_layout
from regard.biases import Shift, is_separable
from regard.biases.base import Bias
from regard.kernels import library

# Nanoseconds of one core, measured with float32 values and 64 channels: what a call and a head of the ratio cost before
# the first number, and what native's kernel takes for a pair (and for one of its channels).
CALL, HEAD = 1.0e6, 0.2e6
PAIR, CHANNEL = 0.6, 0.037


def choose_method(request: Request) -> str:
    """The method that a request runs by: gather, separable, ratio or features."""
    if request.scale != 0:
        return "features"
    if isinstance(request.bias, Shift) and request.dense:
        return "gather"
    apart = request.dense and isinstance(request.bias, Bias) and is_separable(request.bias)
    return "separable" if apart else "ratio"


def find_reluctance(request: Request) -> str | None:
    """Why `auto` should leave a request to the kernels that compute all pairs, or `None`."""
    if library.missing() is not None or request.query.device.type != "cpu":
        return None
    method = choose_method(request)
    if method == "features":
        return (
            "native reads the bias from a table in about the same time, and rounds less than features of positions do"
        )
    if method == "ratio" and torch.compiler.is_compiling():
        return "a ratio of convolutions is a graph break for torch.compile, and native's kernel is not"
    if method == "ratio" and _estimate_ratio_time(request) > _estimate_pairwise_time(request):
        return "for so few pairs computing them all is faster than convolutions"
    return None


def _estimate_ratio_time(request: Request) -> float:
    outputs = request.batch * request.heads * request.value.shape[-1]
    return CALL + HEAD * request.heads + outputs * min(_estimate_method_times(request, make_layout(request)).values())


def _estimate_method_times(request: Request, layout: RelativeLayout) -> dict[str, float]:
    """Nanoseconds of a channel of a head, as far as they are known in advance: a steep head's band is narrower."""
    times = {"transform": POINT * math.prod(transform_size(layout))}
    if not request.dense:
        times["band"] = TAP * request.pattern.pairs(*request.lengths)
    if slabs_fit(layout, request.group):
        times["slabs"] = PRODUCT * math.prod(layout.queries) * math.prod(layout.keys)
    return times


def _estimate_pairwise_time(request: Request) -> float:
    pairs = request.batch * request.heads * request.pattern.pairs(*request.lengths)
    return pairs * (PAIR + CHANNEL * request.value.shape[-1]) * (1 if request.dense else 2)


def count_macs(request: Request) -> int | None:
    """Multiply-adds forward. A transform of `n` real points counts `5/4 n log2 n`, as textbooks do."""
    method, layout = choose_method(request), make_layout(request)
    planes = request.batch * request.value.shape[-1]
    (rows, columns), (key_rows, key_columns) = layout.queries, layout.keys
    if method == "features":
        return None
    if method == "gather":
        return 0
    if method == "separable":
        return planes * request.heads * (key_rows * columns * key_columns + rows * key_rows * columns)
    times = _estimate_method_times(request, layout)
    fastest = min(times, key=times.__getitem__)
    if fastest == "slabs":
        return planes * request.heads * math.prod(layout.queries) * math.prod(layout.keys)
    if fastest == "band":
        return planes * request.heads * _count_taps(request, layout)
    points = math.prod(transform_size(layout))
    transforms = planes * (request.kv_heads + request.heads) * math.ceil(1.25 * points * math.log2(max(2, points)))
    return transforms + planes * request.heads * 2 * points  # the products of spectra


def _count_taps(request: Request, layout: RelativeLayout) -> int:
    return math.ceil(request.pattern.pairs(*request.lengths) / math.prod(layout.queries)) * math.prod(layout.queries)


def find_merit(request: Request) -> str | None:
    """Why this backend comes first for a request."""
    method = choose_method(request)
    if method == "gather":
        return "every head attends to one position, and its output is a copy"
    if method == "separable":
        rows, columns = make_layout(request).keys
        fewer = rows * columns / (rows + columns)
        return f"scores are separable into rows and columns, {fewer:.1f} times fewer products than all pairs"
    if method == "ratio":
        return "scores by relative position are a ratio of two convolutions"
    return None
