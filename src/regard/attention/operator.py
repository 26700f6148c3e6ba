"""The operator: describe an attention, and it runs on the backend that suits it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.attention.checks import Layout, make_request, to_rows
from regard.attention.description import Attention
from regard.attention.explanation import Explanation
from regard.backends import BACKENDS, choose, find
from regard.backends.base import Request
from regard.backends.reference import position_scores, spoiled_rows, visible
from regard.backends.reference import weights as reference_weights
from regard.biases.base import Bias
from regard.errors import BackendError
from regard.features import FeatureMap
from regard.patterns import Pattern
from regard.precision import full_precision


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention | None = None,
    *,
    pattern: Pattern | None = None,
    beta: float | None = None,
    bias: Bias | Tensor | None = None,
    feature_map: str | FeatureMap | Callable | None = None,
    backend: str = "auto",
    layout: Layout = "rows",
) -> Tensor:
    """Attention of `query` over `key` and `value`.

    Tensors are `(*batch, head, token, dim)`. Key and value may have fewer heads than query: its head `h` then uses
    their head `h // group`. Value may have another size than key, and lengths may differ: the last query sits on the
    last key. A query that may see nothing yields zeros; a hidden key or value never touches the output, even if it is
    NaN. Half-precision inputs are computed in float32.

    The fields of `Attention` may be given as keywords, alone or to override those of `attention`. `backend` is
    `"auto"` or a name; a named backend never falls back. `layout="columns"` has `token` last, going in and coming out.

        >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
        >>> attend(query, key, value, pattern=Causal() & Window(2, 0)).shape
        torch.Size([1, 2, 5, 8])
    """
    fields = {"pattern": pattern, "beta": beta, "bias": bias, "feature_map": feature_map}
    query, key, value = to_rows(layout, query, key, value)
    request, shape = make_request(query, key, value, attention, fields)
    chosen = choose(request) if backend == "auto" else find(backend)
    if backend != "auto" and (reason := chosen.refuse(request)) is not None:
        raise _refusal(backend, request, reason)
    with full_precision(query.device):
        output = chosen.run(request)
    if output.shape != shape:
        output = output.reshape(shape)
    return output.transpose(-1, -2) if layout == "columns" else output


def weights(
    query: Tensor,
    key: Tensor,
    attention: Attention | None = None,
    *,
    pattern: Pattern | None = None,
    beta: float | None = None,
    bias: Bias | Tensor | None = None,
    feature_map: str | FeatureMap | Callable | None = None,
    layout: Layout = "rows",
) -> Tensor:
    """The attention weights `(*batch, head, query, key)`, for study: this builds the square.

    Rows sum to one, or to zero for a query that sees nothing. In the column layout the result is `(*batch, head, key,
    query)` and columns sum to one.

        >>> weights(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), pattern=Causal())[0].tolist()[1]
        [0.5, 0.5, 0.0]
    """
    fields = {"pattern": pattern, "beta": beta, "bias": bias, "feature_map": feature_map}
    query, key = to_rows(layout, query, key)
    request, shape = make_request(query, key, key, attention, fields)
    with full_precision(query.device):
        position = position_scores(request)
        weight = reference_weights(request, position)
        shown = visible(request, position)
        weight = torch.where(spoiled_rows(request, shown) & shown, torch.nan, weight)
    weight = weight.to(query.dtype).reshape(*shape[:-1], key.shape[-2])
    return weight.transpose(-1, -2) if layout == "columns" else weight


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention | None = None,
    *,
    pattern: Pattern | None = None,
    beta: float | None = None,
    bias: Bias | Tensor | None = None,
    feature_map: str | FeatureMap | Callable | None = None,
) -> Explanation:
    """Which backend `attend` would take and why the others would not, what the plan looks like and what it costs."""
    fields = {"pattern": pattern, "beta": beta, "bias": bias, "feature_map": feature_map}
    request, _ = make_request(query, key, value, attention, fields)
    return Explanation.of(request)


def _refusal(name: str, request: Request, reason: str) -> BackendError:
    able = [backend.name for backend in BACKENDS if backend.refuse(request) is None]
    return BackendError(
        f"{name!r} cannot run this attention.",
        asked=request.describe(),
        because=reason,
        instead=f'backend="auto", which would choose {choose(request).name}; able are ' + ", ".join(able),
    )
