"""What a law is: a statement, when it applies, the cases to try, and what must be equal in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from regard.adapters.rng import Rng

if TYPE_CHECKING:
    from regard.adapters import Adapter

# The parameters of one trial: sizes, places, kinds of content. Small, printable, and what shrinking makes smaller.
Case = Mapping[str, int | str | bool | float]
# The names under which parameters enter the seed of a case; other names would draw other numbers.
SEED_NAMES = {"path": "way", "last_queries": "asked", "comparison": "ask"}


@dataclass
class Observation:
    """Two tensors that the law says are equal, and how a report describes them.

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
        by_design: whether a difference here may be meant: it is what another kind of attention would show.
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
    by_design: bool = False
    extra: dict[str, object] = field(default_factory=dict)


class Discard(Exception):
    """A case whose input is uninformative: it counts neither as tried nor as refused."""


def discard(reason: str) -> NoReturn:
    """Leave the case: what was observed before still counts against the law, but the case was not tried."""
    raise Discard(reason)


class Law:
    """One law. A subclass states it, lists the cases to try, and yields what must be equal in each.

    Adding a law is one file in `laws/catalog/`: a subclass with the class attributes below, `cases` and `observe`, and
    one line in `laws/catalog/__init__.py`. Searching, precision, flakiness and shrinking are done by `laws/search.py`.
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
    # The parameters that tell one kind of case from another: the side of the padding, the place of a cut.
    kinds: ClassVar[tuple[str, ...]] = ()
    # The fewest kinds of case that must really run before the law is said to hold, and the fewest cases: not refused,
    # not discarded.
    minimum: ClassVar[int] = 4
    # Laws about a subject that changes from call to call are not excused by a subject that does.
    about_repetition: ClassVar[bool] = False

    def applies(self, subject: Adapter) -> str | None:
        """Why the law says nothing about this subject, or None if it does."""
        for need in self.needs:
            if need not in subject.abilities:
                return subject.missing.get(need) or MISSING.get(need, f"the subject has no {need}")
        return None

    def cases(self, subject: Adapter, fast: bool) -> Iterable[Case]:
        """The cases to try, the most informative first."""
        raise NotImplementedError

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        """What must be equal in this case.

        May raise what the subject raises: that is a refusal, not a violation. `discard` leaves a case whose input turns
        out to say nothing; a case that yields nothing is not counted.
        """
        raise NotImplementedError

    def make_rng(self, seed: int, case: Case) -> Rng:
        """The random generator of a case: the same for equal cases, in any order."""
        return Rng(seed, self.slug, tuple((SEED_NAMES.get(name, name), value) for name, value in case.items()))

    def kind_of(self, case: Case) -> tuple[int | str | bool | float | None, ...]:
        """What tells this case from those of other kinds."""
        return tuple(case.get(name) for name in self.kinds)

    def possible(self, case: Case) -> bool:
        """Whether the parameters of a (shrunk) case fit together."""
        return True

    def is_ordinary(self, case: Case) -> bool:
        """Whether a subject that breaks the law here, and in every such case, may not mean to keep it at all.

        Then a claim that was only inferred is dropped; see `Observation.by_design`.
        """
        return False

    def measure(self, subject: Adapter) -> str | None:
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


def expect_equal(expected: Tensor, actual: Tensor, **how: object) -> Observation:
    """An observation that two tensors are equal."""
    return Observation(expected, actual, **how)  # type: ignore[arg-type]


def expect_zero(actual: Tensor, scale: float, **how: object) -> Observation:
    """An observation that a tensor is zero, beside numbers of size `scale`."""
    return Observation(torch.zeros_like(actual), actual, scale=scale, **how)  # type: ignore[arg-type]


def expect_finite(actual: Tensor, **how: object) -> Observation:
    """An observation that every entry is a number."""
    good = torch.where(actual.isfinite(), torch.zeros_like(actual), actual)
    how.setdefault("effect", "is not finite")
    return Observation(torch.zeros_like(actual), good, scale=1.0, **how)  # type: ignore[arg-type]


def expect_true(fact: bool, effect: str, of: Tensor | None = None, reading: str = "", **how: object) -> Observation:
    """An observation of a plain fact; `effect` says what is wrong when it is not one.

    `reading` is an expression in `value`, which stands for the tensor `of`, that is True if the fact is one; a script
    that reproduces the observation has it.
    """
    if of is not None:
        how["extra"] = {"fact": (of, reading)}
    return Observation(torch.zeros(1), torch.zeros(1) if fact else torch.full((1,), torch.inf), effect=effect, **how)  # type: ignore[arg-type]
