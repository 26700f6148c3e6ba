"""Linear attention: a feature map in place of the exponential, so that no square is ever formed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.base import Backend, Request, accumulation_dtype
from regard.backends.finite import cleaned, known_finite
from regard.errors import CalculusError, ShapeError
from regard.features import FeatureMap, scaled_features
from regard.features import feature_map as resolve_features
from regard.patterns import And, Causal, Full, Padding, Pattern

CHUNK = 64  # tokens whose own square is formed; products with the state before them do the rest


class Linear(Backend):
    """Kernelised attention in time and memory linear in the tokens.

        out_i = phi(q_i)^T [sum_j phi(k_j) v_j^T] / phi(q_i)^T [sum_j phi(k_j)]

    phi: the feature map, the root of beta given to both of its arguments; j: the visible keys. Without a
    causal pattern both brackets are the same for every query and are computed once (the dense form). With
    one, chunks of 64 tokens meet the sums of all chunks before them and their own small triangle (the chunked
    form). `step` is the recurrent form. The two brackets travel as one: a column of ones beside the values
    makes the normaliser.

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
        for pattern in _joined(request.pattern):
            if not isinstance(pattern, Full | Causal | Padding):
                return (
                    "linear attention shares its sums over keys between queries, which Full, Causal, Padding "
                    f"and their & allow; {type(pattern).__name__} gives every query keys of its own"
                )
        return None

    def run(self, request: Request) -> Tensor:
        dtype = accumulation_dtype(request)
        query, key, value = (tensor.to(dtype) for tensor in (request.query, request.key, request.value))
        patterns = _joined(request.pattern)
        causal = any(isinstance(pattern, Causal) for pattern in patterns)
        paddings = [pattern for pattern in patterns if isinstance(pattern, Padding)]
        real = _real_keys(paddings, request)
        careful = not known_finite(key, value)
        broken = _broken(key, value, request) & real if careful else None
        if careful:
            key, value = cleaned(key), cleaned(value)
        if paddings:
            # Hidden before phi, whose slope may be infinite there, and after it, for phi(0) is rarely 0.
            key = torch.where(real, key, 0)
        query, key = _features(request, query, key)
        if paddings:
            key = torch.where(real, key, 0)
        columns = _columns(value)
        summed = _causal(query, key, columns, request) if causal else _dense(query, key, columns)
        # A query without any key has zeros, even if it is itself NaN.
        output = torch.where(_seen(real, causal, request), _normalised(summed), 0)
        if broken is not None:
            touched = _seen(broken, causal, request).repeat_interleave(request.group, dim=1)
            output = torch.where(touched, torch.nan, output)
        return output.to(request.value.dtype)


# The two forms over whole sequences: query (batch, head, query, feature), key (batch, kv_head, key, feature),
# columns (batch, kv_head, key, value_dim + 1)


def _dense(query: Tensor, key: Tensor, columns: Tensor) -> Tensor:
    """Two sums over all keys, once for all queries; grouped heads stand below one another."""
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    return (grouped @ (key.mT @ columns)).reshape(*query.shape[:3], columns.shape[-1])


def _causal(query: Tensor, key: Tensor, columns: Tensor, request: Request) -> Tensor:
    """The last query sits on the last key: early keys make the first state, early queries see nothing."""
    queries, keys = request.lengths
    early = max(keys - queries, 0)
    state = key[:, :, :early].mT @ columns[:, :, :early]
    query = query[:, :, max(queries - keys, 0) :]
    output, _ = _chunked(query, key[:, :, early:], columns[:, :, early:], state)
    return pad(output, (0, 0, max(queries - keys, 0), 0))


def _chunked(query: Tensor, key: Tensor, columns: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Causal sums of equally many queries and keys after a state, and the next state.

    A state is `(batch, kv_head, feature, value_dim + 1)`. Costs N C D + 2 N D^2 for chunks of C tokens.
    """
    tokens, group = query.shape[2], query.shape[1] // key.shape[1]
    size = max(min(CHUNK, tokens), 1)
    short = -tokens % size
    chunks = (tokens + short) // size
    query, key, columns = (pad(tensor, (0, 0, 0, short)) for tensor in (query, key, columns))
    # Grouped heads stand below one another in a chunk: (batch, kv_head, chunk, group * size, feature)
    query = query.unflatten(2, (chunks, size)).unflatten(1, (-1, group)).transpose(2, 3).flatten(3, 4)
    key, columns = (tensor.unflatten(2, (chunks, size)) for tensor in (key, columns))
    # Summed up from the left and never subtracted from: what is zero stays exactly zero.
    running = torch.cat((state.unsqueeze(2), key.mT @ columns), dim=2).cumsum(2)
    earlier = torch.ones(size, size, dtype=torch.bool, device=query.device).tril().repeat(group, 1)
    own = torch.where(earlier, query @ key.mT, 0)
    output = query @ running[:, :, :-1] + own @ columns
    output = output.unflatten(3, (group, size)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return output[:, :, :tokens], running[:, :, -1]


def _features(request: Request, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Features of queries and keys; the mean over visible keys is the kernel that is one everywhere."""
    if request.uniform:
        return torch.ones_like(query[..., :1]), torch.ones_like(key[..., :1])
    assert request.feature_map is not None
    return scaled_features(request.feature_map, request.beta, query, key)


def _columns(value: Tensor) -> Tensor:
    """The values and a column of ones, whose weighted sum is the normaliser."""
    return pad(value, (0, 1), value=1.0)


def _normalised(summed: Tensor) -> Tensor:
    total = summed[..., -1:]
    return summed[..., :-1] / torch.where(total == 0, 1, total)


# Who sees what


def _joined(pattern: Pattern) -> list[Pattern]:
    """The patterns that `&` joins, in any nesting."""
    return _joined(pattern.left) + _joined(pattern.right) if isinstance(pattern, And) else [pattern]


def _real_keys(paddings: list[Padding], request: Request) -> Tensor:
    """Which keys no padding hides: `(batch or 1, 1, key, 1)`."""
    device = request.query.device
    j = torch.arange(request.lengths.keys, device=device)
    real = torch.ones_like(j, dtype=torch.bool)[None]
    for padding in paddings:
        count = torch.tensor(padding.counts, device=device)[:, None]
        real = real & (j < count if padding.side == "right" else j >= request.lengths.keys - count)
    return real[:, None, :, None]


def _broken(key: Tensor, value: Tensor, request: Request) -> Tensor:
    """Which values are not finite, themselves or by their key: `(batch, kv_head, key, value_dim)`."""
    broken = ~torch.isfinite(value)
    # The plain mean reads no key.
    return broken if request.uniform else broken | ~torch.isfinite(key).all(-1, keepdim=True)


def _seen(mark: Tensor, causal: bool, request: Request) -> Tensor:
    """For each query whether it may see a marked key: `(..., key, c)` -> `(..., query or 1, c)`."""
    if not causal:
        return mark.any(2, keepdim=True)
    queries, keys = request.lengths
    running = mark.cumsum(2, dtype=torch.int32) > 0
    return pad(running[:, :, max(keys - queries, 0) :], (0, 0, max(queries - keys, 0), 0))


# The recurrent form


@dataclass(frozen=True, eq=False)
class LinearState:
    """All that causal linear attention remembers of the past: two sums, however long the past was.

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
    beta: float | None = None,
) -> tuple[Tensor, LinearState]:
    """The next tokens of causal linear attention, from the state of all tokens before them.

        S_i = S_(i-1) + phi(k_i) v_i^T,   z_i = z_(i-1) + phi(k_i),   out_i = phi(q_i)^T S_i / phi(q_i)^T z_i

    Tensors are `(*batch, head, token, dim)` with one token or more, so that a prompt is a step too; key and
    value may have fewer heads. `beta` and `feature_map` mean what they mean in `attend`. A token costs about
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
    used = _step_beta(beta, query.shape[-1], features)
    request = Request(flat[0], flat[1], flat[2], Causal(), used, feature_map=features)
    # Precision is the operator's business: autocast must not lower the sums.
    with torch.autocast(query.device.type, enabled=False):
        output, after = _advance(request, state, batch)
    return output.to(value.dtype).reshape(*query.shape[:-1], value.shape[-1]), after


def _advance(request: Request, state: LinearState | None, batch: tuple[int, ...]) -> tuple[Tensor, LinearState]:
    dtype = accumulation_dtype(request)
    query, key, value = (tensor.to(dtype) for tensor in (request.query, request.key, request.value))
    broken = _broken(key, value, request)
    query, key = _features(request, query, cleaned(key))
    sums_shape = (*batch, key.shape[1], key.shape[-1], value.shape[-1])
    past = query.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1] + 1)
    if state is not None:
        _check_state(state, sums_shape)
        past = torch.cat((state.sums, state.norm.unsqueeze(-1)), -1).to(dtype).reshape(past.shape)
    summed, future = _chunked(query, key, _columns(cleaned(value)), past)
    touched = _seen(broken, True, request)
    output = torch.where(touched.repeat_interleave(request.group, dim=1), torch.nan, _normalised(summed))
    # A state that has seen something not finite stays spoiled, in the channels that saw it.
    sums = torch.where(touched.any(2)[:, :, None], torch.nan, future[..., :-1])
    return output, LinearState(sums.reshape(sums_shape), future[..., -1].reshape(sums_shape[:-1]))


def _step_beta(beta: float | None, dim: int, features: FeatureMap) -> float:
    if beta is None:
        return 1 / math.sqrt(dim) if features.approximates_exp and dim else 1.0
    if not math.isfinite(beta):
        raise CalculusError(
            "A feature map leaves no scores to sharpen.",
            asked=f"beta={beta}",
            because="linear attention multiplies features; it has no exponent and so no hard limit",
            instead="a finite beta, or attend(..., beta=inf) without a feature map",
        )
    return float(beta)


def _check_step(query: Tensor, key: Tensor, value: Tensor) -> None:
    because = None
    if min(query.ndim, key.ndim, value.ndim) < 3:
        because = "a tensor has no head axis"
    elif query.shape[-1] != key.shape[-1]:
        because = "query and key meet in a dot product and need equally many numbers"
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
