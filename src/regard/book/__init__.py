"""The book: one page for each problem, whose numbers and pictures are computed when the page is run.

    page = load_page("udl-12.1")     parse: front matter, prose, code blocks
    executed = run_page(page)        run the blocks in one namespace; an assertion that fails raises PageError

`regard problem` prints a page, `regard answer` grades an answer, `regard homework` makes sheets and grades folders.
"""

from regard.book.execution import ExecutedPage, run_page
from regard.book.library import list_page_ids, load_page
from regard.book.page import Page, parse_page

__all__ = ["ExecutedPage", "Page", "list_page_ids", "load_page", "parse_page", "run_page"]
