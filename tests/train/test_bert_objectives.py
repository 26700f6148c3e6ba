"""The objectives of text encoders: their statistics, labels and invariants."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from regard.errors import InputError
from regard.train.objectives import (
    IGNORED,
    Corpus,
    Example,
    Stream,
    count_predictions,
    find_invertible,
    find_words,
    info_nce,
    invert_words,
    join_examples,
    make_inversion_pairs,
    make_nsp_pairs,
    make_sop_pairs,
    make_texts,
    mask_tokens,
    pack_sequences,
    replace_tokens,
    shuffle_words,
    truncate_pair,
)
from regard.train.objectives.inversion import split_words

MILLION = 1_000_000
SPECIAL = (0, 1, 2, 3, 4)
CLS, SEP, MASK = 2, 3, 4
VOCABULARY = 30_522


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_tokens(count: int, vocab_size: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(5, vocab_size, (count,), generator=generator(7))


def mask(tokens: torch.Tensor, seed: int = 0, vocab_size: int = VOCABULARY, **settings):
    return mask_tokens(
        tokens, generator=generator(seed), vocab_size=vocab_size, mask_token=MASK, special_tokens=SPECIAL, **settings
    )


def make_corpus(documents: int, sentences: int, seed: int = 0, longest: int = 12) -> Corpus:
    """Documents whose tokens tell the document: token 1000 d + something."""
    rng = random.Random(seed)
    return Corpus.from_documents(
        [
            [[1000 * number + rng.randrange(5, 900) for _ in range(rng.randint(1, longest))] for _ in range(sentences)]
            for number in range(documents)
        ]
    )


# Masked tokens


def test_of_a_million_tokens_15_percent_are_chosen_and_80_10_10_of_them_masked_replaced_and_kept():
    tokens = make_tokens(MILLION)
    masked, targets = mask(tokens)
    chosen = targets != IGNORED
    count = int(chosen.sum())
    assert abs(count - 150_000) <= 1071  # three standard deviations, sqrt(n p (1 - p))
    assert abs(int((chosen & (masked == MASK)).sum()) - 120_000) <= 975
    kept = int((chosen & (masked == tokens)).sum())
    replaced = int((chosen & (masked != tokens) & (masked != MASK)).sum())
    # A random token is the old one, or the mask token, once in 30,522 times: 0.5 of 15,000.
    assert abs(kept - 15_000) <= 365
    assert abs(replaced - 15_000) <= 365
    altered = 0.15 * (0.8 + 0.1 * (1 - 1 / VOCABULARY))
    assert round(altered, 7) == 0.1349995
    assert abs(int((masked != tokens).sum()) - altered * MILLION) <= 3 * math.sqrt(MILLION * altered * (1 - altered))


def test_targets_are_the_original_tokens_and_other_tokens_stay():
    tokens = make_tokens(10_000)
    masked, targets = mask(tokens)
    chosen = targets != IGNORED
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(masked[~chosen], tokens[~chosen])


def test_random_tokens_come_evenly_from_the_whole_vocabulary():
    tokens = torch.full((MILLION,), 9)
    masked, targets = mask(tokens, vocab_size=11)
    drawn = masked[(targets != IGNORED) & (masked != MASK)]
    counts = torch.bincount(drawn, minlength=11).double()
    expected = torch.full((11,), 15_000 / 11, dtype=torch.float64)
    expected[9] += 15_000  # the kept ones
    expected[MASK] = 0
    others = [number for number in range(11) if number not in (9, MASK)]
    assert ((counts - expected)[others].abs() <= 5 * (15_000 / 11) ** 0.5).all()


@pytest.mark.parametrize("settings", [{}, {"exact": True}], ids=["each by itself", "exact"])
def test_masking_follows_from_the_seed(settings):
    tokens = make_tokens(3000).view(20, 150)
    first, again, other = (mask(tokens, seed, **settings) for seed in (3, 3, 4))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.targets, other.targets)


@pytest.mark.parametrize("settings", [{}, {"exact": True}], ids=["each by itself", "exact"])
def test_special_tokens_are_never_chosen(settings):
    tokens = torch.arange(100_000).remainder(11).view(-1, 100)
    _, targets = mask(tokens, vocab_size=11, **settings)
    assert not torch.isin(targets, torch.tensor(SPECIAL)).any()
    assert torch.isin(torch.arange(5, 11), targets).all()


def test_exact_counts_are_those_of_bert():
    assert [count_predictions(length) for length in (1, 10, 20, 128, 512)] == [1, 2, 3, 19, 77]
    assert count_predictions(512, max_predictions=20) == 20
    tokens = make_tokens(7 * 128).view(7, 128)
    _, targets = mask(tokens, exact=True)
    assert (targets != IGNORED).sum(1).tolist() == [19] * 7
    _, targets = mask(tokens, exact=True, max_predictions=5)
    assert (targets != IGNORED).sum(1).tolist() == [5] * 7


def test_exact_counts_hold_for_each_packed_sequence():
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 40, 100]))
    _, targets = mask(make_tokens(150), exact=True, sequences=numbers)
    assert [(targets[numbers == number] != IGNORED).sum().item() for number in range(3)] == [2, 6, 15]


@pytest.mark.parametrize("settings", [{}, {"exact": True}], ids=["each by itself", "exact"])
def test_whole_words_are_chosen_with_all_their_pieces(settings):
    starts_word = torch.ones(50, dtype=torch.bool)
    starts_word[30:] = False  # pieces inside a word
    tokens = torch.randint(5, 50, (40, 101), generator=generator(1))
    words = find_words(tokens, starts_word)
    _, targets = mask(tokens, vocab_size=50, words=words, **settings)
    rows = torch.arange(40)[:, None].expand_as(tokens)
    units = (words if not settings else words + 10_000 * rows).flatten()
    chosen = (targets != IGNORED).flatten()
    for unit in units.unique():
        inside = chosen[units == unit]
        assert inside.all() or not inside.any()
    if settings:
        assert ((targets != IGNORED).sum(1) <= count_predictions(101)).all()
    else:
        share, words_in_all = chosen.float().mean().item(), len(units.unique())
        assert abs(share - 0.15) < 5 * math.sqrt(0.15 * 0.85 / words_in_all) * 2  # words of unequal length


# Replaced tokens


def test_replaced_tokens_are_drawn_by_frequency_and_labelled():
    frequencies = torch.zeros(50)
    frequencies[5:15] = torch.arange(1.0, 11.0)
    tokens = torch.full((MILLION,), 14)
    tokens[::10] = CLS
    replaced, targets = replace_tokens(
        tokens, generator=generator(), frequencies=frequencies, special_tokens=SPECIAL, share=0.15
    )
    assert torch.equal(targets == IGNORED, tokens == CLS)
    assert torch.equal(targets[tokens != CLS] == 1, (replaced != tokens)[tokens != CLS])
    expected = 900_000 * 0.15 * (1 - 10 / 55)  # a draw of the original token counts as original
    assert abs(int((targets == 1).sum()) - expected) <= 3 * expected**0.5
    drawn = torch.bincount(replaced[replaced != tokens], minlength=50).double()
    assert drawn[:5].sum() == 0
    wanted = 900_000 * 0.15 * frequencies[5:14].double() / 55
    assert ((drawn[5:14] - wanted).abs() <= 5 * wanted.sqrt()).all()


# Contrast


def test_info_nce_by_hand_and_its_gradient():
    first = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    second = torch.tensor([[3.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    half = math.sqrt(0.5)
    rows = [(1.0, half, 0), (0.0, half, 1)]
    expected = [math.log(math.exp(a / 0.1) + math.exp(b / 0.1)) - (a, b)[right] / 0.1 for a, b, right in rows]
    assert info_nce(first, second, temperature=0.1).item() == pytest.approx(sum(expected) / 2, rel=1e-12)
    assert info_nce(first, second, temperature=0.1, reduction="sum").item() == pytest.approx(sum(expected), rel=1e-12)
    inputs = [each.requires_grad_() for each in torch.randn(2, 5, 3, dtype=torch.float64, generator=generator())]
    assert torch.autograd.gradcheck(lambda a, b: info_nce(a, b, temperature=0.5), tuple(inputs))


def test_info_nce_of_unrelated_views_is_the_entropy_of_a_guess():
    views = torch.zeros(2, 7, 5)
    views[..., 0] = 1
    assert info_nce(*views).item() == pytest.approx(math.log(7), rel=1e-6)


# Pairs of running text


def test_half_of_ten_thousand_next_sentence_pairs_are_random():
    corpus = make_corpus(documents=3, sentences=30_000)
    pairs = [pair for pair, _ in zip(make_nsp_pairs(corpus, 40, random.Random(0)), range(10_000), strict=False)]
    assert len(pairs) == 10_000
    assert abs(sum(pair.label for pair in pairs) - 5000) <= 150


def test_random_next_sentences_are_of_another_document_and_true_ones_follow():
    corpus = make_corpus(documents=5, sentences=400)
    pairs = list(make_nsp_pairs(corpus, 40, random.Random(0)))
    tokens = corpus.tokens
    for a_start, a_end, b_start, b_end, label in pairs:
        assert a_end - a_start > 0
        assert b_end - b_start > 0
        assert a_end - a_start + b_end - b_start <= 40
        first, second = (
            set((tokens[start:end] // 1000).tolist()) for start, end in ((a_start, a_end), (b_start, b_end))
        )
        assert len(first) == len(second) == 1
        assert (first != second) == (label == 1)
        assert label == 1 or b_start >= a_end
    assert {pair.label for pair in pairs} == {0, 1}


def test_unused_sentences_are_put_back():
    """Without truncation and short sequences, every token is once an A, or the B that follows one."""
    corpus = make_corpus(documents=2, sentences=300, longest=1)
    seen = np.zeros(len(corpus.tokens), dtype=int)
    for a_start, a_end, b_start, b_end, label in make_nsp_pairs(corpus, 6, random.Random(1), short=0.0):
        seen[a_start:a_end] += 1
        if not label:
            seen[b_start:b_end] += 1
    assert (seen == 1).all()


def test_a_single_sentence_has_a_random_next_one():
    corpus = Corpus.from_documents([[[1, 2]], [[3, 4]]])
    assert [pair.label for pair in make_nsp_pairs(corpus, 10, random.Random(0))] == [1, 1]


def test_one_document_has_no_random_next_sentence():
    with pytest.raises(InputError, match="more than one document"):
        list(make_nsp_pairs(make_corpus(documents=1, sentences=9), 10, random.Random(0)))


def test_a_tenth_of_the_pairs_is_short():
    corpus = make_corpus(documents=2, sentences=40_000, longest=1)
    lengths = [b - a + d - c for a, b, c, d, _ in make_nsp_pairs(corpus, 50, random.Random(0))]
    short = sum(length < 49 for length in lengths)  # A, cut at a sentence, and B together have 50 otherwise
    expected = 0.1 * len(lengths) * 47 / 49
    assert abs(short - expected) <= 5 * expected**0.5
    assert min(lengths) == 2


@pytest.mark.parametrize("make_pairs", [make_nsp_pairs, make_sop_pairs])
def test_pairs_follow_from_the_seed(make_pairs):
    corpus = make_corpus(documents=3, sentences=50)
    first, again, other = (list(make_pairs(corpus, 30, random.Random(seed))) for seed in (0, 0, 1))
    assert first == again != other


def test_sentence_order_pairs_are_neighbours_in_either_order():
    corpus = make_corpus(documents=4, sentences=20_000)
    labels = []
    for a_start, a_end, b_start, b_end, label in make_sop_pairs(corpus, 40, random.Random(0)):
        assert (b_start >= a_end) if label == 0 else (a_start >= b_end)
        assert a_end - a_start + b_end - b_start <= 40
        assert corpus.tokens[a_start] // 1000 == corpus.tokens[b_start] // 1000
        labels.append(label)
    assert abs(sum(labels) - len(labels) / 2) <= 3 * math.sqrt(len(labels) / 4)


@pytest.mark.parametrize(("a", "b", "most"), [(9, 4, 10), (4, 9, 10), (7, 7, 9), (20, 3, 5), (3, 4, 8), (8, 7, 9)])
def test_the_longer_side_is_truncated_as_in_bert(a, b, most):
    lengths = [a, b]
    while sum(lengths) > most:  # the loop of the released code
        lengths[0 if lengths[0] > lengths[1] else 1] -= 1
    fronts = set()
    for seed in range(40):
        a_start, a_end, b_start, b_end = truncate_pair(100, 100 + a, 200, 200 + b, most, random.Random(seed))
        assert [a_end - a_start, b_end - b_start] == lengths
        assert 100 <= a_start <= a_end <= 100 + a
        assert 200 <= b_start <= b_end <= 200 + b
        fronts.add((a_start, b_start))
    assert (len(fronts) > 1) == (a + b > most)


def test_texts_are_whole_sentences_of_one_document_and_cover_the_corpus():
    corpus = make_corpus(documents=3, sentences=100, longest=40)
    texts = list(make_texts(corpus, 30))
    assert [start for start, _ in texts] == [0, *[end for _, end in texts[:-1]]]
    assert texts[-1][1] == len(corpus.tokens)
    starts = set(corpus.starts.tolist())
    for start, end in texts:
        assert 0 < end - start <= 30
        assert len(set((corpus.tokens[start:end] // 1000).tolist())) == 1
        assert start in starts or end - start == 30 or end in starts


def test_empty_sentences_and_documents_are_left_out():
    corpus = Corpus.from_documents([[[5], []], [], [[], [6, 7]], [[]]])
    assert corpus.starts.tolist() == [0, 1, 3]
    assert corpus.document_starts.tolist() == [0, 1, 2]


# Inverted sentences


STARTS_WORD = [True] * 20 + [False] * 10


def make_sentences(count: int) -> list[list[int]]:
    rng = random.Random(0)
    made = [[rng.randrange(5, 30) for _ in range(rng.randint(4, 9))] for _ in range(count)]
    return [made[number] for number in find_invertible(made, STARTS_WORD, 40)]


def test_inversion_pairs_are_exactly_balanced_and_labelled():
    sentences = make_sentences(300)
    sentences = sentences[: len(sentences) // 2 * 2]
    pairs = make_inversion_pairs(sentences, STARTS_WORD, random.Random(0))
    assert sum(label for *_, label in pairs) * 2 == len(pairs)
    shuffles = others = 0
    for (first, second, label), sentence in zip(pairs, sentences, strict=True):
        inverted = invert_words(split_words(sentence, STARTS_WORD))
        assert first == sentence
        assert (second == inverted) == (label == 1)
        if not label:
            shuffles += sorted(second) == sorted(sentence)
            others += sorted(second) != sorted(sentence)
    assert abs(shuffles - others) <= 5 * math.sqrt(shuffles + others)


def test_words_keep_their_pieces_in_order():
    words = split_words([5, 6, 25, 26, 7], STARTS_WORD)
    assert words == [[5], [6, 25, 26], [7]]
    assert invert_words(words) == [7, 6, 25, 26, 5]
    for seed in range(20):
        shuffled = shuffle_words(words, random.Random(seed))
        assert "6, 25, 26" in str(shuffled)
        assert shuffled != invert_words(words)


def test_sentences_without_an_inversion_of_their_own_are_not_used():
    sentences = [[5, 6, 5, 7, 5, 6, 5], [5, 6], [5, 6, 5], [5, 6, 7], list(range(5, 18))]
    assert find_invertible(sentences, STARTS_WORD, max_tokens=20) == [3]


# Sequences and streams


def test_packed_sequences_keep_tokens_segments_and_positions():
    rng = random.Random(0)
    examples = [
        Example(
            [rng.randrange(5, 90) for _ in range(rng.randint(1, 11))], [7] * rng.randint(1, 5) if number % 2 else None
        )
        for number in range(23)
    ]
    sequences = join_examples(examples, CLS, SEP)
    packed = pack_sequences(sequences, row_length=20, pad_token=0)
    assert packed.tokens.shape[1] <= 20
    assert packed.tokens.numel() < 23 * 20
    for name, values in (("tokens", sequences.tokens), ("segments", sequences.segments)):
        assert torch.equal(getattr(packed, name).flatten()[packed.places], values)
    starts = sequences.lengths.cumsum(0) - sequences.lengths
    assert torch.equal(packed.places[starts], packed.firsts)
    assert torch.equal(
        packed.positions.flatten()[packed.places], torch.arange(len(sequences.tokens)) - starts[sequences.numbers]
    )
    assert len(packed.places.unique()) == len(packed.places)
    unused = torch.ones(packed.tokens.numel(), dtype=torch.bool).index_fill(0, packed.places, False)
    assert (packed.tokens.flatten()[unused] == 0).all()


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 4, 5], [5, 2, 2, 3]])
def test_the_pattern_of_packed_sequences_is_their_own_sequence(lengths):
    sequences = join_examples([Example([9] * (length - 2)) for length in lengths], CLS, SEP)
    packed = pack_sequences(sequences, 5, 0)
    rows, width = packed.tokens.shape
    numbers = torch.full((rows * width,), -1).index_copy(0, packed.places, sequences.numbers).view(rows, width)
    same = (numbers[:, :, None] == numbers[:, None]) & (numbers >= 0)[:, None] & (numbers >= 0)[:, :, None]
    if packed.pattern is None:
        assert same.all()
    else:
        allowed = torch.stack([packed.pattern.matrix(width)[row] for row in range(rows)]).reshape(rows, width, width)
        real = (numbers >= 0)[:, :, None]
        assert torch.equal(allowed & real, same)


def test_a_stream_gives_every_row_once_an_epoch_whatever_the_batch_size():
    stream = Stream("rows", 3, lambda rng: ((number,) for number in range(10)))
    taken = [row for step in range(5) for row in stream.take(step, 4)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == [(number,) for number in range(10)]
    assert taken[:10] != taken[10:]
    again = Stream("rows", 3, lambda rng: ((number,) for number in range(10)))
    assert again.take(4, 4) == taken[16:]  # without what comes before
    assert Stream("rows", 4, stream.make_table).take(0, 10) != taken[:10]


def test_epochs_of_other_sizes_fill_as_many_steps_as_the_first():
    stream = Stream("rows", 0, lambda rng: ((number,) for number in range(rng.randint(5, 9))))
    sizes = [len(stream._make_epoch(epoch)) for epoch in range(6)]
    assert len(set(sizes)) > 1
    assert stream.size == sizes[0]
    assert len(stream.take(7, 3)) == 3


def test_a_stream_without_rows_is_refused():
    with pytest.raises(InputError, match="no example for the task 'sop'"):
        Stream("sop", 0, lambda rng: [])
