"""The next column of a KV cache, for a kernel that writes keys and values itself."""

from __future__ import annotations

from regard.layers.cache import KVCache


def reserve_column(cache: KVCache) -> tuple[int, int] | None:
    """The column of the next token, and the first that it may see; `None` if the cache is empty or full.

    Room is made as `append` makes it, but nothing counts as stored before `commit_column`.
    """
    storage = cache._storage
    if storage is None or cache._held == 0:
        return None
    window = cache.window
    if window is None:
        if cache.capacity is not None and cache._held >= cache.capacity:
            return None
    elif cache._held >= cache._count_columns():
        past = min(cache._held, window)
        for stored in storage:  # the window moves to the front, once in `window` tokens
            stored[:, :, :past] = stored[:, :, cache._held - past : cache._held].clone()
        cache._held = past
    if cache._held >= cache._count_columns():
        cache._reserve(*storage, cache._held + 1)
    return cache._held, 0 if window is None else max(cache._held - window, 0)


def commit_column(cache: KVCache, first: int) -> None:
    """Count the token that was written into the reserved column; `first` as `reserve_column` returned it."""
    if cache.lengths is not None and cache._real is not None:
        cache.lengths = [length + 1 for length in cache.lengths]
        cache._real = [real + 1 for real in cache._real]
        cache.length = max(cache.lengths)
    else:
        cache.length += 1
    cache._held += 1
    cache._returned = cache._held - first
