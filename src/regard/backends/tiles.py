"""Tiles ready to run: a plan's tiles grouped by shape, so that many small ones cost one batched product.

A group holds tiles with equally many queries and equally many keys, as index tensors, and the masks of its ragged
tiles. Masks repeat (every inner tile of a window has the same one), so each distinct mask is kept once.

Where a pattern tells batch rows apart, the rows are laid end to end as one long sequence (`lay_out`): token `n` of
row `r` is number `r * tokens + n`, and tiles of all rows run together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from regard.patterns import Lengths, Pattern
from regard.plan import Part, plan
from regard.plan.cache import keep

PROGRAM_LIMIT = 256 << 20  # bytes of tiles and masks to remember
HEIGHTS = (128, 64, 32, 16)  # of tiles; on a tie the taller wins
LONGEST = 1024  # keys in a tile; longer ones are split and merged by their log-sum-exp
TILE_BUDGET = 1 << 18  # scores computed at once: small enough for the cache, large enough that threads seldom meet
MASK_BUDGET = 1 << 26  # mask entries kept for reuse by one group; beyond that they are computed at each run
HIDDEN_BUDGET = 1 << 22  # mask entries kept in additive form as well
LOOK_BUDGET = 1 << 22  # mask entries computed at once


@dataclass(frozen=True)
class Places:
    """Token numbers of one or more tiles: a slice where they are evenly spaced, which costs no copy."""

    index: Tensor  # (tile, token)
    span: slice | None

    def take(self, tensor: Tensor) -> Tensor:
        """`(batch, head, token, dim)` -> `(batch, head, tile, token', dim)`."""
        if self.span is not None:
            return tensor[:, :, self.span].unsqueeze(2)
        taken = tensor.index_select(2, self.index.reshape(-1))
        return taken.unflatten(2, self.index.shape)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add `(batch, head, tile, token', dim)` onto the tokens it belongs to."""
        if self.span is not None:
            total[:, :, self.span] += part.squeeze(2)
        else:
            total.index_add_(2, self.index.reshape(-1), part.flatten(2, 3))

    def put(self, total: Tensor, part: Tensor) -> None:
        if self.span is not None:
            total[:, :, self.span] = part.squeeze(2)
        else:
            total.index_copy_(2, self.index.reshape(-1), part.flatten(2, 3))


@dataclass(frozen=True, eq=False)
class Job:
    """Some tiles of a group, small enough to run at once."""

    group: Group
    query: Places
    key: Places
    first: int  # tiles `first` to `last` of the group
    last: int

    @property
    def alone(self) -> bool:
        """Whether no other job touches these queries."""
        return self.group.alone

    @property
    def may_be_empty(self) -> bool:
        """Whether a query might see none of its tile's keys."""
        return self.group.may_be_empty

    @property
    def mask(self) -> Tensor | None:
        """Who sees whom: `(1 or tile, query, key)`; `None` when all see all."""
        return self.group.mask(self.first, self.last, self.query.index.device)

    def hidden(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as something to add: zero where visible, minus infinity where hidden."""
        return self.group.hidden(self.first, self.last, self.query.index.device, dtype)


@dataclass(eq=False)
class Group:
    """Tiles of one shape."""

    part: Part
    row: Tensor | None  # (tile,): the batch row of each tile, where rows are told apart
    query: Tensor  # (tile, query)
    key: Tensor  # (tile, key)
    real: Tensor | None  # (tile, key): False where a short tile was filled up
    ragged: bool
    alone: bool
    masks: Tensor | None = None  # (mask, query, key)
    mask_of: Tensor | None = None  # (tile,)
    may_be_empty: bool = False
    _jobs: dict = field(default_factory=dict, repr=False)  # pieces by size and device
    _masks: dict = field(default_factory=dict, repr=False)  # masks by device
    _hidden: dict = field(default_factory=dict, repr=False)  # additive masks by device and dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.query.shape[0], self.query.shape[1], self.key.shape[1]

    @property
    def size(self) -> int:
        """Bytes, counting masks in both their forms."""
        held = self.query.nbytes + self.key.nbytes
        if self.masks is None:
            return held
        return held + self.masks.nbytes * (5 if self.masks.numel() <= HIDDEN_BUDGET else 1)

    def look(self, first: int, last: int) -> Tensor:
        """The masks of these tiles, straight from the pattern."""
        queries, keys = self.part.lengths
        row = 0 if self.row is None else self.row[first:last].numpy()
        mask = self.part.mask(self.query[first:last].numpy() % queries, self.key[first:last].numpy() % keys, row)
        return mask if self.real is None else mask & self.real[first:last, None, :]

    def keep_masks(self) -> None:
        """Find the distinct masks and sort the tiles by them, if they fit the budget."""
        tiles, queries, keys = self.shape
        if not self.ragged:
            return
        self.may_be_empty = True
        known: dict[bytes, int] = {}
        kept: list[Tensor] = []
        which: list[int] = []
        step = max(1, LOOK_BUDGET // (queries * keys))
        for first in range(0, tiles, step):
            for mask in self.look(first, min(first + step, tiles)):
                mark = np.packbits(mask.numpy()).tobytes()
                if mark not in known:
                    known[mark] = len(kept)
                    kept.append(mask.clone())
                which.append(known[mark])
            if len(kept) * queries * keys > MASK_BUDGET:
                return
        order = torch.tensor(which).argsort(stable=True)
        self.query, self.key = self.query[order], self.key[order]
        self.real = None if self.real is None else self.real[order]
        self.row = None if self.row is None else self.row[order]
        self.masks, self.mask_of = torch.stack(kept), torch.tensor(which)[order]
        self.may_be_empty = not bool(self.masks.any(-1).all())

    def jobs(self, heads: int, device: torch.device) -> list[Job]:
        """The group in pieces whose scores, over `heads` heads of all batch rows, fit the budget."""
        tiles, queries, keys = self.shape
        step = max(1, TILE_BUDGET // max(1, heads * queries * keys))
        if (step, device) not in self._jobs:
            self._jobs[step, device] = [self._job(at, min(at + step, tiles), device) for at in range(0, tiles, step)]
        return self._jobs[step, device]

    def _job(self, first: int, last: int, device: torch.device) -> Job:
        query, key = self.query[first:last], self.key[first:last]
        single = last - first == 1
        return Job(
            self,
            Places(query.to(device), _span(query) if single else None),
            Places(key.to(device), _span(key) if single else None),
            first,
            last,
        )

    def mask(self, first: int, last: int, device: torch.device) -> Tensor | None:
        if not self.ragged:
            return None
        if self.masks is None:
            return self.look(first, last).to(device)
        if device not in self._masks:
            self._masks[device] = self.masks.to(device)
        return self._masks[device][self._which(first, last)]

    def hidden(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        mask = None
        if self.masks is None or self.masks.numel() > HIDDEN_BUDGET:
            mask = self.mask(first, last, device)
            return None if mask is None else _minus_infinity(mask, dtype)
        if (device, dtype) not in self._hidden:
            self._hidden[device, dtype] = _minus_infinity(self.masks.to(device), dtype)
        return self._hidden[device, dtype][self._which(first, last)]

    def _which(self, first: int, last: int) -> slice | Tensor:
        """The masks of these tiles; one is enough when they are all the same."""
        assert self.mask_of is not None
        low, high = int(self.mask_of[first]), int(self.mask_of[last - 1])
        # Tiles are sorted by mask, so equal ends mean that all are equal.
        return slice(low, low + 1) if low == high else self.mask_of[first:last]


def _minus_infinity(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def lay_out(tensor: Tensor, rows: int | None) -> Tensor:
    """`(batch, head, token, dim)` with the batch rows end to end: `(batch / rows, head, rows * token, dim)`."""
    if rows is None:
        return tensor
    apart = tensor.reshape(tensor.shape[0] // rows, rows, *tensor.shape[1:])
    return apart.transpose(1, 2).flatten(2, 3)


def stand_up(tensor: Tensor, rows: int | None) -> Tensor:
    """The inverse of `lay_out`."""
    if rows is None:
        return tensor
    return tensor.unflatten(2, (rows, tensor.shape[2] // rows)).transpose(1, 2).flatten(0, 1)


def _span(index: Tensor) -> slice | None:
    """The slice that takes the same tokens, if they are evenly spaced."""
    numbers = index[0]
    if len(numbers) == 1:
        return slice(int(numbers[0]), int(numbers[0]) + 1)
    step = int(numbers[1] - numbers[0])
    if step > 0 and bool((numbers.diff() == step).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return None


@functools.lru_cache(maxsize=256)
def tile_height(pattern: Pattern, lengths: Lengths, group: int) -> int:
    """How many queries a tile should hold.

    Tall tiles make fast products, low ones follow a narrow pattern more closely. A product of `n` rows runs at about
    `n / (n + 24)` of full speed here, and grouped heads give each query that many rows.
    """
    if pattern._opaque:
        return HEIGHTS[-1]  # every plan would look at all pairs again
    return min(HEIGHTS, key=lambda height: plan(pattern, *lengths, block=height).area * (1 + 24 / (height * group)))


@keep(PROGRAM_LIMIT, lambda groups: 1024 + sum(group.size for group in groups))
def program(pattern: Pattern, lengths: Lengths, block: int) -> tuple[Group, ...]:
    """All groups of a pattern's plan, masks looked up once."""
    planned = plan(pattern, *lengths, block=block)
    only = len(planned.parts) == 1
    groups = [group for part in planned.parts for group in _groups(part, pattern.rows, only)]
    for group in groups:
        group.keep_masks()
    return tuple(groups)


def _groups(part: Part, rows: int | None, only: bool) -> Iterator[Group]:
    """The tiles of a part by shape. Tiles of many odd widths are filled up to common ones."""
    tiles = [tile for tile in range(part.tiles) if part.run_pointer[tile + 1] > part.run_pointer[tile]]
    pieces: dict[tuple, list[tuple]] = {}
    keys = {tile: part.keys(tile) for tile in tiles}
    widths = {(int(part.query_stop[tile] - part.query_start[tile]), len(keys[tile])) for tile in tiles}
    scattered = len(widths) > max(8, len(tiles) // 8)
    for tile in tiles:
        mine, ragged = keys[tile], part.is_ragged(tile)
        # A part that tells no rows apart serves them all.
        batch_rows = [int(part.row[tile])] if part.pattern.rows or rows is None else range(rows)
        for first in range(0, len(mine), LONGEST):
            piece = mine[first : first + LONGEST]
            width = -(-len(piece) // 32) * 32 if scattered else len(piece)
            query = part.queries(tile)
            # Pieces of one tile never share a group: a job would then write the same queries twice at once.
            shape = (len(query), width, ragged or width > len(piece), only and len(mine) <= LONGEST, first)
            for row in batch_rows:
                member = (query + row * part.lengths.queries, piece + row * part.lengths.keys, row)
                pieces.setdefault(shape, []).append(member)
    for (_, width, ragged, alone, _), members in pieces.items():
        full = np.stack([np.pad(key, (0, width - len(key)), mode="edge") for _, key, _ in members])
        real = np.stack([np.arange(width) < len(key) for _, key, _ in members])
        yield Group(
            part=part,
            row=None if rows is None else torch.tensor([row for _, _, row in members]),
            query=torch.from_numpy(np.stack([query for query, _, _ in members])),
            key=torch.from_numpy(full),
            real=None if real.all() else torch.from_numpy(real),
            ragged=ragged,
            alone=alone,
        )
