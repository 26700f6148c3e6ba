"""Text generation: all tokens in one call, or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.kernels.greedy import find_greedy
from regard.layers.modes import eval_mode
from regard.models.generation.beam import search
from regard.models.generation.penalties import LengthPenalty
from regard.models.generation.prompts import Prompts, StopTokens, check_integer, parse_prompts, parse_stop_tokens
from regard.models.generation.protocol import GenerativeModel
from regard.models.generation.sampling import RowGenerators, Sampler, log_probabilities, to_float32_or_wider

if TYPE_CHECKING:
    from jaxtyping import Int

__all__ = ["Generation", "generate", "stream"]


@dataclass(frozen=True)
class Generation:
    """Generated texts, one entry for each prompt.

    Attributes:
        tokens: the new tokens, the stop token last where there is one.
        sequences: the prompt and the new tokens; of an encoder-decoder the new tokens alone.
        scores: log-probability of the new tokens under the model itself, whatever the temperature and the cuts.
        finished: whether the text ended with a stop token, and not because `max_new_tokens` was reached.
    """

    tokens: list[list[int]]
    sequences: list[list[int]]
    scores: list[float]
    finished: list[bool]

    def without_stop(self) -> list[list[int]]:
        """The new tokens without the stop token, ready for a tokenizer."""
        return [text[:-1] if ended else text for text, ended in zip(self.tokens, self.finished, strict=True)]


def generate(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]] | Sequence[int] | Int[Tensor, "batch token"] | Int[Tensor, "token"],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int = 1,
    length_penalty: float | LengthPenalty = 0.6,
    stop_tokens: StopTokens = (),
    seed: int | None = None,
    attention_mask: Tensor | None = None,
    on_token: Callable[[int, int], object] | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

        y_n = argmax p(y | prompt, y_1..n-1)         temperature 0, greedy
        y_n ~ p^(1/T), cut to top_k and top_p        temperature T > 0, see `Sampler`
        Y = argmax log p(Y | prompt) / lp(|Y|)   num_beams > 1, see `beam_search`

    Prompts may have unequal lengths; one prompt may be a plain list or a tensor of one axis. A tensor of padded
    prompts comes with its `attention_mask`, `(batch, token)`, 1 for real tokens, as Hugging Face's tokenizers give
    it. A text ends after a token of `stop_tokens`, which it keeps; the model then no longer computes its row.

    With a `seed` the same call writes the same tokens, and what a row draws does not depend on the other rows of
    the batch; without one, the seed comes from torch's own generator. `on_token(row, token)` is called with every
    token as soon as it is known.

    Computed without gradients and with the model in evaluation mode; afterwards it is in the mode it was.

    >>> from regard.models.generation import Markov, generate
    >>> p = torch.tensor([[0.0, 0.6, 0.4], [0.3, 0.4, 0.3], [1.0, 0.0, 0.0]])     # 0 ends a text and begins it
    >>> generate(Markov(p.log()), [[0], [1, 2]], max_new_tokens=3, stop_tokens=0).tokens
    [[1, 1, 1], [0]]
    >>> generate(Markov(p.log()), [0], max_new_tokens=3, num_beams=2, stop_tokens=0)
    Generation(tokens=[[2, 0]], sequences=[[0, 2, 0]], scores=[-0.916...], finished=[True])
    """
    num_beams = check_integer("num_beams", num_beams, least=1)
    if num_beams > 1:
        _check_beam_arguments(num_beams, temperature, top_k, top_p, on_token)
        max_new_tokens = check_integer("max_new_tokens", max_new_tokens, least=1)
        read = parse_prompts(model, prompts, max_new_tokens, attention_mask)
        found = search(model, read, max_new_tokens, num_beams, length_penalty, stop_tokens)
        texts = [hypotheses[0] for hypotheses in found]
        tokens, finished = [text.tokens for text in texts], [text.finished for text in texts]
        return Generation(
            tokens, _join_prompts(model, read, tokens), [text.log_probability for text in texts], finished
        )
    read, steps = _check_and_start(
        model, prompts, max_new_tokens, temperature, top_k, top_p, stop_tokens, seed, attention_mask
    )
    tokens = [[] for _ in read.lists]
    scores = [0.0 for _ in read.lists]
    finished = [False for _ in read.lists]
    for step in steps:
        for row, token, log_probability, ended in zip(*step, strict=True):
            tokens[row].append(token)
            scores[row] += log_probability
            finished[row] = ended
            if on_token is not None:
                on_token(row, token)
    return Generation(tokens, _join_prompts(model, read, tokens), scores, finished)


def stream(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]] | Sequence[int] | Int[Tensor, "batch token"] | Int[Tensor, "token"],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: StopTokens = (),
    seed: int | None = None,
    attention_mask: Tensor | None = None,
) -> Iterator[tuple[int, int]]:
    """The tokens of `generate` as they are generated: pairs of row and token, the stop token of a row included.

    The model is in evaluation mode until the stream ends or is closed; stop reading at any time.

    >>> from regard.models.generation import Markov, stream
    >>> p = torch.tensor([[0.0, 0.6, 0.4], [0.3, 0.4, 0.3], [1.0, 0.0, 0.0]])
    >>> list(stream(Markov(p.log()), [[0], [1, 2]], max_new_tokens=3, stop_tokens=0))
    [(0, 1), (1, 0), (0, 1), (0, 1)]
    """
    _, steps = _check_and_start(
        model, prompts, max_new_tokens, temperature, top_k, top_p, stop_tokens, seed, attention_mask
    )
    return _yield_tokens(steps)


class _GenerationStep(NamedTuple):
    """One new token of each unfinished row."""

    rows: list[int]
    tokens: list[int]
    log_probabilities: list[float]
    ended: list[bool]


def _check_and_start(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]] | Sequence[int] | Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_tokens: StopTokens,
    seed: int | None,
    attention_mask: Tensor | None,
) -> tuple[Prompts, Iterator[_GenerationStep]]:
    """Check all arguments before the first token is generated."""
    max_new_tokens = check_integer("max_new_tokens", max_new_tokens, least=1)
    sampler = Sampler(temperature, top_k, top_p)
    if temperature == 0 and not (top_k is None and top_p is None):
        raise InputError(
            "Nothing is drawn at temperature 0.",
            asked=f"temperature=0, top_k={top_k}, top_p={top_p}",
            because="the best token is taken for certain, which top_k and top_p cannot change",
            instead="temperature=1.0 as well, or neither top_k nor top_p",
        )
    if seed is not None:
        seed = check_integer("seed", seed, least=0)
    read = parse_prompts(model, prompts, max_new_tokens, attention_mask)
    return read, _generate_steps(model, read, sampler, max_new_tokens, parse_stop_tokens(model, stop_tokens), seed)


@torch.no_grad()  # not inference_mode: what a model computes once and keeps must serve training as well
def _generate_steps(
    model: GenerativeModel,
    read: Prompts,
    sampler: Sampler,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    seed: int | None,
) -> Iterator[_GenerationStep]:
    """The decode loop: sample, yield, drop finished rows, feed the tokens back."""
    rows = list(range(len(read.lists)))
    generators = RowGenerators(seed, len(rows)) if sampler.temperature > 0 else None
    with eval_mode(model):
        logits, cache = model.prefill(read.tokens, read.lengths, max_new_tokens)
        for step in range(max_new_tokens):
            logits = to_float32_or_wider(logits)
            greedy = find_greedy(logits) if generators is None else None
            if greedy is not None:
                tokens, scores = greedy
            else:
                tokens = sampler.sample(logits, None if generators is None else generators.draw(rows))
                scores = log_probabilities(logits, tokens[:, None])[:, 0]
            written = tokens.tolist()
            ended = [token in stop_tokens for token in written]
            yield _GenerationStep(rows, written, scores.tolist(), ended)
            if all(ended) or step == max_new_tokens - 1:
                return
            if any(ended):
                stay = [place for place, end in enumerate(ended) if not end]
                index = torch.tensor(stay, device=tokens.device)
                cache.reorder(index)
                tokens = tokens[index]
                rows = [rows[place] for place in stay]
            logits = model.decode_step(tokens[:, None], cache)


def _yield_tokens(steps: Iterator[_GenerationStep]) -> Iterator[tuple[int, int]]:
    for step in steps:
        yield from zip(step.rows, step.tokens, strict=True)


def _join_prompts(model: GenerativeModel, read: Prompts, tokens: list[list[int]]) -> list[list[int]]:
    if not model.prompt_fills_context:
        return [list(text) for text in tokens]
    return [prompt + text for prompt, text in zip(read.lists, tokens, strict=True)]


def _check_beam_arguments(
    num_beams: int, temperature: float, top_k: int | None, top_p: float | None, on_token: object
) -> None:
    drawn = {"temperature": temperature or None, "top_k": top_k, "top_p": top_p}
    if given := [f"{name}={value}" for name, value in drawn.items() if value is not None]:
        raise InputError(
            "Beam search draws nothing.",
            asked=f"num_beams={num_beams}, {', '.join(given)}",
            because="it searches for the most probable text, deterministically",
            instead="num_beams=1 to draw, or temperature=0 without top_k and top_p to search",
        )
    if on_token is not None:
        raise InputError(
            "Beam search has no tokens before the end.",
            asked=f"num_beams={num_beams}, on_token={on_token!r}",
            because="the best text may change with every step",
            instead="num_beams=1 to follow the tokens, or no on_token",
        )
