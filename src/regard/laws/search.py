"""The search for a counterexample: run cases, tell rounding errors from logic errors, shrink."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from regard.adapters.base import Adapter
from regard.adapters.precision import find_coarsest_dtype
from regard.adapters.rng import Rng
from regard.laws.budget import BUDGET, RunWork, measure_work, select_cases
from regard.laws.compare import BEYOND_ROUNDING, FACTOR, HALF_FACTOR, Finding, compare, size_of
from regard.laws.law import Case, Discard, Law
from regard.laws.other_sizes import describe_sizes
from regard.laws.variants import find_variant, in_native_precision, is_half
from regard.laws.verdict import Counterexample, Origin, Verdict

# By this share of its numbers an ordinary case misses a law that another kind of attention does not mean to keep; what
# misses it by less was meant to keep it.
CLEAR = 0.05
# A failing case is repeated this often; if it then sometimes holds, the verdict is "flaky".
REPEATS = 3
# Runs that making a case smaller may take: at most, and of a subject so large that the budget pays for fewer.
SHRINKS, FEWEST_SHRINKS = 48, 8

# Roundings of half precision and of a wider one are drawn independently; their largest ones differ by less than this.
HALF_GROWTH = 8.0


@dataclass
class Trial:
    """One case, run in one precision: what was found, or why it could not be run."""

    view: Adapter
    findings: list[Finding] = field(default_factory=list)
    refusal: Exception | None = None
    discarded: str = ""
    # Above this many bounds the law is broken: one, or more where float64 has already found nothing.
    threshold: float = 1.0

    @property
    def worst(self) -> Finding | None:
        return max(self.findings, key=lambda finding: finding.ratio, default=None)

    @property
    def broken(self) -> bool:
        return any(finding.ratio > self.threshold for finding in self.findings)


def find_views(subject: Adapter, case: Case) -> list[Adapter]:
    """The subject in float64, where that can be had, and in its own precision; in half precision for a case of that."""
    variant = find_variant(subject, case)
    if variant is None:
        return []
    if is_half(variant):
        return [variant]
    subject = variant
    double = subject.at(torch.float64)
    return [view for view in (double, subject) if view is not None] if double is not subject else [subject]


def examine(
    law: Law,
    subject: Adapter,
    seed: int = 0,
    *,
    fast: bool = False,
    budget: float | None = None,
    work: RunWork | None = None,
    seconds: float | None = None,
    explicit: bool = False,
    inferred: bool = False,
    tick: Callable[[int], None] | None = None,
) -> Verdict:
    """Search one law on one subject.

    `budget` is the work that may be spent, that of a fast or full search if None; `work` is that of one run of the
    subject, measured if None. `seconds` ends the search early, and then the law is undecided. `explicit`: the law was
    claimed by the user, so a subject that refuses every case leaves it undecided. `inferred`: the claim was not made by
    the user, so a subject that breaks it in every ordinary case, as another kind of attention would, does not claim it.
    """
    began = time.perf_counter()
    verdict = Verdict(law, "holds", subject.name, inferred=inferred)
    try:
        reason = law.applies(subject)
        offered = [] if reason else list({tuple(case.items()): case for case in law.cases(subject, fast)}.values())
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as refusal:  # the subject refused a call that the law makes before its first case
        verdict.outcome = "undecided" if explicit else "not applicable"
        verdict.reason = f"it refused every case: {_describe_refusal(refusal)}"
        return verdict
    if reason is None and not law.about_repetition:
        reason = is_flaky(subject)
        if reason is not None:
            verdict.outcome, verdict.reason = "flaky", reason
            return verdict
    if reason is not None:
        verdict.outcome, verdict.reason = "not applicable", reason
        return verdict
    budget = BUDGET[fast] if budget is None else budget
    work = measure_work(subject) if work is None else work
    chosen = select_cases(offered, work, budget, law.minimum, law.kind_of)
    search = Search(verdict, law, offered, explicit)
    spared = [case for case in offered if not any(case is one for one in chosen)]
    for number, case in enumerate([*chosen, *spared]):
        if number >= len(chosen) and not search.lacks(case):
            continue  # the others only make up for cases that were refused or discarded
        if seconds is not None and time.perf_counter() - began >= seconds:
            search.stopped = f"stopped by seconds={seconds:g} after {verdict.tried} of {len(chosen)} cases"
            break
        verdict.cases += 1
        if tick is not None:
            tick(verdict.cases)
        decision = decide(law, subject, case, seed)
        search.count(case, decision)
        if decision.failure is not None:
            if inferred and (refutation := refute_inferred_claim(law, subject, offered, seed)) is not None:
                verdict.outcome = "not applicable"
                verdict.reason = f"not claimed: inferred, and refuted by ordinary input: {refutation}"
                break
            shrinks = min(max(int(budget / (2 * work.of(case))), FEWEST_SHRINKS), SHRINKS)
            _record_violation(verdict, law, decision.failure, case, seed, shrinks)
            break
    search.conclude()
    verdict.seconds = time.perf_counter() - began
    return verdict


@dataclass
class Decision:
    """The result of one case: the trial that breaks the law, or why the case was not counted."""

    failure: Trial | None = None
    refusal: Exception | None = None
    discarded: str = ""
    vacuous: bool = False


@dataclass
class Search:
    """The count of one search, and what follows from it."""

    verdict: Verdict
    law: Law
    offered: list[Case]
    explicit: bool
    stopped: str = ""
    refusal: str = ""
    discarded: str = ""
    vacuous: list[Case] = field(default_factory=list)
    tried_kinds: set[tuple] = field(default_factory=set)

    def count(self, case: Case, decision: Decision) -> None:
        """Take one more case into account."""
        if decision.refusal is not None:
            self.verdict.refused += 1
            self.refusal = self.refusal or _describe_refusal(decision.refusal)
        elif decision.discarded:
            self.verdict.discarded += 1
            self.discarded = self.discarded or decision.discarded
        elif decision.vacuous:
            self.vacuous.append(case)
        else:
            self.verdict.tried += 1
            self.tried_kinds.add(self.law.kind_of(case))

    def lacks(self, case: Case) -> bool:
        """Whether a case that the budget does not pay for would still help to reach the minimum."""
        if self.verdict.tried < self.law.minimum:
            return True
        return len(self.tried_kinds) < self.law.minimum and self.law.kind_of(case) not in self.tried_kinds

    def find_shortage(self) -> str | None:
        """What is missing to the minimum of cases and of kinds of cases, in words; None if enough ran."""
        vacuous = {id(case) for case in self.vacuous}
        telling = [case for case in self.offered if id(case) not in vacuous]
        needed = min(self.law.minimum, len(telling))
        if self.verdict.tried < needed:
            return f"only {self.verdict.tried} of the {needed} cases that it takes could be tried"
        # A subject that refuses a kind may do without it where there are few: half of them are enough then.
        kinds = len({self.law.kind_of(case) for case in telling})
        needed = min(self.law.minimum, (kinds + 1) // 2)
        if len(self.tried_kinds) < needed:
            named = ", ".join(self.law.kinds)
            return f"only {len(self.tried_kinds)} of the {needed} kinds of case ({named}) that it takes could be tried"
        return None

    def conclude(self) -> None:
        """Decide whether enough cases were tried for a law without a violation."""
        verdict = self.verdict
        if verdict.outcome != "holds":
            return
        reasons = [self.stopped] if self.stopped else []
        if verdict.refused:
            which = "every case" if verdict.refused == verdict.cases else f"{verdict.refused} of {verdict.cases} cases"
            reasons.append(f"it refused {which}: {self.refusal}")
        if verdict.discarded:
            reasons.append(f"{verdict.discarded} of {verdict.cases} cases were discarded: {self.discarded}")
        if self.stopped:
            verdict.outcome = "undecided"
        elif len(self.offered) == len(self.vacuous):
            verdict.outcome = "not applicable"
            reasons = ["none of its cases has anything to compare" if self.offered else "the law has no case for it"]
        elif verdict.tried == 0 and not verdict.discarded and not self.explicit:
            verdict.outcome = "not applicable"
        elif (shortage := self.find_shortage()) is not None:
            verdict.outcome = "undecided"
            if verdict.tried:
                reasons.insert(0, shortage)
        verdict.reason = "; ".join(reasons)


def _describe_refusal(refusal: Exception) -> str:
    """What a subject raised, in one line."""
    return f"{type(refusal).__name__}: {(str(refusal).strip().splitlines() or [''])[0]}"


def decide(law: Law, subject: Adapter, case: Case, seed: int) -> Decision:
    """Run the case in each precision.

    Logic shows in float64. A difference that shows in the subject's own precision alone is rounding, unless it is so
    large that no rounding explains it.
    """
    trials: list[Trial] = []
    for view in find_views(subject, case):
        if is_half(view):
            trials.append(run_case(law, view, case, seed))
            if trials[-1].broken:
                trials[-1].threshold = _measure_grown_rounding(law, trials[-1], case, seed)
                if trials[-1].broken:
                    return Decision(trials[-1])
            continue
        clean = any(trial.findings for trial in trials)  # float64 ran and holds
        trial = run_case(law, view, case, seed, BEYOND_ROUNDING if clean else 1.0)
        if trial.broken and (coarser := coarsen(law, view, case, seed)) is not None:
            trial = run_case(law, coarser, case, seed, trial.threshold)
        trials.append(trial)
        if trial.broken:
            return Decision(trial)
    if discarded := next((trial.discarded for trial in trials if trial.discarded), ""):
        return Decision(discarded=discarded)
    if trials and all(trial.refusal is not None for trial in trials):
        return Decision(refusal=trials[-1].refusal)
    return Decision(vacuous=not any(trial.findings for trial in trials))


def _measure_grown_rounding(law: Law, half: Trial, case: Case, seed: int) -> float:
    """How many bounds of half precision the rounding of the subject's own precision grows to.

    Where equal bits are not the subject's habit, each difference grows with the spacing of numbers. A law that the
    wider precision already breaks is no evidence about half precision.
    """
    native = in_native_precision(half.view)
    wide = run_case(law, native, case, seed)
    moved = max((finding.moved for finding in wide.findings), default=math.inf)
    bound = min((finding.bound for finding in half.findings if finding.bound > 0), default=math.inf)
    return max(1.0, HALF_GROWTH * moved * half.view.eps / native.eps / bound) if moved else 1.0


def coarsen(law: Law, view: Adapter, case: Case, seed: int) -> Adapter | None:
    """The subject in float64 with the bound of its own precision, if the case takes it through that; None otherwise.

    What a plain run passes through is known, but another path or another length may round numbers to float32 where
    that one does not: a softmax in float32, a table of rotations. To fewer digits than its own, no path may round.
    """
    if view.dtype != torch.float64 or view.native == torch.float64 or view.eps > 1e-12:
        return None
    coarsest = find_coarsest_dtype(lambda: run_case(law, view, case, seed))
    if coarsest == torch.float64:
        return None
    other = copy.copy(view)
    other._eps = min(torch.finfo(coarsest).eps, torch.finfo(view.native).eps)
    return other


def refute_inferred_claim(law: Law, subject: Adapter, cases: Sequence[Case], seed: int) -> str | None:
    """What an ordinary case shows if all of them break the law as may be meant, and one clearly; None otherwise."""
    shown, clearest = None, CLEAR
    for case in cases:
        if not law.is_ordinary(case):
            continue
        decision = decide(law, subject, case, seed)
        if decision.failure is None:
            if decision.refusal is None and not decision.vacuous and not decision.discarded:
                return None  # it keeps the law here, so it means to
            continue
        broken = [each for each in decision.failure.findings if each.ratio > decision.failure.threshold]
        if not all(each.observation.by_design for each in broken):
            return None
        worst = max(broken, key=lambda each: each.moved)
        apart = worst.moved / (worst.observation.scale or size_of(worst.observation))
        if apart > clearest:
            shown, clearest = make_counterexample(decision.failure, case).happened, apart
    return shown


def run_case(law: Law, view: Adapter, case: Case, seed: int, threshold: float = 1.0) -> Trial:
    """Observe one case in one precision."""
    trial = Trial(view, threshold=threshold)
    factor = FACTOR[torch.float64] if view.eps < 1e-12 else FACTOR[torch.float32]
    factor = HALF_FACTOR if is_half(view) else factor
    try:
        for observation in law.observe(view, case, law.make_rng(seed, case)):
            trial.findings.append(compare(observation, view.eps, factor))
    except Discard as reason:
        trial.discarded = str(reason)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as refusal:  # any error is a refusal of this case; it is counted and reported
        trial.refusal = refusal
    return trial


def is_flaky(subject: Adapter) -> str | None:
    """Why the laws cannot be checked on a subject whose equal calls differ."""
    outputs = []
    try:
        with torch.no_grad():
            x = subject.draw(2, subject.lengths(5)[0], Rng(0, "steady"))
            outputs = [subject.run(x) for _ in range(2)]
    except Exception:  # whatever is wrong there, the law itself will meet it
        return None
    if outputs[0].shape == outputs[1].shape and torch.equal(outputs[0].nan_to_num(), outputs[1].nan_to_num()):
        return None
    apart = float((outputs[0] - outputs[1]).abs().max()) if outputs[0].shape == outputs[1].shape else float("inf")
    return f"two equal calls in evaluation mode differ by {apart:.1e}; see determinism and statelessness"


def _record_violation(verdict: Verdict, law: Law, trial: Trial, case: Case, seed: int, shrinks: int = SHRINKS) -> None:
    """Broken, or flaky; with the smallest case that shows it."""
    again = [run_case(law, trial.view, case, seed, trial.threshold).broken for _ in range(REPEATS)]
    if not all(again):
        verdict.outcome = "flaky"
        verdict.reason = f"the same case broke the law {1 + sum(again)} times out of {1 + REPEATS}"
        verdict.counterexample = make_counterexample(trial, case)
        return
    verdict.outcome = "broken"
    threshold = trial.threshold  # shrinking requires a larger violation, so that small cases are clear ones
    case, trial = shrink(law, trial, case, seed, shrinks)
    verdict.counterexample = make_counterexample(trial, case)

    def breaks(other: Case) -> bool | None:
        again = run_case(law, trial.view, other, seed, threshold)
        silent = again.refusal is not None or again.discarded or not again.findings
        return None if silent and not again.broken else again.broken

    verdict.counterexample.remarks = describe_sizes(law, case, breaks)
    verdict.counterexample.origin = Origin(trial.view, seed, threshold)


def shrink(law: Law, trial: Trial, case: Case, seed: int, shrinks: int = SHRINKS) -> tuple[Case, Trial]:
    """The smallest sizes with which the same law still breaks in the same precision."""
    runs = 0
    best, shown = dict(case), trial
    # A smaller case must not be a weaker one, which could be mistaken for rounding.
    finding = trial.worst
    convincing = max(trial.threshold, min(finding.ratio if finding else 0.0, 1000 * trial.threshold) * 0.99)
    held: dict[str, int] = {}  # the largest size of each name at which the law was seen to hold
    seen = {tuple(best.items())}
    improved = True
    while improved and runs < shrinks:
        improved = False
        for name, candidate in _make_smaller_cases(law, best, held):
            if tuple(candidate.items()) in seen:
                continue
            seen.add(tuple(candidate.items()))
            runs += 1
            attempt = run_case(law, trial.view, candidate, seed, convincing)
            if attempt.broken:
                best, shown, improved = candidate, attempt, True
                break
            held[name] = max(int(candidate[name]), held.get(name, 0))
            if runs >= shrinks:
                break
    return best, shown


def _make_smaller_cases(law: Law, case: Case, held: Mapping[str, int]) -> Iterator[tuple[str, dict]]:
    """Smaller cases, each with the size that it changes: the smallest sizes, then halfway to those that hold."""
    for name, floor in law.smallest.items():
        value = case.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= floor:
            continue
        for size in (floor, floor + 1, floor + 2, None, value - 1):
            # Halfway from the largest size that holds, which may have been found a moment ago.
            below = held.get(name, floor)
            between = (below + value) // 2 if floor <= below < value else (floor + value) // 2
            chosen = between if size is None else size
            if floor <= chosen < value:
                candidate = {**case, name: chosen}
                if law.possible(candidate):
                    yield name, candidate


def make_counterexample(trial: Trial, case: Case) -> Counterexample:
    finding = trial.worst
    assert finding is not None
    observation = finding.observation
    return Counterexample(
        dict(case),
        observation.changed,
        finding.place,
        finding.moved,
        finding.bound,
        observation.effect,
        str(trial.view.dtype).removeprefix("torch."),
        touched=observation.touched,
        map=finding.map,
        where=observation.where,
        tokens=observation.tokens,
        row=observation.row,
        expected=observation.expected.detach(),
        actual=observation.actual.detach(),
        extra=observation.extra,
    )
