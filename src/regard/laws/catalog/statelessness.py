"""L22: the output does not depend on earlier or concurrent calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.arguments import expect_unchanged, expect_unwritten, record_arguments
from regard.laws.concurrent_calls import is_random, run_concurrently, run_interrupted, with_fixed_seed
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.masks import (
    PAIRS,
    list_row_hiding_masks,
    make_pair_mask,
    make_right_padding,
    make_token_mask,
    prepare_masked_call,
)
from regard.laws.variants import LONG, long_lengths

# What may happen between two equal calls, and its description in reports.
BETWEEN = {
    "other": "a call with other content",
    "longer": "a call with more tokens",
    "shorter": "a call with fewer tokens",
    "same start": "a call with the same first token",
    "same end": "a call with the same last token",
    "batch": "a call with more rows",
    "one row": "a call with one row",
    "masked": "a call with a mask",
    "other mask": "a call with another mask",
    "unmasked": "a call without a mask",
    "large": "a call with large numbers",
    "memory": "a call with other content in the same memory",
    "backward": "a backward pass",
    "modes": "training mode and back",
    "refused": "a call that was refused",
    "cached": "a text read with a cache",
    "many": "many calls of all lengths",
}
# Queries of the question and of the call before it, over the same keys. One query is a step of decoding.
QUERIES = ((3, 7), (7, 3), (1, 3), (11, 7), (7, 1), (1, 7), (7, 11), (3, 1))


class StatelessnessLaw(Law):
    id = "L22"
    slug = "statelessness"
    title = "Statelessness"
    headline = "an earlier call changed a later output."
    statement = "Outputs depend on the input alone: not on earlier calls, on other instances, or on other threads."
    equation = "f(b); f(a) = f(a) = f'(a) for another instance f'"
    catches = "tables and masks kept from the first length, caches shared between callers, results stored on the module"
    smallest = {"batch": 1, "tokens": 2}
    kinds = ("between",)
    minimum = 6
    about_repetition = True

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masks = ("none", "right") if "mask" in subject.abilities else ("none",)
        kinds = [kind for kind in BETWEEN if _can_happen_between(subject, kind)]
        tokens = subject.lengths(7)[0]
        for mask in masks:
            for kind in ("other", "longer", "shorter", "thread"):
                yield {"batch": 2, "tokens": tokens, "between": kind, "mask": mask}
        for mask in list_row_hiding_masks(subject)[:1] if tokens > 1 else ():
            yield {"batch": 2, "tokens": tokens, "between": "other", "mask": mask}
        for wanted in long_lengths(subject, fast, LONG):
            yield {"batch": 1, "tokens": wanted, "between": "shorter", "mask": masks[-1]}
        if isinstance(subject, OperatorAdapter):
            numbers = QUERIES[:4] if fast else QUERIES
            for queries, before in numbers if "lengths" in subject.abilities else ():
                for mask in ("none", "pairs") if "mask" in subject.abilities and not fast else ("none",):
                    sizes = {"batch": 2, "tokens": 7, "queries": queries, "before": before}
                    yield {**sizes, "between": "other queries", "mask": mask}
            for mask in PAIRS if "mask" in subject.abilities else ():
                yield {"batch": 2, "tokens": tokens, "between": "other masks of pairs", "mask": mask}
        if subject.caching is not None:
            yield {"batch": 2, "tokens": tokens, "between": "conversations", "mask": "none"}
        # One token may be mistaken for a decode step.
        yield {"batch": 2, "tokens": subject.lengths(1)[0], "between": "longer", "mask": "none"}
        for kind in kinds:
            for mask in masks if kind not in ("other", "longer", "shorter") else ():
                yield {"batch": 2, "tokens": tokens, "between": kind, "mask": mask}
        yield {"batch": 1, "tokens": tokens, "between": "other", "mask": "none"}
        yield {"batch": 2, "tokens": subject.lengths(11)[0], "between": "threads", "mask": "none"}
        for tokens in subject.lengths(66) if fast else subject.lengths(19, 66, 130):
            for kind in ("shorter", "longer", "other"):
                for mask in masks:
                    yield {"batch": 1 + tokens % 2, "tokens": tokens, "between": kind, "mask": mask}

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        with torch.no_grad():
            yield from self._observe_case(subject, case, rng)

    def _observe_case(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens, kind = int(case["batch"]), int(case["tokens"]), str(case["between"])
        how: dict[str, Any] = {"reduction": tokens + subject.channels}
        if kind == "conversations":
            yield from _observe_interleaved_caches(subject, batch, tokens, rng, how)
            return
        if kind in ("other queries", "other masks of pairs"):
            assert isinstance(subject, OperatorAdapter)
            yield from _observe_other_queries(subject, case, rng)
            return
        x = subject.draw(batch, tokens, rng)
        mask = make_token_mask(str(case["mask"]), batch, tokens)
        if is_random(subject, lambda one: one.run(x.clone(), _clone_mask(mask)), batch, tokens, case["mask"]):
            if kind in ("thread", "threads"):
                return  # they share one source of random numbers, as they may
            subject = with_fixed_seed(subject)
        if kind in ("thread", "threads"):
            yield from (_observe_interruption if kind == "thread" else _observe_concurrent_calls)(
                subject, x, mask, rng, how
            )
            return
        # An unused instance runs first; then the one in use, before and after another call.
        unused = subject.copy_unused().run(x.clone(), _clone_mask(mask))
        given = x.clone()
        tensors = {"input": given} if mask is None else {"input": given, "mask": mask}
        before = [tensor.clone() for tensor in tensors.values()]
        with record_arguments(subject) as arguments:
            first = subject.run(given, mask)
        yield from expect_unchanged(tensors, before)
        yield from expect_unwritten(arguments)
        yield expect_equal(unused, first, changed="earlier calls on this instance", **how)
        kept = first.clone()
        _make_call_between(kind, subject, given, rng)
        if kind != "memory":  # what was given may come back as it is
            yield expect_equal(kept, first, changed=BETWEEN[kind], output="the earlier output", exact=True)
        yield expect_equal(unused, subject.run(x.clone(), mask), changed=BETWEEN[kind], **how)
        # A new instance whose first call was the other one.
        other = subject.copy_unused()
        _make_call_between(kind, other, x.clone(), rng)
        yield expect_equal(
            unused, other.run(x.clone(), mask), changed=f"{BETWEEN[kind]}, the first of an instance", **how
        )
        if isinstance(subject, OperatorAdapter):
            yield from _observe_arguments(subject, batch, tokens, str(case["mask"]), rng)


def _clone_mask(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.clone()


def _can_happen_between(subject: Adapter, kind: str) -> bool:
    if kind in ("masked", "other mask", "unmasked"):
        return "mask" in subject.abilities
    return {
        "backward": "gradients" in subject.abilities,
        "modes": isinstance(subject.target, nn.Module),
        "cached": subject.caching is not None,
        "longer": "lengths" in subject.abilities,
        "shorter": "lengths" in subject.abilities,
        "large": "float" in subject.abilities,
    }.get(kind, True)


def _make_call_between(kind: str, subject: Adapter, x: Tensor, rng: Rng) -> None:
    """Make another call; whether it raises does not matter."""
    batch, tokens = x.shape[0], x.shape[1] if "lengths" in subject.abilities else subject.min_length
    longer, shorter = subject.lengths(2 * tokens + 3)[-1], subject.lengths(max(1, tokens // 2))[0]
    with suppress(Exception):
        if kind == "longer":
            subject.run(subject.draw(batch, longer, rng))
        elif kind == "shorter":
            subject.run(subject.draw(batch, shorter, rng))
        elif kind in ("same start", "same end"):
            other, end = subject.draw(batch, tokens, rng), slice(0, 1) if kind == "same start" else slice(-1, None)
            other[:, end] = x[:, end]
            subject.run(other)
        elif kind in ("batch", "one row"):
            subject.run(subject.draw(batch + 3 if kind == "batch" else 1, tokens, rng))
        elif kind == "masked":
            subject.run(subject.draw(batch, tokens, rng), make_right_padding(batch, tokens).flip(0))
        elif kind == "other mask":
            hidden = torch.ones(batch, tokens, dtype=torch.bool)
            hidden[:, 0], hidden[0, tokens // 2] = tokens < 2, False
            subject.run(x, hidden)
        elif kind == "large":
            subject.run(subject.scaled(x, 100.0, rng))
        elif kind == "memory":
            x.copy_(subject.draw(batch, tokens, rng))
            subject.run(x)
        elif kind == "backward":
            _run_backward(subject, subject.draw(batch, tokens, rng))
        elif kind == "modes":
            subject.target.train()
            subject.target.eval()
        elif kind == "refused" and isinstance(subject, OperatorAdapter):
            query, key, value = subject.tensors(rng, batch, tokens, tokens + 1)
            subject.attend(query, key, value[:, :, 1:])
        elif kind == "refused":
            wrong = torch.cat([x, x[..., :1]], -1) if x.is_floating_point() else torch.full_like(x, 10**6)
            subject.run(wrong)
        elif kind == "cached" and subject.caching is not None:
            state = subject.caching.start(batch, tokens)
            for piece in subject.draw(batch, tokens, rng).split([1] * tokens, 1):
                _, state = subject.caching.step(state, piece)
        elif kind == "many":
            for number in range(24):
                subject.run(subject.draw(1 + number % 3, subject.lengths(1 + number)[0], rng))
        else:
            subject.run(subject.draw(batch, tokens, rng))


def _run_backward(subject: Adapter, x: Tensor) -> None:
    with torch.enable_grad():
        if x.is_floating_point():
            x.requires_grad_()
        subject.run(x).square().sum().backward()
    if isinstance(subject.target, nn.Module):
        subject.target.zero_grad(set_to_none=True)


def _observe_arguments(subject: OperatorAdapter, batch: int, tokens: int, form: str, rng: Rng) -> Iterator[Observation]:
    """The tensors that an operator is given are as they were after the call."""
    query, key, value = subject.tensors(rng, batch, tokens, tokens)
    called, mask = prepare_masked_call(subject, form, batch, tokens, tokens, rng)
    given = {"query": query, "key": key, "value": value} | ({} if mask is None else {"mask": mask})
    before = [tensor.clone() for tensor in given.values()]
    called.attend(query, key, value, mask)
    yield from expect_unchanged(given, before)


def _observe_other_queries(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """A question to an operator, after one with other queries over as many keys, or with another mask of pairs."""
    batch, keys, form = int(case["batch"]), int(case["tokens"]), str(case["mask"])
    queries, before = int(case.get("queries", keys)), int(case.get("before", keys))
    question, other = subject.tensors(rng, batch, queries, keys), subject.tensors(rng, batch, before, keys)
    mask, another = (make_pair_mask(subject, form, batch, count, keys, rng) for count in (queries, before))

    def run(one: Adapter) -> Tensor:
        assert isinstance(one, OperatorAdapter)
        given = [tensor.clone() for tensor in question]
        return one.attend_rows(given[0], given[1], given[2], None if mask is None else mask.clone())

    if is_random(subject, run, batch, queries, keys, form):
        return  # reported by `determinism`
    unused = run(subject.copy_unused())
    changed = "a call with other queries" if "queries" in case else "a call with another mask"
    for one, first in ((subject, ""), (subject.copy_unused(), ", the first of an instance")):
        assert isinstance(one, OperatorAdapter)
        with suppress(Exception):
            one.attend(*other, another)
        yield expect_equal(unused, run(one), changed=changed + first, reduction=keys + subject.channels)
    yield from _observe_arguments(subject, batch, keys, form, rng)


def _observe_interruption(
    subject: Adapter, x: Tensor, mask: Tensor | None, rng: Rng, how: dict
) -> Iterator[Observation]:
    subject = subject.copy_unused()  # its state would make a second run differ from the first
    batch, tokens = x.shape[0], x.shape[1] if "lengths" in subject.abilities else subject.min_length
    others = [subject.draw(batch, tokens, rng), subject.draw(batch + 1, subject.lengths(tokens + 4)[-1], rng)]
    for alone, found, effect in run_interrupted(subject, x, mask, others):
        yield expect_equal(alone, found, changed="another call at the same time", effect=effect, **how)


def _observe_concurrent_calls(
    subject: Adapter, x: Tensor, mask: Tensor | None, rng: Rng, how: dict
) -> Iterator[Observation]:
    subject = subject.copy_unused()
    tokens = subject.lengths(2 * x.shape[1])[-1] if "lengths" in subject.abilities else 1
    for expected, found in run_concurrently(subject, [x, subject.draw(x.shape[0], tokens, rng)], None):
        yield expect_equal(expected, found, changed="another call at the same time", **how)


def _observe_interleaved_caches(
    subject: Adapter, batch: int, tokens: int, rng: Rng, how: dict
) -> Iterator[Observation]:
    """Two texts decoded in turn with two caches give the same outputs as each alone."""
    caching = subject.caching
    assert caching is not None
    texts = [subject.draw(batch, tokens, rng) for _ in range(2)]
    alone: list[list[Tensor]] = [[], []]
    mixed: list[list[Tensor]] = [[], []]
    for number, text in enumerate(texts):
        state = caching.start(batch, tokens)
        for piece in text.split(1, 1):
            row, state = caching.step(state, piece)
            alone[number].append(row)
    states = [caching.start(batch, tokens) for _ in texts]
    for place in range(tokens):
        for number, text in enumerate(texts):
            row, states[number] = caching.step(states[number], text[:, place : place + 1])
            mixed[number].append(row)
    for expected, found in zip(alone, mixed, strict=True):
        yield expect_equal(
            torch.cat(expected, 1), torch.cat(found, 1), changed="another text read at the same time", **how
        )
    kept = copy.deepcopy(states[0])
    more = subject.draw(batch, 1, rng)
    one, two = caching.step(copy.deepcopy(kept), more)[0], caching.step(kept, more)[0]
    yield expect_equal(one, two, changed="another copy of the cache", **how)
