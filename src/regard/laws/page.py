"""A report as one page of HTML that needs nothing else: no script, no font, no address."""

from __future__ import annotations

import re
from html import escape

from regard.laws.law import Law
from regard.laws.picture import draw
from regard.laws.report import Report, versions, violation
from regard.laws.table import answer, remark
from regard.laws.verdict import Verdict

CLASSES = {"holds": "holds", "broken": "broken", "flaky": "flaky", "not applicable": "silent"}

STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #1d1f23; --faint: #6a6f78; --line: #dddcd6; --card: #fff;
  --holds: #1f7a45; --broken: #c2281d; --flaky: #a66a00; --touched: #2f62c9; --still: #e9e8e2; --weight: #2f62c9; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171a; --ink: #e6e4de; --faint: #989da6; --line: #33373d;
  --card: #1c1f23; --holds: #5cc98b; --broken: #ff6f61; --flaky: #e9b04b; --touched: #7fa8ff; --still: #2c3036;
  --weight: #7fa8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .25rem; }
p { margin: .25rem 0; } .faint { color: var(--faint); font-size: .9rem; }
code, pre, .equation { font-family: ui-monospace, "Cascadia Mono", Menlo, monospace; font-size: .86rem; }
table { width: 100%; border-collapse: collapse; margin: 1.5rem 0 2.5rem; font-size: .95rem; }
th { text-align: left; font-weight: 600; color: var(--faint); font-size: .82rem; }
th, td { padding: .4rem .7rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: baseline; }
td.count { text-align: right; font-variant-numeric: tabular-nums; } td.words { overflow-wrap: anywhere; }
td a { color: inherit; } .number { display: inline-block; min-width: 2.4em; color: var(--faint); }
.verdict { font-weight: 600; white-space: nowrap; }
b.holds, .verdict.holds { color: var(--holds); } b.broken, .verdict.broken { color: var(--broken); }
b.flaky, .verdict.flaky { color: var(--flaky); } .silent { color: var(--faint); font-weight: 400; }
section { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--broken);
  border-radius: 6px; padding: 1rem 1.25rem; margin: 0 0 1.5rem; }
section.flaky { border-left-color: var(--flaky); } section.silent { border-left-color: var(--line); }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .15rem .75rem; margin: .75rem 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; font-family: ui-monospace, Menlo, monospace;
  font-size: .86rem; white-space: pre-wrap; }
.equation { margin: .6rem 0; padding: .5rem .75rem; background: var(--paper); border-radius: 4px; overflow-x: auto; }
figure { margin: 1rem 0 0; } svg { display: block; width: 100%; height: auto; }
figcaption, .legend { color: var(--faint); font-size: .85rem; margin-top: .4rem; }
.legend span { margin-right: 1.1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); } svg .name { font-weight: 600; fill: var(--ink); }
svg .tick { text-anchor: middle; } svg .row { text-anchor: end; }
rect.touched { fill: var(--touched); } i.touched { background: var(--touched); }
rect.still { fill: var(--still); } i.still { background: var(--still); }
rect.broken { fill: var(--broken); } i.broken { background: var(--broken); }
rect.free { fill: none; stroke: var(--line); } i.free { border: 1px solid var(--faint); }
rect.weight { fill: var(--weight); } i.weight { background: var(--weight); }
rect.differs { stroke: var(--broken); stroke-width: 1.5; } i.differs { border: 2px solid var(--broken); }
details { margin-top: 2rem; } summary { cursor: pointer; font-weight: 600; }
@media (max-width: 40rem) { thead { display: none; } tr { display: block; padding: .5rem 0;
  border-bottom: 1px solid var(--line); } td { display: inline; border: 0; padding: 0 .6rem 0 0; }
  td.words { display: block; color: var(--faint); font-size: .88rem; } td.count::after { content: " cases"; }
  dl { grid-template-columns: 1fr; gap: 0; } dt { margin-top: .4rem; font-size: .82rem; } }
"""


def render(report: Report) -> str:
    """The whole page."""
    told = [verdict for verdict in report.verdicts if verdict.witness is not None or not verdict.ok]
    parts = [
        f"<h1>{escape(report.subject)}</h1>",
        f"<p>{_summary(report)}</p>",
        f'<p class="faint">{escape(_circumstances(report))}</p>',
        _table(report, told),
        *(_section(verdict, report) for verdict in told),
        _statements([verdict.law for verdict in report.verdicts]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Laws: {escape(report.subject)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(part for part in parts if part)}\n</main>\n</body>\n</html>\n"
    )


def equation(text: str) -> str:
    """An equation in plain letters, with its indices lowered and its arrows drawn. Escaped first."""
    text = escape(text, quote=False)
    for plain, drawn in (("=&gt;", "⇒"), ("&lt;=", "≤"), ("&gt;=", "≥"), ("-&gt;", "→"), ("!=", "≠")):
        text = text.replace(plain, drawn)
    text = re.sub(r"_\{([^{}]*)\}", r"<sub>\1</sub>", text)
    text = re.sub(r"\^\{([^{}]*)\}", r"<sup>\1</sup>", text)
    # After one letter an underline lowers; after a word it is part of a name.
    return re.sub(r"(?<![A-Za-z])([A-Za-z]'?|sum|max|min)_(\w+)", r"\1<sub>\2</sub>", text)


def _summary(report: Report) -> str:
    if report.probing:
        held = sum(verdict.outcome == "holds" for verdict in report.verdicts)
        return f"<b>{held}</b> of {len(report.verdicts)} laws hold. Nothing was claimed."
    style = "holds" if report.ok else "broken" if any(v.outcome == "broken" for v in report.failed) else "flaky"
    return f'<b class="{style}">{escape(report.summary)}</b>'


def _circumstances(report: Report) -> str:
    words = [report.kind, f"seed {report.seed}", "a fast search" if report.fast else "a full search"]
    words += [f"{name} {version}" for name, version in versions().items()]
    return " · ".join([*words, *([report.declared] if report.declared else [])])


def _table(report: Report, told: list[Verdict]) -> str:
    rows = []
    for verdict in report.verdicts:
        name = f'<span class="number">{escape(verdict.id)}</span>'
        slug = escape(verdict.slug)
        name += f'<a href="#{slug}">{slug}</a>' if verdict in told else slug
        style = CLASSES[verdict.outcome] if verdict.claimed or verdict.outcome != "broken" else "silent"
        rows.append(
            f'<tr><td>{name}</td><td class="verdict {style}">{escape(answer(verdict))}</td>'
            f'<td class="count">{verdict.cases}</td><td class="words">{escape(remark(verdict))}</td></tr>'
        )
    head = '<tr><th>law</th><th>verdict</th><th style="text-align:right">cases</th><th></th></tr>'
    return f"<table>\n<thead>{head}</thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>"


def _section(verdict: Verdict, report: Report) -> str:
    law = verdict.law
    said = violation(verdict, report.replay(verdict))
    style = ("flaky" if verdict.outcome == "flaky" else "broken") if verdict.claimed else "silent"
    entries = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in said.parts.items())
    figures = "".join(draw(verdict.witness)) if verdict.witness is not None else ""
    headline = f"{escape(law.slug)} — {escape(law.headline)}" if verdict.claimed else escape(law.slug)
    return (
        f'<section id="{escape(law.slug)}" class="{style}">\n<h2>{headline}</h2>\n<p>{escape(law.statement)}</p>\n'
        f'<div class="equation">{equation(law.equation)}</div>\n<dl>{entries}</dl>\n{figures}\n'
        f'<p class="faint">What breaks it: {escape(law.catches)}.</p>\n</section>'
    )


def _statements(laws: list[Law]) -> str:
    if not laws:
        return ""
    words = "".join(
        f"<p><b>{escape(law.id)} {escape(law.title)}.</b> {escape(law.statement)}</p>"
        f'<div class="equation">{equation(law.equation)}</div>'
        for law in laws
    )
    return f"<details><summary>What the laws say</summary>\n{words}\n</details>"
