"""One mistake of a source: the claim, the correction, and cases on which both are run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["wrong", "incomplete", "garbled"]

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Trial:
    """One case: what the source claims, what is computed, and what the correction says.

    Values are numbers, booleans, texts, tuples or tensors; an `Undefined` equals nothing but an `Undefined`.
    """

    case: str
    claimed: Any
    computed: Any
    corrected: Any
    tolerance: float = TOLERANCE

    @property
    def claim_fails(self) -> bool:
        return not is_equal(self.claimed, self.computed, self.tolerance)

    @property
    def correction_holds(self) -> bool:
        return is_equal(self.corrected, self.computed, self.tolerance)


@dataclass(frozen=True)
class Undefined:
    """The value of a formula that cannot be computed, with the reason."""

    reason: str

    def __str__(self) -> str:
        return f"undefined ({self.reason})"


@dataclass(frozen=True)
class Outcome:
    """What running an erratum showed: all trials, in order of size."""

    trials: tuple[Trial, ...]

    @property
    def counterexample(self) -> Trial | None:
        """The first trial in which the claim fails."""
        return next((trial for trial in self.trials if trial.claim_fails), None)

    @property
    def correction_failure(self) -> Trial | None:
        """The first trial in which the correction fails."""
        return next((trial for trial in self.trials if not trial.correction_holds), None)

    @property
    def is_proved(self) -> bool:
        """True if the claim fails at least once and the correction holds in every trial."""
        return self.counterexample is not None and self.correction_failure is None


@dataclass(frozen=True)
class Erratum:
    """A mistake of a source.

    Args:
        id: problem and a word for the mistake, such as `udl-12.1:biases`
        where: source and problem, with the place in it
        kind: `wrong`, `incomplete` (true with a missing condition) or `garbled` (a slip of writing)
        claim: what the source says, in a short paraphrase
        correction: what is right, and why
        trials: yields cases of rising size
    """

    id: str
    where: str
    kind: Kind
    claim: str
    correction: str
    trials: Callable[[], Iterable[Trial]]

    @property
    def problem(self) -> str:
        """The id of the problem's page in the book."""
        return self.id.rsplit(":", 1)[0]

    def run(self) -> Outcome:
        """Run the claim and the correction on every case."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Outcome(tuple(self.trials()))


ENTRIES: dict[str, Erratum] = {}


def erratum(
    id: str, where: str, kind: Kind, *, claim: str, correction: str
) -> Callable[[Callable[[], Iterator[Trial]]], Callable[[], Iterator[Trial]]]:
    """Register the generator of trials below as an erratum."""

    def register(trials: Callable[[], Iterator[Trial]]) -> Callable[[], Iterator[Trial]]:
        assert id not in ENTRIES, id
        ENTRIES[id] = Erratum(id, where, kind, claim, correction, trials)
        return trials

    return register


def attempt(compute: Callable[[], Any]) -> Any:
    """The value of a formula as a source writes it, or `Undefined` where its shapes do not match."""
    try:
        return compute()
    except RuntimeError as failure:
        return Undefined(str(failure).splitlines()[0])


def is_equal(left: Any, right: Any, tolerance: float) -> bool:
    """Equality of values of trials, of floating-point numbers up to `tolerance` relative to the larger one."""
    if isinstance(left, Undefined) or isinstance(right, Undefined):
        return isinstance(left, Undefined) and isinstance(right, Undefined)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and _are_close(left.double(), right.double(), tolerance)
    if isinstance(left, float) or isinstance(right, float):
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=0.0 if tolerance == 0 else 1e-300)
    return type(left) is type(right) and left == right


def _are_close(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    if left.numel() == 0:
        return True
    largest = max(float(left.abs().max()), float(right.abs().max()), 1e-300)
    return float((left - right).abs().max()) <= tolerance * largest
