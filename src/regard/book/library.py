"""The pages that are installed with the package."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path

from regard.book.page import Page, parse_page
from regard.errors import InputError

FOLDER = Path(__file__).parent / "pages"


def list_page_ids(folder: Path = FOLDER) -> list[str]:
    """The ids of all pages, in the order of the sources and their numbers."""
    return sorted((file.stem for file in folder.glob("*.md")), key=sort_key)


def load_page(identifier: str, folder: Path = FOLDER) -> Page:
    """The page of a problem; capital letters in the id do not matter."""
    known = {name.lower(): name for name in list_page_ids(folder)}
    name = known.get(identifier.strip().lower())
    if name is None:
        raise unknown_problem(identifier, list(known.values()))
    return _parse_file(folder / f"{name}.md")


def load_pages(folder: Path = FOLDER) -> list[Page]:
    """All pages, in order."""
    return [_parse_file(folder / f"{name}.md") for name in list_page_ids(folder)]


def unknown_problem(identifier: str, known: list[str]) -> InputError:
    """The error for an id that does not exist, with those that look like it."""
    near = difflib.get_close_matches(identifier.strip().lower(), known, n=3, cutoff=0.5)
    return InputError(
        f"There is no problem {identifier[:60]!r}.",
        because=f"there are {len(known)} problems, and none has this id",
        instead=" or ".join(near) if near else "regard problem, which lists them",
    )


SOURCES = ("bis", "udl", "nyu", "ttic", "eth")


def sort_key(identifier: str) -> tuple[int, list[tuple[int, int | str]]]:
    """Sources in the order of the list above, and 12.10 after 12.9."""
    source, _, rest = identifier.partition("-")
    order = SOURCES.index(source) if source in SOURCES else len(SOURCES)
    return order, [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in _split_digits(rest)]


def _split_digits(text: str) -> list[str]:
    """`1.10a` as 1, ., 10, a."""
    pieces: list[str] = []
    for sign in text:
        if pieces and sign.isdigit() and pieces[-1].isdigit():
            pieces[-1] += sign
        else:
            pieces.append(sign)
    return pieces


@functools.cache
def _parse_file(file: Path) -> Page:
    page = parse_page(file.read_text(encoding="utf-8"), str(file))
    if page.id != file.stem:
        raise InputError(
            f"{file.name} has the id {page.id!r}.",
            because="a page is found by the name of its file",
            instead=f"id: {file.stem}",
        )
    return page
