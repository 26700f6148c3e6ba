"""A plan as the words that the kernels read; `csrc/plan.h` says what each word means."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_bytes
from regard.patterns import Lengths, Pattern
from regard.planner import Plan, PlanPart, make_plans
from regard.planner.ragged import DistinctMasks

PAIRS_AT_ONCE = 1 << 22  # of masks
SEGMENT_AREA = 1 << 20  # pairs after which backward begins a new segment ...
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
    resumes: bool  # whether a query may appear in several parts, whose results are merged

    @property
    def bytes(self) -> int:
        return 1024 + self.words.nbytes + self.masks.nbytes


@lru_cache_bytes(lambda made: made.bytes)
def best_plan(pattern: Pattern, lengths: Lengths, lanes: int) -> Plan:
    """The plan whose tiles cost the least on vectors of so many lanes."""
    lengths = pattern.lengths(*lengths)  # a tracer gives tensors for numbers
    tallest = -(-lengths.queries // lanes)  # vectors that hold all queries: taller tiles would be the same
    vectors = dict.fromkeys(min(each, max(1, tallest)) for each in (VECTORS[:1] if pattern._is_opaque else VECTORS))
    heights = [each * lanes for each in vectors]
    plans = make_plans(pattern, lengths, heights)
    return min(plans, key=lambda made: sum(_estimate_cost(part, lanes) for part in made.parts))


def _estimate_cost(part: PlanPart, lanes: int) -> float:
    """Vectors of scores that a part computes, weighted by how well their tiles use the registers."""
    owner = np.repeat(np.arange(part.tiles), np.diff(part.run_pointer))
    vectors = -(-(part.query_stop - part.query_start) // lanes)[owner]
    kind = np.minimum(vectors, len(COST)) - 1
    weight = np.array(COST)[kind] * np.where(part.run_whole, 1.0, np.array(RAGGED)[kind])
    return float(((part.run_stop - part.run_start) * vectors * weight).sum())


@lru_cache_bytes(lambda made: made.bytes)
def program(pattern: Pattern, lengths: Lengths, lanes: int) -> Program:
    """The program of a pattern for these lengths and vectors of so many lanes, cached."""
    made = best_plan(pattern, lengths, lanes)
    masks = _Masks()
    writer = _Writer(tall=max(VECTORS) * lanes, queries=lengths.queries, alone=len(made.parts) == 1)
    rows = [part.pattern.rows or 1 for part in made.parts]
    words = writer.write([_list_tiles(part, masks) for part in made.parts], rows)
    # A part without batch rows applies to all of them.
    pairs = sum(each * (pattern.rows or 1) // count for each, count in zip(masks.pairs, rows, strict=True))
    words[3:6] = pattern.rows or 1, pairs & 0x7FFFFFFF, pairs >> 31
    return Program(torch.from_numpy(words), masks.tensor(), resumes=not writer.alone)


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
    """The mask words of all ragged runs, every distinct sequence of them once."""

    def __init__(self) -> None:
        self.distinct = DistinctMasks()
        self.offsets = [0]  # where each distinct sequence begins, and the next one
        self.pairs: list[int] = []  # allowed ones in each part

    def place(self, words: np.ndarray) -> int:
        """Where these words begin among those of all runs."""
        number = self.distinct.add(words)
        if number == len(self.offsets) - 1:
            self.offsets.append(self.offsets[-1] + len(words))
        return self.offsets[number]

    def tensor(self) -> Tensor:
        words = np.concatenate(self.distinct.masks) if self.distinct.masks else np.zeros(1, dtype=np.uint64)
        return torch.from_numpy(words.view(np.int64))


def _place_masks(part: PlanPart, masks: _Masks) -> np.ndarray:
    """For every run where its masks begin; -1 for whole ones."""
    places = np.full(part.runs, -1, dtype=np.int64)
    owner = np.repeat(np.arange(part.tiles), np.diff(part.run_pointer))
    height = (part.query_stop - part.query_start)[owner]
    width = part.run_stop - part.run_start
    masks.pairs.append(int((height * width)[part.run_whole].sum()))
    ragged = np.flatnonzero(~part.run_whole)
    if not ragged.size:
        return places
    tall = int(height.max())
    # Runs of all shapes are evaluated together, one call for as many keys as fit.
    for some in np.split(ragged, _find_cuts(width[ragged] * tall, PAIRS_AT_ONCE)):
        words = _pack_masks(part, some, owner[some], width[some], tall)
        masks.pairs[-1] += int(np.bitwise_count(words).sum())
        for run, mine in zip(some, np.split(words, np.cumsum(width[some])[:-1]), strict=True):
            places[run] = masks.place(mine)
    return places


def _pack_masks(part: PlanPart, runs: np.ndarray, owner: np.ndarray, width: np.ndarray, tall: int) -> np.ndarray:
    """One word for each key of these runs, run by run: bit n is set when the tile's query n sees the key."""
    tile = np.repeat(owner, width)
    place = np.arange(tile.size) - np.repeat(np.cumsum(width) - width, width) + np.repeat(part.run_start[runs], width)
    number = part.query_start[tile][:, None] + np.arange(tall)
    real = number < part.query_stop[tile][:, None]
    query = part.query_index[np.where(real, number, part.query_start[tile][:, None])]
    visible = part.mask(query, part.key_index[place][:, None], part.row[tile]).numpy()[..., 0]
    bits = np.uint64(1) << np.arange(tall, dtype=np.uint64)
    return np.where(visible & real, bits, np.uint64(0)).sum(axis=1, dtype=np.uint64)


def _find_cuts(sizes: np.ndarray, most: int) -> np.ndarray:
    """Where to cut a list so that no piece is much larger than `most`."""
    piece = np.cumsum(sizes) // most
    return np.flatnonzero(np.diff(piece)) + 1


def _list_tiles(part: PlanPart, masks: _Masks) -> list[_Tile]:
    places = _place_masks(part, masks)
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
                runs += _split_progressions(index[starts[run] : stops[run]], masked[run])
        # Whole runs first, as the kernels expect: what is ragged is treated apart.
        runs.sort(key=lambda run: run[3] >= 0)
        made.append(_Tile(int(part.row[tile]), part.queries(tile), runs))
    return made


def _split_progressions(keys: np.ndarray, mask: int) -> list[tuple[int, int, int, int]]:
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
            places = [self._write_list(mine) for mine in by_row]
            head[6 + number] = self.put([count, *places])
        self.words[0] = head
        return np.concatenate(self.words)

    def _write_list(self, tiles: list[_Tile]) -> int:
        if self.alone:
            tiles = tiles + self._make_empty_tiles(tiles)
        places = [self._write_tile(tile) for tile in tiles]
        segments = _cut_segments(tiles)
        table = self.put(places)
        return self.put([len(segments), len(tiles), table, *(number for segment in segments for number in segment)])

    def _write_tile(self, tile: _Tile) -> int:
        runs = [number for run in tile.runs for number in run]
        return self.put(np.concatenate([[len(tile.queries), len(tile.runs)], tile.queries, runs]))

    def _make_empty_tiles(self, tiles: list[_Tile]) -> list[_Tile]:
        """Tiles without keys for the queries that no tile holds: their zeros have to be written."""
        left = np.ones(self.queries, dtype=bool)
        for tile in tiles:
            left[tile.queries] = False
        alone = np.flatnonzero(left)
        return [_Tile(0, alone[at : at + self.tall], []) for at in range(0, alone.size, self.tall)]


def _cut_segments(tiles: list[_Tile]) -> list[tuple[int, int, int, int]]:
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
