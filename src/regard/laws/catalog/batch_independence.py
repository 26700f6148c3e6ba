"""L10: the output of a batch row does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.concurrent_calls import is_random, run_concurrently, run_interrupted, with_fixed_seed
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.masks import SIDES, draw_operator_mask, token_mask
from regard.laws.probes import draw_other_content, find_magnitude
from regard.laws.variants import LONG, half_precisions, head_sizes, long_lengths

# Random numbers are drawn for the batch as a whole. These compare batches of one shape, which draw the same ones.
OF_ONE_SHAPE = ("others", "between")


class BatchIndependenceLaw(Law):
    id = "L10"
    slug = "batch-independence"
    title = "Batch independence"
    headline = "a row of the batch changed with the other rows."
    statement = (
        "A row alone gives the same output as in a batch of any size and order, whatever the other rows contain or "
        "mask, whatever was called before, and under concurrent calls."
    )
    equation = "f(X)_i = f(X_i)"
    catches = "attention across the batch, a softmax over axis 0, one row's positions used for all, a shared buffer"
    smallest = {"batch": 2, "tokens": 1, "queries": 1, "keys": 1}
    kinds = ("comparison",)
    minimum = 4
    about_repetition = True

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masked = "mask" in subject.abilities
        sides = ["none", *SIDES] if masked else ["none"]
        heads = subject.heads if isinstance(subject, OperatorAdapter) else 4
        turn = 0
        sizes = (
            [(2, 5), (3, 5), (5, 5), (2, 2), (9, 3)]
            if fast
            else [(2, 5), (3, 5), (5, 5), (2, 2), (8, 7), (heads, 6), (4, 3), (17, 2)]
        )
        # Longer than a block, early: long inputs often take another code path.
        long = subject.lengths(67)[0]
        for comparison in ("alone", "others"):
            yield {"comparison": comparison, "batch": 2, "tokens": long, "mask": "none"}
        for tokens in long_lengths(subject, fast, LONG):
            yield {"comparison": "others", "batch": 2, "tokens": tokens, "mask": "none"}
        for name in half_precisions(subject):
            for comparison in ("alone", "others"):
                yield {
                    "comparison": comparison,
                    "batch": 3,
                    "tokens": subject.lengths(5)[0],
                    "mask": "none",
                    "dtype": name,
                }
        for wide in head_sizes(subject):
            yield {"comparison": "alone", "batch": 3, "tokens": 5, "mask": "none", **wide}
        for batch, wanted in dict.fromkeys(sizes):
            tokens = subject.lengths(wanted)[0]
            for comparison in ("alone", "others", "order", "expanded", "between"):
                side = sides[turn % len(sides)]
                turn += 1
                for mask in dict.fromkeys(["none", side]):
                    yield {"comparison": comparison, "batch": max(batch, 2), "tokens": tokens, "mask": mask}
        if isinstance(subject, OperatorAdapter):
            for batch, queries, keys in ((2, 3, 7), (3, 7, 3), (2, 1, 5), (4, 4, 4)):
                for mask in ("none", "pairs", "heads", "shared") if masked else ("none",):
                    yield {"comparison": "operator", "batch": batch, "queries": queries, "keys": keys, "mask": mask}
        for tokens in subject.lengths(5, 33):
            for mask in ("none", "right") if masked else ("none",):
                yield {"comparison": "threads", "batch": 2, "tokens": tokens, "mask": mask}
        for tokens in subject.lengths(17, 33, 130) if not fast else subject.lengths(43):
            for comparison in ("alone", "others"):
                for mask in sides:
                    yield {"comparison": comparison, "batch": 3, "tokens": tokens, "mask": mask}

    def possible(self, case: Case) -> bool:
        return case["mask"] in ("none", "pairs", "heads", "shared") or int(case["tokens"]) > 1

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if case["comparison"] == "operator":
            assert isinstance(subject, OperatorAdapter)
            yield from _observe_operator(subject, case, rng)
            return
        batch, tokens = int(case["batch"]), int(case["tokens"])
        x = subject.draw(batch, tokens, rng)
        mask = None
        if case["mask"] != "none":
            mask = token_mask(str(case["mask"]), batch, tokens, max(tokens // 2, 1), rng)
        if is_random(subject, lambda one: one.run(x.clone(), mask), batch, tokens, case["mask"]):
            if case["comparison"] not in OF_ONE_SHAPE:
                return
            subject = with_fixed_seed(subject)
        observe = {
            "alone": _observe_row_alone,
            "others": _observe_other_rows_changed,
            "order": _observe_reordered_rows,
            "expanded": _observe_expanded_row,
        }
        observe |= {"between": _observe_call_in_between, "threads": _observe_concurrent_calls}
        yield from observe[str(case["comparison"])](subject, x, mask, rng)


def _select_rows(tensor: Tensor | None, index: slice | Tensor) -> Tensor | None:
    return None if tensor is None else tensor[index]


def _expect_same_rows(
    subject: Adapter, expected: Tensor, actual: Tensor, mask: Tensor | None, changed: str, row: int = 0
) -> Observation:
    where = mask if mask is not None and "aligned" in subject.abilities else None
    reduction = subject.channels + (expected.shape[1] if expected.ndim > 1 else 1)
    return expect_equal(
        expected, actual, where=where, changed=changed, row=row, reduction=reduction, scale=find_magnitude(expected)
    )


def _observe_row_alone(subject: Adapter, x: Tensor, mask: Tensor | None, rng: Rng) -> Iterator[Observation]:
    together = subject.run(x, mask)
    for row in range(len(x)):
        one = slice(row, row + 1)
        alone = subject.run(x[one], _select_rows(mask, one))
        yield _expect_same_rows(
            subject, alone, together[one], _select_rows(mask, one), f"row {row} alone, against a batch of {len(x)}", row
        )


def _observe_other_rows_changed(subject: Adapter, x: Tensor, mask: Tensor | None, rng: Rng) -> Iterator[Observation]:
    before = subject.run(x, mask)
    for row in sorted({0, len(x) - 1}):
        one = slice(row, row + 1)
        for factor in (1.0, 1000.0) if x.is_floating_point() else (1.0,):
            other = draw_other_content(subject, x, rng, factor)
            other[one] = x[one]
            after = subject.run(other, mask)
            yield _expect_same_rows(
                subject, before[one], after[one], _select_rows(mask, one), f"every row but {row}", row
            )
        if mask is not None:
            # The same rows, of which the others hide something else.
            masks = mask.flip(1).clone()
            masks[one] = mask[one]
            after = subject.run(x, masks)
            yield _expect_same_rows(
                subject, before[one], after[one], _select_rows(mask, one), f"the mask of every row but {row}", row
            )


def _observe_reordered_rows(subject: Adapter, x: Tensor, mask: Tensor | None, rng: Rng) -> Iterator[Observation]:
    order = rng.permutation(len(x))
    before, after = subject.run(x, mask), subject.run(x[order], _select_rows(mask, order))
    yield _expect_same_rows(subject, before[order], after, _select_rows(mask, order), "the order of rows")


def _observe_expanded_row(subject: Adapter, x: Tensor, mask: Tensor | None, rng: Rng) -> Iterator[Observation]:
    """One row shown several times without a copy of it."""
    one, hidden = x[:1], _select_rows(mask, slice(0, 1))
    alone = subject.run(one, hidden)
    wide = None if hidden is None else hidden.expand(len(x), -1)
    several = subject.run(one.expand(len(x), *[-1] * (x.ndim - 1)), wide)
    yield _expect_same_rows(subject, alone.expand_as(several), several, wide, "one row, expanded to a batch")


def _observe_call_in_between(subject: Adapter, x: Tensor, mask: Tensor | None, rng: Rng) -> Iterator[Observation]:
    before = subject.run(x, mask)
    subject.run(subject.draw(len(x) + 1, x.shape[1] if "lengths" in subject.abilities else 1, rng))
    subject.run(draw_other_content(subject, x, rng), mask)
    yield _expect_same_rows(subject, before, subject.run(x, mask), mask, "a call with another batch in between")


def _observe_concurrent_calls(subject: Adapter, x: Tensor, mask: Tensor | None, rng: Rng) -> Iterator[Observation]:
    """Concurrent calls: one during the other at chosen places, and both freely."""
    subject, other = subject.copy_unused(), draw_other_content(subject, x, rng)
    for alone, found, effect in run_interrupted(subject, x, mask, [other]):
        observation = _expect_same_rows(subject, alone, found, mask, "a call from another thread at the same time")
        observation.effect = effect
        yield observation
    for alone, found in run_concurrently(subject, [x, other], mask):
        yield _expect_same_rows(subject, alone, found, mask, "calls from another thread at the same time")


def _observe_operator(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    batch, queries, keys, form = int(case["batch"]), int(case["queries"]), int(case["keys"]), str(case["mask"])
    query, key, value = subject.tensors(rng, batch, queries, keys)
    mask = draw_operator_mask(subject, form, batch, queries, keys, rng)

    def run(one: Adapter) -> Tensor:
        assert isinstance(one, OperatorAdapter)
        return one.attend_rows(query, key, value, mask)

    if is_random(subject, run, batch, queries, keys, form):
        return
    whole = run(subject)
    for row in range(batch):
        one = slice(row, row + 1)
        part = mask if mask is None or len(mask) == 1 else mask[one]
        alone = subject.attend_rows(query[one], key[one], value[one], part)
        yield _expect_same_rows(subject, alone, whole[one], None, f"row {row} alone, against a batch of {batch}", row)
