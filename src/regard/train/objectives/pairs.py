r"""Pairs of consecutive text for next-sentence prediction (BERT) and sentence-order prediction (ALBERT).

Both cut a document into chunks of whole sentences that are about as long as a sequence, and cut every chunk at a random
sentence into A and B:

    next sentence     B is the rest of the chunk (label 0), or text of another document (label 1), evenly at random;
                      also text of another document if the chunk is a single sentence. The unused rest of a chunk
                      begins the next one.
    sentence order    A and B (label 0), or B and A (label 1), evenly at random; no pair for a single sentence.

A pair longer than `max_tokens` loses single tokens of its longer side, at the front or at the back at random. A chunk
aims at `max_tokens`, or with probability 0.1 at a random shorter length, so that short sequences are seen as well.

Text that is cut at both ends is still one run of tokens, so a pair is four positions in the corpus and a label.

Sources: Devlin et al., BERT (2019), appendix A.2, and the released `create_pretraining_data.py`; Lan et al., ALBERT
(ICLR 2020), section 3.1. Where we differ: their code draws the shorter length once for a document, ours for each chunk,
since our documents may be whole books; and it tries ten times to find another document, ours always finds one.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from regard.errors import InputError
from regard.train.objectives.corpus import Corpus

SHORT = 0.1


class PairSpan(NamedTuple):
    """Where A and B lie in the tokens of a corpus, and the label of the pair."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int
    label: int


def make_nsp_pairs(corpus: Corpus, max_tokens: int, rng: random.Random, *, short: float = SHORT) -> Iterator[PairSpan]:
    """The next-sentence pairs of one pass over a corpus; label 0: B follows A, 1: B is of another document.

    max_tokens: of A and B together; short: the probability of a shorter sequence.
    """
    if len(corpus) < 2:
        raise InputError(
            "Next-sentence prediction needs more than one document.",
            asked='the task "nsp"',
            found=f"{len(corpus)} document",
            because="half of its pairs take B from another document",
            instead='the task "sop", or more documents',
        )
    starts = corpus.starts.tolist()
    documents = corpus.document_starts.tolist()
    for number in range(len(corpus)):
        first, stop = documents[number], documents[number + 1]
        while first < stop:
            target = _draw_length(max_tokens, short, rng)
            end = _find_end(starts, first, stop, target)
            middle = first + 1 if end - first == 1 else rng.randint(first + 1, end - 1)
            is_random = end - first == 1 or rng.random() < 0.5
            if is_random:
                other = rng.randrange(len(corpus) - 1)
                other += other >= number
                b_first = rng.randrange(documents[other], documents[other + 1])
                b_end = _find_end(starts, b_first, documents[other + 1], target - (starts[middle] - starts[first]))
            else:
                b_first, b_end = middle, end
            span = starts[first], starts[middle], starts[b_first], starts[b_end]
            yield PairSpan(*truncate_pair(*span, max_tokens, rng), int(is_random))
            first = middle if is_random else end


def make_sop_pairs(corpus: Corpus, max_tokens: int, rng: random.Random, *, short: float = SHORT) -> Iterator[PairSpan]:
    """The sentence-order pairs of one pass over a corpus; label 0: in order, 1: swapped."""
    starts = corpus.starts.tolist()
    documents = corpus.document_starts.tolist()
    for number in range(len(corpus)):
        first, stop = documents[number], documents[number + 1]
        while first < stop:
            end = _find_end(starts, first, stop, _draw_length(max_tokens, short, rng))
            if end - first > 1:
                middle = rng.randint(first + 1, end - 1)
                a_start, a_end, b_start, b_end = truncate_pair(
                    starts[first], starts[middle], starts[middle], starts[end], max_tokens, rng
                )
                if rng.random() < 0.5:
                    yield PairSpan(b_start, b_end, a_start, a_end, 1)
                else:
                    yield PairSpan(a_start, a_end, b_start, b_end, 0)
            first = end


def make_texts(corpus: Corpus, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Texts of as many whole sentences as fit, within a document; a longer sentence is cut."""
    starts = corpus.starts.tolist()
    documents = corpus.document_starts.tolist()
    for number in range(len(corpus)):
        first, stop = documents[number], documents[number + 1]
        while first < stop:
            end = bisect_left(starts, starts[first] + max_tokens + 1, first + 1, stop + 1) - 1
            if end == first:  # a sentence longer than a sequence
                end = first + 1
                for start in range(starts[first], starts[end], max_tokens):
                    yield start, min(start + max_tokens, starts[end])
            else:
                yield starts[first], starts[end]
            first = end


def truncate_pair(
    a_start: int, a_end: int, b_start: int, b_end: int, max_tokens: int, rng: random.Random
) -> tuple[int, int, int, int]:
    """Remove tokens one by one from the longer side (B if they are equal), each from the front or the back at random.

    >>> truncate_pair(0, 3, 10, 12, 9, random.Random(0))
    (0, 3, 10, 12)
    """
    a, b = a_end - a_start, b_end - b_start
    excess, difference = max(0, a + b - max_tokens), abs(a - b)
    both = max(0, excess - difference)  # what is removed from each in turn, once they are equally long
    single = excess - both
    a_removed = both // 2 + (single if a > b else 0)
    a_front, b_front = _toss(a_removed, rng), _toss(excess - a_removed, rng)
    a_start, b_start = a_start + a_front, b_start + b_front
    return a_start, a_start + a - a_removed, b_start, b_start + b - (excess - a_removed)


def _toss(coins: int, rng: random.Random) -> int:
    """How many of some fair coins show heads."""
    return rng.getrandbits(coins).bit_count() if coins else 0


def _draw_length(max_tokens: int, short: float, rng: random.Random) -> int:
    return rng.randint(2, max_tokens) if rng.random() < short else max_tokens


def _find_end(starts: list[int], first: int, stop: int, length: int) -> int:
    """The end of the fewest sentences from `first` on that have `length` tokens; `stop` if all have fewer."""
    return min(bisect_left(starts, starts[first] + length, first + 1, stop + 1), stop)
