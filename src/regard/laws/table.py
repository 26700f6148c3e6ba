"""A report in a terminal, or as the same table in plain text."""

from __future__ import annotations

import io

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from regard.laws.report import Report
from regard.laws.verdict import Verdict

WIDTH = 100
COLOURS = {"holds": "green", "broken": "bold red", "flaky": "bold yellow", "not applicable": "dim"}
# The outcome of a law that nobody claims, which is no fault.
PROBED = {"holds": "yes", "broken": "no", "flaky": "not always", "not applicable": "does not apply"}
# A rule under the header and nothing else; letters that every terminal and every log file has.
RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def render(report: Report, width: int = WIDTH) -> RenderableType:
    """The table, and below it every violation in full."""
    # Text, never markup: what strangers call their modules may have brackets.
    parts: list[RenderableType] = [
        _line((report.subject, "bold"), (f"  {report.kind}, seed {report.seed}: {_summary(report)}", "none"))
    ]
    if report.declared:
        parts.append(_line((report.declared, "dim")))
    if report.verdicts:
        parts += [Text(), _table(report, width)]
    for broken in report.violations:
        first, *rest = str(broken).split("\n")
        parts += [Text(), _line(("LawViolation: ", "bold red"), (first, "bold"))]
        parts += [_line((line[:11], "cyan"), (line[11:], "none")) for line in rest]
    return Group(*parts)


def text(report: Report, width: int = WIDTH) -> str:
    """The report without colours, however the terminal is made, and if there is none."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(render(report, width), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))


def show(report: Report) -> None:
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(render(report, console.width), crop=False)
    else:
        print(text(report))


def answer(verdict: Verdict) -> str:
    """The outcome; of a law that was only probed, whether it holds."""
    return verdict.outcome if verdict.claimed else PROBED[verdict.outcome]


def remark(verdict: Verdict) -> str:
    """The one line that a table has for a verdict: what happened, or why not, or what was measured."""
    words = verdict.measured
    if not words and verdict.witness is not None:
        witness = verdict.witness
        words = f"{witness.changed} -> {witness.happened}" if witness.changed else witness.happened
    return " ".join((words or verdict.reason).split())


def _summary(report: Report) -> str:
    if not report.probing:
        return report.summary
    return f"{sum(verdict.outcome == 'holds' for verdict in report.verdicts)} of {len(report.verdicts)} laws hold"


def _table(report: Report, width: int) -> Table:
    table = Table(box=RULED, pad_edge=False, padding=(0, 1), show_edge=False, header_style="bold")
    room = width
    for name, justify in (("law", "left"), ("verdict", "left"), ("cases", "right"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=True, overflow="crop")  # type: ignore[arg-type]
    rows = [
        (f"{verdict.id:<4}{verdict.slug}", answer(verdict), str(verdict.cases or "-"), remark(verdict), verdict)
        for verdict in report.verdicts
    ]
    for column in range(3):
        room -= 3 + max(len(row[column]) for row in [*rows, ("law", "verdict", "cases")])
    for law, verdict, cases, words, judged in rows:
        colour = COLOURS[judged.outcome] if judged.claimed else "none"
        table.add_row(Text(law), Text(verdict, style=colour), cases, Text(_short(words, max(room, 20)), style="dim"))
    return table


def _short(words: str, room: int) -> str:
    return words if len(words) <= room else f"{words[: room - 4].rstrip()} ..."


def _line(*pieces: tuple[str, str]) -> Text:
    """One line that stays one: a terminal may wrap it, but what is copied from it is whole."""
    return Text.assemble(*pieces, no_wrap=True, overflow="ignore")
