"""The laws on a loaded model: a verdict as soon as it is found, and the page of the first that is broken."""

from __future__ import annotations

from typing import Any

from regard.adapters import adapt
from regard.lab.fields import Fields
from regard.lab.jobs import Job
from regard.lab.state import Lab
from regard.laws import check
from regard.laws.checking import find_laws
from regard.laws.claims import infer_claims
from regard.laws.verdict import Verdict

SECONDS = 60.0  # of one law; what takes longer is undecided, and says so


def check_model(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """Search for a case in which the model breaks a law that its kind claims, law by law."""
    opened = lab.open(fields.text("model"), job)
    subject = adapt(opened.module)
    if fields.has("laws"):
        laws = find_laws([str(slug)[:60] for slug in fields.entries("laws", 100)])
    else:
        laws = find_laws(infer_claims(subject))
    claims = [law.slug for law in laws]
    verdicts, page = [], None

    def make_reporter(number: int) -> Any:
        def report(name: str, done: int, total: int) -> None:
            job.progress(done, total, f"law {number + 1} of {len(laws)}: {name}")

        return report

    for number, law in enumerate(laws):
        job.progress(0, 0, f"law {number + 1} of {len(laws)}: {law.slug}")
        report = check(
            subject, claims=claims, only=[law.slug], fast=True, seconds=SECONDS, progress=make_reporter(number)
        )
        for verdict in report.verdicts:
            verdicts.append(_describe(verdict))
            job.report({"verdict": verdicts[-1]})
            if page is None and verdict.counterexample is not None and not verdict.ok:
                page = report.to_html()
    return {"verdicts": verdicts, "counterexample": page}


def _describe(verdict: Verdict) -> dict[str, Any]:
    found = verdict.counterexample
    message = verdict.reason or ("" if found is None else found.happened)
    return {
        "law": verdict.law.slug,
        "title": verdict.law.title,
        "verdict": str(verdict.outcome),
        "cases": verdict.cases,
        "message": str(message).strip(),
    }
