"""Attention by position: scores that depend on relative position only, without looking at pairs.

gather      every head looks at one place (`Shift`): a copy
separable   a score along rows plus one along columns: two softmaxes, `R C (R + C)` products
ratio       any relative score: a ratio of two convolutions, in a band or by the Fourier transform
features    a hill added to content: some more features of query and key, and ordinary attention
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.base import Backend, Request, accumulation_dtype
from regard.backends.positional.content import content_refusal, with_features
from regard.backends.positional.costs import dearer, multiplications, praise, way
from regard.backends.positional.question import layout_of, refusal, table_of
from regard.backends.positional.ratio import Ratio, Task
from regard.biases import Shift, axis_scores
from regard.biases.base import Bias
from regard.calculus import axis_weights, separable_attention
from regard.nonfinite import is_known_finite, zero_nonfinite


class Positional(Backend):
    """Heads that look by position alone, at a fraction of the cost of all pairs."""

    name = "positional"

    def refuse(self, request: Request) -> str | None:
        if request.scale != 0 and not request.hard:
            return content_refusal(request)
        return refusal(request)

    def reluctance(self, request: Request) -> str | None:
        return dearer(request)

    def merit(self, request: Request) -> str | None:
        return praise(request)

    def macs(self, request: Request) -> int | None:
        return multiplications(request)

    def is_opaque(self, request: Request) -> bool:
        return way(request) == "ratio"  # how a row is best computed is found from numbers

    def run(self, request: Request) -> Tensor:
        return _run(request)


def _run(request: Request) -> Tensor:
    if 0 in (*request.lengths, request.batch, request.value.shape[-1]):
        return request.value.new_zeros(*request.query.shape[:3], request.value.shape[3])
    if request.scale != 0:
        return with_features(request)
    if isinstance(request.bias, Shift) and request.dense:
        return _gather(request, request.bias)
    value = request.value.to(accumulation_dtype(request))
    clean = is_known_finite(request.value)
    output = _average(request, value if clean else zero_nonfinite(value))
    if not clean:
        output = torch.where(_touched(request), torch.nan, output)
    return output.to(request.value.dtype)


def _average(request: Request, value: Tensor) -> Tensor:
    """The mean of values `(batch, kv_head, key, channel)` that are all finite."""
    assert isinstance(request.bias, Bias)
    axes = axis_scores(request.bias) if request.dense else None
    if axes is None:
        return Ratio.apply(value, table_of(request), Task(layout_of(request), request.group))  # type: ignore
    return _by_axes(request, value, axes)


def _by_axes(request: Request, value: Tensor, axes: tuple[Tensor, Tensor]) -> Tensor:
    rows, columns = axis_weights(*(scores.to(value.dtype).expand(request.heads, -1, -1) for scores in axes))
    keys = layout_of(request).keys
    shared = [
        separable_attention(rows[first : first + request.group], columns[first : first + request.group], image)
        for first, image in zip(range(0, request.heads, request.group), value.unflatten(2, keys).unbind(1), strict=True)
    ]  # each (batch, row, column, group, channel)
    by_head = [heads.flatten(1, 2).transpose(1, 2) for heads in shared]
    return by_head[0] if len(by_head) == 1 else torch.cat(by_head, dim=1)


def _touched(request: Request) -> Tensor:
    """Which outputs saw a value that is not finite; without content, queries and keys are not read."""
    broken = ~torch.isfinite(request.value)
    assert isinstance(request.bias, Bias)
    axes = axis_scores(request.bias) if request.dense else None
    if axes is None:
        share = Ratio.apply(broken.double(), _alike(table_of(request)), Task(layout_of(request), request.group))
    else:
        share = _by_axes(request, broken.double(), (_alike(axes[0]), _alike(axes[1])))
    # One broken key of all is the least that counts; a transform's error is far below.
    return share > 0.5 / request.lengths.keys  # type: ignore[operator]


def _alike(scores: Tensor) -> Tensor:
    """The same score for all that is visible."""
    return torch.where(scores.detach() == -torch.inf, -torch.inf, 0.0).double()


def _gather(request: Request, bias: Shift) -> Tensor:
    """Every head's output is a copy of what it looks at, bit by bit."""
    queries, keys = request.lengths
    target = bias.targets(queries, request.lengths.offset).to(request.value.device).expand(request.heads, -1)
    inside = (target >= 0) & (target < keys)
    head = torch.arange(request.heads, device=target.device) // request.group
    place = (head[:, None] * keys + target.clamp(0, keys - 1)).flatten()

    def taken(tensor: Tensor) -> Tensor:
        return tensor.flatten(1, 2).index_select(1, place).unflatten(1, (request.heads, queries))

    output = taken(request.value)
    if not is_known_finite(output):
        output = torch.where(torch.isfinite(output), output, torch.nan)
    if bias.edges == "zeros":
        output = torch.where(inside[..., None], output, 0)
    return output
