"""A report as one page of HTML that needs nothing else: no script, no font, no address."""

from __future__ import annotations

import re

from regard.laws.law import Law
from regard.laws.picture import draw
from regard.laws.report import Report, versions, violation
from regard.laws.table import unchecked_table, verdict_table
from regard.laws.verdict import Verdict
from regard.render.markup import Markup, element, escape
from regard.render.page import Page, paragraph, read_asset


def render(report: Report) -> str:
    """The whole page."""
    told = [verdict for verdict in report.verdicts if verdict.counterexample is not None or not verdict.ok]
    order = list(report.causes)
    told.sort(key=lambda verdict: order.index(verdict.slug) if verdict.slug in order else len(order))
    page = Page(report.subject, title=f"Laws: {report.subject}")
    page.use_style(read_asset("regard.laws", "page.css"))
    page.open_with(
        paragraph(*_render_summary(report)),
        paragraph(_render_circumstances(report), kind="faint"),
        verdict_table(report, linked=told).to_html(),
    )
    for verdict in told:
        _add_verdict(page, verdict, report)
    if report.unchecked:
        page.add("Not checked", unchecked_table(report, report.unchecked).to_html(), anchor="unchecked")
    if report.verdicts:
        page.close_with(_render_statements([verdict.law for verdict in report.verdicts]))
    return page.html


def equation(text: str) -> Markup:
    """An equation in plain letters, with its indices lowered and its arrows drawn. Escaped first."""
    drawn = str(escape(text))
    for plain, sign in (("=&gt;", "⇒"), ("&lt;=", "≤"), ("&gt;=", "≥"), ("-&gt;", "→"), ("!=", "≠")):
        drawn = drawn.replace(plain, sign)
    drawn = re.sub(r"_\{([^{}]*)\}", r"<sub>\1</sub>", drawn)
    drawn = re.sub(r"\^\{([^{}]*)\}", r"<sup>\1</sup>", drawn)
    # After one letter an underline lowers; after a word it is part of a name.
    return Markup(re.sub(r"(?<![A-Za-z])([A-Za-z]'?|sum|max|min)_(\w+)", r"\1<sub>\2</sub>", drawn))


def _render_summary(report: Report) -> list[str]:
    if report.probing:
        held = sum(verdict.outcome == "holds" for verdict in report.verdicts)
        return [element("b", held), f" of {len(report.verdicts)} laws hold. Nothing was claimed."]
    kind = "holds" if report.ok else "broken" if any(v.outcome == "broken" for v in report.failed) else "flaky"
    words: list[str] = [element("b", report.summary, class_=kind)]
    causes = report.causes
    return [*words, f". Likeliest cause: {next(iter(causes))}."] if len(causes) > 1 else words


def _render_circumstances(report: Report) -> str:
    words = [report.kind, f"seed {report.seed}", "a fast search" if report.fast else "a full search"]
    words += [f"{name} {version}" for name, version in versions().items()]
    return " · ".join([*words, *([report.declared] if report.declared else [])])


def _add_verdict(page: Page, verdict: Verdict, report: Report) -> None:
    """A section with the counterexample."""
    law = verdict.law
    text = violation(verdict, report.replay(verdict), report.tell_cause(verdict.slug))
    kind = ("broken" if verdict.outcome == "broken" else "flaky") if verdict.claimed else "silent"
    entries = [
        element(tag, words) for part in text.parts.items() for tag, words in zip(("dt", "dd"), part, strict=True)
    ]
    page.add(
        f"{law.slug} — {text.headline}" if verdict.claimed else law.slug,
        paragraph(law.statement),
        element("div", equation(law.equation), class_="equation"),
        element("dl", *entries),
        *(draw(verdict.counterexample) if verdict.counterexample is not None else []),
        paragraph(f"What breaks it: {law.catches}.", kind="faint"),
        anchor=law.slug,
        kind=kind,
    )


def _render_statements(laws: list[Law]) -> Markup:
    words = []
    for law in laws:
        words.append(paragraph(element("b", f"{law.id} {law.title}."), f" {law.statement}"))
        words.append(element("div", equation(law.equation), class_="equation"))
    return element("details", element("summary", "What the laws say"), *words)
