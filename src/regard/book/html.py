"""An executed page as one self-contained HTML file, with MathML and inline figures."""

from __future__ import annotations

from regard.book.execution import ExecutedPage
from regard.book.formulas import as_mathml
from regard.book.markdown import inline_figure, to_markdown
from regard.render.markup import Markup
from regard.render.page import Page as HtmlPage

STYLE = """
main { max-width: 52rem; }
.formula { overflow-x: auto; margin: 1rem 0; } math { font-size: 1.08em; }
pre code { font-size: 1em; } pre code.language-text { color: var(--faint); }
pre:has(> .language-text) { background: none; border: 1px solid var(--line); margin-top: -.6rem; }
table { width: auto; margin: 1rem 0; }
blockquote { margin: 1rem 0; padding-left: 1rem; border-left: 3px solid var(--line); }
h2 { margin-top: 2.4rem; } li { max-width: 66ch; }
"""


def to_html(executed: ExecutedPage) -> str:
    """The page as one HTML file without any address outside of it."""
    page = executed.page
    made = HtmlPage(page.title, kicker=f"{page.id} · {page.source}")
    made.use_style(STYLE)
    made.open_with(markdown_to_html(to_markdown(executed, as_mathml, inline_figure, title=False, links=False)))
    return made.html


def markdown_to_html(text: str) -> Markup:
    """CommonMark with tables; HTML in the text is kept, since only pages of this package get here."""
    from markdown_it import MarkdownIt

    return Markup(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
