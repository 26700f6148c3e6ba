"""All errata, source by source."""

from __future__ import annotations

import difflib

from regard.book.errata import bishop, eth, nyu_attention, nyu_models, nyu_multihead, prince, prince_models, ttic  # noqa: F401
from regard.book.errata.erratum import ENTRIES, Erratum
from regard.book.library import sort_key
from regard.errors import InputError


def list_errata(problem: str | None = None) -> list[Erratum]:
    """All entries in the order of the problems, or those of a problem (`udl-12.1`) or source (`udl`)."""
    entries = sorted(ENTRIES.values(), key=lambda entry: sort_key(entry.problem))
    if problem is None:
        return entries
    wanted = problem.lower()
    found = [entry for entry in entries if entry.id == wanted or _belongs(entry.id, wanted)]
    if not found:
        near = difflib.get_close_matches(
            wanted, [*ENTRIES, *(entry.problem for entry in ENTRIES.values())], n=3, cutoff=0.5
        )
        raise InputError(
            f"{problem!r} names no erratum.",
            because="neither an entry, nor a problem, nor a source with entries has this name",
            instead=" or ".join(dict.fromkeys(near)) or "regard errata, which lists all of them",
        )
    return found


def find_erratum(id: str) -> Erratum:
    """The entry with this id."""
    found = list_errata(id)
    if len(found) > 1:
        raise InputError(
            f"{id!r} names {len(found)} errata.",
            because="it is a problem or a source, not an entry",
            instead=" or ".join(entry.id for entry in found[:3]),
        )
    return found[0]


def _belongs(id: str, prefix: str) -> bool:
    rest = id.removeprefix(prefix)
    return rest != id and not rest[:1].isalnum()
