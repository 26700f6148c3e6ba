"""The tiles of a plan grouped by shape, so that many small ones are one batched product.

A group holds tiles with equally many queries and equally many keys, as index tensors, and the masks of its ragged
tiles. Masks repeat (every inner tile of a window has the same one), so each distinct mask is kept once.

Where a pattern differs between batch rows, the rows are concatenated into one long sequence (`fold_batch`): token `n`
of row `r` is number `r * tokens + n`, and tiles of all rows run together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_bytes, outside_modes
from regard.dropout import KEYS_AT_ONCE
from regard.patterns import Lengths, Pattern
from regard.patterns.box import Array
from regard.planner import PlanPart, plan
from regard.planner.ragged import DistinctMasks, stack_by_shape

HEIGHTS = (128, 64, 32, 16)  # of tiles; on a tie the taller wins
LONGEST = 1024  # keys in a tile; longer ones are split and merged by their log-sum-exp
TILE_BUDGET = (
    1 << 18
)  # scores computed at once: small enough for the cache, large enough that threads rarely synchronize
MASK_BUDGET = 1 << 26  # mask entries kept for reuse by one group; beyond that they are computed at each run
ADDITIVE_BUDGET = 1 << 22  # mask entries kept in additive form as well
EVALUATION_BUDGET = 1 << 22  # mask entries computed at once
GROUP_BYTES = 4096  # of a group's objects, beside its numbers


@dataclass(frozen=True)
class TokenIndex:
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
    query: TokenIndex
    key: TokenIndex
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

    def key_blocks(self, keys: int, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The blocks of neighbouring keys that dropout draws at once, and where each key is among their keys.

        `(tile, block)` and `(tile, key')`, for key numbers inside their own batch row of so many keys; `numbers` are
        those of the same keys in a longer sequence.
        """
        with outside_modes():
            key = self.group.key[self.first : self.last].numpy() % max(keys, 1)
            key = key if numbers is None else numbers.cpu().numpy()[key]
            block = key // KEYS_AT_ONCE
            number = np.cumsum(np.diff(block, axis=1, prepend=block[:, :1]) != 0, axis=1)
            blocks = np.zeros((len(block), int(number.max(initial=0)) + 1), dtype=np.int64)
            np.put_along_axis(blocks, number, block, axis=1)
            place = number * KEYS_AT_ONCE + key % KEYS_AT_ONCE
            device = self.key.index.device
            return torch.from_numpy(blocks).to(device), torch.from_numpy(place).to(device)

    @property
    def mask(self) -> Tensor | None:
        """The mask `(1 or tile, query, key)`; `None` when every pair is allowed."""
        return self.group.mask(self.first, self.last, self.query.index.device)

    def additive_mask(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as something to add: zero where visible, minus infinity where hidden."""
        return self.group.additive_mask(self.first, self.last, self.query.index.device, dtype)


@dataclass(eq=False)
class Group:
    """Tiles of one shape."""

    part: PlanPart
    row: Tensor | None  # (tile,): the batch row of each tile, where rows are distinguished
    query: Tensor  # (tile, query)
    key: Tensor  # (tile, key)
    real: Tensor | None  # (tile, key): False where a short tile was filled up
    ragged: bool
    alone: bool
    masks: Tensor | None = None  # (mask, query, key)
    mask_of: Tensor | None = None  # (tile,)
    mask_numbers: tuple[int, ...] = ()  # the same, readable where tensors are fake
    may_be_empty: bool = False
    _jobs: dict = field(default_factory=dict, repr=False)  # pieces by size and device
    _masks: dict = field(default_factory=dict, repr=False)  # masks by device
    _additive_masks: dict = field(default_factory=dict, repr=False)  # additive masks by device and dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.query.shape[0], self.query.shape[1], self.key.shape[1]

    @property
    def size(self) -> int:
        """Bytes, counting jobs and the additive forms of the masks (float32 and float64), which are made later."""
        held = GROUP_BYTES + 2 * (self.query.nbytes + self.key.nbytes)
        if self.masks is None:
            return held
        return held + self.masks.nbytes * (13 if self.masks.numel() <= ADDITIVE_BUDGET else 1)

    def evaluate_masks(self, first: int, last: int) -> Tensor:
        """The masks of these tiles, straight from the pattern."""
        queries, keys = self.part.lengths
        row = 0 if self.row is None else self.row[first:last].numpy()
        mask = self.part.mask(self.query[first:last].numpy() % queries, self.key[first:last].numpy() % keys, row)
        return mask if self.real is None else mask & self.real[first:last, None, :]

    def deduplicate_masks(self) -> None:
        """Find the distinct masks and sort the tiles by them, if they fit the budget."""
        tiles, queries, keys = self.shape
        if not self.ragged:
            return
        self.may_be_empty = True
        distinct = DistinctMasks()
        which: list[int] = []
        step = max(1, EVALUATION_BUDGET // (queries * keys))
        for first in range(0, tiles, step):
            which += [distinct.add(mask) for mask in self.evaluate_masks(first, min(first + step, tiles)).numpy()]
            if len(distinct.masks) * queries * keys > MASK_BUDGET:
                return
        order = torch.tensor(which).argsort(stable=True)
        self.query, self.key = self.query[order], self.key[order]
        self.real = None if self.real is None else self.real[order]
        self.row = None if self.row is None else self.row[order]
        self.masks, self.mask_of = torch.from_numpy(np.stack(distinct.masks)), torch.tensor(which)[order]
        self.mask_numbers = tuple(sorted(which))
        self.may_be_empty = not bool(self.masks.any(-1).all())

    def jobs(self, heads: int, device: torch.device) -> list[Job]:
        """The group in pieces whose scores, over `heads` heads of all batch rows, fit the budget."""
        tiles, queries, keys = self.shape
        step = max(1, TILE_BUDGET // max(1, heads * queries * keys))
        if (step, device) not in self._jobs:
            # Those of the last call only: batches of ever new sizes would pile up.
            with outside_modes():  # jobs outlive a trace, and their indices have values
                made = [self._job(at, min(at + step, tiles), device) for at in range(0, tiles, step)]
            self._jobs = {(step, device): made}
            return made
        return self._jobs[step, device]

    def _job(self, first: int, last: int, device: torch.device) -> Job:
        query, key = self.query[first:last], self.key[first:last]
        single = last - first == 1
        return Job(
            self,
            TokenIndex(query.to(device), _find_slice(query) if single else None),
            TokenIndex(key.to(device), _find_slice(key) if single else None),
            first,
            last,
        )

    def mask(self, first: int, last: int, device: torch.device) -> Tensor | None:
        if not self.ragged:
            return None
        if self.masks is None:
            return self.evaluate_masks(first, last).to(device)
        if device not in self._masks:
            with outside_modes():
                self._masks[device] = self.masks.to(device)
        return self._masks[device][self._select_masks(first, last)]

    def additive_mask(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        mask = None
        if self.masks is None or self.masks.numel() > ADDITIVE_BUDGET:
            mask = self.mask(first, last, device)
            return None if mask is None else _make_additive(mask, dtype)
        if (device, dtype) not in self._additive_masks:
            with outside_modes():
                self._additive_masks[device, dtype] = _make_additive(self.masks.to(device), dtype)
        return self._additive_masks[device, dtype][self._select_masks(first, last)]

    def _select_masks(self, first: int, last: int) -> slice | Tensor:
        """The masks of these tiles; one is enough when they are all the same."""
        assert self.mask_of is not None
        low, high = self.mask_numbers[first], self.mask_numbers[last - 1]
        # Tiles are sorted by mask, so equal ends mean that all are equal.
        return slice(low, low + 1) if low == high else self.mask_of[first:last]


def _make_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def fold_batch(tensor: Tensor, rows: int | None) -> Tensor:
    """`(batch, head, token, dim)` with the batch rows end to end: `(batch / rows, head, rows * token, dim)`."""
    if rows is None:
        return tensor
    apart = tensor.reshape(tensor.shape[0] // rows, rows, *tensor.shape[1:])
    return apart.transpose(1, 2).flatten(2, 3)


def unfold_batch(tensor: Tensor, rows: int | None) -> Tensor:
    """The inverse of `fold_batch`."""
    if rows is None:
        return tensor
    return tensor.unflatten(2, (rows, tensor.shape[2] // rows)).transpose(1, 2).flatten(0, 1)


def _find_slice(index: Tensor) -> slice | None:
    """The slice that takes the same tokens, if they are evenly spaced."""
    numbers = index[0]
    if len(numbers) == 1:
        return slice(int(numbers[0]), int(numbers[0]) + 1)
    step = int(numbers[1] - numbers[0])
    if step > 0 and bool((numbers.diff() == step).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return None


@lru_cache_bytes(lambda height: 0)
def tile_height(pattern: Pattern, lengths: Lengths, group: int) -> int:
    """How many queries a tile should hold.

    Tall tiles make fast products, low ones follow a narrow pattern more closely. A product of `n` rows runs at about
    `n / (n + 24)` of full speed here, and grouped heads give each query that many rows.
    """
    if pattern._is_opaque:
        return HEIGHTS[-1]  # every plan would evaluate all pairs again
    # One tile holds all queries, however much taller it might be.
    heights = [height for height in HEIGHTS if height < lengths.queries or height == HEIGHTS[0]]
    if len(heights) == 1:
        return heights[0]
    return min(heights, key=lambda height: plan(pattern, *lengths, block=height).area * (1 + 24 / (height * group)))


@lru_cache_bytes(lambda groups: sum(group.size for group in groups))
def group_tiles(pattern: Pattern, lengths: Lengths, block: int) -> tuple[Group, ...]:
    """All groups of a pattern's plan, masks looked up once."""
    planned = plan(pattern, *lengths, block=block)
    only = len(planned.parts) == 1
    groups = [group for part in planned.parts for group in _make_groups(part, pattern.rows, only)]
    for group in groups:
        group.deduplicate_masks()
    return tuple(groups)


def _make_groups(part: PlanPart, rows: int | None, only: bool) -> Iterator[Group]:
    """The tiles of a part by shape. Tiles of many odd widths are filled up to common ones."""
    for (_, _, ragged, alone, _), (query, key, real, row) in stack_by_shape(_list_tiles(part, rows, only)):
        yield Group(
            part=part,
            row=None if rows is None else torch.from_numpy(row),
            query=torch.from_numpy(query),
            key=torch.from_numpy(key),
            real=None if real.all() else torch.from_numpy(real),
            ragged=ragged,
            alone=alone,
        )


def _list_tiles(part: PlanPart, rows: int | None, only: bool) -> Iterator[tuple[tuple, tuple[Array, ...]]]:
    """Shape and properties of each tile, or of each piece of a long one; its queries, keys, real keys and batch row."""
    tiles = [tile for tile in range(part.tiles) if part.run_pointer[tile + 1] > part.run_pointer[tile]]
    keys = {tile: part.keys(tile) for tile in tiles}
    widths = {(int(part.query_stop[tile] - part.query_start[tile]), len(keys[tile])) for tile in tiles}
    scattered = len(widths) > max(8, len(tiles) // 8)
    for tile in tiles:
        mine, ragged, query = keys[tile], part.is_ragged(tile), part.queries(tile)
        for first in range(0, len(mine), LONGEST):
            piece = mine[first : first + LONGEST]
            width = -(-len(piece) // 32) * 32 if scattered else len(piece)
            # Pieces of one tile never share a group: a job would then write the same queries twice at once.
            shape = (len(query), width, ragged or width > len(piece), only and len(mine) <= LONGEST, first)
            key, real = np.pad(piece, (0, width - len(piece)), mode="edge"), np.arange(width) < len(piece)
            for row in part.batch_rows(tile, rows or 1):
                queries = query + row * part.lengths.queries
                yield shape, (queries, key + row * part.lengths.keys, real, np.asarray(row))
