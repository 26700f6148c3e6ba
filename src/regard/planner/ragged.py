"""Ragged tiles, whose queries do not all see the same keys: tiles of one shape together, every distinct mask once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from regard.patterns.box import Array

Key = TypeVar("Key", bound=Hashable)


class DistinctMasks:
    """Deduplicates masks, numbered in order of appearance: most tiles of a pattern share one.

    >>> import numpy as np
    >>> distinct = DistinctMasks()
    >>> [distinct.add(np.array(mask)) for mask in ([True, False], [True, True], [True, False])]
    [0, 1, 0]
    >>> len(distinct.masks)
    2
    """

    def __init__(self) -> None:
        self.masks: list[Array] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, mask: Array) -> int:
        """The number of a mask, booleans of one shape or words of bits; equal masks have the same number."""
        content = (np.packbits(mask) if mask.dtype == bool else mask).tobytes()
        number = self._numbers.setdefault(content, len(self.masks))
        if number == len(self.masks):
            self.masks.append(mask.copy())
        return number


def stack_by_shape(members: Iterable[tuple[Key, tuple[Array, ...]]]) -> Iterator[tuple[Key, list[Array]]]:
    """Tuples of arrays with equal keys, stacked: each distinct key once, in the order of first appearance.

    >>> import numpy as np
    >>> members = [("a", (np.zeros(2),)), ("b", (np.zeros(3),)), ("a", (np.ones(2),))]
    >>> [(key, array.shape) for key, (array,) in stack_by_shape(members)]
    [('a', (2, 2)), ('b', (1, 3))]
    """
    groups: dict[Key, list[tuple[Array, ...]]] = {}
    for key, arrays in members:
        groups.setdefault(key, []).append(arrays)
    for key, tuples in groups.items():
        yield key, [np.stack(column) for column in zip(*tuples, strict=True)]
