"""The verdict of a law on a subject, and its smallest counterexample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from torch import Tensor

from regard.laws.law import Law

if TYPE_CHECKING:
    from regard.adapters.base import Adapter

Outcome = Literal["holds", "broken", "not applicable", "flaky", "undecided"]


@dataclass(frozen=True)
class Origin:
    """Where a counterexample was seen: the subject in that precision, the seed, and the threshold in bounds."""

    view: Adapter
    seed: int
    threshold: float


@dataclass
class Counterexample:
    """The smallest case found in which a law does not hold.

    Attributes:
        case: its parameters.
        remarks: at which other sizes it was tried: `{"batch": "fails at every size tried: 1, 2, 3"}`.
        changed: what was done to the input.
        place: the entry of the output that changed.
        moved: by how much; inf is "not a number".
        bound: what rounding can do.
        effect: what happened, in words, where "moved" does not fit.
        precision: the precision in which it shows.
        touched: `(batch, token)`, True where the input was changed.
        map: `(batch, token)`, by how much each output row moved.
        where: `(batch, token)`, False where outputs are free to move; None if none is.
        tokens: the token that each column of `map` stands for, where that is not its own number.
        row: the row of the batch that the first row of `map` stands for.
        expected, actual: the two sides, for drawing.
        origin: where it was seen, to run it again.
    """

    case: dict[str, Any]
    changed: str
    place: str
    moved: float
    bound: float
    effect: str = ""
    precision: str = ""
    remarks: dict[str, str] = field(default_factory=dict)
    touched: Tensor | None = None
    map: Tensor | None = None
    where: Tensor | None = None
    tokens: Sequence[int] | None = None
    row: int = 0
    expected: Tensor | None = None
    actual: Tensor | None = None
    extra: dict[str, object] = field(default_factory=dict)
    origin: Origin | None = field(default=None, repr=False)

    @property
    def happened(self) -> str:
        """What the output did, with its numbers."""
        if self.effect:
            return f"{self.place} {self.effect}"
        if self.moved == float("inf"):
            return f"{self.place} became NaN or infinite"
        bound = "every bit should agree" if self.bound == 0 else f"bound {self.bound:.1e}"
        return f"{self.place} moved by {self.moved:.1e}, {bound}"


@dataclass(eq=False)
class Verdict:
    """One law's word on one subject.

    Attributes:
        law: the law.
        outcome: holds, broken, not applicable, flaky, or undecided: too few cases could be tried.
        reason: why it is not applicable or undecided, what is flaky, or what was left out.
        counterexample: the smallest counterexample of a broken or flaky law.
        cases: the number of cases tried.
        tried: how many of them ran and compared something.
        refused: how many of them the subject refused to run.
        discarded: how many of them had an uninformative input, such as one beside a kink.
        claimed: whether the subject claims the law.
        inferred: whether that claim was inferred from the kind of the subject: neither the user nor its documentation
            makes it.
    """

    law: Law
    outcome: Outcome
    subject: str = ""
    reason: str = ""
    counterexample: Counterexample | None = None
    cases: int = 0
    tried: int = 0
    refused: int = 0
    discarded: int = 0
    seconds: float = 0.0
    replay: str = ""
    claimed: bool = True
    inferred: bool = False
    measured: str = ""

    @property
    def slug(self) -> str:
        return self.law.slug

    @property
    def id(self) -> str:
        return self.law.id

    @property
    def ok(self) -> bool:
        return self.outcome in ("holds", "not applicable")

    def script(self, target: str = "") -> str:
        """The counterexample as a file of plain torch; see `Report.script`."""
        from regard.laws.script import write_first

        return write_first(
            [self] if self.counterexample is not None else [], [self.replay] if self.counterexample else [], target
        )

    def __str__(self) -> str:
        if self.outcome == "holds":
            return f"{self.slug}: holds ({self.tried} cases{', an inferred claim' if self.inferred else ''})"
        if self.counterexample is None:
            return f"{self.slug}: {self.outcome}, {self.reason}" if self.reason else f"{self.slug}: {self.outcome}"
        return f"{self.slug}: {self.outcome}, {self.counterexample.happened}"


class Verdicts(tuple[Verdict, ...]):
    """Verdicts in the order of the laws; a law's slug or number finds its own.

    >>> from regard.laws import check
    >>> report = check(attend, kind="operator", claims=["determinism", "permutation"], fast=True)
    >>> "permutation" in report.verdicts, report.verdicts["L9"].outcome
    (True, 'holds')
    """

    def __new__(cls, verdicts: Iterable[Verdict] = ()) -> Verdicts:
        return super().__new__(cls, verdicts)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | tuple) else NotImplemented

    __hash__ = tuple.__hash__

    def __contains__(self, item: object) -> bool:
        if isinstance(item, str):
            return any(item in (verdict.slug, verdict.id) for verdict in self)
        return super().__contains__(item)

    @overload
    def __getitem__(self, item: str) -> Verdict: ...
    @overload
    def __getitem__(self, item: SupportsIndex) -> Verdict: ...
    @overload
    def __getitem__(self, item: slice) -> tuple[Verdict, ...]: ...
    def __getitem__(self, item: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(item, str):
            for verdict in self:
                if item in (verdict.slug, verdict.id):
                    return verdict
            raise KeyError(item)
        return super().__getitem__(item)
