"""A graded question: the expected answer, accepted conventions, known mistakes, and sizes from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy

Kind = Literal["formula", "number", "matrix", "function"]
Sizes = dict[str, Any]
# Choices of a symbol in fresh sizes; those of one question differ, so that no size passes for another.
DOMAINS: dict[str, tuple[Any, ...]] = {
    "count": (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 19, 23),
    "real": ("-3/2", "-2/3", "1/4", "1/3", "5/4", "7/3"),
    "positive": ("1/4", "1/2", "2/3", "5/4", "7/3", "3"),
    "share": ("1/10", "1/5", "1/4", "2/5", "3/7", "5/8", "4/5"),
}


@dataclass(frozen=True)
class Symbol:
    """A symbol of a formula: its meaning and its domain (`count` is a positive integer, `share` between 0 "
    "and 1)."""

    name: str
    meaning: str
    domain: Literal["count", "real", "positive", "share"] = "count"


@dataclass(frozen=True)
class Question:
    """A question of a problem.

    Attributes:
        id: the problem, and after a slash the part: `udl-12.1/biases`. A problem's first question has no part.
        prompt: the question in one or two sentences.
        kind: `formula` (also answered by a number for given sizes), `number`, `matrix` or `function`.
        symbols: of a formula.
        expected: the answer of a formula question; other kinds have `solve`.
        solve: sizes (or the inputs of a function) -> the expected number or matrix.
        conventions: name -> formula, or a function like `solve`, of answers that are right but for a convention.
        mistakes: formula -> what is forgotten or confused in it.
        sizes: the sizes of the source; None if a formula is asked without sizes.
        draw: seed -> sizes, for `number`, `matrix` and `function` questions.
        holds: which values of the symbols make sense, such as D divisible by H.
        tolerance: relative, for numbers, matrices and functions.
    """

    id: str
    prompt: str
    kind: Kind = "formula"
    symbols: tuple[Symbol, ...] = ()
    expected: str = ""
    solve: Callable[[Sizes], Any] | None = None
    conventions: Mapping[str, Any] = field(default_factory=dict)
    mistakes: Mapping[str, str] = field(default_factory=dict)
    sizes: Sizes | None = None
    draw: Callable[[numpy.random.Generator], Sizes] | None = None
    holds: Callable[[Sizes], bool] = lambda sizes: True
    tolerance: float = 1e-3

    @property
    def problem(self) -> str:
        """The id of the page."""
        return self.id.partition("/")[0]

    def fresh_sizes(self, seed: int | None) -> Sizes | None:
        """Sizes from a seed; without a seed those of the source."""
        if seed is None:
            return self.sizes
        if self.draw is not None:
            return self.draw(numpy.random.default_rng(seed))
        chosen = random.Random(f"{self.id} {seed}")
        for _ in range(10_000):
            sizes = {symbol.name: chosen.choice(DOMAINS[symbol.domain]) for symbol in self.symbols}
            numbers = to_numbers(sizes)
            if len(set(numbers.values())) == len(numbers) and self.holds(numbers):
                return sizes
        raise AssertionError(f"{self.id}: no sizes are allowed")


def to_numbers(sizes: Mapping[str, Any]) -> dict[str, float]:
    """Sizes as floats; fractions are written as texts such as 2/3."""
    return {name: float(_divide(value)) if isinstance(value, str) else float(value) for name, value in sizes.items()}


def to_exact(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes as numbers of mpmath with fifty digits."""
    from regard.book.expression import context

    return {name: context.mpf(value) for name, value in sizes.items()}


def _divide(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / float(below or 1)


def counts(text: str) -> tuple[Symbol, ...]:
    """Symbols that are positive integers: `counts("N tokens, D channels")`."""
    return symbols(text)


def symbols(text: str) -> tuple[Symbol, ...]:
    """Symbols and their meanings, `N tokens, beta:real inverse temperature`."""
    found = []
    for part in text.split(","):
        name, _, meaning = part.strip().partition(" ")
        name, _, domain = name.partition(":")
        found.append(Symbol(name, meaning.strip(), domain or "count"))  # type: ignore[arg-type]
    return tuple(found)


def formula(id: str, prompt: str, names: str, expected: str, mistakes: Mapping[str, str], **options: Any) -> Question:
    """A formula question, written in one call."""
    return Question(id, prompt, "formula", symbols(names), expected, mistakes=mistakes, **options)


def draw_normal(generator: numpy.random.Generator, *shape: int) -> numpy.ndarray:
    """Normal numbers with two decimals, which can be copied by hand."""
    return numpy.round(generator.standard_normal(shape), 2)


def softmax(scores: numpy.ndarray, axis: int = -1) -> numpy.ndarray:
    """The plain definition, stable."""
    shifted = numpy.exp(scores - scores.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)


Questions = Sequence[Question]
