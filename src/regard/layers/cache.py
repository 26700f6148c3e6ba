"""Caches of decoders: keys and values of all tokens or of a window, of a context, or the sums of linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from regard.attention import Attention
from regard.backends.linear_attention import LinearState, step
from regard.caching import lru_cache_small
from regard.errors import CacheError
from regard.layers.cache_requirements import check_window, find_window
from regard.patterns import Padding

FIRST_CAPACITY = 64  # tokens that a cache without a fixed capacity makes room for at first; it doubles from there

Lengths = Sequence[int] | Tensor


class KVCache:
    """Keys and values of all tokens so far, `(batch, kv_head, token, dim)`, in storage that is made once.

    Rows end together: the last token of every row lies in the last column, which is where the next query sits. A row
    with fewer tokens than others begins later; `padding` hides what lies before it.

    The first tokens may be padded on the left (`lengths`).

    Args:
        capacity: largest number of tokens; if `None` the storage doubles when it is full.
        window: keep only this many tokens before the newest, which is all that a pattern of this reach sees; the
            storage then depends on the window and not on the length of the sequence.

        >>> from regard.layers import KVCache
        >>> cache = KVCache(capacity=8)
        >>> key, value = cache.append(torch.randn(1, 2, 3, 5), torch.randn(1, 2, 3, 7))
        >>> cache.append(torch.randn(1, 2, 1, 5), torch.randn(1, 2, 1, 7))[1].shape
        torch.Size([1, 2, 4, 7])
        >>> cache.crop(2)
        >>> cache
        KVCache(2 tokens, capacity=8)
    """

    def __init__(self, capacity: int | None = None, *, window: int | None = None) -> None:
        given = [size for size in (capacity, window) if size is not None]
        whole = all(isinstance(size, int) and not isinstance(size, bool) for size in given)
        if not whole or (capacity is not None and capacity < 1) or (window is not None and window < 0):
            raise CacheError(
                "A cache holds tokens.",
                asked=f"KVCache(capacity={capacity}, window={window})",
                because="the capacity is at least one token and the window at least none",
                instead="KVCache(capacity=1024), or KVCache(window=128)",
            )
        self.capacity, self.window = capacity, window
        self.length = 0  # tokens of the longest row so far, dropped ones included
        self.lengths: list[int] | None = None  # the same for each row, where they differ
        self._real: list[int] | None = (
            None  # tokens of each row that lie side by side before the end, where they differ
        )
        self._held = 0  # columns in use
        self._returned = 0  # columns that the last append returned
        self._checked: Attention | None = None  # the attention that was found to fit this cache
        self._storage: tuple[Tensor, Tensor] | None = None

    @classmethod
    def for_attention(cls, attention: Attention, capacity: int | None = None) -> KVCache:
        """A cache that keeps what the attention needs: a window for a pattern of limited reach, else all tokens."""
        window = find_window(attention)
        if window is None or (capacity is not None and capacity <= window):
            return cls(capacity)
        return cls(capacity, window=window)

    def check_fits(self, attention: Attention) -> None:
        """Refuse an attention whose keys this cache does not keep, or that cannot be cached."""
        if attention is not self._checked:
            check_window(attention, self.window, self)
            self._checked = attention

    @property
    def batch(self) -> int | None:
        return None if self._storage is None else len(self._storage[0])

    @property
    def held(self) -> int:
        """Columns in use: all tokens, or those that the window still needs."""
        return self._held

    @property
    def bytes(self) -> int:
        """ModelCache of the storage."""
        return 0 if self._storage is None else sum(tensor.nbytes for tensor in self._storage)

    @property
    def real(self) -> tuple[int, ...] | None:
        """How many of the columns last returned hold tokens of each row; `None` when all rows are full."""
        if self._real is None or min(self._real) >= self._returned:
            return None
        return tuple(min(real, self._returned) for real in self._real)

    @property
    def padding(self) -> Padding | None:
        """The pattern that hides the columns before each row's first token; `None` when all rows are full."""
        return None if (real := self.real) is None else _make_padding(real)

    def positions(self, count: int, lengths: Lengths | None = None) -> Tensor:
        """Positions of the next tokens: `(token,)`, or `(batch, token)` where rows differ."""
        if lengths is not None:
            return padded_positions(count, lengths)
        if self.lengths is None:
            return torch.arange(self.length, self.length + count)
        return torch.tensor(self.lengths)[:, None] + torch.arange(count)

    def append(self, key: Tensor, value: Tensor, lengths: Lengths | None = None) -> tuple[Tensor, Tensor]:
        """Store the next tokens; returns every key and value that their queries attend to.

        `lengths` says how many of the first tokens of each row are real, counted from the right.
        """
        self._check_append(key, value, lengths)
        count = key.shape[-2]
        if lengths is not None:
            self.lengths = _to_length_list(lengths)
            self._real = list(self.lengths)
        elif self.lengths is not None and self._real is not None:
            self.lengths = [length + count for length in self.lengths]
            self._real = [real + count for real in self._real]
        self.length = self.length + count if self.lengths is None else max(self.lengths)
        if self.window is not None:
            visible = self._append_window(key, value)
        else:
            self._reserve(key, value, self._held + count)
            visible = self._write_columns(key, value)
        self._returned = visible[0].shape[-2]
        return visible

    def reorder(self, index: Tensor) -> None:
        """Continue other rows: row `b` becomes what row `index[b]` was. Rows may repeat, and their number change."""
        if self._storage is None:
            return
        rows = _to_row_list(index)
        _check_row_numbers(rows, len(self._storage[0]))
        same = len(rows) == self.batch
        new = []
        for stored in self._storage:
            chosen = stored[:, :, : self._held].index_select(0, index)
            if not same:
                stored = stored.new_empty(len(rows), *stored.shape[1:])
            stored[:, :, : self._held] = chosen
            new.append(stored)
        self._storage = new[0], new[1]
        if self.lengths is not None and self._real is not None:
            self.lengths = [self.lengths[row] for row in rows]
            self._real = [self._real[row] for row in rows]
            self.length = max(self.lengths)

    def crop(self, lengths: int | Lengths) -> None:
        """Keep only the first tokens: as many for every row, or a number for each."""
        if self._storage is None:
            return
        batch = len(self._storage[0])
        totals = self.lengths or [self.length] * batch
        reals = [min(real, self._held) for real in self._real or [self._held] * batch]
        if isinstance(lengths, int | Integral) or (isinstance(lengths, Tensor) and lengths.ndim == 0):
            lengths = int(lengths)
            wanted = [min(lengths, total) for total in totals]
            if lengths > self.length:
                wanted = [lengths] * batch
        else:
            wanted = _to_length_list(lengths)
        self._check_crop(wanted, totals, reals)
        kept = [real - (total - keep) for keep, total, real in zip(wanted, totals, reals, strict=True)]
        held = max(kept)
        for stored in self._storage:
            for row in range(batch):
                start = self._held - reals[row]
                if start != held - kept[row]:  # rows that keep less move right, so that all end together
                    moved = stored[row, :, start : start + kept[row]].clone()
                    stored[row, :, held - kept[row] : held] = moved
        self._held, self._returned, self.length = held, held, max(wanted)
        uneven = len(set(wanted)) > 1 or len(set(kept)) > 1
        self.lengths, self._real = (wanted, kept) if uneven else (None, None)

    def __repr__(self) -> str:
        size = f", capacity={self.capacity}" if self.capacity else ""
        window = "" if self.window is None else f", window={self.window}"
        return f"KVCache({self.length} tokens{size}{window})"

    # Storage

    def _count_columns(self) -> int:
        return 0 if self._storage is None else self._storage[0].shape[-2]

    def _reserve(self, key: Tensor, value: Tensor, wanted: int) -> None:
        if self._storage is not None and wanted <= self._count_columns():
            return
        if self.capacity is not None and self.window is None:
            columns = self.capacity
        else:
            columns = max(
                wanted, 2 * self._count_columns(), FIRST_CAPACITY if self.window is None else 2 * self.window + 1
            )
        made = []
        for index, tensor in enumerate((key, value)):
            with torch.inference_mode(False):  # what is stored may be continued in another mode
                stored = torch.empty(
                    *tensor.shape[:-2], columns, tensor.shape[-1], dtype=tensor.dtype, device=tensor.device
                )
            if self._storage is not None:
                stored[:, :, : self._held] = self._storage[index][:, :, : self._held]
            made.append(stored)
        self._storage = made[0], made[1]

    def _write_columns(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        assert self._storage is not None
        keys, values = self._storage
        start, count = self._held, key.shape[-2]
        self._held = stop = start + count
        keys.narrow(2, start, count).copy_(key)
        values.narrow(2, start, count).copy_(value)
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def _append_window(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append, dropping what no later query can see; a long chunk passes through without being stored whole."""
        assert self.window is not None
        count, window = key.shape[-2], self.window
        past = min(self._held, window)
        if count > window + 1:
            visible = [key, value]
            if self._storage is not None and past:
                held = slice(self._held - past, self._held)
                visible = [torch.cat((s[:, :, held], new), -2) for s, new in zip(self._storage, visible, strict=True)]
            self._held = 0
            self._reserve(key, value, window + 1)
            last = slice(count - window - 1, None)
            self._write_columns(key[:, :, last], value[:, :, last])
            return visible[0], visible[1]
        if self._storage is not None and self._held + count > self._count_columns():
            for stored in self._storage:  # the window moves to the front, once in `window` tokens
                stored[:, :, :past] = stored[:, :, self._held - past : self._held].clone()
            self._held = past
        self._reserve(key, value, self._held + count)
        visible = self._write_columns(key, value)
        first = max(self._held - count - window, 0)  # the oldest of these queries sees no further
        return visible[0][:, :, first:], visible[1][:, :, first:]

    # Checks

    def _check_append(self, key: Tensor, value: Tensor, lengths: Lengths | None) -> None:
        because = instead = ""
        if key.ndim != 4 or key.shape[:3] != value.shape[:3]:
            because, instead = "a token brings one key and one value for each head", "(batch, kv_head, token, dim)"
        elif torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            because = "what is stored would be overwritten before a gradient could use it"
            instead = "torch.no_grad() while decoding; no cache while training"
        elif lengths is not None and self._held:
            because = "only the first tokens may be padded; later ones would leave holes between tokens"
            instead = "lengths with the first append, and then the same number of tokens for all rows"
        elif lengths is not None and not _lengths_fit(_to_length_list(lengths), len(key), key.shape[2]):
            because = f"there are {len(key)} rows of {key.shape[2]} tokens"
            instead = "one length for each row, at most the number of tokens"
        elif self._storage is not None and _has_other_shape(self._storage, key, value):
            stored = self._storage[0]
            because = f"it holds keys {tuple(stored.shape)} of {stored.dtype}"
            instead = "the same rows, heads, sizes and dtype at each step; a new cache for another batch"
        elif self.capacity is not None and self.window is None and self._held + key.shape[2] > self.capacity:
            because = f"it has room for {self.capacity} tokens and holds {self._held}"
            instead = f"KVCache(capacity={self._held + key.shape[2]}), or KVCache() which grows"
        if because:
            raise CacheError(
                "These tokens cannot be appended to the cache.",
                asked=f"key {tuple(key.shape)}  value {tuple(value.shape)}"
                + ("" if lengths is None else f"  lengths {_to_length_list(lengths)}"),
                because=because,
                instead=instead,
            )

    def _check_crop(self, wanted: list[int], totals: list[int], reals: list[int]) -> None:
        because = ""
        if len(wanted) != len(totals):
            because = f"the cache has {len(totals)} rows"
        elif any(keep < 0 or keep > total for keep, total in zip(wanted, totals, strict=True)):
            because = f"its rows have {sorted(set(totals))} tokens, and cropping adds none"
        elif self.window is not None:
            for keep, total, real in zip(wanted, totals, reals, strict=True):
                first = total - real  # the oldest token that is still here
                if first > max(0, keep - self.window):
                    because = f"the window has dropped tokens before {first}, which the next query would have to see"
        if because:
            raise CacheError(
                "The cache cannot be cropped to these lengths.",
                asked=f"crop({wanted[0] if len(set(wanted)) == 1 else wanted})",
                because=because,
                instead="lengths between nothing and what is there; a cache without a window keeps all tokens",
            )


class CrossCache:
    """Keys and values of the context of cross-attention, projected once for all decode steps."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.source: Tensor | None = None  # the context that was projected; none after its rows were reordered

    def fill(self, key: Tensor, value: Tensor, *, source: Tensor | None = None) -> None:
        self.key, self.value, self.source = key, value, source

    def reorder(self, index: Tensor) -> None:
        if self.key is not None and self.value is not None:
            _check_row_numbers(_to_row_list(index), len(self.key))
            self.source = None
            self.key, self.value = self.key.index_select(0, index), self.value.index_select(0, index)

    def crop(self, lengths: int | Lengths) -> None:
        """The context stays as it is."""


class StateCache:
    """The sums of causal linear attention: as large after a million tokens as after one.

    `crop` cannot be had: what was added to a sum cannot be told apart any more.
    """

    def __init__(self) -> None:
        self.length = 0
        self.lengths: list[int] | None = None
        self.state: LinearState | None = None

    padding = None
    positions = KVCache.positions

    def check_fits(self, attention: Attention) -> None:
        """Refuse an attention that is not causal linear attention."""
        if not _is_causal_linear(attention):
            raise CacheError(
                "Only causal linear attention fits into a sum.",
                asked=f"a StateCache for {attention}",
                because="a sum cannot tell its tokens apart, so every query must see all of them, by features",
                instead="layer.new_cache()",
            )

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention: Attention,
        lengths: Lengths | None = None,
    ) -> Tensor:
        """The output of the next tokens; `lengths` as in `KVCache.append`."""
        count, feature_map, scale = key.shape[-2], attention.feature_map, attention.scale
        assert feature_map is not None
        if lengths is not None and (
            self.state is not None or not _lengths_fit(_to_length_list(lengths), len(key), count)
        ):
            raise CacheError(
                "Only the first tokens may be padded.",
                asked=f"lengths {_to_length_list(lengths)} of {len(key)} rows of {count} tokens, after {self.length}",
                because="later padding would leave holes between tokens"
                if self.state is not None
                else "every row has a length, and that is at most the number of tokens",
                instead="lengths with the first tokens only, one for each row",
            )
        if lengths is not None and min(_to_length_list(lengths)) < count:
            output = query.new_zeros(*query.shape[:-1], value.shape[-1])
            states = []
            for row, length in enumerate(
                _to_length_list(lengths)
            ):  # each row by itself: a sum has no place to hide padding
                real = slice(row, row + 1), slice(None), slice(count - length, None)
                output[real], state = step(query[real], key[real], value[real], feature_map=feature_map, scale=scale)
                states.append(state)
            self.state = LinearState(torch.cat([s.sums for s in states]), torch.cat([s.norm for s in states]))
            self.lengths = _to_length_list(lengths)
        else:
            output, self.state = step(query, key, value, self.state, feature_map=feature_map, scale=scale)
            self.lengths = None if self.lengths is None else [length + count for length in self.lengths]
        self.length = self.length + count if self.lengths is None else max(self.lengths)
        return output

    def reorder(self, index: Tensor) -> None:
        if self.state is None:
            return
        rows = index.tolist()
        _check_row_numbers(rows, len(self.state.norm))
        self.state = self.state.reorder(index)
        if self.lengths is not None:
            self.lengths = [self.lengths[row] for row in rows]
            self.length = max(self.lengths)

    def crop(self, lengths: int | Lengths) -> None:
        if not isinstance(lengths, int) or lengths != self.length:
            raise CacheError(
                "A sum cannot be cropped.",
                asked=f"crop({lengths}) of {self.length} tokens",
                because="linear attention keeps sums over its past, and a token cannot be taken out of them exactly",
                instead="start again from the tokens, or keep copies of `cache.state` to return to",
            )


class ModelCache:
    """The caches of all layers of a model, which grow, are reordered and cropped together.

    Args:
        layers: a cache for each layer's self-attention.
        cross_layers: a cache for each layer's cross-attention, in an encoder-decoder.
    """

    def __init__(self, layers: Sequence[KVCache | StateCache], cross_layers: Sequence[CrossCache] = ()) -> None:
        self.layers, self.cross_layers = list(layers), list(cross_layers)
        self.encoder_padding: Padding | None = None  # hides the padding of the source in an encoder-decoder

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.layers[0].length if self.layers else 0

    @property
    def lengths(self) -> list[int] | None:
        """Tokens of each row, where they differ."""
        return self.layers[0].lengths if self.layers else None

    def positions(self, count: int, lengths: Lengths | None = None) -> Tensor:
        """Positions of the next tokens: `(token,)`, or `(batch, token)` where rows differ."""
        return (self.layers[0] if self.layers else KVCache()).positions(count, lengths)

    def reorder(self, index: Tensor) -> None:
        """Continue other rows: row `b` becomes what row `index[b]` was."""
        for cache in (*self.layers, *self.cross_layers):
            cache.reorder(index)
        if self.encoder_padding is not None:
            counts = self.encoder_padding.counts
            self.encoder_padding = Padding([counts[row] for row in index.tolist()], self.encoder_padding.side)

    def crop(self, lengths: int | Lengths) -> None:
        """Keep only the first tokens of each row."""
        for cache in self.layers:
            cache.crop(lengths)


def make_cache(attention: Attention, capacity: int | None = None) -> KVCache | StateCache:
    """The smallest cache that fits an attention: sums for causal linear attention, else keys and values."""
    return StateCache() if _is_causal_linear(attention) else KVCache.for_attention(attention, capacity)


def _is_causal_linear(attention: Attention) -> bool:
    return attention.feature_map is not None and attention.pattern is not None and attention.pattern.is_causal


def padded_positions(count: int, lengths: Lengths) -> Tensor:
    """Each token's position in its own text, `(batch, token)`, for rows padded on the left; padding counts as first."""
    first = torch.tensor([length - count for length in _to_length_list(lengths)], dtype=torch.long)[:, None]
    return (first + torch.arange(count)).clamp(min=0)


def _to_row_list(index: Tensor) -> list[int]:
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise CacheError(
            "Rows are named by whole numbers.",
            asked=f"reorder({index!r})",
            because="row b becomes what row index[b] was",
            instead="reorder(torch.tensor([0, 0, 2]))",
        )
    return index.tolist()


def _to_length_list(lengths: Lengths) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else [int(length) for length in lengths]


def _check_row_numbers(rows: list[int], batch: int) -> None:
    if not rows or min(rows) < 0 or max(rows) >= batch:
        raise CacheError(
            "There are no such rows.",
            asked=f"reorder({rows})",
            found=f"{batch} rows, counted from 0",
            because="a row continues another one, which must be there",
            instead=f"numbers from 0 to {batch - 1}",
        )


def _lengths_fit(lengths: list[int], rows: int, tokens: int) -> bool:
    return len(lengths) == rows and all(0 <= length <= tokens for length in lengths)


def _has_other_shape(storage: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> bool:
    return any(
        (*stored.shape[:2], stored.shape[3], stored.dtype) != (*new.shape[:2], new.shape[3], new.dtype)
        for stored, new in zip(storage, (key, value), strict=True)
    )


@lru_cache_small(maxsize=64)
def _make_padding(real: tuple[int, ...]) -> Padding:
    """The same value for all layers, whose intervals are then computed once."""
    return Padding(real, side="left")
