"""Beam search."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.layers.modes import eval_mode
from regard.models.generation.penalties import LengthPenalty, parse_penalty
from regard.models.generation.prompts import Prompts, StopTokens, check_integer, parse_prompts, parse_stop_tokens
from regard.models.generation.protocol import GenerativeModel
from regard.models.generation.sampling import find_max_logits, find_top_logits, log_probabilities, to_float32_or_wider

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["Hypothesis", "beam_search", "search"]


class Hypothesis(NamedTuple):
    """A text that beam search found.

    Attributes:
        tokens: the new tokens, the stop token last if there is one.
        score: what hypotheses are compared by, the log-probability divided by the length penalty.
        log_probability: of the new tokens, given the prompt.
        finished: whether the text ended with a stop token, and not because it grew too long.
    """

    tokens: list[int]
    score: float
    log_probability: float
    finished: bool


def beam_search(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]] | Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    num_beams: int = 4,
    length_penalty: float | LengthPenalty = 0.6,
    stop_tokens: StopTokens = (),
    best: int = 1,
    attention_mask: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The most probable continuations, weighed by length, as far as `num_beams` texts side by side can find them.

        score(Y) = log p(Y | prompt) / lp(|Y|)        log p(Y | prompt) = sum_n log p(y_n | prompt, y_1..n-1)

    Y: new tokens, the stop token included. lp: the length penalty; a number alpha is `WuPenalty(alpha)`,
    ((5 + |Y|) / 6)^alpha, and `PowerPenalty(alpha)` is |Y|^alpha.

    At each step every live text is continued by every token. Of all continuations of a prompt the `num_beams` most
    probable are considered: those that end are kept in a pool of the `num_beams` best scores; the `num_beams` most
    probable that do not end live on. Texts of `max_new_tokens` tokens go to the pool as they are. Equal scores are
    decided by the rank of the text before, then by the lower token.

    A prompt is done as soon as no live text can still enter its `best` first hypotheses. The proof: what a text
    adds has log-probability of at most 0, so its score can never exceed the largest log p / lp(n) over the lengths
    n it may still reach, and this is at one of the two ends because lp is monotone. Stopping early never changes
    the result.

    Source: Wu et al., Google's Neural Machine Translation System (2016), equation 14; Vaswani et al., Attention
    Is All You Need (2017), section 6.1, with 4 beams and alpha 0.6. Ours has no coverage penalty. With
    `PowerPenalty` the result is that of Hugging Face's `generate(num_beams=..., early_stopping="never")`; their
    default, `early_stopping=False`, may stop before the best text is found.

    A tensor of padded prompts comes with its `attention_mask`, `(batch, token)`, 1 for real tokens.

    Returns, for each prompt, the `best` first hypotheses, the best one first (fewer if there are fewer texts).

    >>> from regard.models.generation import Markov, beam_search
    >>> p = torch.tensor([[0.0, 0.6, 0.4], [0.3, 0.35, 0.35], [1.0, 0.0, 0.0]])   # 0 ends a text and begins it
    >>> (hypothesis,), = beam_search(
    ...     Markov(p.log()), [0], max_new_tokens=5, num_beams=2, stop_tokens=0, length_penalty=0.0
    ... )
    >>> hypothesis.tokens, round(hypothesis.log_probability, 4)                    # 0.4 * 1; greedy takes the 0.6
    ([2, 0], -0.9163)
    """
    max_new_tokens, num_beams, best = (
        check_integer(*each, least=1)
        for each in (("max_new_tokens", max_new_tokens), ("num_beams", num_beams), ("best", best))
    )
    if best > num_beams:
        raise InputError(
            "There are fewer beams than hypotheses to return.",
            asked=f"best={best}, num_beams={num_beams}",
            because="the pool of finished texts has as many places as there are beams",
            instead=f"num_beams={best}, or best={num_beams}",
        )
    return search(
        model,
        parse_prompts(model, prompts, max_new_tokens, attention_mask),
        max_new_tokens,
        num_beams,
        length_penalty,
        stop_tokens,
        best,
    )


@torch.no_grad()
def search(
    model: GenerativeModel,
    read: Prompts,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float | LengthPenalty,
    stop_tokens: StopTokens,
    best: int = 1,
) -> list[list[Hypothesis]]:
    """`beam_search` of prompts that were read already, with numbers that were checked."""
    penalty = parse_penalty(length_penalty, max_new_tokens)
    wanted = _BeamSearch(model, max_new_tokens, num_beams, best, penalty, parse_stop_tokens(model, stop_tokens))
    with eval_mode(model):
        return [pool.hypotheses(best) for pool in wanted.run(read)]


@dataclass(frozen=True)
class _BeamSearch:
    """The arguments of a search, and its loop."""

    model: GenerativeModel
    max_new_tokens: int
    num_beams: int
    best: int
    penalty: LengthPenalty
    ends: frozenset[int]

    def run(self, read: Prompts) -> list[_FinishedBeams]:
        """Grows the texts of all prompts, and returns the finished ones of each."""
        device = read.tokens.device
        pools = [_FinishedBeams(self.num_beams) for _ in read.lists]
        is_end = torch.zeros(self.model.vocab_size, dtype=torch.bool, device=device)
        is_end[sorted(self.ends)] = True
        logits, cache = self.model.prefill(read.tokens, read.lengths, self.max_new_tokens)
        items = list(range(len(pools)))  # the prompts that are not done, in the order of the model's rows
        live = torch.zeros(len(items), 1, dtype=torch.float64, device=device)  # (item, beam) log-probabilities
        for length in range(1, self.max_new_tokens + 1):
            totals, parents, tokens = _rank_continuations(logits, live, self.num_beams + len(self.ends))
            stops = is_end[tokens]
            if length == self.max_new_tokens:
                self._add_finished(pools, items, length, totals, parents, tokens, stops)
                break
            if bool(stops[:, : self.num_beams].any()):
                self._add_finished(pools, items, length, totals, parents, tokens, stops)
            # Texts that do not end move to the front and keep their order; every item has as many of them.
            width = live.shape[1]
            lasting = min(self.num_beams, width * (self.model.vocab_size - len(self.ends)))
            order = stops.sort(dim=-1, stable=True).indices[:, :lasting]
            live, parents, tokens = (x.gather(-1, order) for x in (totals, parents, tokens))
            for item, *step in zip(items, parents.tolist(), tokens.tolist(), strict=True):
                pools[item].grow(*step)
            rows = parents + width * torch.arange(len(items), device=device)[:, None]
            stay = [place for place, item in enumerate(items) if self._can_improve(live[place], length, pools[item])]
            if not stay:
                break
            if len(stay) < len(items):
                rows, live, tokens = (x[stay] for x in (rows, live, tokens))
                items = [items[place] for place in stay]
            if not torch.equal(rows.flatten(), torch.arange(len(logits), device=device)):
                cache.reorder(rows.flatten())
            logits = self.model.decode_step(tokens.reshape(-1, 1), cache)
        return pools

    def _add_finished(self, pools: list[_FinishedBeams], items: list[int], length: int, *continued: Tensor) -> None:
        """Puts those of the first `num_beams` continuations that end, or all of them at last, into the pools."""
        divisor, last = self.penalty(length), length == self.max_new_tokens
        rows = zip(*(x[:, : self.num_beams].tolist() for x in continued), strict=True)
        for item, row in zip(items, rows, strict=True):
            for total, parent, token, stopped in zip(*row, strict=True):
                if (stopped or last) and total > -math.inf:
                    pools[item].add(total / divisor, total, parent, token, stopped)

    def _can_improve(self, live: Float[Tensor, "beam"], length: int, pool: _FinishedBeams) -> bool:
        """Whether the most probable live text of this length could still become one of the best."""
        if len(live) == 0:
            return False
        return self.penalty.bound(float(live[0]), length + 1, self.max_new_tokens) > pool.score_at(self.best)


def _rank_continuations(
    logits: Float[Tensor, "row vocabulary"], live: Float[Tensor, "item beam"], count: int
) -> tuple[Float[Tensor, "item rank"], Int[Tensor, "item rank"], Int[Tensor, "item rank"]]:
    """Continuations of each item in falling order of their log-probability: that, the beam before, the token.

    The `count` best of each beam are enough: `count` is the number of beams and of stop tokens together, so each
    beam offers as many tokens that do not end as could be wanted of all beams together.
    """
    logits = to_float32_or_wider(logits)
    items, num_beams = live.shape
    find_max_logits(logits)
    tokens = find_top_logits(logits, min(count, logits.shape[-1]))[1]
    # Rounding must not make a probability larger than 1: the early end relies on it.
    steps = log_probabilities(logits, tokens).double().clamp_(max=0.0)
    totals = (live[:, :, None] + steps.view(items, num_beams, -1)).flatten(1)
    totals, order = totals.sort(dim=-1, descending=True, stable=True)
    return totals, order // tokens.shape[-1], tokens.reshape(items, -1).gather(-1, order)


@dataclass
class _FinishedBeams:
    """The finished texts of one prompt, best first, and the trail that all its texts have left.

    A text is kept as its last token and the beam before it; the rest is read off the trail when it is asked for,
    so that a step costs nothing for the tokens written before.
    """

    places: int
    trail: list[tuple[list[int], list[int]]] = field(default_factory=list)  # parents and tokens of each step's beams
    keys: list[float] = field(default_factory=list)  # minus the scores, in rising order
    entries: list[tuple[float, int, int, int, bool]] = field(default_factory=list)

    def grow(self, parents: list[int], tokens: list[int]) -> None:
        """Notes the beams of one more step: the beam before each, and its token."""
        self.trail.append((parents, tokens))

    def add(self, score: float, total: float, parent: int, token: int, stopped: bool) -> None:
        """A text that ends with this token after that beam."""
        place = bisect.bisect_right(self.keys, -score)  # after its equals: who came first stays first
        if place < self.places:
            self.keys.insert(place, -score)
            self.entries.insert(place, (total, len(self.trail), parent, token, stopped))
            del self.keys[self.places :], self.entries[self.places :]

    def score_at(self, place: int) -> float:
        """The score of the `place`-th best text, counted from 1; -inf if there are fewer."""
        return -self.keys[place - 1] if len(self.keys) >= place else -math.inf

    def hypotheses(self, count: int) -> list[Hypothesis]:
        """The first `count` texts."""
        found = []
        for key, (total, depth, beam, token, stopped) in zip(self.keys[:count], self.entries, strict=False):
            text = [token]
            for parents, tokens in reversed(self.trail[:depth]):
                text.append(tokens[beam])
                beam = parents[beam]
            found.append(Hypothesis(text[::-1], -key, total, stopped))
        return found
