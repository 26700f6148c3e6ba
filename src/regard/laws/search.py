"""Looking for a case that breaks a law, telling rounding from logic, and making the case small."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from regard.laws.judge import BEYOND_ROUNDING, FACTOR, Finding, judge
from regard.laws.law import Case, Dice, Law
from regard.laws.subjects.base import Subject
from regard.laws.verdict import Verdict, Witness

# A failing case is repeated this often; if it then sometimes holds, the verdict is "flaky".
REPEATS = 3
# Runs that making a case smaller may take.
SHRINKS = 48


@dataclass
class Trial:
    """One case, run in one precision: what was found, or why it could not be run."""

    view: Subject
    findings: list[Finding] = field(default_factory=list)
    refusal: Exception | None = None
    # Above this many bounds the law is broken: one, or more where float64 has already found nothing.
    threshold: float = 1.0

    @property
    def worst(self) -> Finding | None:
        return max(self.findings, key=lambda finding: finding.ratio, default=None)

    @property
    def broken(self) -> bool:
        return any(finding.ratio > self.threshold for finding in self.findings)


def views(subject: Subject) -> list[Subject]:
    """The subject in float64, where that can be had, and in its own precision."""
    double = subject.at(torch.float64)
    return [view for view in (double, subject) if view is not None] if double is not subject else [subject]


def examine(
    law: Law,
    subject: Subject,
    seed: int = 0,
    *,
    fast: bool = False,
    seconds: float = 30.0,
    tick: Callable[[int], None] | None = None,
) -> Verdict:
    """Search one law on one subject."""
    # The time of this thread: on a busy machine the same cases are looked at as on a quiet one.
    start, began = time.thread_time(), time.perf_counter()
    verdict = Verdict(law, "holds", subject.name)
    reason = law.applies(subject)
    if reason is None and not law.about_repetition:
        reason = unsteady(subject)
        if reason is not None:
            verdict.outcome, verdict.reason = "flaky", reason
            return verdict
    if reason is not None:
        verdict.outcome, verdict.reason = "not applicable", reason
        return verdict
    refusal: Exception | None = None
    for case in law.cases(subject, fast):
        if time.thread_time() - start > seconds:
            verdict.reason = f"stopped after {verdict.cases} cases and {seconds:.0f} s"
            break
        verdict.cases += 1
        if tick is not None:
            tick(verdict.cases)
        failure, refused = decide(law, subject, case, seed)
        if refused is not None:
            verdict.refused += 1
            refusal = refusal or refused
        if failure is not None:
            _condemn(verdict, law, failure, case, seed, start + 2 * seconds)
            break
    if verdict.outcome == "holds" and refusal is not None:
        words = f"{type(refusal).__name__}: {str(refusal).strip().splitlines()[0] if str(refusal).strip() else ''}"
        if verdict.refused == verdict.cases:
            verdict.outcome, verdict.reason = "not applicable", f"it refused every case: {words}"
        else:
            refused = f"it refused {verdict.refused} of {verdict.cases} cases: {words}"
            verdict.reason = f"{verdict.reason}; {refused}" if verdict.reason else refused
    if verdict.cases == 0:
        verdict.outcome, verdict.reason = "not applicable", verdict.reason or "there is no case to look at"
    verdict.seconds = time.perf_counter() - began
    return verdict


def decide(law: Law, subject: Subject, case: Case, seed: int) -> tuple[Trial | None, Exception | None]:
    """The trial in which the case breaks the law, if it does; and why it could not be run, if it could not.

    Logic shows in float64. A difference that shows in the subject's own precision alone is rounding, unless it is so
    large that no rounding explains it.
    """
    trials: list[Trial] = []
    for view in views(subject):
        clean = any(trial.findings for trial in trials)  # float64 has looked, and found nothing
        trials.append(run(law, view, case, seed, BEYOND_ROUNDING if clean else 1.0))
        if trials[-1].broken:
            return trials[-1], None
    refused = all(trial.refusal is not None for trial in trials)
    return None, trials[-1].refusal if refused else None


def run(law: Law, view: Subject, case: Case, seed: int, threshold: float = 1.0) -> Trial:
    """Observe one case in one precision."""
    trial = Trial(view, threshold=threshold)
    factor = FACTOR[torch.float64] if view.eps < 1e-12 else FACTOR[torch.float32]
    try:
        for observation in law.observe(view, case, Dice(seed, law.slug, tuple(case.items()))):
            trial.findings.append(judge(observation, view.eps, factor))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as refusal:  # a stranger may refuse a case in any way; it is counted and reported
        trial.refusal = refusal
    return trial


def unsteady(subject: Subject) -> str | None:
    """Why nothing can be said about a subject that answers the same question in two ways."""
    answers = []
    try:
        with torch.no_grad():
            x = subject.draw(2, subject.lengths(5)[0], Dice(0, "steady"))
            answers = [subject.run(x) for _ in range(2)]
    except Exception:  # whatever is wrong there, the law itself will meet it
        return None
    if answers[0].shape == answers[1].shape and torch.equal(answers[0].nan_to_num(), answers[1].nan_to_num()):
        return None
    apart = float((answers[0] - answers[1]).abs().max()) if answers[0].shape == answers[1].shape else float("inf")
    return f"two equal calls in evaluation mode differ by {apart:.1e}; see determinism and statelessness"


def _condemn(verdict: Verdict, law: Law, trial: Trial, case: Case, seed: int, deadline: float) -> None:
    """Broken, or flaky; with the smallest case that shows it."""
    again = [run(law, trial.view, case, seed, trial.threshold).broken for _ in range(REPEATS)]
    if not all(again):
        verdict.outcome = "flaky"
        verdict.reason = f"the same case broke the law {1 + sum(again)} times out of {1 + REPEATS}"
        verdict.witness = witness(trial, case)
        return
    verdict.outcome = "broken"
    case, trial = shrink(law, trial, case, seed, deadline)
    verdict.witness = witness(trial, case)
    verdict.witness.remarks = irrelevant(law, trial, case, seed)


def shrink(law: Law, trial: Trial, case: Case, seed: int, deadline: float) -> tuple[Case, Trial]:
    """The smallest sizes with which the same law still breaks in the same precision."""
    runs = 0
    best, shown = dict(case), trial
    # A smaller case must not be a weaker one, which could be mistaken for rounding.
    finding = trial.worst
    convincing = max(trial.threshold, min(finding.ratio if finding else 0.0, 1000 * trial.threshold) * 0.99)
    improved = True
    while improved and runs < SHRINKS and time.thread_time() < deadline:
        improved = False
        for candidate in _smaller(law, best):
            runs += 1
            attempt = run(law, trial.view, candidate, seed, convincing)
            if attempt.broken:
                best, shown, improved = candidate, attempt, True
                break
            if runs >= SHRINKS or time.thread_time() > deadline:
                break
    return best, shown


def _smaller(law: Law, case: Case) -> Iterator[dict]:
    for name, floor in law.smallest.items():
        value = case.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= floor:
            continue
        for size in dict.fromkeys([floor, floor + 1, floor + 2, (floor + value) // 2, value - 1]):
            if floor <= size < value:
                candidate = {**case, name: size}
                if law.possible(candidate):
                    yield candidate


def irrelevant(law: Law, trial: Trial, case: Case, seed: int) -> dict[str, str]:
    """Sizes that do not matter: the law breaks with larger ones too."""
    remarks = {}
    for name in law.smallest:
        value = case.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        larger = [{**case, name: value + more} for more in (1, 2)]
        larger = [candidate for candidate in larger if law.possible(candidate)]
        if larger and all(run(law, trial.view, each, seed, trial.threshold).broken for each in larger):
            remarks[name] = "any size fails"
    return remarks


def witness(trial: Trial, case: Case) -> Witness:
    finding = trial.worst
    assert finding is not None
    seen = finding.observation
    return Witness(
        dict(case),
        seen.changed,
        finding.place,
        finding.moved,
        finding.bound,
        seen.effect,
        str(trial.view.dtype).removeprefix("torch."),
        touched=seen.touched,
        map=finding.map,
        where=seen.where,
        tokens=seen.tokens,
        row=seen.row,
        expected=seen.expected.detach(),
        actual=seen.actual.detach(),
        extra=seen.extra,
    )
