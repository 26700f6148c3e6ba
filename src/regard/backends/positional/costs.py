"""What the ways of positional attention cost, and when looking at all pairs is cheaper."""

from __future__ import annotations

import math

import torch

from regard.backends.base import Request
from regard.backends.positional.layout import Layout
from regard.backends.positional.products import transform_size
from regard.backends.positional.question import layout_of
from regard.backends.positional.ratio import POINT, PRODUCT, TAP, slabs_fit
from regard.biases import Shift, falls_apart
from regard.biases.base import Bias
from regard.kernels import library

# Nanoseconds of one core, measured with float32 values and 64 channels: what a call and a head of the ratio cost before
# the first number, and what native's kernel takes for a pair (and for one of its channels).
CALL, HEAD = 1.0e6, 0.2e6
PAIR, CHANNEL = 0.6, 0.037


def way(request: Request) -> str:
    """Which of the ways a request takes: gather, separable, ratio or features."""
    if request.scale != 0:
        return "features"
    if isinstance(request.bias, Shift) and request.dense:
        return "gather"
    apart = request.dense and isinstance(request.bias, Bias) and falls_apart(request.bias)
    return "separable" if apart else "ratio"


def dearer(request: Request) -> str | None:
    """Why `auto` should leave a request to the kernels that look at all pairs, or `None`."""
    if library.missing() is not None or request.query.device.type != "cpu":
        return None
    taken = way(request)
    if taken == "features":
        return "native reads a hill from a table in about the same time, and rounds less than features of positions do"
    if taken == "ratio" and torch.compiler.is_compiling():
        return "to torch.compile a ratio of convolutions is a break in the graph, and native's kernel is none"
    if taken == "ratio" and _ratio(request) > _pairs(request):
        return "so few pairs are looked at faster than the means of convolutions are taken"
    return None


def _ratio(request: Request) -> float:
    outputs = request.batch * request.heads * request.value.shape[-1]
    return CALL + HEAD * request.heads + outputs * min(_ways(request, layout_of(request)).values())


def _ways(request: Request, layout: Layout) -> dict[str, float]:
    """Nanoseconds of a channel of a head, as far as they can be foreseen: a steep head's band is narrower."""
    ways = {"transform": POINT * math.prod(transform_size(layout))}
    if not request.dense:
        ways["band"] = TAP * request.pattern.pairs(*request.lengths)
    if slabs_fit(layout, request.group):
        ways["slabs"] = PRODUCT * math.prod(layout.queries) * math.prod(layout.keys)
    return ways


def _pairs(request: Request) -> float:
    pairs = request.batch * request.heads * request.pattern.pairs(*request.lengths)
    return pairs * (PAIR + CHANNEL * request.value.shape[-1]) * (1 if request.dense else 2)


def multiplications(request: Request) -> int | None:
    """Multiply-adds forward. A transform of `n` real points counts `5/4 n log2 n`, as textbooks do."""
    taken, layout = way(request), layout_of(request)
    planes = request.batch * request.value.shape[-1]
    (rows, columns), (key_rows, key_columns) = layout.queries, layout.keys
    if taken == "features":
        return None
    if taken == "gather":
        return 0
    if taken == "separable":
        return planes * request.heads * (key_rows * columns * key_columns + rows * key_rows * columns)
    ways = _ways(request, layout)
    foreseen = min(ways, key=ways.__getitem__)
    if foreseen == "slabs":
        return planes * request.heads * math.prod(layout.queries) * math.prod(layout.keys)
    if foreseen == "band":
        return planes * request.heads * _taps(request, layout)
    points = math.prod(transform_size(layout))
    transforms = planes * (request.kv_heads + request.heads) * math.ceil(1.25 * points * math.log2(max(2, points)))
    return transforms + planes * request.heads * 2 * points  # the products of spectra


def _taps(request: Request, layout: Layout) -> int:
    return math.ceil(request.pattern.pairs(*request.lengths) / math.prod(layout.queries)) * math.prod(layout.queries)


def praise(request: Request) -> str | None:
    """What puts this backend first for a request."""
    taken = way(request)
    if taken == "gather":
        return "every head looks at one place, and its output is a copy"
    if taken == "separable":
        rows, columns = layout_of(request).keys
        fewer = rows * columns / (rows + columns)
        return f"rows and columns fall apart, {fewer:.1f} times fewer products than all pairs"
    if taken == "ratio":
        return "scores by relative position are a ratio of two convolutions"
    return None
