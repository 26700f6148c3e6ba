"""The operator: describe an attention, and it runs on the backend that suits it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.attention.checks import Layout, make_request, to_rows
from regard.attention.description import Attention
from regard.attention.explanation import Explanation
from regard.autocast import disable_autocast
from regard.backends import BACKENDS, choose, find
from regard.backends.base import Request
from regard.backends.reference import compute_weights, drop_weights, position_scores
from regard.biases.base import Bias
from regard.errors import BackendError
from regard.features import FeatureMap
from regard.patterns import Pattern


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention | None = None,
    *,
    pattern: Pattern | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    bias: Bias | Tensor | None = None,
    feature_map: str | FeatureMap | Callable | None = None,
    dropout: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    backend: str = "auto",
    layout: Layout = "rows",
) -> Tensor:
    """Attention of `query` over `key` and `value`.

    Tensors are `(*batch, head, token, dim)`. Key and value may have fewer heads than query: its head `h` then uses
    their head `h // group`. Value may have another size than key, and lengths may differ: the last query sits on the
    last key. Half-precision inputs are computed in float32.

    A query that may see nothing yields zeros. A hidden key, value or bias never touches the output, even if it is NaN;
    minus infinity in a bias hides a pair. NaN and infinities that are visible make outputs NaN: a query, a key, or a
    bias of NaN or plus infinity its whole row, a value its channel. At `scale=0` queries and keys are not read. Outputs
    that are NaN send no gradient back. If an input requires a gradient, so does the output.

    `mask` is a boolean tensor that broadcasts to `(*batch, head, query, key)`, `True` where a query may see a key, as
    in torch's `scaled_dot_product_attention`. It joins the pattern: both have to allow a pair. Each call reads all of
    it to find its plan again; `pattern=Mask(mask)`, made once, does so once.

    `dropout` is the probability of dropping an attention weight; those that are kept are divided by `1 - dropout`, as
    `dropout_p` of `scaled_dot_product_attention` does it. It is applied whenever it is not 0: a module in eval mode
    passes 0. The mask depends on a seed, the batch row, the head, the query and the key alone (`regard.dropout` has the
    formula), so it is the same on every backend and for any number of threads, and backward computes it again: memory
    stays linear in the tokens. The seed is drawn from torch's default generator (`torch.manual_seed`), or is
    `dropout_seed`. A dropped key is still a visible one: if its value is NaN, so is the output. A query whose keys
    are all dropped yields zeros. `dropout` is rounded to the nearest multiple of 2^-16. Linear attention has no weights
    to drop.

    The fields of `Attention` may be given as keywords, alone or to override those of `attention`. `backend` is
    `"auto"` or a name; a named backend never falls back. `layout="columns"` has `token` last, going in and coming out.

        >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
        >>> attend(query, key, value, pattern=Causal() & Window(2, 0)).shape
        torch.Size([1, 2, 5, 8])
    """
    fields = {"pattern": pattern, "scale": scale, "bias": bias, "feature_map": feature_map}
    query, key, value = to_rows(layout, query, key, value)
    if _route is not None:
        output = _route(query, key, value, attention, mask=mask, dropout=dropout, dropout_seed=dropout_seed, **fields)
        return output.transpose(-1, -2) if layout == "columns" else output
    request, shape = make_request(query, key, value, attention, mask, fields, dropout, dropout_seed)
    chosen = choose(request) if backend == "auto" else find(backend)
    if backend != "auto" and (reason := chosen.refuse(request)) is not None:
        raise _refusal(backend, request, reason)
    with disable_autocast(query.device):
        output = chosen(request)
    if output.shape != shape:
        output = output.reshape(shape)
    return output.transpose(-1, -2) if layout == "columns" else output


_route: Callable[..., Tensor] | None = None  # no context variable: torch.compile has to see that it changed


@contextlib.contextmanager
def reroute_attention(route: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, `attend` calls `route` with the same arguments, in all threads; `layout` is "rows"."""
    global _route
    before, _route = _route, route
    try:
        yield
    finally:
        _route = before


def weights(
    query: Tensor,
    key: Tensor,
    attention: Attention | None = None,
    *,
    pattern: Pattern | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    bias: Bias | Tensor | None = None,
    feature_map: str | FeatureMap | Callable | None = None,
    dropout: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    layout: Layout = "rows",
) -> Tensor:
    """The attention weights `(*batch, head, query, key)`, for study: this builds the square.

    Rows sum to one, or to zero for a query that sees nothing. In the column layout the result is `(*batch, head, key,
    query)` and columns sum to one. With `dropout`, these are the weights that `attend` uses with the same seed: zero
    where dropped, divided by `1 - dropout` elsewhere.

        >>> weights(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), pattern=Causal())[0].tolist()[1]
        [0.5, 0.5, 0.0]
    """
    fields = {"pattern": pattern, "scale": scale, "bias": bias, "feature_map": feature_map}
    query, key = to_rows(layout, query, key)
    request, shape = make_request(query, key, key, attention, mask, fields, dropout, dropout_seed)
    with disable_autocast(query.device):
        weight, shown, nan_rows = compute_weights(request, position_scores(request))
        weight = request.keep_graph(torch.where(nan_rows & shown, torch.nan, drop_weights(request, weight)))
    weight = weight.to(query.dtype).reshape(*shape[:-1], key.shape[-2])
    return weight.transpose(-1, -2) if layout == "columns" else weight


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention | None = None,
    *,
    pattern: Pattern | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    bias: Bias | Tensor | None = None,
    feature_map: str | FeatureMap | Callable | None = None,
    dropout: float = 0.0,
) -> Explanation:
    """Which backend `attend` would take and why the others would not, what the plan looks like and what it costs."""
    fields = {"pattern": pattern, "scale": scale, "bias": bias, "feature_map": feature_map}
    request, _ = make_request(query, key, value, attention, mask, fields, dropout, dropout_seed=0)
    return Explanation.of(request)


def _refusal(name: str, request: Request, reason: str) -> BackendError:
    able = [backend.name for backend in BACKENDS if backend.refuse(request) is None]
    return BackendError(
        f"{name!r} cannot run this attention.",
        asked=request.describe(),
        because=reason,
        instead=f'backend="auto", which would choose {choose(request).name}; able are ' + ", ".join(able),
    )
