"""Which keys travel between which processes, decided by the pattern before anything is sent.

Process r computes its own queries. In step s it receives from process r - s the keys and values that its queries may
see there, and sends to process r + s what that one needs. So a window exchanges its borders only, and a block of pairs
that is empty is never sent. What is needed travels in pieces that are small beside the tokens of a process: one is in
memory while the next one is on its way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from regard.caching import lru_cache_small
from regard.distributed.sequence_layout import SequenceLayout
from regard.patterns import Lengths, Pattern
from regard.patterns.submatrix import Runs, count_tokens, find_needed_keys, find_needed_queries, restrict

PIECES = 16  # that a process's keys are cut into, ...
PIECE_TOKENS = 256  # ... unless they would be smaller than this: kernels need some work for each message


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


class Transfer(NamedTuple):
    """What leaves and what arrives at the same time: keys for another process, and a piece from a third one."""

    step: int
    destination: int
    sent: Runs
    source: int
    received: Piece | None


@dataclass(frozen=True, eq=False)
class Exchange:
    """What one process computes, receives and sends.

    Attributes:
        rank, size: this process, and how many there are.
        own: the runs of its tokens among the queries and among the keys.
        local: its own queries and its own keys; `None` where no query sees any.
        transfers: in the order in which they happen.
    """

    rank: int
    size: int
    own: tuple[Runs, Runs]
    local: Piece | None
    transfers: tuple[Transfer, ...]

    @property
    def keys_sent(self) -> int:
        return sum(count_tokens(each.sent) for each in self.transfers)

    @property
    def keys_received(self) -> int:
        return sum(each.received.count for each in self.transfers if each.received is not None)


@lru_cache_small(maxsize=64)
def plan_exchange(pattern: Pattern, queries: SequenceLayout, keys: SequenceLayout, rank: int) -> Exchange:
    """The exchange of one process; every process finds its own, and they fit together."""
    size, whole = keys.processes, Lengths(queries.tokens, keys.tokens)
    own = queries.runs(rank), keys.runs(rank)
    limit = max(PIECE_TOKENS, -(-keys.tokens // (keys.processes * PIECES)))
    transfers = []
    for step in range(1, size):
        source, destination = (rank - step) % size, (rank + step) % size
        needed = find_needed_keys(pattern, whole, own[0], keys.runs(source))
        wanted = find_needed_keys(pattern, whole, queries.runs(destination), own[1])
        for sent, received in itertools.zip_longest(_cut(wanted, limit), _cut(needed, limit), fillvalue=()):
            piece = _make_piece(pattern, whole, source, own[0], received) if received else None
            transfers.append(Transfer(step, destination, sent, source, piece))
    local = None
    if find_needed_keys(pattern, whole, *own):
        local = Piece(rank, *own, restrict(pattern, whole, *own))
    return Exchange(rank, size, own, local, tuple(transfers))


def _make_piece(pattern: Pattern, whole: Lengths, owner: int, queries: Runs, keys: Runs) -> Piece:
    """The piece between these tokens, without queries that see none of the keys."""
    # Where little is known of a pattern the two searches may disagree; what is sent must be received all the same.
    readers = find_needed_queries(pattern, whole, queries, keys) or queries
    return Piece(owner, readers, keys, restrict(pattern, whole, readers, keys))


def _cut(runs: Runs, limit: int) -> list[Runs]:
    """The runs in groups of at most `limit` tokens."""
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for start, stop in runs:
        while start < stop:
            if not room:
                groups.append([])
                room = limit
            end = min(stop, start + room)
            groups[-1].append((start, end))
            room -= end - start
            start = end
    return [tuple(group) for group in groups]
