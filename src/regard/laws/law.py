"""What a law is: a statement, when it applies, where to look, and what must be equal there."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.laws.subjects.base import Subject

# The parameters of one trial: sizes, places, kinds of content. Small, printable, and what shrinking makes smaller.
Case = Mapping[str, int | str | bool | float]


class Dice:
    """Random numbers that depend on a seed and on what they are for, and on nothing else."""

    def __init__(self, seed: int, *words: object) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, *words)).encode()))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Standard normal numbers, drawn in float64 so that every precision sees the same ones, rounded."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to `high`, `high` not included."""
        return torch.randint(low, high, shape, generator=self.generator)

    def integer(self, low: int, high: int) -> int:
        return int(self.integers(low, high, 1))

    def permutation(self, count: int) -> Tensor:
        """An order other than the given one, wherever there is another."""
        identity = torch.arange(count)
        for _ in range(8):
            order = torch.randperm(count, generator=self.generator)
            if count < 2 or not torch.equal(order, identity):
                return order
        return identity.roll(1)

    def signs(self, *shape: int) -> Tensor:
        return self.integers(0, 2, *shape) * 2.0 - 1.0


@dataclass
class Observation:
    """Two tensors that the law says are equal, and how to speak of them.

    Attributes:
        expected: what the law promises, `(batch, token, ...)` where the output has tokens.
        actual: what was found, of the same shape.
        changed: what was done to the input, as in `input[0, 3]`.
        where: the `(batch, token)` entries that must agree; all of them if None.
        touched: the `(batch, token)` entries of the input that were changed, for the picture.
        tokens: the token that each entry of axis 1 stands for, where that is not its own number.
        row: the row of the batch that entry 0 of axis 0 stands for.
        output: what the tensors are called in messages.
        exact: equal in every bit, not up to rounding.
        reduction: the number of terms summed on the way to one entry.
        scale: the size of the numbers that rounding is relative to; the largest entry if None.
        effect: what the difference means, in the words of the law, when the default does not fit.
    """

    expected: Tensor
    actual: Tensor
    changed: str = ""
    where: Tensor | None = None
    touched: Tensor | None = None
    tokens: Sequence[int] | None = None
    row: int = 0
    output: str = "output"
    exact: bool = False
    reduction: int = 1
    scale: float | None = None
    effect: str = ""
    extra: dict[str, object] = field(default_factory=dict)


class Law:
    """One law. A subclass states it, says where to look, and yields what must be equal there.

    Adding a law is one file in `laws/articles/`: a subclass with the class attributes below, `cases` and `observe`, and
    one line in `laws/articles/__init__.py`. Searching, precision, flakiness and shrinking are not its business.
    """

    id: ClassVar[str]
    slug: ClassVar[str]
    title: ClassVar[str]  # the law's name in words
    headline: ClassVar[str]  # what a violation says first: "a later token changed an earlier output"
    statement: ClassVar[str]
    equation: ClassVar[str]
    catches: ClassVar[str]  # what real faults break it
    # What a subject must be able to do; `applies` says which is missing.
    needs: ClassVar[tuple[str, ...]] = ()
    # Which parameters of a case may shrink, and to what.
    smallest: ClassVar[Mapping[str, int]] = {"batch": 1, "tokens": 1}
    # Laws about a subject that changes from call to call are not excused by a subject that does.
    about_repetition: ClassVar[bool] = False

    def applies(self, subject: Subject) -> str | None:
        """Why the law says nothing about this subject, or None if it does."""
        for need in self.needs:
            if need not in subject.abilities:
                return subject.missing.get(need) or MISSING.get(need, f"the subject has no {need}")
        return None

    def cases(self, subject: Subject, fast: bool) -> Iterable[Case]:
        """Where to look, the most telling places first."""
        raise NotImplementedError

    def observe(self, subject: Subject, case: Case, dice: Dice) -> Iterator[Observation]:
        """What must be equal in this case. May raise what the subject raises; that is a refusal, not a violation."""
        raise NotImplementedError

    def possible(self, case: Case) -> bool:
        """Whether the parameters of a (shrunk) case fit together."""
        return True

    def measure(self, subject: Subject) -> str | None:
        """What `probe` says beside yes or no, such as the width of a window."""
        return None

    def __eq__(self, other: object) -> bool:
        """A law is the same as its slug or its number, so that either finds it in a list or a set of laws."""
        return other in (self.slug, self.id) if isinstance(other, str) else self is other

    def __hash__(self) -> int:
        return hash(self.slug)

    def __str__(self) -> str:
        return self.slug

    def __repr__(self) -> str:
        return f"<law {self.id} {self.slug}>"


MISSING = {
    "mask": "it takes no mask",
    "aligned": "its output has no row for each token",
    "float": "its inputs are whole numbers, which have no neighbours",
    "gradients": "it has no gradients",
    "weights": "its weights cannot be observed",
    "cache": "it has no cache",
    "operator": "it is not an operator on queries, keys and values",
    "lengths": "it takes one length only",
    "module": "it is not a module",
}


def equal(expected: Tensor, actual: Tensor, **how: object) -> Observation:
    """An observation that two tensors are equal."""
    return Observation(expected, actual, **how)  # type: ignore[arg-type]


def zero(actual: Tensor, scale: float, **how: object) -> Observation:
    """An observation that a tensor is zero, beside numbers of size `scale`."""
    return Observation(torch.zeros_like(actual), actual, scale=scale, **how)  # type: ignore[arg-type]


def finite(actual: Tensor, **how: object) -> Observation:
    """An observation that every entry is a number."""
    good = torch.where(actual.isfinite(), torch.zeros_like(actual), actual)
    how.setdefault("effect", "is not finite")
    return Observation(torch.zeros_like(actual), good, scale=1.0, **how)  # type: ignore[arg-type]


def true(fact: bool, effect: str, **how: object) -> Observation:
    """An observation of a plain fact; `effect` says what is wrong when it is not one."""
    return Observation(torch.zeros(1), torch.zeros(1) if fact else torch.full((1,), torch.inf), effect=effect, **how)  # type: ignore[arg-type]
