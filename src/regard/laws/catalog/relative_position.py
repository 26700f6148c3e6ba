"""L15: for equal content, scores depend on the distance of two tokens alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.adapters import attention_watch
from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.probes import find_visible_lengths, table_coarseness
from regard.laws.score_reading import is_kernelised, read_own_scores

# Places that an ordinary input moves by.
FEW = 7


class RelativePositionLaw(Law):
    id = "L15"
    slug = "relative-position"
    title = "Relative position"
    headline = "a score depends on absolute positions, not only on their distance."
    statement = (
        "Shifting a pair of tokens together leaves its score unchanged; at equal positions a rotation has no effect."
    )
    equation = "score(i, j) = score(i + s, j + s) for equal content,  score(i, i) = scale q . k at every i"
    catches = (
        "rotary encodings that are not rotations, offsets counted from the wrong end, absolute tables, biases of a "
        "shifted distance"
    )
    smallest = {"batch": 1, "queries": 1, "keys": 2, "tokens": 3}
    kinds = ("by", "shift", "tokens", "keys")
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        if isinstance(subject, OperatorAdapter) or hasattr(subject, "shifted"):
            return None
        if "lengths" not in subject.abilities:
            return "its tokens cannot be named from outside"
        if find_visible_lengths(subject) or _pads_left(subject):
            return None
        return "its weights cannot be observed, and it takes no mask that would move its tokens"

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        if hasattr(subject, "shifted"):
            for shift in (1, 7, 100):
                for tokens in subject.lengths(5, 17):
                    yield {"batch": 2, "tokens": tokens, "shift": shift, "by": "shift"}
        if isinstance(subject, OperatorAdapter):
            for tokens in (5, 67, 17) if fast else (5, 67, 3, 17, 33, 131):
                yield {"batch": 1, "queries": tokens, "keys": tokens, "by": "weights"}
                yield {"batch": 2, "queries": tokens, "keys": tokens, "by": "own place"}
            for queries, keys in (
                ((1, 7), (3, 11), (5, 6), (2, 67)) if fast else ((1, 7), (3, 11), (5, 6), (2, 67), (17, 131))
            ):
                yield {"batch": 1, "queries": queries, "keys": keys, "by": "weights"}
            return
        for tokens in find_visible_lengths(subject)[: 2 if fast else None]:
            yield {"batch": 2, "tokens": tokens, "by": "weights"}
        if _pads_left(subject):
            for shift in (1, 6):
                yield {"batch": 2, "tokens": subject.lengths(7)[0], "shift": shift, "by": "padding"}

    def is_ordinary(self, case: Case) -> bool:
        return int(case.get("shift", 1)) <= FEW

    def possible(self, case: Case) -> bool:
        return "queries" not in case or int(case["queries"]) <= int(case["keys"])

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if case["by"] == "shift" or case["by"] == "padding":
            yield from self._observe_shift(subject, case, rng)
        elif not isinstance(subject, OperatorAdapter):
            yield from self._observe_layer(subject, case, rng)
        elif case["by"] == "weights":
            yield from self._observe_operator(subject, case, rng)
        elif not is_kernelised(subject):
            yield from self._observe_own(subject, case, rng)

    def _observe_operator(self, subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
        query, key, _ = subject.tensors(rng, batch, 1, 1)
        query, key = (part.expand(-1, -1, keys, -1).contiguous() for part in (query, key))
        square = subject.matrix(query, key)
        if queries == keys:
            yield from expect_by_distance(square, "the same token everywhere")
            return
        found = subject.matrix(query[:, :, :queries].contiguous(), key)
        ends = [square[:, :, -queries:], square[:, :, :queries]]
        if subject.conventions.align == "start":
            ends.reverse()
        if not {"alignment", "cache"} & set(subject.context):
            # How unequal lengths are aligned was not declared: either end will do.
            ends.sort(key=lambda end: float((end - found).abs().nan_to_num(0, 0, 0).max()))
        (expected, known), (actual, seen) = find_logit_steps(ends[0]), find_logit_steps(found)
        both = known & seen
        yield expect_equal(
            torch.where(both, expected, 0.0).transpose(1, 2),
            torch.where(both, actual, 0.0).transpose(1, 2),
            output="scores",
            changed=f"the last {queries} of {keys} queries alone",
            reduction=keys + subject.dim,
            scale=_find_logit_size(query, key, square),
        )

    def _observe_own(self, subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
        """The score at equal places, for the same content in each: what a rotation must leave alone."""
        batch, tokens = int(case["batch"]), int(case["keys"])
        same = _ConstantTokens(rng)
        query, key, score, clear = read_own_scores(subject, same, batch, tokens, subject.dim)
        if not bool(clear.any()):
            return
        last = clear.double().cumsum(-1).argmax(-1, keepdim=True)
        expected = score.gather(-1, last).expand_as(score)
        yield expect_equal(
            torch.where(clear, expected, 0.0).transpose(1, 2),
            torch.where(clear, score, 0.0).transpose(1, 2),
            output="scores",
            changed="the same token everywhere",
            effect="of a token with itself depends on its place",
            reduction=tokens + subject.dim,
            scale=_find_logit_size(query, key, None),
        )

    def _observe_layer(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens = int(case["batch"]), int(case["tokens"])
        if not attention_watch.fair_lengths(subject, batch, tokens):
            return
        x = subject.draw(batch, tokens, rng)
        x = x[:, :1].expand_as(x).contiguous()
        maps = [weights for weights in subject.weights(x) if weights.shape[-2:] == (tokens, tokens)]
        output = subject.run(x)
        apart = (output - output[:, :1]).abs().max() if "aligned" in subject.abilities else torch.inf
        same = bool(apart <= 1e3 * subject.eps * output.abs().max())
        coarse = table_coarseness(subject)
        for weights in maps if same else maps[:1]:  # deeper layers too, if equal tokens stay equal
            yield from expect_by_distance(weights, "the same token everywhere", coarse)

    def _observe_shift(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens, shift = int(case["batch"]), int(case["tokens"]), int(case["shift"])
        x = subject.draw(batch, tokens, rng)
        if case["by"] == "shift":
            before, after = subject.shifted(x, 0), subject.shifted(x, shift)  # type: ignore[attr-defined]
        else:
            front = subject.draw(batch, shift, rng)
            mask = torch.ones(batch, tokens + shift, dtype=torch.bool)
            mask[:, :shift] = False
            before = subject.run(x, mask[:, shift:])
            after = subject.run(torch.cat([front, x], 1), mask)[:, shift:]
        yield expect_equal(
            before,
            after,
            changed=f"every place moved by {shift}",
            by_design=True,
            reduction=tokens + subject.channels,
            scale=float(before.abs().nan_to_num(0, 0, 0).max()) * table_coarseness(subject),  # other rows of a table
        )


class _ConstantTokens(Rng):
    """A random generator that gives every token the same content."""

    def __init__(self, rng: Rng) -> None:
        self.generator = rng.generator

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        one = super().normal(*shape[:-2], 1, shape[-1], dtype=dtype)
        return one.expand(shape).clone()


def find_logit_steps(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The growth of the logit from one key to the next, `(batch, head, query, key - 1)`, and where both are seen."""
    positive = (weights[..., 1:] > 1e-30) & (weights[..., :-1] > 1e-30)
    logits = weights.clamp(min=1e-300 if weights.dtype == torch.float64 else 1e-37).log()
    return torch.where(positive, logits[..., 1:] - logits[..., :-1], 0.0), positive


def expect_by_distance(weights: Tensor, changed: str, coarse: float = 1.0) -> Iterator[Observation]:
    """Steps of square weights depend on the distance alone: each equals the first of its diagonal."""
    found, positive = find_logit_steps(weights)
    tokens = weights.shape[-1]
    distance = torch.arange(tokens)[:, None] - torch.arange(1, tokens)[None, :] + tokens
    flat, defined = found.flatten(2), positive.flatten(2)
    places = distance.flatten().expand_as(flat)
    # Of each distance the step that came first; a distance that is seen once has nothing to be compared with.
    order = torch.arange(flat.shape[-1]).expand_as(flat)
    first = torch.full((*flat.shape[:2], 2 * tokens + 1), flat.shape[-1]).scatter_reduce(
        -1, places, torch.where(defined, order, flat.shape[-1]), "amin"
    )
    expected = flat.gather(-1, first.clamp(max=flat.shape[-1] - 1).gather(-1, places))
    expected = torch.where(defined, expected, 0.0).unflatten(-1, found.shape[-2:])
    largest = float(weights[weights > 1e-30].log().abs().max()) if bool((weights > 1e-30).any()) else 1.0
    yield expect_equal(
        expected.transpose(1, 2),
        found.transpose(1, 2),
        output="scores",
        changed=changed,
        by_design=True,
        reduction=tokens,
        scale=(1.0 + largest) * coarse,
    )


def _find_logit_size(query: Tensor, key: Tensor, weights: Tensor | None) -> float:
    """The size of the logits that rounding is relative to."""
    size = 1.0 + float(query.norm(dim=-1).max() * key.norm(dim=-1).max())
    if weights is not None and bool((weights > 1e-30).any()):
        size += float(weights[weights > 1e-30].log().abs().max())
    return size


def _pads_left(subject: Adapter) -> bool:
    """Whether tokens can be moved by padding before them."""
    able = {"mask", "aligned", "lengths"} <= subject.abilities
    return able and subject.kind != "operator" and subject.conventions.left is not False
