"""A boolean attention mask `(batch, 1, query, key)` that holds a pattern, and becomes dense only where it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.caching import outside_modes
from regard.patterns import Full, Pattern

aten = torch.ops.aten


class PatternMask(Tensor):
    """A mask as models of Hugging Face pass it from layer to layer, without the square.

    Every operation sees the dense boolean mask, which is built the first time that it is needed; views that change
    nothing, and the attention of Regard, do not need it. A model that changes the mask in place changes the dense one,
    and the pattern is no longer used. So a model may do with its mask what it likes.

    Attributes:
        pattern: over the queries and the first `used_keys` keys, or `None` once the mask was changed in place.
        padding: the part of the pattern that comes from a 2-D attention mask.
        used_keys: the keys after these are hidden from all queries: the free slots of a static cache.
        key_offset: the absolute position of the first key; not 0 where a rolling cache dropped its oldest keys.
    """

    pattern: Pattern | None
    padding: Pattern
    used_keys: int
    key_offset: int
    _dense: Tensor | None

    @staticmethod
    def __new__(cls, pattern: Pattern, shape: tuple[int, ...], used_keys: int, padding=None, key_offset: int = 0):
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device="cpu")  # type: ignore[attr-defined]
        mask.pattern, mask.used_keys, mask.key_offset = pattern, used_keys, key_offset
        mask.padding = Full() if padding is None else padding
        mask._dense = None
        return mask

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PatternMask({self.pattern!r}, shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to_dense(self) -> Tensor:  # type: ignore[override]
        """The boolean tensor, True where a query may see a key."""
        if self._dense is None:
            batch, heads, queries, keys = self.shape
            assert self.pattern is not None
            with outside_modes():
                visible = self.pattern.matrix(queries, self.used_keys)
                if self.pattern.heads is None:
                    visible = visible.unsqueeze(-3)
                dense = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
                dense[..., : self.used_keys] = visible
            self._dense = dense
        return self._dense

    def _resize(self, shape: tuple[int, ...]) -> PatternMask:
        assert self.pattern is not None
        return PatternMask(self.pattern, shape, self.used_keys, self.padding, self.key_offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, PatternMask) and first.pattern is not None:
            kept = _find_unchanged(func, first, args)
            if kept is not None:
                return first._resize(kept)
        args, kwargs = tree_map_only(PatternMask, PatternMask.to_dense, (args, kwargs or {}))
        if func._schema.is_mutable and isinstance(first, PatternMask):
            first.pattern = None  # from now on the dense mask is the truth
        return func(*args, **kwargs)  # type: ignore[reportCallIssue]


def is_jit_traced() -> bool:
    """Whether torch.jit.trace records: values that are read now would be constants of the recorded program."""
    return torch._C._get_tracing_state() is not None


def _find_unchanged(func: Any, mask: PatternMask, args: tuple) -> tuple[int, ...] | None:
    """The shape of a view that hides and shows the same pairs, or `None`."""
    shape = tuple(mask.shape)
    if func in (aten.detach.default, aten.alias.default):
        return shape
    if func is aten.slice.Tensor:
        axis: Any
        _, axis, start, stop, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
        axis, length = axis % 4, shape[axis]
        stop = length if stop is None else min(stop, length)
        if start not in (None, 0) or step != 1 or stop < (mask.used_keys if axis == 3 else length):
            return None
        return (*shape[:axis], stop, *shape[axis + 1 :])
    return None
