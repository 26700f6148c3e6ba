"""Position-only attention: scores that depend on relative position alone, without computing them for every pair.

gather      every head attends to one position (`Shift`): a copy
separable   a score along rows plus one along columns: two softmaxes, `R C (R + C)` products
ratio       any relative score: a ratio of two convolutions, in a band or by the Fourier transform
features    a Gaussian bias added to content: a few more features of query and key, then ordinary attention
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.base import Backend, Request, accumulation_dtype
from regard.backends.positional.costs import choose_method, count_macs, find_merit, find_reluctance
from regard.backends.positional.position_features import attend_with_features, find_content_refusal
from regard.backends.positional.ratio import Ratio
from regard.backends.positional.relative_scores import find_refusal, make_layout, make_table
from regard.biases import Shift, axis_scores
from regard.biases.base import Bias
from regard.calculus import axis_weights, separable_attention
from regard.nonfinite import is_known_finite, zero_nonfinite


class Positional(Backend):
    """Attention by relative position alone, at a fraction of the cost of all pairs."""

    name = "positional"

    def refuse(self, request: Request) -> str | None:
        if request.dropout is not None:
            return "dropout acts on single weights, which it never computes"
        if request.scale != 0 and not request.hard:
            return find_content_refusal(request)
        return find_refusal(request)

    def reluctance(self, request: Request) -> str | None:
        return find_reluctance(request)

    def merit(self, request: Request) -> str | None:
        return find_merit(request)

    def macs(self, request: Request) -> int | None:
        return count_macs(request)

    def is_opaque(self, request: Request) -> bool:
        return choose_method(request) == "ratio"  # the method depends on tensor values

    def run(self, request: Request) -> Tensor:
        return _run(request)


def _run(request: Request) -> Tensor:
    if 0 in (*request.lengths, request.batch, request.value.shape[-1]):
        return request.value.new_zeros(*request.query.shape[:3], request.value.shape[3])
    if request.scale != 0:
        return attend_with_features(request)
    if isinstance(request.bias, Shift) and request.dense:
        return _gather(request, request.bias)
    value = request.value.to(accumulation_dtype(request))
    clean = is_known_finite(request.value)
    output = _average(request, value if clean else zero_nonfinite(value))
    if not clean:
        output = torch.where(_find_nan_outputs(request), torch.nan, output)
    return output.to(request.value.dtype)


def _average(request: Request, value: Tensor) -> Tensor:
    """The mean of values `(batch, kv_head, key, channel)` that are all finite."""
    assert isinstance(request.bias, Bias)
    axes = axis_scores(request.bias) if request.dense else None
    if axes is None:
        return Ratio.apply(value, make_table(request), make_layout(request), request.group)  # type: ignore
    return _attend_by_axes(request, value, axes)


def _attend_by_axes(request: Request, value: Tensor, axes: tuple[Tensor, Tensor]) -> Tensor:
    rows, columns = axis_weights(*(scores.to(value.dtype).expand(request.heads, -1, -1) for scores in axes))
    keys = make_layout(request).keys
    shared = [
        separable_attention(rows[first : first + request.group], columns[first : first + request.group], image)
        for first, image in zip(range(0, request.heads, request.group), value.unflatten(2, keys).unbind(1), strict=True)
    ]  # each (batch, row, column, group, channel)
    by_head = [heads.flatten(1, 2).transpose(1, 2) for heads in shared]
    return by_head[0] if len(by_head) == 1 else torch.cat(by_head, dim=1)


def _find_nan_outputs(request: Request) -> Tensor:
    """Which outputs see a non-finite value; without content, queries and keys are not read."""
    nonfinite = ~torch.isfinite(request.value)
    assert isinstance(request.bias, Bias)
    axes = axis_scores(request.bias) if request.dense else None
    if axes is None:
        share = Ratio.apply(
            nonfinite.double(), _equalize_scores(make_table(request)), make_layout(request), request.group
        )
    else:
        share = _attend_by_axes(request, nonfinite.double(), (_equalize_scores(axes[0]), _equalize_scores(axes[1])))
    # The smallest share is one key of all; the error of a transform is far below.
    return share > 0.5 / request.lengths.keys  # type: ignore[operator]


def _equalize_scores(scores: Tensor) -> Tensor:
    """Equal scores for all visible pairs."""
    return torch.where(scores.detach() == -torch.inf, -torch.inf, 0.0).double()


def _gather(request: Request, bias: Shift) -> Tensor:
    """Each output is a bitwise copy of the one value that its head attends to."""
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
