"""`check`: the laws that a subject claims. `probe`: the laws that hold, whether claimed or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from regard.adapters import Adapter, adapt
from regard.errors import InputError
from regard.laws.budget import RunWork, measure_work
from regard.laws.catalog import LAWS
from regard.laws.claims import infer_claims
from regard.laws.law import Law
from regard.laws.reference import ReferenceLaw, read_reference
from regard.laws.report import Report
from regard.laws.search import examine
from regard.laws.unchecked import list_unchecked
from regard.laws.verdict import Verdict, Verdicts

# Laws that need ordinary inputs only: a subject that claims one and raises in every case breaks it.
MUST_RUN = (
    "causality",
    "padding",
    "permutation",
    "batch-independence",
    "determinism",
    "statelessness",
    "gradients",
    "reference",
)

# Parameters from which on a module is copied as seldom as possible.
LARGE = 20_000_000

Progress = Callable[[str, int, int], None]


def check(
    target: Any,
    *,
    kind: str | None = None,
    claims: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    also: Sequence[str] = (),
    reference: Any = None,
    seed: int = 0,
    fast: bool = False,
    seconds: float | None = None,
    progress: Progress | None = None,
    name: str | None = None,
    **options: Any,
) -> Report:
    """Search for a case in which the target breaks a law that it claims.

    `target` is an operator `f(query, key, value, mask=None)`, a layer `f(x, mask=None)`, a model, or anything that
    is recognised: modules of torch, Hugging Face, timm, x-transformers and Regard. `claims` are slugs or numbers of
    laws; without them the target's kind decides. `only` narrows the search to some of them, or adds to them; `also`
    claims further laws. `reference` is another function or module, called as the target is, whose values are the right
    ones: its weights are used as they are given. Options are conventions and sizes: see `read`. The same seed draws the
    same cases on every machine: the search is limited by its work, not by its time. `seconds` limits the time of each
    law as well; what it stops is undecided.

        >>> from regard.laws import check
        >>> check(attend, kind="operator", claims=["permutation", "empty-rows"], pattern=None, fast=True).ok
        True
    """
    with _silence_warnings(target):
        subject = adapt(target, kind, name, **options)
        reference_adapter = None if reference is None else read_reference(reference, subject, kind, options)
        given = find_laws(infer_claims(subject) if claims is None else claims)
        further = [law for law in find_laws(also) if law not in given] if also else []
        claimed = find_laws([law.slug for law in (*given, *further)])
        chosen, compared = _narrow_laws(claimed, reference_adapter, only)
        laws = find_laws([law.slug for law in (*claimed, *chosen)])
        verdicts = [
            _find_verdict(
                law, subject, seed, fast, seconds, progress, laws, claims is not None or law not in given, True
            )
            for law in chosen
        ]
        if compared is not None:
            verdicts.append(_find_verdict(compared, subject, seed, fast, seconds, progress, [*laws, compared], True))
        unchecked = (
            list_unchecked(subject, chosen, claims is not None, reference_adapter is not None) if only is None else []
        )
    settings = {"kind": kind, "claims": None if claims is None else [law.slug for law in given], **options}
    settings |= {"also": [law.slug for law in further]} if further else {}
    settings |= {"reference": reference_adapter.subject.name} if reference_adapter is not None else {}
    return Report(
        subject.name,
        subject.kind,
        Verdicts(verdicts),
        seed,
        subject.declared,
        fast=fast,
        asked=settings,
        unchecked=unchecked,
    )


def probe(
    target: Any,
    *,
    kind: str | None = None,
    laws: Sequence[str] | None = None,
    seed: int = 0,
    fast: bool = True,
    seconds: float | None = None,
    progress: Progress | None = None,
    name: str | None = None,
    **options: Any,
) -> Report:
    """Which laws hold: tries all without requiring any, and measures what can be measured."""
    with _silence_warnings(target):
        subject = adapt(target, kind, name, **options)
        chosen = find_laws(laws or [law.slug for law in LAWS])
        verdicts = []
        for law in chosen:
            verdict = _find_verdict(law, subject, seed, fast, seconds, progress, chosen, False)
            verdict.claimed = False
            if verdict.outcome != "not applicable":
                verdict.measured = law.measure(subject) or ""
            verdicts.append(verdict)
    settings = {"kind": kind, **options}
    return Report(
        subject.name, subject.kind, Verdicts(verdicts), seed, subject.declared, fast=fast, probing=True, asked=settings
    )


def assert_laws(
    target: Any,
    *,
    kind: str | None = None,
    claims: Sequence[str] | None = None,
    also: Sequence[str] = (),
    reference: Any = None,
    seed: int = 0,
    fast: bool = True,
    **options: Any,
) -> Report:
    """`check`, for tests: raises a LawViolation, with the smallest case, if a claim is broken, flaky or undecided.

    >>> from regard.laws import assert_laws
    >>> assert_laws(attend, kind="operator", claims=["causality"])
    Traceback (most recent call last):
    regard.errors.LawViolation: causality - a later token changed an earlier output.
      subject  attend
      ...
    """
    report = check(target, kind=kind, claims=claims, also=also, reference=reference, seed=seed, fast=fast, **options)
    report.require()
    return report


def find_laws(names: Sequence[str]) -> list[Law]:
    """Laws by slug or number, in the order of their numbers."""
    if isinstance(names, str):
        names = [names]
    if not names:
        raise InputError(
            "no law is named.",
            asked="an empty list of laws",
            because="a report that asks nothing would say that all is well",
            instead="claims=None lets the kind decide; or some of " + ", ".join(law.slug for law in LAWS),
        )
    found = []
    for name in names:
        law = next((law for law in LAWS if str(name).lower().replace("_", "-") in (law.slug, law.id.lower())), None)
        if law is None:
            raise InputError(
                f"there is no law {name!r}.",
                asked=f"claims={list(names)!r}",
                because="laws are called by their slug or their number",
                instead=", ".join(law.slug for law in LAWS),
            )
        found.append(law)
    return sorted(set(found), key=LAWS.index)


def _narrow_laws(
    claimed: list[Law], reference_adapter: ReferenceLaw | None, only: Sequence[str] | None
) -> tuple[list[Law], ReferenceLaw | None]:
    """The laws to check, and the reference if there is one."""
    if only is None:
        return claimed, reference_adapter
    names = [only] if isinstance(only, str) else list(only)
    others = [name for name in names if str(name) != ReferenceLaw.slug]
    if len(others) < len(names) and reference_adapter is None:
        raise InputError(
            "there is no reference to compare with.",
            asked=f"only={names!r}",
            because="equality with a reference needs one",
            instead="reference= a function or module that is called as the target is",
        )
    chosen = find_laws(others) if others or not names else []
    return chosen, reference_adapter if len(others) < len(names) else None


def _find_verdict(
    law: Law,
    subject: Adapter,
    seed: int,
    fast: bool,
    seconds: float | None,
    progress: Progress | None,
    laws: list[Law],
    explicit: bool,
    accusing: bool = False,
) -> Verdict:
    """The law's word on the subject and on every other view of it; the worst counts.

    `explicit` is whether the user claims the law, `accusing` whether it is claimed at all.
    """
    worst: Verdict | None = None
    for part in (subject, *subject.parts):
        if part is not subject and part.claims and law.slug not in part.claims:
            continue  # a decoder is causal, what it reads is not
        part.context = tuple(other.slug for other in laws)

        def tick(cases: int) -> None:
            if progress is not None:
                progress(law.slug, laws.index(law), cases)

        tick(0)
        if part not in _WORK:
            _WORK[part] = measure_work(part)  # before the copy, which nothing has used yet
        inferred = accusing and not explicit and not part.documented
        how: dict[str, Any] = {"work": _WORK[part], "seconds": seconds, "explicit": explicit, "inferred": inferred}
        verdict = examine(law, _copy_if_small(part), seed, fast=fast, tick=tick, **how)
        refuses_masks = "mask" in law.needs and "mask" in part.missing and verdict.cases == 0
        if explicit and law.slug in MUST_RUN and (0 < verdict.cases == verdict.refused or refuses_masks):
            verdict.outcome = "broken"  # a subject that claims such a law must at least run
        if worst is None or _RANK[verdict.outcome] > _RANK[worst.outcome]:
            worst = verdict
        elif verdict.outcome == worst.outcome:
            worst.cases += verdict.cases
            worst.tried += verdict.tried
            worst.refused += verdict.refused
            worst.discarded += verdict.discarded
            worst.seconds += verdict.seconds
    assert worst is not None
    return worst


def _copy_if_small(subject: Adapter) -> Adapter:
    """The subject as no other law has used it, so that a verdict does not depend on what else is asked.

    Except of large modules, of which one more copy for each law would be a burden.
    """
    if _is_large(subject.target):
        return subject
    try:
        return subject.copy_unused()
    except Exception:  # what cannot be copied is used as it is
        return subject


def _is_large(target: Any) -> bool:
    return isinstance(target, nn.Module) and sum(each.numel() for each in target.parameters()) > LARGE


# What one run of an adapter costs.
_WORK: WeakKeyDictionary[Adapter, RunWork] = WeakKeyDictionary()

_RANK = {"not applicable": 0, "holds": 1, "undecided": 2, "flaky": 3, "broken": 4}


@contextmanager
def _silence_warnings(target: Any) -> Iterator[None]:
    """Third-party warnings are silenced, and the state of the global random generator is restored.

    Small cases run on one thread: more would gain nothing, and lose much on a busy machine.
    """
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        if not _is_large(target):
            torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
