"""The documentation: links and anchors of its Markdown, the site that is built from it, and its docstrings."""

from __future__ import annotations

import contextlib
import html
import re
import sys
from pathlib import Path

import pytest

from regard.book import list_page_ids, load_page
from regard.book.homework.pdf import BROWSERS, find_program

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "tools" / "site"
sys.path.insert(0, str(SITE))

import docstrings  # noqa: E402  (from tools/site)
import links  # noqa: E402

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = sorted((ROOT / "src" / "regard" / "book" / "pages").glob("*.md"))
LINK = re.compile(r"\[[^\]\[]*\]\((?P<target>[^()\s]+)\)")
CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1[^\n]*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


# Markdown, as it is read in the repository


def find_broken_links(file: Path) -> list[str]:
    """Links of a Markdown file to files and headings that do not exist."""
    broken = []
    for match in LINK.finditer(CODE.sub("", file.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        goal = (file.parent / target).resolve() if target else file
        if "://" in match["target"]:
            continue
        if not goal.exists() or (anchor and anchor not in find_anchors(goal)):
            broken.append(match["target"])
    return broken


def find_anchors(file: Path) -> set[str]:
    """The anchors that are made from the headings of a Markdown file."""
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1[^\n]*$", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+\s+(.*?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", [*DOCUMENTS, *PAGES], ids=lambda file: file.name)
def test_links_and_anchors_lead_somewhere(file):
    assert find_broken_links(file) == []


@pytest.mark.parametrize("link", ["other.md", "#no-heading", "there.md#nothing", "missing/there.md"])
def test_a_broken_link_in_markdown_is_found(tmp_path, link):
    (tmp_path / "there.md").write_text("# A heading, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        f"# Mine\n\n[a](there.md) [b](there.md#a-heading-with-code) [c](#mine) `[d](code.md)` [e]({link})\n"
    )
    assert find_broken_links(page) == [link]


def test_the_map_of_the_book_has_every_problem_with_its_title():
    text = (ROOT / "docs" / "book.md").read_text(encoding="utf-8")
    for name in list_page_ids():
        page = load_page(name)
        assert f"| [{name}](../src/regard/book/pages/{name}.md) | {page.title} | {page.topic} |" in text, name
    assert text.count("src/regard/book/pages/") == len(list_page_ids())
    assert f"{len(list_page_ids())} problems" in text


# The site


def write_site(folder: Path, body: str) -> Path:
    (folder / "other.html").write_text('<h1 id="here">Other</h1><a name="old"></a>')
    (folder / "style.css").write_text("body { background: url('other.html') }")
    (folder / "index.html").write_text(f'<link href="style.css"><a href="other.html#here">a</a>{body}')
    return folder


def test_a_site_without_faults_has_none(tmp_path):
    body = '<a href="#x" id="x">b</a><a href="other.html#old">c</a><img src="data:image/png;base64,AA"><a href="https://report/1">d</a>'
    assert links.find_faults(write_site(tmp_path, body)) == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="missing.html">a</a>', "missing.html does not exist"),
        ('<a href="other.html#gone">a</a>', "other.html#gone has no such anchor"),
        ('<a href="#gone">a</a>', "#gone has no such anchor"),
        ('<img src="missing.png">', "missing.png does not exist"),
        ('<script src="https://cdn/x.js"></script>', "fetches https://cdn/x.js"),
        ('<link href="//fonts/css">', "fetches //fonts/css"),
        ("<style>@import 'https://fonts/css';</style>", "fetches https://fonts/css"),
        ('<p style="background: url(https://x/y.png)">', "fetches https://x/y.png"),
    ],
)
def test_a_fault_of_a_site_is_found(tmp_path, body, fault):
    assert links.find_faults(write_site(tmp_path, body)) == [f"index.html: {fault}"]


def test_a_style_sheet_that_fetches_is_found(tmp_path):
    write_site(tmp_path, "")
    (tmp_path / "style.css").write_text("@font-face { src: url(https://fonts/a.woff2) }")
    assert links.find_faults(tmp_path) == ["style.css: fetches https://fonts/a.woff2"]


def test_docstrings_become_restructured_text():
    text = """Weights of `a*b`s and 2*3, `code
that goes on`.

    y = x_ * W

Args:
    first: what it is, `x`
        and more.
    *rest: others.

    >>> f(1)
    2

name: a parameter without a section,
    which goes on.
Source: a paper, whose line
goes on without indentation.
"""
    made = "\n".join(docstrings.to_restructured_text(text.split("\n")))
    assert "``a*b``\\ s and 2\\*3, ``code that goes on``." in made
    assert "::\n\n    y = x_ * W\n" in made
    assert "**Arguments**\n\n- ``first``: what it is, ``x``\n  and more.\n- ``*rest``: others.\n" in made
    assert "\n>>> f(1)\n2\n" in made
    assert "Source: a paper, whose line\ngoes on" in made


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The whole site, built once: two minutes."""
    pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install regard[docs]")
    pytest.importorskip("furo", reason="furo is not installed: pip install regard[docs]")
    import build

    folder = tmp_path_factory.mktemp("site")
    assert build.build(folder) == []
    return folder / "html"


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_without_broken_links(built):
    for name in list_page_ids():
        page = (built / "book" / f"{name}.html").read_text(encoding="utf-8")
        assert load_page(name).title.split()[0] in html.unescape(page).replace("’", "'")  # Sphinx sets curly quotes
        assert "{{" not in page, name
    assert (built / "book" / "eth-c2.html").read_text(encoding="utf-8").count("<figure") == 1
    assert "<math" in (built / "book" / "udl-12.4.html").read_text(encoding="utf-8")
    assert 'id="regard.patterns.Window"' in (built / "reference" / "regard.patterns.html").read_text(encoding="utf-8")
    assert "softmax" in (built / "searchindex.js").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_pages_of_the_site_fit_and_fetch_nothing(built, width, scheme):
    pages = ["index", "book", "book/errata", "book/udl-12.8", "book/nyu-1.1e", "laws", "reference/regard.layers"]
    for page in pages:
        with open_page(built, f"{page}.html", width, scheme) as opened:
            hidden = opened.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert hidden <= 0, f"{page} is {hidden} pixels wider than the screen"
            size = opened.evaluate("parseFloat(getComputedStyle(document.querySelector('article p')).fontSize)")
            assert size >= 14, page


@pytest.mark.slow
def test_the_search_of_the_site_works_without_a_server(built):
    with open_page(built, "index.html", 1440, "light") as page:
        page.fill("input[name=q]", "saturated")
        page.press("input[name=q]", "Enter")
        page.wait_for_selector("#search-results li a")
        found = page.eval_on_selector_all("#search-results li a", "links => links.map(link => link.textContent)")
        assert any("Jacobian" in title for title in found), found


@contextlib.contextmanager
def open_page(folder: Path, name: str, width: int, scheme: str):
    """A page of a folder in Chromium; nothing may be fetched but files of the folder, and nothing go wrong."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: regard[browser]")
    program = find_program(BROWSERS)
    if program is None:
        pytest.skip("there is no Chromium on this machine: make browser")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda failure: wrong.append(str(failure)))
        page.on("requestfailed", lambda request: wrong.append(request.url))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url))
        page.goto((folder / name).as_uri())
        yield page
        browser.close()
        assert wrong == [], name
