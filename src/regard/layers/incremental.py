"""Unmasked attention that grows and shrinks token by token."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from regard.calculus import Merged, append_key, merge, remove_key
from regard.errors import CacheError, ShapeError

QUERIES_AT_ONCE = 128  # rows of scores that exist at one time
MOST_AMPLIFIED = 16.0  # a rounding error may grow by this factor before its row is computed again


class IncrementalAttention:
    r"""The attention of every token over every token, kept up to date while tokens come and go.

        append   h_i' = (e^{l_i} h_i + e^{s_i} v) / (e^{l_i} + e^{s_i}),    l_i' = log(e^{l_i} + e^{s_i})
        remove   h_i' = h_i + a_i / (1 - a_i) (h_i - v),                    l_i' = l_i + log(1 - a_i)

    `h_i` and `l_i` are the output of query `i` and the log-sum-exp of its scores, `s_i = scale q_i . k` its score of
    the token that comes or goes, `v` that token's value and `a_i = e^{s_i - l_i}` its weight. Without a mask a new
    token changes the outputs of all old ones; one number for each query makes that `O(N D)` instead of `O(N^2 D)`.

    Removing divides what is left by `1 - a`, and the rounding errors with it. An error made when the log-sum-exp was
    `l` is `e^{l - l'}` times as large now, so with `p_i` the largest `l_i` since row `i` was last computed afresh, no
    error has grown by more than `e^{p_i - l_i}`. Rows for which that exceeds 16, or that are not finite, are computed
    afresh: those that gave almost all their weight to what was removed.

    Source: the online softmax of Milakov and Gimelshein (2018), applied to rows that are already finished.

    Where we differ: `scale` must be finite, as hard attention has no log-sum-exp. Half precision is kept in float32
    and given back in half. Gradients flow through everything that was appended.

    Args:
        scale: inverse temperature; `None` is `1/sqrt(dim)`.

        >>> from regard.layers.incremental import IncrementalAttention
        >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
        >>> running = IncrementalAttention()
        >>> output = running.append(query[..., :4, :], key[..., :4, :], value[..., :4, :])
        >>> output = running.append(query[..., 4:, :], key[..., 4:, :], value[..., 4:, :])
        >>> torch.allclose(output, attend(query, key, value), atol=1e-6)
        True
        >>> running.remove(2).shape
        torch.Size([1, 2, 4, 8])
    """

    def __init__(self, scale: float | None = None) -> None:
        if scale is not None and not math.isfinite(scale):
            raise ShapeError(
                "A running attention needs a finite scale.",
                asked=f"scale={scale}",
                because="a hard attention has no log-sum-exp to carry on",
                instead="a finite scale, or attend(..., scale=inf) on the whole sequence",
            )
        self.scale = scale
        self._dtype: torch.dtype | None = None
        # With the heads as (kv_head, group): query and output have all of them, key and value a group of one.
        self._query = self._key = self._value = self._output = self._lse = self._peak = torch.empty(0, 0)

    def __len__(self) -> int:
        """How many tokens there are."""
        return self._query.shape[-2]

    @property
    def output(self) -> Tensor:
        """The attention of all tokens over all tokens, `(*batch, head, token, value_dim)`."""
        if self._dtype is None:
            raise CacheError(
                "A running attention has no output yet.",
                asked="output",
                found="no tokens",
                because="the batch, the heads and the sizes are those of the first tokens",
                instead="append(query, key, value) first",
            )
        return self._output.flatten(-4, -3).to(self._dtype)

    def append(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Let one or more tokens join at the end, and return the attention of all tokens.

        `query` is `(*batch, head, new, dim)`, `key` and `value` are `(*batch, kv_head, new, ...)`: query head `h` uses
        key head `h // group`. The cost for each new token is `O(tokens * dim)`.
        """
        dtype = query.dtype
        query, key, value = folded = self._check_and_group(query, key, value)
        if len(self) == 0:
            # Also when all tokens were removed: what is left of them are shapes.
            self._query, self._key, self._value = folded
            self._output, self._lse = self._compute_rows(query)
            self._peak, self._dtype = self._lse.detach(), dtype
            return self.output
        if key.shape[-2] == 1:
            score = (self._query @ key.mT)[..., 0] * self._scale
            output, lse = append_key(self._output, self._lse, score, value[..., 0, :])
        else:
            output, lse = merge(self._output, self._lse, *_attend_in_chunks(self._query, key, value, self._scale))
        self._query = torch.cat((self._query, query), -2)
        self._key = torch.cat((self._key, key), -2)
        self._value = torch.cat((self._value, value), -2)
        new = self._compute_rows(query)
        self._output = torch.cat((output, new.output), -2)
        peak = torch.maximum(self._peak, lse.detach())
        self._lse = torch.cat((lse, new.lse), -1)
        self._peak = torch.cat((peak, new.lse.detach()), -1)
        return self.output

    def remove(self, index: int | Iterable[int]) -> Tensor:
        """Let the token at `index`, or several, leave, and return the attention of the others.

        Indices count as in a list, negative ones from the end, all as before the removal. Each token costs `O(tokens *
        dim)`, and each row that has to be computed afresh as much again.
        """
        gone = self._check_indices(index)
        stays = torch.ones(len(self), dtype=torch.bool, device=self._query.device)
        stays[gone] = False
        keep = stays.nonzero()[:, 0]
        query, output, lse = self._query[..., keep, :], self._output[..., keep, :], self._lse[..., keep]
        for token in gone:
            score = (query @ self._key[..., token, :, None])[..., 0] * self._scale
            output, lse = remove_key(output, lse, score, self._value[..., token, :])
        self._query, self._key, self._value = query, self._key[..., keep, :], self._value[..., keep, :]
        self._peak = self._peak[..., keep]
        # Written so that NaN counts as lost.
        lost = ~((self._peak - lse.detach() <= math.log(MOST_AMPLIFIED)) & output.detach().isfinite().all(-1))
        self._output, self._lse = self._recompute_lost(lost, output, lse)
        return self.output

    def _recompute_lost(self, lost: Tensor, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The rows with the lost ones computed afresh, in every batch row and head if in any."""
        rows = lost.flatten(0, -2).any(0).nonzero()[:, 0]
        if not len(rows):
            return output, lse
        recomputed, lost_rows = self._compute_rows(self._query[..., rows, :]), lost[..., rows]
        new_output = torch.where(lost_rows[..., None], recomputed.output, output[..., rows, :])
        new_lse = torch.where(lost_rows, recomputed.lse, lse[..., rows])
        self._peak = self._peak.index_copy(
            -1, rows, torch.where(lost_rows, recomputed.lse.detach(), self._peak[..., rows])
        )
        return output.index_copy(-2, rows, new_output), lse.index_copy(-1, rows, new_lse)

    def _compute_rows(self, query: Tensor) -> Merged:
        return _attend_in_chunks(query, self._key, self._value, self._scale)

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self._query.shape[-1]) if self.scale is None else self.scale

    def _check_indices(self, index: int | Iterable[int]) -> list[int]:
        given = list(index) if isinstance(index, Iterable) else [index]
        tokens = len(self)
        numbers = [operator.index(number) for number in given]
        if wrong := [number for number in numbers if not -tokens <= number < tokens]:
            raise CacheError(
                "A token that is not there cannot be removed.",
                asked=f"remove({wrong[0]})",
                found=f"{tokens} tokens",
                because="indices count from 0, negative ones from the end",
                instead=f"an index of at least {-tokens} and below {tokens}" if tokens else "append tokens first",
            )
        return sorted({number % tokens for number in numbers})

    def _check_and_group(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The checked tensors in the dtype of the sums, heads folded as `(kv_head, group)`."""
        shapes = f"query {tuple(query.shape)}  key {tuple(key.shape)}  value {tuple(value.shape)}"
        given = shapes + "      # (*batch, head, token, dim)"
        fits = min(query.ndim, key.ndim, value.ndim) >= 3 and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
        fits = fits and query.shape[-2:] == key.shape[-2:] and key.shape[-3:-1] == value.shape[-3:-1]
        if not fits or key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]:
            raise ShapeError(
                "These tensors are not the same new tokens.",
                asked=given,
                because="every new token has a query, a key and a value, and query heads share key heads evenly",
                instead="query (*batch, head, new, dim), key (*batch, kv_head, new, dim) and value likewise",
            )
        heads = (key.shape[-3], query.shape[-3] // key.shape[-3])
        wide = torch.promote_types(query.dtype, torch.float32)
        folded = query.to(wide).unflatten(-3, heads), key.to(wide).unsqueeze(-3), value.to(wide).unsqueeze(-3)
        if self._dtype is None:
            return folded
        held = (self._query, self._key, self._value)
        same = all(
            old.shape[:-2] == new.shape[:-2] and old.shape[-1] == new.shape[-1] and old.dtype == new.dtype
            for old, new in zip(held, folded, strict=True)
        )
        if not same or query.dtype != self._dtype:
            raise CacheError(
                "The new tokens do not fit the ones there are.",
                asked=f"{given}  {query.dtype}",
                found=f"{len(self)} tokens with output {tuple(self.output.shape)}  {self._dtype}",
                because="batch, heads, sizes and dtype stay what they were for the first tokens",
                instead="a IncrementalAttention of its own for each batch",
            )
        return folded


def _attend_in_chunks(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Merged:
    """Attention and log-sum-exp, some queries at a time so that the square never exists."""
    parts = [_attend(some, key, value, scale) for some in query.split(QUERIES_AT_ONCE, -2)]
    if len(parts) == 1:
        return parts[0]
    return Merged(torch.cat([part.output for part in parts], -2), torch.cat([part.lse for part in parts], -1))


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Merged:
    score = query @ key.mT * scale
    if not key.shape[-2]:
        return Merged(score @ value.expand(*score.shape[:-2], 0, -1), score.new_full(score.shape[:-1], -math.inf))
    return Merged(score.softmax(-1) @ value, score.logsumexp(-1))
