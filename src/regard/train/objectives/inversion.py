"""Inverted-sentence detection: is B the sentence A with its words in reverse order?

Positives (label 1) are a sentence and its inversion. Negatives (label 0) are, evenly at random, a sentence and another
order of its own words, or a sentence and the inversion of another one; so neither the order of B alone nor the words
that A and B share give the label away. Every batch has as many positives as negatives.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

# With three different words there are orders that are neither the sentence nor its inversion.
FEWEST_WORDS = 3
POSITIVE, NEGATIVE = 1, 0

Words = list[list[int]]
Pair = tuple[list[int], list[int], int]


def split_words(tokens: Sequence[int], starts_word: Sequence[bool]) -> Words:
    """The tokens of each word; `starts_word[token]` is false for pieces inside a word."""
    words: Words = []
    for token in tokens:
        if words and not starts_word[token]:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def invert_words(words: Words) -> list[int]:
    """The tokens of a sentence with its words in reverse order; the pieces of a word stay in theirs.

    >>> invert_words([[5], [6, 7], [8]])
    [8, 6, 7, 5]
    """
    return [token for word in reversed(words) for token in word]


def shuffle_words(words: Words, rng: random.Random) -> list[int]:
    """The tokens of a sentence in a random order of its words that is not its inversion."""
    assert is_invertible(words)
    while True:
        order = rng.sample(words, len(words))
        if (shuffled := [token for word in order for token in word]) != invert_words(words):
            return shuffled


def is_invertible(words: Words) -> bool:
    """Whether a sentence has three different words, and differs from its inversion."""
    different = len(set(map(tuple, words))) >= FEWEST_WORDS
    return different and invert_words(words) != [token for word in words for token in word]


def find_invertible(sentences: Iterable[Sequence[int]], starts_word: Sequence[bool], max_tokens: int) -> list[int]:
    """The sentences that can be inverted and fit twice into `max_tokens`."""
    return [
        number
        for number, tokens in enumerate(sentences)
        if 2 * len(tokens) <= max_tokens and is_invertible(split_words(tokens, starts_word))
    ]


def make_inversion_pairs(
    sentences: Sequence[Sequence[int]], starts_word: Sequence[bool], rng: random.Random
) -> list[Pair]:
    """A pair `(A, B, label)` for each of an even number of invertible sentences; every second one is positive.

    The other sentence of a negative pair is one of the given sentences.
    """
    assert len(sentences) % 2 == 0, "as many positives as negatives need an even number of sentences"
    words = [split_words(tokens, starts_word) for tokens in sentences]
    pairs: list[Pair] = []
    for number, tokens in enumerate(sentences):
        inverted = invert_words(words[number])
        if number % 2 == 0:
            pairs.append((list(tokens), inverted, POSITIVE))
            continue
        other = invert_words(words[_draw_other(number, len(words), rng)])
        if rng.random() < 0.5 or other == inverted:
            other = shuffle_words(words[number], rng)
        pairs.append((list(tokens), other, NEGATIVE))
    return pairs


def _draw_other(number: int, count: int, rng: random.Random) -> int:
    drawn = rng.randrange(count - 1)
    return drawn + (drawn >= number)
