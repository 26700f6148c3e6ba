"""The book for the site: every page after its run, with figures, questions and errata; the errata after theirs."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Iterable
from pathlib import Path

from regard.book import list_page_ids, load_page, run_page
from regard.book.errata import list_errata
from regard.book.errata.report import format_value
from regard.book.library import SOURCES
from regard.book.markdown import inline_figure, to_markdown
from regard.book.questions import find_questions
from regard.book.terminal import BOOKS

KINDS = {"wrong": "wrong", "incomplete": "incomplete", "garbled": "a slip of writing"}
# A page for each source, which has the list of its problems and their place in the sidebar.
SOURCE_PAGES = tuple(f"source-{source}" for source in SOURCES)


def write_pages(folder: Path, pages: Iterable[str] | None, jobs: int) -> None:
    """Run the pages, and write them, the pages of the sources, and the errata as Markdown."""
    folder.mkdir()
    names = list_page_ids()
    chosen = set(names if pages is None else pages)
    # New processes, not copies of this one: a copy of a process that has used its threads may wait for them forever.
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        # The slow ones first, so that none of them is left alone at the end.
        order = sorted(names, key=lambda name: not load_page(name).slow)
        made = {name: pool.submit(make_page, name, name in chosen) for name in order}
        errata = pool.submit(make_errata)
        for name in names:
            (folder / f"{name}.md").write_text(made[name].result(), encoding="utf-8")
        (folder / "errata.md").write_text(errata.result(), encoding="utf-8")
    for source, page in zip(SOURCES, SOURCE_PAGES, strict=True):
        (folder / f"{page}.md").write_text(make_source(source), encoding="utf-8")


def make_page(name: str, run: bool = True) -> str:
    """A page with its outputs, or without a run its title alone."""
    page = load_page(name)
    if not run:
        return f"# {page.title}\n\n*{page.source}*\n\nThis page was not run.\n"
    text = f"# {page.title}\n\n*{page.id} · {page.source}*\n\n"
    text += to_markdown(run_page(page), None, inline_figure, title=False)
    lines = []
    for question in find_questions(name):
        lines.append(f'- {_escape(question.prompt)}\n  `regard answer {question.id} "..."`')
    if lines:
        text += "\n## Questions that are graded\n\n" + "\n".join(lines) + "\n"
    errata = [entry for entry in list_errata() if entry.problem == name]
    if errata:
        links = ", ".join(f"[{entry.id}](errata.md#{anchor_of(entry.id)})" for entry in errata)
        text += f"\nErrata that run: {links}.\n"
    return text


def make_source(source: str) -> str:
    """The problems of a source."""
    names = [name for name in list_page_ids() if name.partition("-")[0] == source]
    rows = [f"| [{name}]({name}.md) | {load_page(name).title} | {load_page(name).topic} |" for name in names]
    title, _, rest = BOOKS[source].partition(",")
    toctree = "\n".join(names)
    return (
        f"# {title}\n\n{rest.strip() or title}.\n\n| problem | title | topic |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n"
    )


def make_errata() -> str:
    """Every erratum: what is claimed, the smallest case in which that fails, and the correction."""
    entries = list_errata()
    parts = [
        "# Mistakes of the sources",
        f"{len(entries)} places in the problem sets, and in solutions of them that circulate, are wrong, incomplete or "
        "garbled. Each claim was run on cases of rising size until it failed; each correction held in all of them. "
        "`regard errata --run` does the same on your machine.",
    ]
    for entry in entries:
        outcome = entry.run()
        trial = outcome.counterexample
        if trial is None or not outcome.is_proved:
            raise SystemExit(f"the erratum {entry.id} is not proved")
        parts += [
            f"({anchor_of(entry.id)})=\n## {entry.id}",
            f"{entry.where}: {KINDS[entry.kind]}.",
            f"**Claimed.** {entry.claim}",
            f"**Instead.** {entry.correction}",
            f"```text\nfails     {trial.case}\nclaimed   {format_value(trial.claimed)}\n"
            f"computed  {format_value(trial.computed)}\nholds     the correction, in {len(outcome.trials)} of "
            f"{len(outcome.trials)} cases\n```",
        ]
        if entry.problem in list_page_ids():
            parts.append(f"The page of the problem: [{entry.problem}]({entry.problem}.md).")
    return "\n\n".join(parts) + "\n"


def anchor_of(identifier: str) -> str:
    return "erratum-" + identifier.replace(":", "-").replace(".", "-")


def _escape(text: str) -> str:
    """A prompt of a question is plain text, with stars and brackets that are no markup."""
    return "".join(f"\\{sign}" if sign in "*_[]<$" else sign for sign in text)
