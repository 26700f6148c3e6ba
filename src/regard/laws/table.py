"""A report in a terminal, or as the same tables in plain text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from regard.laws.report import Report
from regard.laws.unchecked import Unchecked
from regard.laws.verdict import Verdict
from regard.render.table import Cell, Column, Table, shorten
from regard.render.terminal import WIDTH, one_line, plain_text, print_fitted, stack

if TYPE_CHECKING:
    from rich.console import RenderableType

# As many laws that were left out for the same reason are named in one line.
ALIKE = 4
KINDS = {"holds": "holds", "broken": "broken", "flaky": "flaky", "undecided": "flaky", "not applicable": "silent"}
# The outcome of a law that is not claimed, which is no violation.
PROBED = {
    "holds": "yes",
    "broken": "no",
    "flaky": "not always",
    "undecided": "undecided",
    "not applicable": "does not apply",
}


def render(report: Report, width: int = WIDTH) -> RenderableType:
    """The table, and below it every violation in full."""
    title = one_line(
        (report.subject, "bold"), (f"  {report.kind}, seed {report.seed}: {_format_summary(report)}", "none")
    )
    causes = report.causes
    return stack(
        [title, *([one_line((report.declared, "dim"))] if report.declared else [])],
        verdict_table(report).to_rich(width) if report.verdicts else [],
        one_line((f"likeliest cause: {next(iter(causes))}", "bold")) if len(causes) > 1 else [],
        *(_violation_lines(str(broken)) for broken in report.violations),
        _unchecked_lines(report, width),
    )


def text(report: Report, width: int = WIDTH) -> str:
    """The report without colors, whatever the terminal."""
    return plain_text(render(report, width))


def show(report: Report) -> None:
    """Print the report, in color to a terminal."""
    print_fitted(lambda width: render(report, width))


def verdict_table(report: Report, linked: list[Verdict] | None = None) -> Table:
    """A row for each law: its verdict, the cases that were tried, and what was found.

    linked: the verdicts that a page describes below the table.
    """
    rows = []
    for verdict in report.verdicts:
        link = f"#{verdict.slug}" if linked and verdict in linked else ""
        kind = KINDS[verdict.outcome] if verdict.claimed else ""
        words = Cell(describe(verdict), "faint")
        rows.append(
            (
                Cell(_format_name(verdict), link=link),
                Cell(format_outcome(verdict), kind),
                str(verdict.tried or "-"),
                words,
            )
        )
    columns = [Column("law"), Column("verdict"), Column("cases", "right"), Column("", "left", "wrap")]
    return Table(columns, rows)


def unchecked_table(report: Report, unchecked: list[Unchecked]) -> Table:
    """The laws that were left out, each with why and what would have it checked."""
    rows = []
    for left in unchecked:
        add = (left.flag if report.command else left.argument) or "-"
        rows.append((Cell(_format_name(left), "faint"), add, Cell(left.reason, "faint")))
    return Table([Column("not checked"), Column("add"), Column("", "left", "wrap")], rows)


def format_outcome(verdict: Verdict) -> str:
    """The outcome, and whether the claim was inferred; of a law that was only probed, whether it holds."""
    if not verdict.claimed:
        return PROBED[verdict.outcome]
    return f"{verdict.outcome}, inferred" if verdict.inferred else verdict.outcome


def describe(verdict: Verdict) -> str:
    """A verdict in one line: what happened, or why not, or what was measured."""
    words = verdict.measured
    if not words and verdict.counterexample is not None:
        counterexample = verdict.counterexample
        words = (
            f"{counterexample.changed} -> {counterexample.happened}"
            if counterexample.changed
            else counterexample.happened
        )
    return " ".join((words or verdict.reason).split())


def _format_name(law: Verdict | Unchecked) -> str:
    return f"{law.id:<4}{law.slug}"


def _format_summary(report: Report) -> str:
    if not report.probing:
        return report.summary
    return f"{sum(verdict.outcome == 'holds' for verdict in report.verdicts)} of {len(report.verdicts)} laws hold"


def _violation_lines(violation: str) -> list[RenderableType]:
    first, *rest = violation.split("\n")
    title = one_line(("LawViolation: ", "bold red"), (first, "bold"))
    return [title, *(one_line((line[:11], "cyan"), (line[11:], "none")) for line in rest)]


def _unchecked_lines(report: Report, width: int) -> list[RenderableType]:
    """The laws that were left out; many of one reason in one line."""
    counts = Counter(left.reason for left in report.unchecked)
    rare = [left for left in report.unchecked if counts[left.reason] < ALIKE]
    lines: list[RenderableType] = [unchecked_table(report, rare).to_rich(width)] if rare else []
    for reason in dict.fromkeys(left.reason for left in report.unchecked if counts[left.reason] >= ALIKE):
        slugs = ", ".join(left.slug for left in report.unchecked if left.reason == reason)
        how = "--also SLUG" if report.command else 'also=["..."]'
        words = shorten(f"not checked, {reason}; {how} adds one: {slugs}", max(width, 24), "wrap")
        lines += [one_line((line, "dim")) for line in words.split("\n")]
    return lines
