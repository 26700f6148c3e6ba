"""The laws that a trained model must obey, checked for the report of its run."""

from __future__ import annotations

from regard.adapters import adapt
from regard.cli.output import status
from regard.laws import Report, check
from regard.laws.claims import infer_claims
from regard.laws.table import verdict_table
from regard.render.markup import Markup
from regard.render.page import paragraph
from regard.train import ResNetRecipe, Run

# What the weights of a trained model could break, and a caller would notice: of these, a kind is asked what it claims.
LAWS = ("causality", "cache", "padding", "batch-independence", "determinism")


def check_laws(run: Run) -> Report | None:
    """The verdicts on the trained model: a fast search for a case that breaks a law its kind claims.

    None for a ResNet, which has no attention.
    """
    if isinstance(run.recipe, ResNetRecipe):
        return None
    model = getattr(run.model, "bert", run.model)  # a head on a BERT claims nothing beyond its encoder
    claims = infer_claims(adapt(model))
    wanted = [law for law in LAWS if law in claims]
    with status("checking the laws of the trained model"):
        return check(model, only=wanted, fast=True)


def render_laws(report: Report) -> list[Markup]:
    """The section of a page: the summary, and a row for each law with the number of cases that were tried."""
    cases = sum(verdict.tried for verdict in report.verdicts)
    lines = [paragraph(f"{report.summary}, in {cases:,} cases. regard check runs a longer search.")]
    return [*lines, verdict_table(report).to_html()]


def describe_laws(report: Report) -> str:
    """One line for the end of the run."""
    cases = sum(verdict.tried for verdict in report.verdicts)
    names = ", ".join(verdict.slug for verdict in (report.failed or report.verdicts))
    return f"laws: {report.summary} in {cases:,} cases ({names})"
