"""A boolean tensor as a pattern."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_small, outside_cache_if_fake, outside_modes
from regard.errors import PatternError
from regard.patterns.base import Pattern
from regard.patterns.box import Array, Lengths


class Mask(Pattern):
    """The pairs where a boolean tensor is true: `tensor[..., n, j]` says whether query number `n` may see key `j`.

    Axes are those of torch's `scaled_dot_product_attention`: the tensor broadcasts to `(*batch, head, query, key)`, and
    `True` means *attend*. `(query, key)` is one mask for all, `(head, query, key)` one for each head, `(batch, 1,
    query, key)` one for each batch row; `(batch, 1, 1, key)` hides keys, as padding does. An axis of 1 broadcasts.
    Several batch axes count as one, row by row.

    The query and key axes are the queries and keys themselves: `n` counts queries from 0, whatever their absolute
    positions. With fewer queries than keys query `n` sits at position `n + keys - queries`, where every other pattern
    counts it too, so that `Causal() & Mask(tensor)` aligns. Lengths that differ from those of the tensor are refused.

    The tensor is copied, and later changes to it do not matter. Two masks are equal when shape and bits are. Planning
    evaluates every pair once, in tiles; equal masks share one cached plan. A mask that differs between heads runs
    with heads as batch rows: the plan is as many times larger, and keys that heads share are copied for each of them.

        >>> mask = Mask(torch.tensor([[True, False, True], [False, False, True]]))
        >>> mask, mask.pairs(2, 3)
        (Mask(shape=(2, 3)), 3)
        >>> (Causal() & mask).draw(2, 3)
        █··
        ··█
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool or tensor.ndim < 2 or 0 in tensor.shape[:-2]:
            found = f"{tuple(tensor.shape)} of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise PatternError(
                "A mask is a boolean tensor.",
                asked=f"Mask({found})",
                because="it has True where a query may see a key, and broadcasts to (*batch, head, query, key)",
                instead="torch.as_tensor(mask).bool(), with at least the axes (query, key)",
            )
        with outside_modes():
            self.shape = tuple(tensor.shape)
            four_axes = (math.prod(self.shape[:-3]), *(1,) * (3 - tensor.ndim), *self.shape[-3:])
            self._bits: Array = tensor.detach().cpu().numpy().copy().reshape(four_axes)
            self._bits.setflags(write=False)
            digest = hashlib.blake2b(np.packbits(self._bits).tobytes(), digest_size=32)
        self._identity = (self._bits.shape, digest.digest())
        self._allowed = int(np.count_nonzero(self._bits))

    def __repr__(self) -> str:
        return f"Mask(shape={self.shape})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def rows(self) -> int | None:
        return None if len(self._bits) == 1 else len(self._bits)

    @property
    def heads(self) -> int | None:
        return None if self._bits.shape[1] == 1 else self._bits.shape[1]

    def _check_lengths(self, lengths: Lengths) -> None:
        queries, keys = self._bits.shape[2:]
        if queries not in (1, lengths.queries) or keys not in (1, lengths.keys):
            raise PatternError(
                "The mask does not fit the sequence.",
                asked=f"{self!r}: {queries} queries and {keys} keys",
                found=f"{lengths.queries} queries and {lengths.keys} keys",
                because="the last two axes of a mask are the queries and the keys themselves",
                instead=f"a mask (..., {lengths.queries}, {lengths.keys}); an axis of 1 broadcasts",
            )

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        queries, keys = self._bits.shape[2:]
        bits = outside_cache_if_fake(_bits_on_device)(self, j.device)
        # Where an axis of the mask broadcasts, adding `0 * i` gives the result the shape of the pairs.
        n = i - (lengths.keys if keys == 1 else keys) + queries if queries > 1 else 0 * i
        j = j if keys > 1 else 0 * j
        if not bits.numel():
            return (i == j) & (i != j)
        inside = (n >= 0) & (n < queries) & (j >= 0) & (j < keys)
        row = row if len(bits) > 1 else 0 * row  # one row for all
        return inside & bits[row, n.clamp(0, queries - 1), j.clamp(0, keys - 1)]

    @property
    def _needs_key_length(self) -> bool:
        return self._bits.shape[3] == 1 < self._bits.shape[2]

    @property
    def _is_prefix_stable(self) -> bool:
        return True  # a longer mask extends the same rows

    @property
    def _supports_left_padding(self) -> bool:
        return True

    @property
    def is_full(self) -> bool:
        return self._allowed == self._bits.size

    @property
    def is_key_padding(self) -> bool:
        return self._bits.shape[2] == 1 or self.is_full

    @property
    def fixed_length(self) -> int | None:
        lengths = {length for length in self._bits.shape[2:] if length != 1}
        return lengths.pop() if len(lengths) == 1 else None

    def _count_pairs(self, lengths: Lengths) -> int:
        *_, queries, keys = self._bits.shape
        times = (lengths.queries if queries == 1 else 1) * (lengths.keys if keys == 1 else 1)
        return self._allowed * times


@lru_cache_small(maxsize=4)
def _bits_on_device(mask: Mask, device: torch.device) -> Tensor:
    """The mask on a device, one row for each batch row and head: `(row, query, key)`."""
    with torch.inference_mode(False):
        return torch.from_numpy(mask._bits.copy()).flatten(0, 1).to(device)
