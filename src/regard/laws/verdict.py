"""What a law says of a subject, and the smallest case that makes it say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex, overload

from torch import Tensor

from regard.laws.law import Law

Outcome = Literal["holds", "broken", "not applicable", "flaky"]


@dataclass
class Witness:
    """The smallest case found in which a law does not hold.

    Attributes:
        case: its parameters.
        remarks: which parameters do not matter: `{"batch": "any size fails"}`.
        changed: what was done to the input.
        place: where the output answered.
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

    @property
    def happened(self) -> str:
        """What the output did, with its numbers."""
        if self.effect:
            return f"{self.place} {self.effect}"
        if self.moved == float("inf"):
            return f"{self.place} became what is no number"
        bound = "every bit should agree" if self.bound == 0 else f"bound {self.bound:.1e}"
        return f"{self.place} moved by {self.moved:.1e}, {bound}"


@dataclass(eq=False)
class Verdict:
    """One law's word on one subject.

    Attributes:
        law: the law.
        outcome: holds, broken, not applicable or flaky.
        reason: why it is not applicable, what is flaky, or what was left out.
        witness: the smallest counterexample of a broken or flaky law.
        cases: the number of cases looked at; refused: how many of them the subject refused to run.
        claimed: whether the subject claims the law.
    """

    law: Law
    outcome: Outcome
    subject: str = ""
    reason: str = ""
    witness: Witness | None = None
    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    replay: str = ""
    claimed: bool = True
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

    def __str__(self) -> str:
        if self.outcome == "holds":
            return f"{self.slug}: holds ({self.cases} cases)"
        if self.witness is None:
            return f"{self.slug}: {self.outcome}, {self.reason}" if self.reason else f"{self.slug}: {self.outcome}"
        return f"{self.slug}: {self.outcome}, {self.witness.happened}"


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
