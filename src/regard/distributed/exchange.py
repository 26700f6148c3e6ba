"""Which keys travel between which processes, decided by the pattern before anything is sent.

Process r computes its own queries. In step s it receives from process r - s the keys and values that its queries may
see there, and sends to process r + s what that one needs. So a window exchanges its borders only, a block of pairs that
is empty is never sent, and of what arrives only one piece is in memory while the next one is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from regard.caching import lru_cache_small
from regard.distributed.sequence_layout import SequenceLayout
from regard.patterns import Lengths, Pattern
from regard.patterns.submatrix import Runs, count_tokens, find_needed_keys, find_needed_queries, restrict


@dataclass(frozen=True, eq=False)
class Piece:
    """Some queries of a process, and the keys of a process that they see.

    Attributes:
        owner: the process that holds the keys.
        queries, keys: their numbers in the whole sequence.
        pattern: the pairs between them, numbered anew.
    """

    owner: int
    queries: Runs
    keys: Runs
    pattern: Pattern

    @property
    def count(self) -> int:
        return count_tokens(self.keys)


@dataclass(frozen=True, eq=False)
class Exchange:
    """What one process computes, receives and sends.

    Attributes:
        rank, size: this process, and how many there are.
        own: the runs of its tokens among the queries and among the keys.
        local: its own queries and its own keys; `None` where no query sees any.
        received: by step, from process `rank - step`; `None` where nothing is needed.
        sent: by step, the keys that process `rank + step` needs.
    """

    rank: int
    size: int
    own: tuple[Runs, Runs]
    local: Piece | None
    received: tuple[Piece | None, ...]
    sent: tuple[Runs, ...]

    def steps(self) -> Iterator[tuple[int, int, Piece | None, Runs]]:
        """Source and destination of each step, what arrives and what is sent."""
        for step, (piece, keys) in enumerate(zip(self.received, self.sent, strict=True), 1):
            yield (self.rank - step) % self.size, (self.rank + step) % self.size, piece, keys

    @property
    def keys_sent(self) -> int:
        return sum(map(count_tokens, self.sent))

    @property
    def keys_received(self) -> int:
        return sum(piece.count for piece in self.received if piece is not None)


@lru_cache_small(maxsize=64)
def plan_exchange(pattern: Pattern, queries: SequenceLayout, keys: SequenceLayout, rank: int) -> Exchange:
    """The exchange of one process; every process finds its own, and they fit together."""
    size, whole = keys.processes, Lengths(queries.tokens, keys.tokens)
    mine = queries.runs(rank), keys.runs(rank)
    received, sent = [], []
    for step in range(1, size):
        source, destination = (rank - step) % size, (rank + step) % size
        received.append(_make_piece(pattern, whole, source, mine[0], keys.runs(source)))
        sent.append(find_needed_keys(pattern, whole, queries.runs(destination), mine[1]))
    local = _make_piece(pattern, whole, rank, *mine, whole_keys=True)
    return Exchange(rank, size, mine, local, tuple(received), tuple(sent))


def _make_piece(
    pattern: Pattern, whole: Lengths, owner: int, queries: Runs, keys: Runs, whole_keys: bool = False
) -> Piece | None:
    """The piece between these tokens without those that see or are seen by none; local keys are all there anyway."""
    needed = find_needed_keys(pattern, whole, queries, keys)
    if not needed:
        return None
    if whole_keys:
        return Piece(owner, queries, keys, restrict(pattern, whole, queries, keys))
    # Where little is known of a pattern the two searches may disagree; what is sent must be received all the same.
    readers = find_needed_queries(pattern, whole, queries, needed) or queries
    return Piece(owner, readers, needed, restrict(pattern, whole, readers, needed))
