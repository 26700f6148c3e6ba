"""Results are checked before anything is timed: ours against float64, every peer against ours."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.peers import Form

MOST_SCORES = 2**24  # scores of the float64 reference, which forms the square: 128 MiB for each tensor of them


class WrongResult(AssertionError):
    """A competitor computes something else."""


class Outcome(NamedTuple):
    """The output, and the gradients of query, key and value where the case has them."""

    output: Tensor
    gradients: tuple[Tensor, ...]


def outcome(case: Case, form: Form, inputs: tuple[Tensor, ...]) -> Outcome:
    query, key, value, grad_output = inputs
    if not case.backward:
        with torch.no_grad():
            return Outcome(form(query, key, value), ())
    output = form(query, key, value)
    return Outcome(output.detach(), torch.autograd.grad(output, (query, key, value), grad_output))


def assert_ours(case: Case, ours: Outcome, inputs: tuple[Tensor, ...]) -> float:
    """Compare with the float64 reference on as much as fits; returns the largest error.

    Heads and batch rows do not touch each other, so some of them stand for all. Of a long sequence only the last
    queries are compared, and then no gradients of key and value, to which every query contributes.
    """
    part = _select_subset(case)
    whole_length = part.queries == case.shape[2]
    query, key, value, grad_output = (tensor.detach()[: part.batch, : part.heads].double() for tensor in inputs)
    # The last query sits on the last key, so fewer queries are the last ones.
    query, grad_output = (tensor[:, :, -part.queries :] for tensor in (query, grad_output))
    double = tuple(tensor.requires_grad_(case.backward) for tensor in (query, key, value))
    truth = outcome(case, lambda *qkv: case.attend(*qkv, "reference"), (*double, grad_output))

    def cut(tensor: Tensor, tokens: int) -> Tensor:
        return tensor[: part.batch, : part.heads, -tokens:]

    pairs = [(cut(ours.output, part.queries), truth.output)]
    if case.backward:
        pairs.append((cut(ours.gradients[0], part.queries), truth.gradients[0]))
        if whole_length:
            others = zip(ours.gradients[1:], truth.gradients[1:], strict=True)
            pairs += [(cut(mine, case.shape[2]), true) for mine, true in others]
    return _largest_error(pairs, case.shape[2], "ours is wrong against float64")


def assert_peer(case: Case, name: str, peer: Outcome, ours: Outcome) -> float:
    """Compare a peer with ours, all of it; returns the largest difference."""
    pairs = [(peer.output, ours.output), *zip(peer.gradients, ours.gradients, strict=True)]
    return _largest_error(pairs, case.shape[2], f"{name} and ours differ")


class _Subset(NamedTuple):
    batch: int
    heads: int
    queries: int


def _select_subset(case: Case) -> _Subset:
    batch, heads, tokens, _ = case.shape
    if tokens**2 > MOST_SCORES:
        return _Subset(1, 1, MOST_SCORES // tokens)
    squares = MOST_SCORES // tokens**2
    return _Subset(min(batch, squares // heads), heads, tokens) if squares >= heads else _Subset(1, squares, tokens)


def _largest_error(pairs: list[tuple[Tensor, Tensor]], length: int, message: str) -> float:
    largest = 0.0
    for found, true in pairs:
        error = float((found - true).abs().max())
        # Rounding errors of a sum of n terms grow like the root of n; 8 leaves room for the products and the exp.
        bound = 8 * torch.finfo(torch.float32).eps * math.sqrt(length) * float(true.abs().max())
        if not error <= bound:  # so written that NaN fails
            raise WrongResult(f"{message} by {error:.1e}, where {bound:.1e} is allowed")
        largest = max(largest, error)
    return largest
