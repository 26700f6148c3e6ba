"""A plan as the words that the kernels read; `csrc/plan.h` says what each word means."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.patterns import Lengths, Pattern
from regard.plan import Part, Plan, plan
from regard.plan.cache import keep

PLAN_LIMIT, PROGRAM_LIMIT = 64 << 20, 256 << 20  # bytes of plans and of programs to remember
PAIRS_AT_ONCE = 1 << 22  # of masks
SEGMENT_AREA = 1 << 20  # pairs after which the way back begins a new segment ...
SEGMENT_DEPTH = 128  # ... once they are so many for each key it touches: a segment's keys are cleared and added up
VECTORS = (3, 2, 1)  # in a tile; on a tie the taller wins
# What a vector of scores costs in a tile of one, two and three, as measured: tall tiles use the registers best, and of
# a ragged run they skip the vectors that see nothing.
COST = (1.28, 1.06, 1.0)
RAGGED = (1.0, 0.9, 0.78)


@dataclass(frozen=True, eq=False)
class Program:
    """What a kernel runs: words, and masks with one 64-bit word for each key of a ragged run."""

    words: Tensor  # int32
    masks: Tensor  # int64
    plan: Plan
    resumes: bool  # whether a query may appear in several parts, whose results are merged

    @property
    def size(self) -> int:
        return _weight(self.plan) + self.words.nbytes + self.masks.nbytes


def _weight(made: Plan) -> int:
    return 1024 + sum(part.size for part in made.parts)


@keep(PLAN_LIMIT, _weight)
def best_plan(pattern: Pattern, lengths: Lengths, lanes: int) -> Plan:
    """The plan whose tiles cost the least on vectors of so many lanes."""
    heights = [vectors * lanes for vectors in (VECTORS[:1] if pattern._opaque else VECTORS)]
    plans = [plan(pattern, *lengths, block=height) for height in heights]
    return min(plans, key=lambda made: sum(_cost(part, lanes) for part in made.parts))


def _cost(part: Part, lanes: int) -> float:
    """Vectors of scores that a part computes, weighted by how well their tiles use the registers."""
    owner = np.repeat(np.arange(part.tiles), np.diff(part.run_pointer))
    vectors = -(-(part.query_stop - part.query_start) // lanes)[owner]
    kind = np.minimum(vectors, len(COST)) - 1
    weight = np.array(COST)[kind] * np.where(part.run_whole, 1.0, np.array(RAGGED)[kind])
    return float(((part.run_stop - part.run_start) * vectors * weight).sum())


@keep(PROGRAM_LIMIT, lambda made: made.size)
def program(pattern: Pattern, lengths: Lengths, lanes: int) -> Program:
    """The program of a pattern for these lengths and vectors of so many lanes, cached."""
    made = best_plan(pattern, lengths, lanes)
    masks = _Masks()
    writer = _Writer(tall=max(VECTORS) * lanes, queries=lengths.queries, alone=len(made.parts) == 1)
    words = writer.write([_tiles(part, masks) for part in made.parts], [part.pattern.rows or 1 for part in made.parts])
    words[3:6] = pattern.rows or 1, made.pairs & 0x7FFFFFFF, made.pairs >> 31
    return Program(torch.from_numpy(words), masks.tensor(), made, resumes=not writer.alone)


@dataclass(frozen=True)
class _Tile:
    row: int
    queries: np.ndarray
    runs: list[tuple[int, int, int, int]]  # first key, how many, step, place of the masks

    @property
    def area(self) -> int:
        return len(self.queries) * sum(count for _, count, _, _ in self.runs)

    @property
    def low(self) -> int:
        return min(min(first, first + (count - 1) * step) for first, count, step, _ in self.runs)

    @property
    def high(self) -> int:
        return 1 + max(max(first, first + (count - 1) * step) for first, count, step, _ in self.runs)


class _Masks:
    """Every distinct sequence of mask words once: most tiles of a pattern look alike."""

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}
        self.pieces: list[np.ndarray] = []
        self.count = 0

    def place(self, words: np.ndarray) -> int:
        name = words.tobytes()
        if name not in self.known:
            self.known[name] = self.count
            self.pieces.append(words)
            self.count += len(words)
        return self.known[name]

    def tensor(self) -> Tensor:
        words = np.concatenate(self.pieces) if self.pieces else np.zeros(1, dtype=np.uint64)
        return torch.from_numpy(words.view(np.int64))


def _mask_places(part: Part, masks: _Masks) -> np.ndarray:
    """For every run where its masks begin; -1 for whole ones."""
    places = np.full(part.runs, -1, dtype=np.int64)
    owner = np.repeat(np.arange(part.tiles), np.diff(part.run_pointer))
    height = (part.query_stop - part.query_start)[owner]
    width = part.run_stop - part.run_start
    ragged = np.flatnonzero(~part.run_whole)
    shapes, which = np.unique(np.stack([height[ragged], width[ragged]]), axis=1, return_inverse=True)
    for number, (tall, wide) in enumerate(shapes.T):
        runs = ragged[which.reshape(-1) == number]
        bits = np.uint64(1) << np.arange(tall, dtype=np.uint64)
        at_once = max(1, PAIRS_AT_ONCE // int(tall * wide))
        for begin in range(0, runs.size, at_once):
            some = runs[begin : begin + at_once]
            query = part.query_index[part.query_start[owner[some]][:, None] + np.arange(tall)]
            key = part.key_index[part.run_start[some][:, None] + np.arange(wide)]
            seen = part.mask(query, key, part.row[owner[some]]).numpy()
            words = np.where(seen, bits[:, None], np.uint64(0)).sum(axis=1, dtype=np.uint64)
            for run, mine in zip(some, words, strict=True):
                places[run] = masks.place(np.ascontiguousarray(mine))
    return places


def _tiles(part: Part, masks: _Masks) -> list[_Tile]:
    places = _mask_places(part, masks)
    index = part.key_index
    natural = bool((index == np.arange(index.size)).all())
    starts, stops, pointer = part.run_start.tolist(), part.run_stop.tolist(), part.run_pointer.tolist()
    masked = places.tolist()
    made = []
    for tile in range(part.tiles):
        runs: list[tuple[int, int, int, int]] = []
        for run in range(pointer[tile], pointer[tile + 1]):
            if natural:
                runs.append((starts[run], stops[run] - starts[run], 1, masked[run]))
            else:
                runs += _progressions(index[starts[run] : stops[run]], masked[run])
        # Whole runs first, as the kernels expect: what is ragged is treated apart.
        runs.sort(key=lambda run: run[3] >= 0)
        made.append(_Tile(int(part.row[tile]), part.queries(tile), runs))
    return made


def _progressions(keys: np.ndarray, mask: int) -> list[tuple[int, int, int, int]]:
    """Key numbers as runs with a constant step."""
    steps = np.diff(keys)
    runs = []
    at = 0
    while at < keys.size:
        step = int(steps[at]) if at < steps.size else 1
        other = np.flatnonzero(steps[at:] != step)
        count = keys.size - at if not other.size else int(other[0]) + 1
        runs.append((int(keys[at]), count, step, mask + at if mask >= 0 else -1))
        at += count
    return runs


class _Writer:
    """Puts tiles into lists, lists into parts, and everything into one array of words."""

    def __init__(self, tall: int, queries: int, alone: bool) -> None:
        self.tall, self.queries, self.alone = tall, queries, alone
        self.words: list[np.ndarray] = []
        self.length = 0

    def put(self, numbers) -> int:
        """Append words; where they begin."""
        place = self.length
        array = np.asarray(numbers, dtype=np.int32).reshape(-1)
        self.words.append(array)
        self.length += array.size
        return place

    def write(self, parts: list[list[_Tile]], rows: list[int]) -> np.ndarray:
        tallest = max([len(tile.queries) for tiles in parts for tile in tiles] + [self.tall if self.alone else 1])
        head = np.zeros(6 + len(parts), dtype=np.int32)
        head[:3] = len(parts), tallest, not self.alone
        self.put(head)
        for number, (tiles, count) in enumerate(zip(parts, rows, strict=True)):
            by_row: list[list[_Tile]] = [[] for _ in range(count)]
            for tile in tiles:
                if tile.runs or self.alone:
                    by_row[tile.row].append(tile)
            places = [self._list(mine) for mine in by_row]
            head[6 + number] = self.put([count, *places])
        self.words[0] = head
        return np.concatenate(self.words)

    def _list(self, tiles: list[_Tile]) -> int:
        if self.alone:
            tiles = tiles + self._nothing_to_see(tiles)
        places = [self._tile(tile) for tile in tiles]
        segments = _segments(tiles)
        table = self.put(places)
        return self.put([len(segments), len(tiles), table, *(number for segment in segments for number in segment)])

    def _tile(self, tile: _Tile) -> int:
        runs = [number for run in tile.runs for number in run]
        return self.put(np.concatenate([[len(tile.queries), len(tile.runs)], tile.queries, runs]))

    def _nothing_to_see(self, tiles: list[_Tile]) -> list[_Tile]:
        """Tiles without keys for the queries that no tile holds: somebody has to write their zeros."""
        left = np.ones(self.queries, dtype=bool)
        for tile in tiles:
            left[tile.queries] = False
        alone = np.flatnonzero(left)
        return [_Tile(0, alone[at : at + self.tall], []) for at in range(0, alone.size, self.tall)]


def _segments(tiles: list[_Tile]) -> list[tuple[int, int, int, int]]:
    """First and last tile, lowest and highest key of each segment. Neither the batch nor the threads decide."""
    # Equal shares, so that the last one is no crumb for which others wait.
    total = sum(tile.area for tile in tiles)
    share = max(SEGMENT_AREA, -(-total // max(1, round(total / SEGMENT_AREA))))
    segments: list[tuple[int, int, int, int]] = []
    first, area, low, high = 0, 0, 0, 0
    for number, tile in enumerate(tiles):
        if tile.runs:
            low, high = (min(low, tile.low), max(high, tile.high)) if area else (tile.low, tile.high)
            area += tile.area
        if area >= max(share, SEGMENT_DEPTH * (high - low)):
            segments.append((first, number + 1, low, high))
            first, area, low, high = number + 1, 0, 0, 0
    if first < len(tiles) or not segments:
        segments.append((first, len(tiles), low, high))
    return segments
