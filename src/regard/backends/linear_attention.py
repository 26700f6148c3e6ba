"""Linear attention: a feature map in place of the exponential, without the matrix of scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.autocast import disable_autocast
from regard.backends.base import Backend, Request, accumulation_dtype, attention_observer, join_graph
from regard.errors import CalculusError, ShapeError
from regard.features import Elu1, FeatureMap, scaled_features
from regard.features import feature_map as resolve_features
from regard.kernels.eager import is_plain_eager
from regard.kernels.linear_attention import (
    Phi,
    attention,
    compute_in_torch,
    is_supported,
    normalise,
    try_attention,
)
from regard.nonfinite import find_nonfinite_rows, has_no_values, is_known_finite, zero_nonfinite
from regard.patterns import Causal, Pattern


class LinearAttentionBackend(Backend):
    """Kernelised attention in time and memory linear in the tokens.

        out_i = phi(q_i)^T [sum_j phi(k_j) v_j^T] / phi(q_i)^T [sum_j phi(k_j)]

    phi: the feature map, the root of scale given to both of its arguments; j: the visible keys. Without a
    causal pattern both brackets are the same for every query and are computed once (the dense form). With
    one, each chunk of tokens attends to the sums of all chunks before it and to its own small triangle (the chunked
    form): in C++ where that was built and the tensors are on the CPU, else in torch. `step` is the recurrent
    form. In torch the two brackets are computed as one: a column of ones beside the values makes the normaliser.

    Source: Katharopoulos et al., Transformers are RNNs (2020), sections 3.2 to 3.4; the chunks are those of
    Hua et al., Transformer Quality in Linear Time (2022).

        >>> x = torch.randn(1, 2, 5, 3)
        >>> attend(x, x, x, pattern=Causal(), feature_map="elu1", backend="linear").shape
        torch.Size([1, 2, 5, 3])
    """

    name = "linear"

    def refuse(self, request: Request) -> str | None:
        if request.feature_map is None:
            return "linear attention needs a feature map in place of exp, and none was given"
        for pattern in request.pattern._split_intersection():
            if not pattern.is_causal and not pattern.is_key_padding:
                return (
                    "linear attention shares its sums over keys between queries, which Full, Causal, Padding "
                    f"and their & allow; {type(pattern).__name__} gives every query keys of its own"
                )
        return None

    def run(self, request: Request) -> Tensor:
        dtype = accumulation_dtype(request)
        query, key, value = (tensor.to(dtype) for tensor in (request.query, request.key, request.value))
        patterns = request.pattern._split_intersection()
        causal = any(pattern.is_causal for pattern in patterns)
        paddings = [pattern for pattern in patterns if pattern.is_key_padding and not pattern.is_full]
        if causal and not paddings and (output := _run_fused(query, key, value, request)) is not None:
            return output.to(request.value.dtype)
        real = _find_real_keys(paddings, request)
        has_nonfinite = not is_known_finite(query, key, value)
        nonfinite = _find_nonfinite_values(key, value, request) & real if has_nonfinite else None
        nan_rows = _find_nonfinite_queries(query, request) if has_nonfinite else None
        if has_nonfinite:
            query, key, value = zero_nonfinite(query), zero_nonfinite(key), zero_nonfinite(value)
        if paddings:
            # Zeroed before phi, whose derivative may be infinite there, and after it, for phi(0) is rarely 0.
            key = torch.where(real, key, 0)
        kernel = causal and is_supported(query, key, value)
        query, key, phi = compute_features(request, query, key, fused=kernel and not paddings)
        if paddings:
            key = torch.where(real, key, 0)
        if causal:
            output = _attend_causal(query, key, value, request, phi, attention if kernel else compute_in_torch)
        else:
            output = normalise(_attend_dense(query, key, append_ones(value)))
        # A query without any key has zeros, even if it is itself NaN.
        visible = _propagate_marks(real, causal, request)
        output = torch.where(visible, output, 0)
        if nonfinite is not None and nan_rows is not None:
            nan_marks = _propagate_marks(nonfinite, causal, request).repeat_interleave(request.group, dim=1)
            output = torch.where(nan_marks | (nan_rows & visible), torch.nan, output)
        return output.to(request.value.dtype)


def _run_fused(query: Tensor, key: Tensor, value: Tensor, request: Request) -> Tensor | None:
    """Causal attention by the kernel alone, or `None` if something is not finite."""
    eager = is_plain_eager(query, key, value)
    if not is_supported(query, key, value) or not (eager or has_no_values()):
        return None
    read, met, phi = compute_features(request, query, key, fused=True)
    # The kernel reports a non-finite value, but a non-finite query or key only if it computes the features itself.
    if not request.uniform and not phi.map and not is_known_finite(query):
        return None
    early = key[:, :, : max(request.lengths.keys - request.lengths.queries, 0)]
    if not request.uniform and not is_known_finite(early if phi.map else key):
        return None
    return _attend_causal(read, met, value, request, phi, try_attention if eager else attention)


# The two forms over whole sequences: query (batch, head, query, feature), key (batch, kv_head, key, feature),
# columns (batch, kv_head, key, value_dim + 1)


def _attend_dense(query: Tensor, key: Tensor, columns: Tensor) -> Tensor:
    """Two sums over all keys, once for all queries; grouped heads are stacked along the queries."""
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    return (grouped @ (key.mT @ columns)).reshape(*query.shape[:3], columns.shape[-1])


def _attend_causal(query: Tensor, key: Tensor, value: Tensor, request: Request, phi: Phi, product: Callable) -> Any:
    """The last query is aligned with the last key: extra keys make the first state, extra queries see nothing."""
    queries, keys = request.lengths
    early, late = max(keys - queries, 0), max(queries - keys, 0)
    if not early and not late:  # a slice of everything, or a pad of nothing, would still be copied by backward
        made = product(query, key, value, None, None, phi)
        return made if made is None else made[0]
    state = norm = None
    if early:
        first = key[:, :, :early]
        sums = (Elu1()(first * phi.key_scale) if phi.map else first).mT @ append_ones(value[:, :, :early])
        state, norm = sums[..., :-1], sums[..., -1]
    made = product(query[:, :, late:], key[:, :, early:], value[:, :, early:], state, norm, phi)
    return made if made is None else pad(made[0], (0, 0, late, 0))


def compute_features(request: Request, query: Tensor, key: Tensor, fused: bool) -> tuple[Tensor, Tensor, Phi]:
    """Features of queries and keys; `fused` leaves a map that the kernel implements to it.

    The mean over visible keys is the kernel that is one everywhere.
    """
    if request.uniform:
        return torch.ones_like(query[..., :1]), torch.ones_like(key[..., :1]), Phi()
    assert request.feature_map is not None
    if fused and type(request.feature_map) is Elu1:
        root = math.sqrt(abs(request.scale))
        return query, key, Phi(1, math.copysign(root, request.scale), root)
    return *scaled_features(request.feature_map, request.scale, query, key), Phi()


def append_ones(value: Tensor) -> Tensor:
    """The values and a column of ones, whose weighted sum is the normaliser."""
    return pad(value, (0, 1), value=1.0)


# Visibility


def _find_real_keys(paddings: list[Pattern], request: Request) -> Tensor:
    """Which keys no padding hides: `(batch or 1, 1, key, 1)`."""
    device = request.query.device
    i, j = torch.zeros((), dtype=torch.long, device=device), torch.arange(request.lengths.keys, device=device)
    real = torch.ones_like(j, dtype=torch.bool)[None]
    for padding in paddings:  # all queries see the same keys
        row = torch.arange(padding.rows or 1, device=device)[:, None]
        real = real & request.by_row(padding._allows(i, j, row, request.lengths).expand(len(row), len(j)))
    return real[:, None, :, None]


def _find_nonfinite_values(key: Tensor, value: Tensor, request: Request) -> Tensor:
    """Which values are not finite, themselves or by their key: `(batch, kv_head, key, value_dim)`."""
    nonfinite = ~torch.isfinite(value)
    # The plain mean reads no key.
    return nonfinite if request.uniform else nonfinite | find_nonfinite_rows(key)


def _find_nonfinite_queries(query: Tensor, request: Request) -> Tensor:
    """Which queries are not finite, `(batch, head, query, 1)`; the plain mean reads none."""
    return find_nonfinite_rows(query) & (not request.uniform)


def _propagate_marks(mark: Tensor, causal: bool, request: Request) -> Tensor:
    """For each query whether it may see a marked key: `(..., key, c)` -> `(..., query or 1, c)`."""
    if not causal:
        return mark.any(2, keepdim=True)
    queries, keys = request.lengths
    running = mark.cumsum(2, dtype=torch.int32) > 0
    return pad(running[:, :, max(keys - queries, 0) :], (0, 0, max(queries - keys, 0), 0))


# The recurrent form


@dataclass(frozen=True, eq=False)
class LinearState:
    """The recurrent state of causal linear attention: two sums of constant size.

        sums = sum_j phi(k_j) v_j^T,     norm = sum_j phi(k_j)

    Attributes:
        sums: `(*batch, kv_head, feature, value_dim)`.
        norm: `(*batch, kv_head, feature)`.
    """

    sums: Tensor
    norm: Tensor

    def reorder(self, index: Tensor) -> LinearState:
        """The states of other batch rows, as beam search needs: row `b` of the result is row `index[b]`."""
        return LinearState(self.sums.index_select(0, index), self.norm.index_select(0, index))


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LinearState | None = None,
    *,
    feature_map: str | FeatureMap | Callable,
    scale: float | None = None,
) -> tuple[Tensor, LinearState]:
    """The next tokens of causal linear attention, from the state of all tokens before them.

        S_i = S_(i-1) + phi(k_i) v_i^T,   z_i = z_(i-1) + phi(k_i),   out_i = phi(q_i)^T S_i / phi(q_i)^T z_i

    Tensors are `(*batch, head, token, dim)` with one token or more, so that a prompt is a step too; key and
    value may have fewer heads. `scale` and `feature_map` mean what they mean in `attend`. A token costs about
    2 D (D_v + 1) multiply-adds for each head, and the state never grows.

    Source: Katharopoulos et al., Transformers are RNNs (2020), section 3.4.

        >>> x = torch.randn(2, 3, 1, 5)
        >>> output, state = step(x, x, x, feature_map="elu1")
        >>> output.shape, state.sums.shape, state.norm.shape
        (torch.Size([2, 3, 1, 5]), torch.Size([2, 3, 5, 5]), torch.Size([2, 3, 5]))
    """
    _check_step(query, key, value)
    features, batch = resolve_features(feature_map), tuple(query.shape[:-3])
    flat = [tensor.reshape(math.prod(batch), *tensor.shape[-3:]) for tensor in (query, key, value)]
    used = _choose_scale(scale, query.shape[-1], features)
    request = Request(flat[0], flat[1], flat[2], Causal(), used, feature_map=features)
    observer = None if torch.compiler.is_compiling() else attention_observer.get()
    with disable_autocast(query.device):
        if observer is None:
            output, after = _advance(request, state, batch)
        else:
            output, after = observer(request, lambda: _advance(request, state, batch))
    if torch.is_grad_enabled() and (used == 0 or not output.requires_grad):
        past = () if state is None else (state.sums, state.norm)
        output = join_graph(output, *request.tensors, *past)
    return output.to(value.dtype).reshape(*query.shape[:-1], value.shape[-1]), after


def _advance(request: Request, state: LinearState | None, batch: tuple[int, ...]) -> tuple[Tensor, LinearState]:
    dtype = accumulation_dtype(request)
    query, key, value = (tensor.to(dtype) for tensor in (request.query, request.key, request.value))
    kernel = is_supported(query, key, value)
    read, met, phi = compute_features(request, query, key, fused=kernel)
    shape = (*batch, key.shape[1], met.shape[-1], value.shape[-1])
    past: tuple[Tensor | None, Tensor | None] = (None, None)
    if state is not None:
        _check_state(state, shape)
        past = (
            state.sums.to(dtype).reshape(len(query), *shape[-3:]),
            state.norm.to(dtype).reshape(len(query), *shape[-3:-1]),
        )
    made = None
    if kernel and is_plain_eager(query, key, value, *past) and (phi.map or is_known_finite(query, key)):
        made = try_attention(read, met, value, *past, phi)
    if made is not None:
        output, sums, norm = made
        return output, LinearState(sums.reshape(shape), norm.reshape(shape[:-1]))
    nonfinite = _find_nonfinite_values(key, value, request)
    read, met, phi = compute_features(request, zero_nonfinite(query), zero_nonfinite(key), fused=kernel)
    output, sums, norm = (attention if kernel else compute_in_torch)(read, met, zero_nonfinite(value), *past, phi)
    nan_marks = _propagate_marks(nonfinite, True, request)
    nan_rows = nan_marks.repeat_interleave(request.group, dim=1) | _find_nonfinite_queries(query, request)
    output = torch.where(nan_rows, torch.nan, output)
    # A state that has summed a non-finite value stays NaN, in that value's channels.
    sums = torch.where(nan_marks.any(2)[:, :, None], torch.nan, sums)
    return output, LinearState(sums.reshape(shape), norm.reshape(shape[:-1]))


def _choose_scale(scale: float | None, dim: int, features: FeatureMap) -> float:
    if scale is None:
        return 1 / math.sqrt(dim) if features.approximates_exp and dim else 1.0
    if not math.isfinite(scale):
        raise CalculusError(
            "A feature map leaves no scores to sharpen.",
            asked=f"scale={scale}",
            because="linear attention multiplies features; it has no exponent and so no hard limit",
            instead="a finite scale, or attend(..., scale=inf) without a feature map",
        )
    return float(scale)


def _check_step(query: Tensor, key: Tensor, value: Tensor) -> None:
    because = None
    if min(query.ndim, key.ndim, value.ndim) < 3:
        because = "a tensor has no head axis"
    elif query.shape[-1] != key.shape[-1]:
        because = "the dot product of query and key needs equal head dims"
    elif not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        because = "the axes before the heads, the batch, must be the same for all three"
    elif not query.shape[-2] == key.shape[-2] == value.shape[-2]:
        because = "each new token brings one query, one key and one value"
    elif key.shape[-3] != value.shape[-3] or not key.shape[-3] or query.shape[-3] % key.shape[-3]:
        because = "key and value need the same heads, and the query's heads must be a multiple of them"
    elif len({query.dtype, key.dtype, value.dtype}) > 1 or not query.dtype.is_floating_point:
        because = f"they need one floating-point dtype, not {query.dtype}, {key.dtype} and {value.dtype}"
    if because is not None:
        named = {"query": query, "key": key, "value": value}
        shapes = (f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())
        raise ShapeError(
            "These tensors do not make a step.",
            asked="  ".join(shapes) + "      # (*batch, head, token, dim)",
            because=because,
            instead="query, key and value of the same new tokens; attend(...) for tokens that differ",
        )


def _check_state(state: LinearState, wanted: tuple[int, ...]) -> None:
    if tuple(state.sums.shape) != wanted or tuple(state.norm.shape) != wanted[:-1]:
        raise ShapeError(
            "The state belongs to another attention.",
            asked=f"state with sums {tuple(state.sums.shape)}, norm {tuple(state.norm.shape)}",
            found=f"tokens and features that need sums {wanted}, norm {wanted[:-1]}",
            because="a state has the batch, the key heads, the features and the value size of its tokens",
            instead="the state of the previous step with the same feature map, or None for the first token",
        )
