"""Building a plan by a search over boxes, whose cost is proportional to the size of the plan.

For every tile of queries the search starts from all keys. Where a pattern allows *none* of the pairs the keys are
dropped, where it allows *all* of them they become a whole run, and otherwise the keys are halved and searched again,
down to `LEAF` keys, which become a ragged run. All tiles are searched together, one numpy call per level.
"""

from __future__ import annotations

import numpy as np
import torch

from regard.patterns.base import Pattern
from regard.patterns.box import ALL, NONE, SOME, Array, Lengths, TokenBox
from regard.patterns.compose import Not, Or
from regard.patterns.token_order import NATURAL_ORDER, TokenOrder
from regard.planner.part import PlanPart

LEAF = 16


def build(pattern: Pattern, lengths: Lengths, block: int, sort: bool) -> tuple[PlanPart, ...]:
    """The parts of a plan: disjoint sets of pairs, each in the order that makes it densest."""
    if not lengths.queries or not lengths.keys:
        return ()
    wanted: dict[TokenOrder, Pattern] = {}
    for alternative in pattern._split_union() if sort else ():
        order = alternative._find_dense_order()
        wanted[order] = Or(wanted[order], alternative) if order in wanted else alternative
    # An open order only moves queries, which is valid for every pattern: it takes the natural part too.
    open_orders = [order for order in wanted if not order.closed and order != NATURAL_ORDER]
    if open_orders and NATURAL_ORDER in wanted:
        wanted[open_orders[0]] = Or(wanted[open_orders[0]], wanted.pop(NATURAL_ORDER))
    if len(wanted) <= 1:
        return (_build_part(pattern, next(iter(wanted), NATURAL_ORDER), lengths, block, sort),)
    parts: list[PlanPart] = []
    earlier: Pattern | None = None
    for order, alternative in wanted.items():
        rest = alternative if earlier is None else alternative & Not(earlier)
        parts.append(_build_part(rest, order, lengths, block, sort))
        earlier = alternative if earlier is None else earlier | alternative
    return tuple(parts)


def _build_part(pattern: Pattern, order: TokenOrder, lengths: Lengths, block: int, sort: bool) -> PlanPart:
    order = order.fit_to_tile(block)
    query_position = np.arange(lengths.offset, lengths.keys)
    query_class = order.find_classes(query_position)
    if sort and not order.closed:
        query_class = 2 * query_class + pattern._is_global(query_position)
    query_sort = np.argsort(query_class, kind="stable")
    query_position, query_class = query_position[query_sort], query_class[query_sort]
    start, stop = _cut_tiles(query_class, block)
    if order.closed:
        seeing = query_class[start] >= 0
        start, stop = start[seeing], stop[seeing]
    query_box = order.make_boxes(query_position, start, stop - 1)

    if order.closed:
        key_position = np.arange(lengths.keys)
        key_class = order.find_classes(key_position)
        key_sort = np.argsort(key_class, kind="stable")
        key_position, key_class = key_position[key_sort], key_class[key_sort]
        low = np.searchsorted(key_class, query_class[start], "left")
        high = np.searchsorted(key_class, query_class[start], "right")
    else:
        key_position = np.arange(lengths.keys)
        key_sort = key_position
        low, high = np.zeros_like(start), np.full_like(start, lengths.keys)

    key_order = order if order.closed else NATURAL_ORDER
    search = _KeySearch(pattern, query_box, key_order, key_position, lengths, order)
    rows = pattern.rows or 1
    tiles = start.size
    if rows > 1:
        start, stop = np.tile(start, rows), np.tile(stop, rows)
        low, high = np.tile(low, rows), np.tile(high, rows)
    row = np.repeat(np.arange(rows), tiles)
    tile_query = np.tile(np.arange(tiles), rows)
    owner, run_start, run_stop, whole = search.find_runs(row, tile_query, low, high)
    owner, run_start, run_stop, whole = search.resolve_opaque(
        owner, run_start, run_stop, whole, start, stop, query_sort
    )
    pointer = np.searchsorted(owner, np.arange(row.size + 1))
    return PlanPart(
        pattern=pattern,
        order=order,
        lengths=lengths,
        query_index=query_sort,
        key_index=key_sort,
        row=row,
        query_start=start,
        query_stop=stop,
        run_pointer=pointer,
        run_start=run_start,
        run_stop=run_stop,
        run_whole=whole,
    )


def _cut_tiles(kind: Array, block: int) -> tuple[Array, Array]:
    """Tiles of at most `block` neighbours that never mix classes; the tiles of a class are equally full."""
    edges = np.flatnonzero(np.diff(kind)) + 1
    first = np.concatenate([[0], edges])
    last = np.concatenate([edges, [kind.size]])
    count = -(-(last - first) // block)
    owner = np.repeat(np.arange(first.size), count)
    number = np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)
    start = first[owner] + number * block
    return start, np.minimum(start + block, last[owner])


class _KeySearch:
    """The search of every tile through the keys."""

    def __init__(
        self,
        pattern: Pattern,
        query_box: TokenBox,
        key_order: TokenOrder,
        key_position: Array,
        lengths: Lengths,
        order: TokenOrder,
    ) -> None:
        self.pattern, self.query_box, self.key_order = pattern, query_box, key_order
        self.key_position, self.lengths = key_position, lengths
        self.grid = None if order.closed else order.grid

    def find_coverage(self, row: Array, tile: Array, start: Array, stop: Array) -> Array:
        key = self.key_order.make_boxes(self.key_position, start, stop - 1)
        return self.pattern._box_coverage(self.query_box.take(tile), key, row, self.lengths)

    def find_runs(self, row: Array, tile: Array, start: Array, stop: Array) -> tuple[Array, Array, Array, Array]:
        """Owner tile, start, stop and wholeness of every run, sorted by owner and start."""
        owner = np.arange(row.size)
        found: list[tuple[Array, Array, Array, Array]] = []
        keep = stop > start
        owner, start, stop = owner[keep], start[keep], stop[keep]
        while owner.size:
            coverage = self.find_coverage(row[owner], tile[owner], start, stop)
            done = (coverage == ALL) | ((coverage == SOME) & (stop - start <= LEAF))
            found.append((owner[done], start[done], stop[done], coverage[done] == ALL))
            unresolved = (coverage != NONE) & ~done
            owner, start, stop = owner[unresolved], start[unresolved], stop[unresolved]
            middle = self._find_split(start, stop)
            owner = np.concatenate([owner, owner])
            start, stop = np.concatenate([start, middle]), np.concatenate([middle, stop])
        if not found:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty, empty.astype(bool)
        owner, start, stop, whole = (np.concatenate(column) for column in zip(*found, strict=True))
        by_place = np.lexsort((start, owner))
        owner, start, stop, whole = owner[by_place], start[by_place], stop[by_place], whole[by_place]
        owner, start, stop, whole = join_runs(owner, start, stop, whole)
        return self._trim_ragged_runs(row, tile, owner, start, stop, whole)

    def _find_split(self, start: Array, stop: Array) -> Array:
        middle = (start + stop) // 2
        if self.grid is None:
            return middle
        # On a grid a run that spans rows is cut between rows: columns are a range only inside one row.
        top, bottom = self.grid.row(start), self.grid.row(stop - 1)
        between = self.grid.start + (top + bottom + 1) // 2 * self.grid.columns
        return np.where((top != bottom) & (between > start) & (between < stop), between, middle)

    def _trim_ragged_runs(self, row, tile, owner, start, stop, whole) -> tuple[Array, Array, Array, Array]:
        """Drop keys at both ends of ragged runs that no query of the tile may see."""
        reach = np.arange(LEAF)
        ragged = np.flatnonzero(~whole)
        for side in ("start", "stop"):
            at = start[ragged, None] + reach if side == "start" else stop[ragged, None] - 1 - reach
            real = (at >= start[ragged, None]) & (at < stop[ragged, None])
            place = np.where(real, at, np.minimum(start, stop - 1)[ragged, None]).reshape(-1)
            tiles = np.repeat(owner[ragged], LEAF)
            visible = self.find_coverage(row[tiles], tile[tiles], place, place + 1).reshape(-1, LEAF) != NONE
            kept = (visible & real).any(1)
            lost = np.where(kept, (visible & real).argmax(1), np.minimum(LEAF, (stop - start)[ragged]))
            if side == "start":
                start[ragged] += lost
            else:
                stop[ragged] -= lost
        alive = stop > start
        return owner[alive], start[alive], stop[alive], whole[alive]

    def resolve_opaque(self, owner, start, stop, whole, query_start, query_stop, query_sort) -> tuple:
        """For an opaque pattern: evaluate the pairs, drop empty runs, find whole ones."""
        if not self.pattern._is_opaque or not owner.size:
            return owner, start, stop, whole
        pieces = []
        for number in range(owner.size):
            cuts = np.append(np.arange(start[number], stop[number], LEAF), stop[number])
            tile = owner[number]
            i = torch.from_numpy(query_sort[query_start[tile] : query_stop[tile]] + self.lengths.offset)[:, None]
            j = torch.from_numpy(self.key_position[start[number] : stop[number]])
            row = torch.zeros((), dtype=torch.long) + int(tile // max(1, self.query_box.first.size))
            visible = self.pattern._allows(i, j, row, self.lengths).expand(len(i), len(j)).numpy()
            some, every = visible.any(0), visible.all(0)
            left = cuts[:-1] - start[number]
            some, every = np.logical_or.reduceat(some, left), np.logical_and.reduceat(every, left)
            pieces.append((np.full(int(some.sum()), tile), cuts[:-1][some], cuts[1:][some], every[some]))
        owner, start, stop, whole = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return join_runs(owner, start, stop, whole)


def join_runs(owner: Array, start: Array, stop: Array, whole: Array) -> tuple[Array, Array, Array, Array]:
    """Merge neighbouring runs of one tile and one kind."""
    if not owner.size:
        return owner, start, stop, whole
    fresh = np.ones(owner.size, dtype=bool)
    fresh[1:] = (owner[1:] != owner[:-1]) | (start[1:] != stop[:-1]) | (whole[1:] != whole[:-1])
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], owner.size) - 1
    return owner[first], start[first], stop[last], whole[first]
