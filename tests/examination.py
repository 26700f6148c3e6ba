"""The verdicts of every claimed law after a short look: each law's minimum of cases, and none beyond it."""

from __future__ import annotations

from typing import Any

from regard.adapters import adapt
from regard.laws import Verdict
from regard.laws.budget import measure_work
from regard.laws.checking import find_laws
from regard.laws.search import examine


def examine_claims(target: Any, seed: int = 0) -> list[Verdict]:
    """The verdict of each claimed law on the target and on its other views."""
    subject = adapt(target)
    context = tuple(law.slug for law in find_laws(subject.claims))
    found = []
    for view in (subject, *subject.parts):
        view.context, work = context, measure_work(view)
        found += [examine(law, view, seed, fast=True, budget=0, work=work) for law in find_laws(view.claims)]
    return found


def find_violations(target: Any, fewest: int = 5) -> list[str]:
    """What is broken or undecided; at least `fewest` laws must hold, so that nothing passes by refusing everything."""
    found = examine_claims(target)
    assert sum(verdict.outcome == "holds" for verdict in found) >= fewest
    return [str(verdict) for verdict in found if not verdict.ok]
