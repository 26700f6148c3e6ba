"""Faults of a folder of HTML pages: links and anchors that lead nowhere, and addresses outside of the folder.

A page may link to an address of the web in its text (reports of bugs do), but nothing is fetched from there: no script,
style, font, image or frame.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements and attributes by which a browser fetches something.
FETCHED = {"src", "srcset", "data", "poster", "action"}
IN_STYLE = re.compile(r"url\(\s*['\"]?(?P<target>[^'\")]+)|@import\s+['\"](?P<imported>[^'\"]+)")
WEB = ("http://", "https://", "//", "ws://", "wss://")


class Page(HTMLParser):
    """The ids of a page, its links, and what it fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.in_style = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_style = tag == "style"
        for name, value in attrs:
            if value is None:
                continue
            if name in ("id", "name") and tag != "meta":
                self.ids.add(value)
            elif name == "href" and tag in ("a", "area"):
                self.links.append(value)
            elif name in FETCHED or (name in ("href", "xlink:href")):
                self.fetched.append(value)
            elif name == "style":
                self.fetched += targets_of_style(value)

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag: str) -> None:
        self.in_style = False

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.fetched += targets_of_style(data)


def targets_of_style(text: str) -> list[str]:
    """What a style sheet loads."""
    return [match["target"] or match["imported"] for match in IN_STYLE.finditer(text)]


def find_faults(folder: Path) -> list[str]:
    """One line for each fault, `page: what`; an empty list if there is none."""
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.html"))}
    faults = []
    for file, page in pages.items():
        name = file.relative_to(folder)
        faults += [f"{name}: fetches {target}" for target in page.fetched if target.startswith(WEB)]
        for target in [*page.links, *page.fetched]:
            if not target.startswith((*WEB, "data:", "mailto:")) and (why := explain(file, target, pages)):
                faults.append(f"{name}: {target} {why}")
    for file in sorted(folder.rglob("*.css")):
        for target in targets_of_style(file.read_text(encoding="utf-8")):
            if target.startswith(WEB):
                faults.append(f"{file.relative_to(folder)}: fetches {target}")
    return faults


def explain(file: Path, target: str, pages: dict[Path, Page]) -> str:
    """Why a link of a page leads nowhere; an empty text if it leads somewhere."""
    parts = urlsplit(target)
    if parts.scheme:
        return "is not a link of this site"
    goal = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if goal.is_dir():
        goal = goal / "index.html"
    if not goal.exists():
        return "does not exist"
    if parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].ids:
        return "has no such anchor"
    return ""
