"""L12: in eval mode equal calls give equal outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.arguments import expect_unchanged, expect_unwritten, record_arguments
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.masks import PAIRS, list_row_hiding_masks, make_token_mask, prepare_masked_call
from regard.laws.variants import LONG, half_precisions, head_sizes, long_lengths

# The probability that every dropout of a copy is given, so that dropout which ignores eval mode shows.
RAISED = 0.5
REPEATS = 4


class DeterminismLaw(Law):
    id = "L12"
    slug = "determinism"
    title = "Determinism"
    headline = "two equal calls in evaluation mode gave different outputs."
    statement = "In eval mode equal calls give bit-identical outputs, whatever the dropout rate of training."
    equation = "f(x) = f(x), bit by bit"
    catches = (
        "dropout that ignores the mode, random features redrawn in every call, uninitialised memory, inputs modified "
        "in place"
    )
    smallest = {"batch": 1, "tokens": 1}
    kinds = ("mask", "gradients", "dropout", "memory")
    minimum = 4
    about_repetition = True

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        dropouts = ["as it is", "raised"] if isinstance(subject.target, nn.Module) else ["as it is"]
        masks = ["none", "right"] if "mask" in subject.abilities else ["none"]
        sizes = (
            [(2, 5), (1, 1), (1, 17), (3, 66)]
            if fast
            else [(2, 5), (1, 1), (3, 1), (1, 17), (3, 66), (2, 130), (5, 9), (1, 260)]
        )
        sizes = [(batch, subject.lengths(tokens)[0]) for batch, tokens in sizes]
        # A row of which everything is hidden; half precision, wide heads and long sequences, which have their own code.
        first = sizes[0][1]
        for mask in list_row_hiding_masks(subject) if first > 1 else ():
            yield _make_case(2, first, "as it is", mask, False)
        for name in half_precisions(subject):
            yield _make_case(2, first, "as it is", masks[-1], False) | {"dtype": name}
        for tokens in long_lengths(subject, fast, LONG):
            yield _make_case(1, tokens, "as it is", masks[-1], False)
        for wide in head_sizes(subject):
            yield _make_case(2, first, "as it is", masks[-1], False) | wide
        for batch, tokens in dict.fromkeys(sizes):
            for dropout in dropouts:
                for mask in masks:
                    for gradients in (False, True) if "gradients" in subject.abilities else (False,):
                        yield _make_case(batch, tokens, dropout, mask, gradients)
        if isinstance(subject, OperatorAdapter):
            # One query is a decode step, which often has a code path of its own.
            for queries, keys in ((1, 7), (7, 11), (1, 66), (11, 7)):
                for mask in masks:
                    yield {**_make_case(2, queries, "as it is", mask, False), "keys": keys}
            for mask in PAIRS if "mask" in subject.abilities else ():
                yield _make_case(2, 7, "as it is", mask, False)
                yield {**_make_case(2, 3, "as it is", mask, False), "keys": 7}
        for batch, tokens in ((2, 7), (1, 35)):
            for mask in masks:
                yield {**_make_case(batch, subject.lengths(tokens)[0], "as it is", mask, False), "memory": "filled"}

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens = int(case["batch"]), int(case["tokens"])
        called = raise_dropout(subject) if case["dropout"] == "raised" else subject
        gradients = bool(case["gradients"])
        with torch.set_grad_enabled(gradients):
            call, given = _prepare_call(called, batch, tokens, int(case["keys"]), str(case["mask"]), gradients, rng)
            before = [tensor.detach().clone() for tensor in given.values()]
            with record_arguments(called) as arguments:
                first = call()
            yield from expect_unchanged(given, before)
            yield from expect_unwritten(arguments)
            if case["memory"] == "filled":
                with _filled_memory():
                    again = call()
                yield expect_equal(
                    first,
                    again,
                    changed="what lies in memory before it is written",
                    reduction=tokens + subject.channels,
                )
                return
            for number in range(1, REPEATS):
                yield expect_equal(first, call(), changed=f"nothing; call {number + 1} of the same", exact=True)


def _make_case(batch: int, tokens: int, dropout: str, mask: str, gradients: bool) -> dict:
    return {
        "batch": batch,
        "tokens": tokens,
        "keys": 0,
        "dropout": dropout,
        "mask": mask,
        "gradients": gradients,
        "memory": "as it is",
    }


def _prepare_call(
    subject: Adapter, batch: int, tokens: int, keys: int, form: str, gradients: bool, rng: Rng
) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
    """A call that can be repeated, and the tensors that it is given: the very same ones each time."""
    if isinstance(subject, OperatorAdapter):
        query, key, value = subject.tensors(rng, batch, tokens, keys or tokens)
        given = {"query": query, "key": key, "value": value}
        for tensor in given.values():
            tensor.requires_grad_(gradients)
        called, mask = prepare_masked_call(subject, form, batch, tokens, keys or tokens, rng)
        given |= {} if mask is None else {"mask": mask}
        return lambda: subject.rows(called.attend(query, key, value, mask)), given
    x = subject.draw(batch, tokens, rng)
    if x.is_floating_point():
        x.requires_grad_(gradients)
    mask = make_token_mask(form, batch, tokens)
    return lambda: subject.run(x, mask), {"input": x} if mask is None else {"input": x, "mask": mask}


def raise_dropout(subject: Adapter) -> Adapter:
    """A copy of the subject with every dropout set to one half, still in evaluation mode."""
    other = subject.copy_unused()
    for part in other.target.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = RAISED
        for name, value in list(vars(part).items()):
            named = "drop" in name.lower() or name.lower() in ("p", "prob", "rate", "attn_p", "resid_p")
            if named and isinstance(value, float) and 0 <= value < 1 and math.isfinite(value):
                setattr(part, name, RAISED)
    other.target.eval()
    return other


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Within this context, uninitialised memory holds NaN."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(before, warn_only=warned)
