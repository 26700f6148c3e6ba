"""L12: in evaluation mode the same question has one answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.laws.law import Case, Dice, Law, Observation, equal
from regard.laws.subjects.base import Subject
from regard.laws.subjects.operator import Operator

# The probability that every dropout of a copy is given, so that one which forgets the mode cannot hide.
RAISED = 0.5
REPEATS = 4


class Determinism(Law):
    id = "L12"
    slug = "determinism"
    title = "Determinism"
    headline = "two equal calls in evaluation mode gave two answers."
    statement = "In evaluation mode equal calls give equal bits, however large the dropout that training would apply."
    equation = "f(x) = f(x), bit by bit"
    catches = (
        "dropout that ignores the mode, features drawn anew, memory read before it is written, inputs changed in place"
    )
    smallest = {"batch": 1, "tokens": 1}
    about_repetition = True

    def cases(self, subject: Subject, fast: bool) -> Iterator[Case]:
        dropouts = ["as it is", "raised"] if isinstance(subject.target, nn.Module) else ["as it is"]
        masks = ["none", "right"] if "mask" in subject.abilities else ["none"]
        sizes = [(2, 5), (1, 17), (3, 66)] if fast else [(2, 5), (1, 1), (1, 17), (3, 66), (2, 130), (5, 9), (1, 260)]
        sizes = [(batch, subject.lengths(tokens)[0]) for batch, tokens in sizes]
        for batch, tokens in dict.fromkeys(sizes):
            for dropout in dropouts:
                for mask in masks:
                    for gradients in (False, True) if "gradients" in subject.abilities else (False,):
                        yield _case(batch, tokens, dropout, mask, gradients)
        if isinstance(subject, Operator):
            for mask in masks:
                yield {**_case(2, 7, "as it is", mask, False), "keys": 11}
        for batch, tokens in ((2, 7), (1, 35)):
            for mask in masks:
                yield {**_case(batch, subject.lengths(tokens)[0], "as it is", mask, False), "memory": "filled"}

    def observe(self, subject: Subject, case: Case, dice: Dice) -> Iterator[Observation]:
        batch, tokens = int(case["batch"]), int(case["tokens"])
        asked = louder(subject) if case["dropout"] == "raised" else subject
        gradients = bool(case["gradients"])
        with torch.set_grad_enabled(gradients):
            call = _question(asked, batch, tokens, int(case["keys"]), case["mask"] != "none", gradients, dice)
            first = call()
            if case["memory"] == "filled":
                with _filled_memory():
                    again = call()
                yield equal(
                    first,
                    again,
                    changed="what lies in memory before it is written",
                    reduction=tokens + subject.channels,
                )
                return
            for number in range(1, REPEATS):
                yield equal(first, call(), changed=f"nothing; call {number + 1} of the same", exact=True)


def _case(batch: int, tokens: int, dropout: str, mask: str, gradients: bool) -> dict:
    return {
        "batch": batch,
        "tokens": tokens,
        "keys": 0,
        "dropout": dropout,
        "mask": mask,
        "gradients": gradients,
        "memory": "as it is",
    }


def _question(
    subject: Subject, batch: int, tokens: int, keys: int, masked: bool, gradients: bool, dice: Dice
) -> Callable[[], Tensor]:
    """A call that can be repeated, with the very same tensors each time."""
    if isinstance(subject, Operator):
        tensors = subject.tensors(dice, batch, tokens, keys or tokens)
        mask = right_padded(batch, keys or tokens)[:, None, None, :] if masked else None
        for tensor in tensors:
            tensor.requires_grad_(gradients)
        return lambda: subject.rows(subject.attend(*tensors, mask))
    x = subject.draw(batch, tokens, dice)
    if x.is_floating_point():
        x.requires_grad_(gradients)
    mask = right_padded(batch, tokens) if masked else None
    return lambda: subject.run(x, mask)


def right_padded(batch: int, tokens: int) -> Tensor:
    """A mask of which the rows end in padding, one token more in each; every row keeps half of its tokens."""
    hidden = torch.arange(batch)[:, None].clamp(max=tokens // 2)
    return torch.arange(tokens) < tokens - hidden


def louder(subject: Subject) -> Subject:
    """A copy of the subject with every dropout set to one half, still in evaluation mode."""
    other = subject.fresh()
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
    """While this lasts, memory that nobody has written yet holds what is no number."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(before, warn_only=warned)
