"""`check`: the laws that a subject claims. `probe`: the laws that hold, whether claimed or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

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

Progress = Callable[[str, int, int], None]


def check(
    target: Any,
    *,
    kind: str | None = None,
    claims: Sequence[str] | None = None,
    seed: int = 0,
    fast: bool = False,
    progress: Progress | None = None,
    name: str | None = None,
    **options: Any,
) -> Report:
    """Search for a case in which the target breaks a law that it claims.

    `target` is an operator `f(query, key, value, mask=None)`, a layer `f(x, mask=None)`, a model, or anything that
    is recognised: modules of torch, Hugging Face, timm, x-transformers and Regard. `claims` are slugs or numbers of laws;
    without them the target's kind decides. Options are its conventions and sizes: see `Conventions`. The same seed looks at
    the same cases.

        >>> from regard.laws import check
        >>> check(attend, kind="operator", claims=["permutation", "empty-rows"], pattern=None).ok
        True
    """
    with _quiet():
        subject = read(target, kind, name, **options)
        laws = find_laws(infer(subject) if claims is None else claims)
        verdicts = [_verdict(law, subject, seed, fast, progress, laws, claims is not None) for law in laws]
    return Report(subject.name, subject.kind, Verdicts(verdicts), seed, subject.declared, fast=fast)


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
    with _quiet():
        subject = read(target, kind, name, **options)
        chosen = find_laws(laws or [law.slug for law in LAWS])
        verdicts = []
        for law in chosen:
            verdict = _verdict(law, subject, seed, fast, progress, chosen, False)
            verdict.claimed = False
            if verdict.outcome != "not applicable":
                verdict.measured = law.measure(subject) or ""
            verdicts.append(verdict)
    return Report(subject.name, subject.kind, Verdicts(verdicts), seed, subject.declared, fast=fast, probing=True)


def find_laws(names: Sequence[str]) -> list[Law]:
    """Laws by slug or number, in the order of their numbers."""
    if isinstance(names, str):
        names = [names]
    found = []
    for name in names:
        law = next((law for law in LAWS if str(name).lower().replace("_", "-") in (law.slug, law.id.lower())), None)
        if law is None:
            raise InputError(
                f"there is no law {name!r}.",
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
        part.context = tuple(other.slug for other in laws)

        def tick(cases: int) -> None:
            if progress is not None:
                progress(law.slug, laws.index(law), cases)

        tick(0)
        verdict = examine(law, part, seed, fast=fast, seconds=SECONDS[fast], tick=tick)
        if explicit and verdict.outcome == "not applicable" and verdict.cases and verdict.refused == verdict.cases:
            verdict.outcome = "broken"  # who claims a law must at least run
        if worst is None or _RANK[verdict.outcome] > _RANK[worst.outcome]:
            worst = verdict
        elif verdict.outcome == worst.outcome:
            worst.cases += verdict.cases
            worst.seconds += verdict.seconds
    assert worst is not None
    return worst


_RANK = {"not applicable": 0, "holds": 1, "flaky": 2, "broken": 3}


class _quiet(warnings.catch_warnings):
    """Strangers' warnings stay inside, and the random numbers outside go on as if nothing had happened."""

    def __enter__(self) -> Any:
        self._state = torch.get_rng_state()
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        torch.set_rng_state(self._state)
