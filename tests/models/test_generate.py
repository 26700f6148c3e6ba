"""Generated text follows the model's distribution, row by row, independent of the batch; refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from twins import transformers
from writers import Hugging, Toy, left_padded, tiny_gpt2

from regard.errors import InputError
from regard.models.generation import generate, stream

PROMPTS = [[3, 1], [2], [1, 1, 3, 0, 2], [5, 8, 9]]


def greedy_text(toy, prompt, max_new_tokens, stop=()):
    """One text, from scratch at every step."""
    text = []
    while len(text) < max_new_tokens and not (text and text[-1] in stop):
        text.append(int(toy.after(prompt + text).argmax()))
    return text


def sampled(toy, prompts, seed=13, **more):
    return generate(toy, prompts, **{"max_new_tokens": 71, "temperature": 0.9, "top_p": 0.95, "seed": seed, **more})


# Greedy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [(), 4, (4, 7)], ids=str)
def test_greedy_takes_the_best_token_each_time(dtype, stop):
    toy = Toy(seed=1, dtype=dtype)
    result = generate(toy, PROMPTS, max_new_tokens=17, stop_tokens=stop)
    ends = {stop} if isinstance(stop, int) else set(stop)
    assert result.tokens == [greedy_text(toy, prompt, 17, ends) for prompt in PROMPTS]
    assert result.sequences == [prompt + text for prompt, text in zip(PROMPTS, result.tokens, strict=True)]
    assert result.finished == [text[-1] in ends for text in result.tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_scores_are_the_models_own_log_probabilities(temperature):
    toy = Toy(seed=1)
    result = generate(toy, PROMPTS, max_new_tokens=17, temperature=temperature, seed=3, stop_tokens=4)
    for prompt, text, score in zip(PROMPTS, result.tokens, result.scores, strict=True):
        rows = [toy.after(prompt + text[:n]).log_softmax(-1)[token].item() for n, token in enumerate(text)]
        # at most 17 sums and 17 logarithms of sums of 11 terms
        assert math.isclose(score, sum(rows), rel_tol=17 * 11 * 2**-52)


def test_rows_that_ended_are_no_longer_computed():
    toy = Toy(vocab_size=5, seed=3)
    prompts = [[token, other] for token in range(5) for other in range(4)]
    result = generate(toy, prompts, max_new_tokens=13, stop_tokens=(2,))
    lengths = [len(text) for text in result.tokens]
    assert result.tokens == [greedy_text(toy, prompt, 13, (2,)) for prompt in prompts]
    assert len(set(lengths)) > 3
    # a row of n tokens is read once with its prompt, and once more for each of its tokens but the last
    assert toy.reads == [sum(length >= step for length in lengths) for step in range(1, max(lengths) + 1)]


def test_the_stop_token_is_kept_and_can_be_taken_off():
    toy = Toy(vocab_size=5, seed=3)
    result = generate(toy, [[0], [1], [2]], max_new_tokens=3, stop_tokens=(2,))
    assert sorted(result.finished) == [False, True, True]
    for text, bare, ended in zip(result.tokens, result.without_stop(), result.finished, strict=True):
        assert text == ([*bare, 2] if ended else bare)
        assert 2 not in bare


def test_the_last_token_is_not_read():
    toy = Toy()
    generate(toy, [[1, 2, 3]], max_new_tokens=5)
    assert len(toy.reads) == 5
    assert toy.caches[0].length == 3 + 4


@pytest.mark.parametrize(
    "prompts",
    [
        [[3, 1, 4]],
        [3, 1, 4],
        ((3, 1, 4),),
        torch.tensor([3, 1, 4]),
        torch.tensor([[3, 1, 4]], dtype=torch.int32),
        [torch.tensor([3, 1, 4])],
        list(torch.tensor([[3, 1, 4]])),
        list(torch.tensor([3, 1, 4])),
        np.array([[3, 1, 4]], dtype=np.uint16),
        np.array([3, 1, 4]),
        [np.array([3, 1, 4])],
        list(np.array([3, 1, 4])),
    ],
    ids=str,
)
def test_a_prompt_may_be_given_in_many_forms(prompts):
    toy = Toy()
    assert generate(toy, prompts, max_new_tokens=5).sequences == [[3, 1, 4, *greedy_text(toy, [3, 1, 4], 5)]]


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    "stop", [torch.tensor([4, 7]), np.array([4, 7]), {4, 7}, [np.int32(4), torch.tensor(7)]], ids=str
)
def test_stop_tokens_may_be_given_in_many_forms(stop, num_beams):
    expected = generate(Toy(), PROMPTS, max_new_tokens=17, num_beams=num_beams, stop_tokens=(4, 7))
    assert any(expected.finished)
    assert generate(Toy(), PROMPTS, max_new_tokens=17, num_beams=num_beams, stop_tokens=stop) == expected


def test_no_stop_token_and_a_single_one_may_be_given_in_many_forms():
    assert generate(Toy(), PROMPTS, max_new_tokens=17, stop_tokens=None) == generate(Toy(), PROMPTS, max_new_tokens=17)
    assert generate(Toy(), PROMPTS, max_new_tokens=17, stop_tokens=torch.tensor(4)) == generate(
        Toy(), PROMPTS, max_new_tokens=17, stop_tokens=4
    )


@pytest.mark.parametrize("num_beams", [1, 2])
def test_prompts_are_read_once(num_beams):
    class Once(Toy):
        looks = 0

        @property
        def context_length(self):
            self.looks += 1

        @context_length.setter
        def context_length(self, value):
            assert value is None

    toy = Once()
    generate(toy, iter(PROMPTS), max_new_tokens=3, num_beams=num_beams)
    assert toy.looks == 1


# Chance


def test_a_seed_repeats_the_text():
    toy = Toy()
    first, again, other = sampled(toy, PROMPTS), sampled(toy, PROMPTS), sampled(toy, PROMPTS, seed=14)
    assert first == again
    assert all(a != b for a, b in zip(first.tokens, other.tokens, strict=True))
    torch.manual_seed(5)
    free = sampled(toy, PROMPTS, seed=None)
    torch.manual_seed(5)
    assert sampled(toy, PROMPTS, seed=None) == free
    assert sampled(toy, PROMPTS, seed=None) != free


def test_samples_of_a_row_are_independent_of_its_batch():
    toy = Toy()
    stop = 4  # the others leave at different times
    result = sampled(toy, PROMPTS, stop_tokens=stop)
    assert len({len(text) for text in result.tokens}) > 1
    for row, prompt in enumerate(PROMPTS):
        others = [[7, 7, 7, 7, 7, 7, 7]] * row + [prompt] + [[9]]
        assert sampled(toy, others, stop_tokens=stop).tokens[row] == result.tokens[row]


def test_equal_prompts_get_different_texts():
    texts = sampled(Toy(), [[1, 2]] * 5).tokens
    assert len({tuple(text) for text in texts}) == 5


def test_a_longer_text_begins_like_the_shorter():
    short, long = sampled(Toy(), PROMPTS, max_new_tokens=67), sampled(Toy(), PROMPTS, max_new_tokens=131)
    assert [text[:67] for text in long.tokens] == short.tokens


# Streams


def test_a_stream_gives_the_tokens_of_generate_as_they_are_made():
    toy = Toy(seed=3)
    arguments = dict(max_new_tokens=13, stop_tokens=(2, 6), temperature=0.8, seed=1)
    result = generate(toy, PROMPTS, **arguments)
    told = []
    assert generate(toy, PROMPTS, on_token=lambda row, token: told.append((row, token)), **arguments) == result
    toy.reads.clear()
    pairs, reads = [], []
    for pair in stream(toy, PROMPTS, **arguments):
        pairs.append(pair)
        reads.append(len(toy.reads))
    assert pairs == told
    assert [[token for row, token in pairs if row == wanted] for wanted in range(4)] == result.tokens
    assert reads[:5] == [1, 1, 1, 1, 2]  # a token is given before the next is asked for


def test_a_stream_checks_at_once_and_runs_lazily():
    toy = Toy()
    with pytest.raises(InputError):
        stream(toy, [[11]], max_new_tokens=3)
    stream(toy, [[10]], max_new_tokens=3)
    assert toy.reads == []


def test_gradients_are_off_in_the_model_and_on_outside():
    toy = Toy()
    for _ in stream(toy, PROMPTS, max_new_tokens=3):
        assert torch.is_grad_enabled()
    generate(toy, PROMPTS, max_new_tokens=3, num_beams=2)
    assert len(toy.grads) == 6
    assert not any(toy.grads)


class Moody(nn.Module, Toy):
    """A toy that is a module, with a part in training and a part frozen in evaluation."""

    def __init__(self):
        nn.Module.__init__(self)
        Toy.__init__(self)
        self.awake, self.frozen = nn.Dropout(), nn.Dropout().eval()
        self.modes = []

    def _logits(self, state):
        self.modes.append((self.training, self.awake.training, self.frozen.training))
        if len(self.modes) == 11:
            raise RuntimeError("the eleventh reading fails")
        return super()._logits(state)


def test_the_model_rests_while_it_writes_and_is_as_it_was_afterwards():
    model = Moody()
    before = (True, True, False)

    def mode():
        return (model.training, model.awake.training, model.frozen.training)

    generate(model, [[1]], max_new_tokens=3)
    assert mode() == before
    generate(model, [[1]], max_new_tokens=3, num_beams=2)
    assert mode() == before
    unfinished = stream(model, [[1]], max_new_tokens=3)
    next(unfinished)
    unfinished.close()
    assert mode() == before
    with pytest.raises(RuntimeError, match="eleventh"):
        generate(model, [[1]], max_new_tokens=5)
    assert mode() == before
    assert set(model.modes) == {(False, False, False)}
    model.eval()
    generate(model, [[1]], max_new_tokens=2)
    assert mode() == (False, False, False)


# Others


@pytest.mark.parametrize("ends", [[], [5], [5, 17]], ids=str)
def test_greedy_texts_of_unequal_prompts_are_hugging_faces(ends):
    model = tiny_gpt2(transformers())
    prompts = [[3, 14, 15, 9], [2], [6, 5, 3], [22, 0, 1, 2, 3, 4, 5]]
    theirs = model.generate(
        **left_padded(prompts), max_new_tokens=19, do_sample=False, eos_token_id=ends or None, pad_token_id=1
    )
    ours = generate(Hugging(model), prompts, max_new_tokens=19, stop_tokens=ends)
    assert any(ours.finished) == bool(ends)
    for text, expected in zip(ours.tokens, theirs[:, 7:].tolist(), strict=True):
        assert text == expected[: len(text)]
        assert set(expected[len(text) :]) <= {1}


# Contexts


def test_the_context_is_filled_to_the_last_token():
    toy = Toy(context=13)
    assert len(generate(toy, [[1] * 9, [2]], max_new_tokens=4).tokens[0]) == 4
    with pytest.raises(InputError, match="room for 4") as caught:
        generate(toy, [[1] * 9, [2]], max_new_tokens=5)
    assert caught.value.instead == "max_new_tokens=4 or less"
    with pytest.raises(InputError, match="room for 0") as caught:
        generate(toy, [[1] * 13], max_new_tokens=2)
    assert "last 11 tokens" in caught.value.instead
    with pytest.raises(InputError) as caught:
        generate(toy, [[1] * 17], max_new_tokens=17)
    assert "shorter prompt" in caught.value.instead


def test_the_source_of_an_encoder_decoder_does_not_count():
    toy = Toy(context=5, prompt_fills_context=False)
    result = generate(toy, [[1] * 7, [2]], max_new_tokens=5)
    assert result.sequences == result.tokens == [greedy_text(toy, prompt, 5) for prompt in ([1] * 7, [2])]
    with pytest.raises(InputError, match="max_new_tokens=6") as caught:
        generate(toy, [[1] * 7], max_new_tokens=6)
    assert caught.value.instead == "max_new_tokens=5 or less"


# Refusals


@pytest.mark.parametrize("write", [generate, stream])
@pytest.mark.parametrize(
    ("prompts", "arguments", "word"),
    [
        ([[1, 2], [3, 11]], {}, "prompts[1][1] = 11"),
        ([[1, -1]], {}, "prompts[0][1] = -1"),
        (torch.tensor([[0, 1, 99]]), {}, "prompts[0][2] = 99"),
        ([[1], []], {}, "Prompt 1 is empty"),
        ([], {}, "no prompt"),
        (torch.zeros(0, 3, dtype=torch.int64), {}, "no prompt"),
        (torch.zeros(3, 0, dtype=torch.int64), {}, "Prompt 0 is empty"),
        (torch.zeros(2, 3), {}, "torch.float32"),
        (torch.zeros(2, 3, 5, dtype=torch.int64), {}, "(2, 3, 5)"),
        ("hello", {}, "not text"),
        ([["hello"]], {}, "not text"),
        ([[1.5]], {}, "not text"),
        ([[1, True]], {}, "not text"),
        (5, {}, "prompts=5"),
        (None, {}, "prompts=None"),
        (np.array(5), {}, "prompts=array(5)"),
        (np.array([[1.0]]), {}, "not text"),
        (np.zeros((1, 1, 1), dtype=int), {}, "not text"),
        ([[1]], {"max_new_tokens": torch.tensor([3, 4])}, "max_new_tokens=[3, 4]"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
        ([[1]], {"temperature": -1}, "temperature=-1"),
        ([[1]], {"temperature": 1.0, "top_p": 2.0}, "top_p=2.0"),
        ([[1]], {"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ([[1]], {"top_k": 5}, "Nothing is drawn"),
        ([[1]], {"top_p": 0.5}, "Nothing is drawn"),
        ([[1]], {"stop_tokens": 11}, "stop_tokens=11"),
        ([[1]], {"stop_tokens": (0, -2)}, "stop_tokens=-2"),
        ([[1]], {"stop_tokens": 1.5}, "stop_tokens=1.5"),
        ([[1]], {"stop_tokens": torch.tensor([1.5])}, "stop_tokens=1.5"),
        ([[1]], {"stop_tokens": torch.tensor([[1]])}, "stop_tokens=[1]"),
        ([[1]], {"seed": 1.5}, "seed=1.5"),
    ],
)
def test_what_cannot_be_written_is_refused(write, prompts, arguments, word):
    with pytest.raises(InputError) as caught:
        write(Toy(), prompts, **{"max_new_tokens": 3, **arguments})
    assert word in str(caught.value)
    assert caught.value.asked or caught.value.found
    assert caught.value.because
    assert caught.value.instead


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": 3, "temperature": 0.5}, "temperature=0.5"),
        ({"num_beams": 3, "top_k": 5}, "top_k=5"),
        ({"num_beams": 3, "on_token": print}, "on_token"),
    ],
)
def test_what_beams_cannot_do_is_refused(arguments, word):
    with pytest.raises(InputError) as caught:
        generate(Toy(), [[1]], max_new_tokens=3, **arguments)
    assert word in caught.value.asked


def test_logits_that_are_no_numbers_stop_the_text():
    toy = Toy()
    toy.table[:, 3] = math.nan
    for more in ({}, {"temperature": 1.0}, {"num_beams": 2}):
        with pytest.raises(InputError, match="NaN in row 0"):
            generate(toy, [[1]], max_new_tokens=3, **more)
