"""Plans: the runs of keys that each tile of queries needs, found without evaluating the whole mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.caching import lazy_property, lru_cache_bytes
from regard.errors import PatternError
from regard.patterns.arguments import check_integer
from regard.patterns.base import Pattern
from regard.patterns.box import Lengths
from regard.patterns.token_order import NATURAL_ORDER
from regard.planner.build import build
from regard.planner.dense import build_from_square, evaluate, is_small
from regard.planner.part import PlanPart

BLOCK = 128


@dataclass(frozen=True, eq=False)
class Plan:
    """The block-sparse layout of a pattern for two lengths, read by kernels, the cost model and pictures."""

    pattern: Pattern
    lengths: Lengths
    block: int
    parts: tuple[PlanPart, ...]

    @lazy_property
    def pairs(self) -> int:
        """The exact number of allowed pairs, summed over batch rows the pattern distinguishes."""
        closed_form = self.pattern._count_pairs(self.lengths)
        if closed_form is not None:
            return closed_form
        return sum(part.count_pairs() * self._count_batch_rows(part) for part in self.parts)

    @property
    def area(self) -> int:
        """The number of pairs inside the plan's tiles: what a tiled computation executes."""
        return sum(part.area * self._count_batch_rows(part) for part in self.parts)

    def _count_batch_rows(self, part: PlanPart) -> int:
        """How many batch rows a part applies to."""
        return self.pattern.rows or 1 if part.pattern.rows is None else 1

    @property
    def bytes(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def tiles(self) -> int:
        return sum(part.tiles for part in self.parts)

    def matrix(self) -> Tensor:
        """The pattern rebuilt from the plan: `(row, query, key)`, a count that is 0 or 1 in a valid plan."""
        rows = self.pattern.rows or 1
        counts = torch.zeros(rows, *self.lengths, dtype=torch.int64)
        for part in self.parts:
            for tile in range(part.tiles):
                query = torch.from_numpy(part.queries(tile))[:, None]
                row = int(part.row[tile]) if part.pattern.rows else slice(None)
                whole, ragged = part.keys(tile, whole=True), part.keys(tile, whole=False)
                counts[row, query, torch.from_numpy(whole)] += 1
                counts[row, query, torch.from_numpy(ragged)] += part.mask(
                    part.queries(tile), ragged, int(part.row[tile])
                ).long()
        return counts

    def __str__(self) -> str:
        runs = sum(part.runs for part in self.parts)
        whole = sum(int(part.run_whole.sum()) for part in self.parts)
        queries, keys = self.lengths
        orders = dict.fromkeys(part.order.name for part in self.parts if part.order != NATURAL_ORDER)
        lines = [
            f"{queries:,} queries x {keys:,} keys, {self.pairs:,} pairs allowed",
            f"{self.tiles:,} tiles of up to {self.block} queries, {runs:,} runs of keys ({whole:,} whole)",
            f"{self.area:,} pairs computed, {self.pairs / self.area:.0%} of them useful"
            if self.area
            else "nothing to do",
        ]
        if orders:
            parts = "one part" if len(self.parts) == 1 else f"{len(self.parts)} parts merged by their log-sum-exp"
            lines.append(f"{parts}, tokens sorted by " + " and ".join(orders))
        return "\n".join(lines)


@lru_cache_bytes(lambda made: made.bytes)
def plan(pattern: Pattern, queries: int, keys: int | None = None, *, block: int = BLOCK, sort: bool = True) -> Plan:
    """The plan of a pattern for these lengths, cached.

    `block` is the largest number of queries in a tile; `sort=False` keeps the tokens in their own order, as a kernel
    with fixed blocks needs. Building takes time and memory proportional to the tiles and runs it names. Heads that the
    pattern tells apart are planned as batch rows.

        >>> plan(Window(128, 128), 4096).pairs
        1036160
    """
    if not isinstance(pattern, Pattern) or check_integer("A plan", "block", block) < 1:
        raise PatternError(
            "There is nothing to plan.",
            asked=f"plan({pattern!r}, ..., block={block})",
            because="a plan needs a pattern and tiles of at least one query",
            instead="plan(Causal(), 1024)",
        )
    return make_plans(pattern._with_folded_heads, pattern.lengths(queries, keys), (block,), sort=sort)[0]


def make_plans(pattern: Pattern, lengths: Lengths, blocks: Sequence[int], *, sort: bool = True) -> list[Plan]:
    """One plan for each tile height in `blocks`, not cached."""
    if lengths.queries and lengths.keys and is_small(pattern, lengths):
        square = evaluate(pattern, lengths)
        parts = [(build_from_square(pattern, lengths, square, block),) for block in blocks]
    else:
        parts = [build(pattern, lengths, block, sort) for block in blocks]
    return [Plan(pattern, lengths, block, made) for block, made in zip(blocks, parts, strict=True)]


__all__ = ["BLOCK", "Plan", "PlanPart", "make_plans", "plan"]
