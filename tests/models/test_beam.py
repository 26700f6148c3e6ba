"""A wide beam search equals exhaustive search, a narrow one equals other implementations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from plain import slow
from twins import transformers
from writers import Histories, Hugging, Toy, left_padded, tiny_gpt2

from regard.errors import InputError
from regard.models.generation import Markov, PowerPenalty, WuPenalty, beam_search, generate
from regard.models.generation.penalties import LengthPenalty

PROMPTS = [[3, 1], [2], [1, 1, 3, 0, 2]]
PENALTIES = [
    WuPenalty(),
    WuPenalty(0.0),
    WuPenalty(3.0),
    WuPenalty(-2.0),
    PowerPenalty(),
    PowerPenalty(0.0),
    PowerPenalty(2.0),
    PowerPenalty(-0.7),
]
FEW_AND_MORE = [*PENALTIES[::3], *slow(*PENALTIES[1::3], *PENALTIES[2::3])]


def log_probability(toy, prompt, text):
    """Of a text after a prompt, from scratch."""
    steps = [toy.after([*prompt, *text[:n]]).double().log_softmax(-1)[token].item() for n, token in enumerate(text)]
    return sum(steps)


def every_text(vocab_size, max_new_tokens, stop):
    """All texts that end with their first stop token, and those that never do and have max_new_tokens tokens."""
    inner = [token for token in range(vocab_size) if token not in stop]
    for length in range(1, max_new_tokens + 1):
        for body in itertools.product(inner, repeat=length - 1):
            for token in range(vocab_size):
                if token in stop or length == max_new_tokens:
                    yield [*body, token]


def plain_beam_search(toy, prompt, max_new_tokens, num_beams, penalty, stop):
    """The definition, one text at a time, without a cache and without an early end."""
    live, pool = [([], 0.0)], []
    for length in range(1, max_new_tokens + 1):
        grown = []
        for text, total in live:
            steps = toy.after(prompt + text).double().log_softmax(-1).tolist()
            grown += [([*text, token], total + step) for token, step in enumerate(steps)]
        grown.sort(key=lambda pair: -pair[1])
        ended = [pair for pair in grown[:num_beams] if pair[0][-1] in stop or length == max_new_tokens]
        pool += [(total / penalty(length), text) for text, total in ended]
        live = [pair for pair in grown if pair[0][-1] not in stop][:num_beams]
    return sorted(pool, key=lambda pair: -pair[0])[:num_beams]


def assert_same(found, expected):
    """The same texts with the same scores; the order of summation allows an error of a few roundings."""
    assert [hypothesis.tokens for hypothesis in found] == [text for _, text in expected]
    for hypothesis, (score, _) in zip(found, expected, strict=True):
        assert math.isclose(hypothesis.score, score, rel_tol=1e-13)


@pytest.mark.parametrize("penalty", FEW_AND_MORE, ids=str)
@pytest.mark.parametrize("stop", [(2,), (0, 3), ()], ids=str)
def test_a_wide_beam_is_exhaustive_search(penalty, stop):
    toy = Toy(vocab_size=4, seed=5)
    texts = list(every_text(4, 4, stop))
    found = beam_search(
        toy, PROMPTS, max_new_tokens=4, num_beams=4**4, length_penalty=penalty, stop_tokens=stop, best=7
    )
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        totals = [(log_probability(toy, prompt, text), text) for text in texts]
        ranked = sorted(((total / penalty(len(text)), text) for total, text in totals), key=lambda pair: -pair[0])
        assert_same(hypotheses, ranked[:7])
        for hypothesis in hypotheses:
            assert hypothesis.finished == (hypothesis.tokens[-1] in stop)
            assert math.isclose(
                hypothesis.log_probability, log_probability(toy, prompt, hypothesis.tokens), rel_tol=1e-13
            )


@pytest.mark.parametrize("penalty", FEW_AND_MORE, ids=str)
@pytest.mark.parametrize(("num_beams", "best"), [(1, 1), (2, 1), (3, 3), (5, 2)])
def test_ending_early_changes_nothing(penalty, num_beams, best):
    spared = 0
    for seed in range(5):
        toy = Toy(vocab_size=7, seed=seed, spread=1.5)
        arguments = dict(max_new_tokens=11, num_beams=num_beams, length_penalty=penalty, stop_tokens=(5, 6))
        found = beam_search(toy, PROMPTS, best=best, **arguments)
        spared += 11 * len(PROMPTS) * num_beams - sum(toy.reads)
        for prompt, hypotheses in zip(PROMPTS, found, strict=True):
            assert_same(hypotheses, plain_beam_search(toy, prompt, 11, num_beams, penalty, (5, 6))[:best])
    assert spared > 0


def test_a_bound_for_the_present_length_would_end_too_early(monkeypatch):
    def hasty(penalty, log_probability, shortest, longest):
        return log_probability / penalty(shortest)

    monkeypatch.setattr(LengthPenalty, "bound", hasty)
    with pytest.raises(AssertionError):
        test_ending_early_changes_nothing(PowerPenalty(2.0), 2, 1)


def test_the_bound_holds_for_every_length_between():
    for penalty, total in itertools.product(PENALTIES, [-0.0, -0.3, -17.0]):
        assert penalty.bound(total, 3, 11) == max(total / penalty(length) for length in range(3, 12))


def test_the_penalties_by_hand():
    assert WuPenalty()(1) == 1.0
    assert math.isclose(WuPenalty(0.6)(13), 3**0.6)
    assert PowerPenalty()(13) == 13.0
    assert PowerPenalty(-1)(4) == 0.25


def test_a_cache_that_is_not_reordered_is_noticed(monkeypatch):
    def careless(cache, index):
        if len(index) != len(cache.state):
            cache.state = cache.state[index]

    monkeypatch.setattr(Histories, "reorder", careless)
    with pytest.raises(AssertionError):
        test_ending_early_changes_nothing(WuPenalty(), 3, 3)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_one_beam_without_an_end_is_greedy(penalty):
    toy = Toy(vocab_size=13, seed=2)
    greedy = generate(toy, PROMPTS, max_new_tokens=17)
    found = beam_search(toy, PROMPTS, max_new_tokens=17, num_beams=1, length_penalty=penalty)
    assert [hypotheses[0].tokens for hypotheses in found] == greedy.tokens
    for hypotheses, score in zip(found, greedy.scores, strict=True):
        assert math.isclose(hypotheses[0].log_probability, score, rel_tol=1e-13)


def test_one_beam_without_a_penalty_is_greedy():
    for seed in range(5):
        toy = Toy(vocab_size=7, seed=seed)
        greedy = generate(toy, PROMPTS, max_new_tokens=17, stop_tokens=(2, 4))
        found = beam_search(toy, PROMPTS, max_new_tokens=17, num_beams=1, length_penalty=0.0, stop_tokens=(2, 4))
        assert [hypotheses[0].tokens for hypotheses in found] == greedy.tokens


def test_a_prompt_does_not_notice_the_others():
    toy = Toy(vocab_size=7, seed=11)
    together = beam_search(toy, PROMPTS, max_new_tokens=13, num_beams=3, stop_tokens=4, best=3)
    for prompt, hypotheses in zip(PROMPTS, together, strict=True):
        assert beam_search(toy, [prompt], max_new_tokens=13, num_beams=3, stop_tokens=4, best=3) == [hypotheses]


def test_prompts_that_are_done_are_not_computed():
    never, always = torch.full((5, 5), -math.inf), 0
    never[:, 1:4] = torch.tensor([0.1, 0.2, 0.3])
    never[4] = torch.tensor([9.0, 0, 0, 0, 0])  # after 4 the text ends almost surely, after others it cannot
    toy = Markov(never)
    rows = []
    decode_step = toy.decode_step
    toy.decode_step = lambda tokens, cache: rows.append(len(tokens)) or decode_step(tokens, cache)
    found = beam_search(toy, [[4], [1], [4]], max_new_tokens=5, num_beams=2, length_penalty=0.0, stop_tokens=always)
    assert [hypotheses[0].tokens for hypotheses in found] == [[0], [3, 3, 3, 3, 3], [0]]
    assert rows == [2, 2, 2, 2]


def test_texts_of_probability_zero_are_never_found():
    chain = torch.full((5, 5), -math.inf)
    chain[0, 1] = chain[1, 2] = chain[2, 0] = 0.0  # one text only
    chain[3, 3] = chain[4, 4] = 0.0
    found = beam_search(Markov(chain), [0], max_new_tokens=7, num_beams=4, best=4, stop_tokens=0)
    assert [hypothesis.tokens for hypothesis in found[0]] == [[1, 2, 0]]
    assert found[0][0].log_probability == 0.0


def test_a_vocabulary_of_nothing_but_ends():
    found = beam_search(Toy(vocab_size=3), [[0], [1, 2]], max_new_tokens=5, num_beams=2, best=2, stop_tokens=(0, 1, 2))
    assert [[len(hypothesis.tokens) for hypothesis in hypotheses] for hypotheses in found] == [[1, 1], [1, 1]]


def test_generate_takes_the_best_text():
    toy = Toy(vocab_size=7, seed=3)
    result = generate(toy, PROMPTS, max_new_tokens=11, num_beams=3, length_penalty=PowerPenalty(), stop_tokens=4)
    found = beam_search(toy, PROMPTS, max_new_tokens=11, num_beams=3, length_penalty=PowerPenalty(), stop_tokens=4)
    assert result.tokens == [hypotheses[0].tokens for hypotheses in found]
    assert result.sequences == [[*prompt, *text] for prompt, text in zip(PROMPTS, result.tokens, strict=True)]
    assert result.scores == [hypotheses[0].log_probability for hypotheses in found]
    assert result.finished == [hypotheses[0].finished for hypotheses in found]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("ends", [[], [5], [5, 17]], ids=str)
def test_the_texts_and_scores_are_hugging_faces(alpha, ends):
    model = tiny_gpt2(transformers())
    prompts = [[3, 14, 15, 9], [2], [6, 5, 3], [22, 0, 1, 2, 3, 4, 5]]
    theirs = model.generate(
        **left_padded(prompts),
        max_new_tokens=13,
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        length_penalty=alpha,
        early_stopping="never",
        eos_token_id=ends or None,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ours = beam_search(
        Hugging(model),
        prompts,
        max_new_tokens=13,
        num_beams=3,
        best=3,
        length_penalty=PowerPenalty(alpha),
        stop_tokens=ends,
    )
    flat = [hypothesis for hypotheses in ours for hypothesis in hypotheses]
    new = theirs.sequences[:, 7:]
    for hypothesis, text, score in zip(flat, new.tolist(), theirs.sequences_scores.tolist(), strict=True):
        length = len(hypothesis.tokens)
        assert hypothesis.tokens == text[:length]
        assert set(text[length:]) <= {1}  # their padding
        # they add log-probabilities in float32: 13 terms below 64 in size
        assert math.isclose(hypothesis.score, score, rel_tol=1e-5, abs_tol=13 * 64 * 2**-24)
    if ends:
        assert any(hypothesis.finished for hypothesis in flat)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": 2.0}, "num_beams=2.0"),
        ({"num_beams": 2, "best": 3}, "best=3"),
        ({"best": 0}, "best=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"length_penalty": math.nan}, "nan"),
        ({"length_penalty": "long"}, "long"),
        ({"length_penalty": 1e4}, "WuPenalty(alpha=10000.0)"),
        ({"length_penalty": -1e4}, "WuPenalty(alpha=-10000.0)"),
        ({"length_penalty": 10**400}, "up to 3 tokens"),
        ({"length_penalty": PowerPenalty(1e4)}, "PowerPenalty(alpha=10000.0)"),
        ({"length_penalty": PowerPenalty(-(10**4))}, "PowerPenalty(alpha=-10000)"),
    ],
)
def test_what_cannot_be_is_refused(arguments, word):
    with pytest.raises(InputError) as caught:
        beam_search(Toy(), [[1]], **{"max_new_tokens": 3, **arguments})
    assert word in caught.value.asked
    assert caught.value.because
    assert caught.value.instead


@pytest.mark.parametrize("alpha", [-90.0, 90.0])
def test_a_strong_length_penalty_decides_by_length(alpha):
    found = beam_search(
        Toy(), [[1]], max_new_tokens=5, num_beams=11, stop_tokens=4, length_penalty=PowerPenalty(alpha)
    )[0][0]
    assert len(found.tokens) == (5 if alpha > 0 else 1)
    assert math.isclose(found.score, found.log_probability / len(found.tokens) ** alpha)
