"""The caches of a model as a native decode step reads and writes them.

Addresses and strides stay the same from step to step, so they are kept beside the cache; a step updates the columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.kernels.model_step import CACHE_FIELDS
from regard.layers.cache import CrossCache, KVCache, ModelCache
from regard.layers.cache_columns import commit_column, reserve_column
from regard.patterns import Padding

if TYPE_CHECKING:
    from regard.models.native_decode import NativeDecoder

COLUMN, START, STOP = 8, 9, 10  # of the fields of one cache


class CacheFields:
    """The fields of `STEP_CACHE` for every attention of a model, one behind the other."""

    def __init__(self, owner: object, rows: int, cache: ModelCache, own: np.ndarray, fields: list[tuple], kept: list):
        self.owner, self.rows = owner, rows
        self.own = own  # which of the attentions read the text itself
        self.fields = np.array(fields, dtype=np.int64).reshape(-1, CACHE_FIELDS)
        self.address = self.fields.ctypes.data
        self.storages = [layer._storage for layer in cache.layers if isinstance(layer, KVCache)]
        self.sizes = [layer._count_columns() for layer in cache.layers if isinstance(layer, KVCache)]
        self.contexts = [layer.key for layer in cache.cross_layers]
        self.kept = kept  # tensors whose addresses are in the fields
        self.starts: np.ndarray | None = None

    def fits(self, owner: object, rows: int, cache: ModelCache) -> bool:
        """Whether the storage is where it was, and has a column left."""
        return (
            self.owner is owner
            and self.rows == rows
            and all(
                layer._storage is storage and layer._held < size  # type: ignore[union-attr]
                for layer, storage, size in zip(cache.layers, self.storages, self.sizes, strict=True)
            )
            and all(layer.key is key for layer, key in zip(cache.cross_layers, self.contexts, strict=True))
        )

    def update(self, cache: ModelCache) -> None:
        """The next column of every layer, and the first token of rows that are padded on the left."""
        layers: list[KVCache] = cache.layers  # type: ignore[assignment]
        self.fields[self.own, COLUMN] = [layer._held for layer in layers]
        if layers[0]._real is None:
            if self.starts is not None:
                self.starts = None
                self.fields[self.own, START] = 0
            return
        begins = [[max(layer._held - real, 0) for real in layer._real or ()] for layer in layers]
        self.starts = np.array(begins, dtype=np.int64).reshape(len(layers), self.rows)
        first, step = self.starts.ctypes.data, self.starts.strides[0]
        self.fields[self.own, START] = [first + step * number for number in range(len(layers))]

    def commit(self, cache: ModelCache) -> None:
        """Count the token that the step has written."""
        for layer in cache.layers:
            assert isinstance(layer, KVCache)
            commit_column(layer, 0 if layer.window is None else max(layer._held - layer.window, 0))


def find_fields(decoder: NativeDecoder, cache: ModelCache, rows: int) -> CacheFields | None:
    """The fields for the next step, with room for one more token; `None` where the caches do not fit the step."""
    fields: CacheFields | None = cache.__dict__.get("_step_fields")
    if fields is None or not fields.fits(decoder.identity, rows, cache):
        fields = _make_fields(decoder, cache, rows)
        cache.__dict__["_step_fields"] = fields
    if fields is not None:
        fields.update(cache)
    return fields


def _make_fields(decoder: NativeDecoder, cache: ModelCache, rows: int) -> CacheFields | None:
    stride = 2 if decoder.has_context else 1
    if len(cache.layers) * stride != len(decoder.attentions):
        return None
    if decoder.has_context and len(cache.cross_layers) != len(cache.layers):
        return None
    fields: list[tuple] = []
    kept: list[Tensor] = []
    for number, layer in enumerate(decoder.attentions):
        if decoder.has_context and number % 2:
            made = _describe_context(cache.cross_layers[number // 2], cache.encoder_padding, rows, kept)
        else:
            own = cache.layers[number // stride]
            if type(own) is not KVCache or reserve_column(own) is None:
                return None
            own.check_fits(layer.attention)
            made = _describe_storage(own, rows)
        if made is None:
            return None
        fields.append(made)
    own_fields = np.arange(0, len(decoder.attentions), stride)
    return CacheFields(decoder.identity, rows, cache, own_fields, fields, kept)


def _describe_storage(own: KVCache, rows: int) -> tuple | None:
    assert own._storage is not None
    key, value = own._storage
    if not _is_plain_cache(key, rows) or not _is_plain_cache(value, rows):
        return None
    if own._real is not None and len(own._real) != rows:
        return None
    return key.data_ptr(), value.data_ptr(), *key.stride()[:3], *value.stride()[:3], own._held, 0, 0


def _describe_context(own: CrossCache, padding: Padding | None, rows: int, kept: list[Tensor]) -> tuple | None:
    key, value = own.key, own.value
    if key is None or value is None or not _is_plain_cache(key, rows) or not _is_plain_cache(value, rows):
        return None
    count = key.shape[2]
    start, stop = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), count)
    if padding is not None:
        counts = torch.tensor(padding.counts)
        if len(counts) != rows or int(counts.min()) < 1:
            return None
        start, stop = (count - counts, stop) if padding.side == "left" else (start, counts)
    kept += [start, stop]
    return (
        key.data_ptr(),
        value.data_ptr(),
        *key.stride()[:3],
        *value.stride()[:3],
        0,
        start.data_ptr(),
        stop.data_ptr(),
    )


def _is_plain_cache(stored: Tensor, rows: int) -> bool:
    return (
        type(stored) is Tensor
        and stored.is_cpu
        and stored.dtype == torch.float32
        and stored.shape[0] == rows
        and stored.stride(3) == 1
    )
