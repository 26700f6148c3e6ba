"""Scores of an operator, read off its weights."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng


def read_own_scores(
    subject: OperatorAdapter, rng: Rng, batch: int, tokens: int, dim: int, factor: float = 1.0, **sizes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, its own key, the score of each query with the key of its own place, and where it can be read off.

    With a first key of zeros, whose score is zero, the score is a logarithm of two weights. Biases and
    normalisers fall out against the same with queries of zero; rotations do nothing at equal places.

        score_ii = log(A_ii / A_i0)(q) - log(A_ii / A_i0)(0)
    """
    query, key = _draw_query_and_key(subject, rng, batch, tokens, tokens, dim, **sizes)
    query = query * factor
    key[:, :, 0] = 0
    own = []
    for content in (query, torch.zeros_like(query)):
        logs = _take_logs(find_weights(subject, content, key, sizes.get("value_dim")))
        own.append(logs.diagonal(dim1=-2, dim2=-1) - logs[..., 0])
    score = own[0] - own[1]
    clear = score.isfinite()
    clear[..., 0] = False
    return query, key.repeat_interleave(query.shape[1] // key.shape[1], 1), score, clear


def read_scores_of_few_queries(
    subject: OperatorAdapter, rng: Rng, batch: int, queries: int, keys: int, dim: int, factor: float = 1.0, **sizes: int
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The same as `own_scores` for fewer queries than keys, an odd number; once for each end at which they may meet.

    Every other key is zeros, so that each key that is not stands beside one, within the reach of any window. The end at
    which the subject aligns lengths comes first.
    """
    query, key = _draw_query_and_key(subject, rng, batch, queries, keys, dim, **sizes)
    query = query * factor
    key[:, :, 1::2] = 0
    wide = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    contents = (query, torch.zeros_like(query))
    logs = [_take_logs(find_weights(subject, content, key, sizes.get("value_dim"))) for content in contents]
    found = []
    rows = torch.arange(queries)
    for own in (rows + keys - queries, rows):
        beside = torch.where(own > 0, own - 1, own + 1)
        score, nothing = (each[..., rows, own] - each[..., rows, beside] for each in logs)
        score = score - nothing
        found.append((query, wide[:, :, own], score, score.isfinite() & (own % 2 == 0)))
    return found[::-1] if subject.conventions.align == "start" else found


def _take_logs(weights: Tensor) -> Tensor:
    """Logarithms; NaN for what comes near the smallest of numbers, where digits are lost."""
    return torch.where(weights > 1e6 * torch.finfo(weights.dtype).tiny, weights.log(), torch.nan)


def _draw_query_and_key(
    subject: OperatorAdapter, rng: Rng, batch: int, queries: int, keys: int, dim: int, **sizes: int
) -> tuple[Tensor, Tensor]:
    """Query and key. Groups of heads have the same keys: which of them a head uses is covered by `head-groups`."""
    own = {"heads": subject.heads, "kv_heads": subject.kv_heads, **sizes}
    query, key, _ = subject.tensors(rng, batch, queries, keys, dim=dim, **own)
    return query, key if key.shape[1] == query.shape[1] else key[:, :1].expand_as(key).clone()


def find_weights(subject: OperatorAdapter, query: Tensor, key: Tensor, value_dim: int | None = None) -> Tensor:
    """The weights, also for heads and values of another size than the subject's own."""
    size = subject.value_dim
    fits = value_dim is None and query.shape[-1] != subject.dim
    subject.value_dim = query.shape[-1] if fits else value_dim or size
    try:
        return subject.matrix(query, key)
    finally:
        subject.value_dim = size


_KERNELISED: WeakKeyDictionary[Adapter, bool] = WeakKeyDictionary()


def is_kernelised(subject: OperatorAdapter) -> bool:
    """Whether weights are products of features, found out once for each subject."""
    if subject not in _KERNELISED:
        _KERNELISED[subject] = _is_sum_of_features(subject)
    return _KERNELISED[subject]


@torch.no_grad()
def _is_sum_of_features(subject: OperatorAdapter) -> bool:
    """A large matrix of products of features has no more rank than there are features.

    It is taken beside the weights of zero queries, so that a bias falls out; for features that is a scaling of rows and
    columns.
    """
    tokens = 65
    view = subject.at(torch.float64) or subject
    if not isinstance(view, OperatorAdapter) or view.eps > 1e-12:
        return False
    try:
        once, thrice = (read_own_scores(view, Rng(0, "growth"), 3, 2, view.dim, factor)[2] for factor in (1.0, 3.0))
        if float((thrice - 3 * once)[..., 1].norm()) < 0.01 * float(thrice[..., 1].norm()):
            return False  # logits that grow with the query are no logarithms of sums
        query, key, _ = view.tensors(Rng(0, "features"), 1, 2 * tokens, 2 * tokens)
        weights, plain = (view.matrix(content, key)[0, 0, tokens:, :tokens] for content in (query * 1.5, query * 0))
        weights = weights / plain  # the late and the early: a causal operator shows these too
        weights = weights / weights.amax(0) / (weights / weights.amax(0)).amax(1, keepdim=True)
        values = torch.linalg.svdvals(weights)
    except Exception:  # the law itself will meet it
        return False
    return bool((weights != 0).all() and values[-1] < 1e-13 * values[0])
