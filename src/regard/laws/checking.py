"""`check`: the laws that a subject claims. `probe`: the laws that hold, whether claimed or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.errors import InputError
from regard.laws.articles import LAWS
from regard.laws.claims import infer
from regard.laws.law import Law
from regard.laws.report import Report
from regard.laws.search import examine
from regard.laws.subjects import Subject, read
from regard.laws.verdict import Verdict, Verdicts

# Seconds that one law may search, in a fast and in a full check.
SECONDS = {True: 0.8, False: 8.0}

# Laws that ask for nothing but ordinary input: a subject that claims one and raises in every case breaks it.
MUST_RUN = ("causality", "padding", "permutation", "batch-independence", "determinism", "statelessness", "gradients")

# Parameters from which on a module is copied as seldom as possible.
LARGE = 20_000_000

Progress = Callable[[str, int, int], None]


def check(
    target: Any,
    *,
    kind: str | None = None,
    claims: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    seed: int = 0,
    fast: bool = False,
    progress: Progress | None = None,
    name: str | None = None,
    **options: Any,
) -> Report:
    """Search for a case in which the target breaks a law that it claims.

    `target` is an operator `f(query, key, value, mask=None)`, a layer `f(x, mask=None)`, a model, or anything that
    is recognised: modules of torch, Hugging Face, timm, x-transformers and Regard. `claims` are slugs or numbers of
    laws; without them the target's kind decides. `only` narrows the search to some of them, or adds to them. Options
    are its conventions and sizes: see `read`. The same seed draws the same cases.

        >>> from regard.laws import check
        >>> check(attend, kind="operator", claims=["permutation", "empty-rows"], pattern=None, fast=True).ok
        True
    """
    with _quiet(target):
        subject = read(target, kind, name, **options)
        claimed = find_laws(infer(subject) if claims is None else claims)
        chosen = claimed if only is None else find_laws(only)
        laws = find_laws([law.slug for law in (*claimed, *chosen)])
        verdicts = [
            _verdict(law, subject, seed, fast, progress, laws, claims is not None or law not in claimed)
            for law in chosen
        ]
    asked = {"kind": kind, "claims": None if claims is None else [law.slug for law in claimed], **options}
    return Report(subject.name, subject.kind, Verdicts(verdicts), seed, subject.declared, fast=fast, asked=asked)


def probe(
    target: Any,
    *,
    kind: str | None = None,
    laws: Sequence[str] | None = None,
    seed: int = 0,
    fast: bool = True,
    progress: Progress | None = None,
    name: str | None = None,
    **options: Any,
) -> Report:
    """Which laws hold, without accusing anyone: claims nothing, tries all, and measures what can be measured."""
    with _quiet(target):
        subject = read(target, kind, name, **options)
        chosen = find_laws(laws or [law.slug for law in LAWS])
        verdicts = []
        for law in chosen:
            verdict = _verdict(law, subject, seed, fast, progress, chosen, False)
            verdict.claimed = False
            if verdict.outcome != "not applicable":
                verdict.measured = law.measure(subject) or ""
            verdicts.append(verdict)
    asked = {"kind": kind, **options}
    return Report(
        subject.name, subject.kind, Verdicts(verdicts), seed, subject.declared, fast=fast, probing=True, asked=asked
    )


def assert_laws(
    target: Any,
    *,
    kind: str | None = None,
    claims: Sequence[str] | None = None,
    seed: int = 0,
    fast: bool = True,
    **options: Any,
) -> Report:
    """`check`, for tests: raises a LawViolation with the smallest counterexample if a claim is broken.

    >>> from regard.laws import assert_laws
    >>> assert_laws(attend, kind="operator", claims=["causality"])
    Traceback (most recent call last):
    regard.errors.LawViolation: causality - a later token changed an earlier output.
      subject  attend
      ...
    """
    report = check(target, kind=kind, claims=claims, seed=seed, fast=fast, **options)
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


def _verdict(
    law: Law,
    subject: Subject,
    seed: int,
    fast: bool,
    progress: Progress | None,
    laws: list[Law],
    explicit: bool,
) -> Verdict:
    """The law's word on the subject and on every other view of it; the worst counts."""
    worst: Verdict | None = None
    for part in (subject, *subject.parts):
        if part is not subject and part.claims and law.slug not in part.claims:
            continue  # a decoder is causal, what it reads is not
        part.context = tuple(other.slug for other in laws)

        def tick(cases: int) -> None:
            if progress is not None:
                progress(law.slug, laws.index(law), cases)

        tick(0)
        verdict = examine(law, _unused(part), seed, fast=fast, seconds=SECONDS[fast], tick=tick)
        refuses_masks = "mask" in law.needs and "mask" in part.missing and verdict.cases == 0
        if explicit and law.slug in MUST_RUN and (0 < verdict.cases == verdict.refused or refuses_masks):
            verdict.outcome = "broken"  # who claims such a law must at least run
        if worst is None or _RANK[verdict.outcome] > _RANK[worst.outcome]:
            worst = verdict
        elif verdict.outcome == worst.outcome:
            worst.cases += verdict.cases
            worst.seconds += verdict.seconds
    assert worst is not None
    return worst


def _unused(subject: Subject) -> Subject:
    """The subject as no other law has used it, so that a verdict does not depend on what else is asked.

    Except of large modules, of which one more copy for each law would be a burden.
    """
    if _large(subject.target):
        return subject
    try:
        return subject.fresh()
    except Exception:  # what cannot be copied is used as it is
        return subject


def _large(target: Any) -> bool:
    return isinstance(target, nn.Module) and sum(each.numel() for each in target.parameters()) > LARGE


_RANK = {"not applicable": 0, "holds": 1, "flaky": 2, "broken": 3}


@contextmanager
def _quiet(target: Any) -> Iterator[None]:
    """Strangers' warnings stay inside, and the random numbers outside go on as if nothing had happened.

    Small cases run on one thread: more would gain nothing, and lose much on a busy machine.
    """
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        if not _large(target):
            torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
