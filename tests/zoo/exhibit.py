"""One fault, rebuilt small: what broke, where it was reported, and the corrected code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Exhibit:
    """A faulty piece of attention beside its corrected twin.

    Attributes:
        id: the row of the list of reports, or a name of our own that begins with the law's number.
        report_url: where it happened; empty for faults that we invented.
        story: what went wrong, in one sentence.
        kind: operator, layer or model.
        faulty, twin: factories of the two.
        law: the laws that must catch the fault.
        claims: what the twin claims, and must keep; the laws of `law` are among them.
        options: the conventions and sizes to check with.
    """

    id: str
    report_url: str
    story: str
    kind: str
    faulty: Callable[[], Any]
    twin: Callable[[], Any]
    law: tuple[str, ...]
    claims: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = set(self.law) - set(self.claims)
        if missing:
            raise ValueError(f"{self.id}: the twin has to claim {sorted(missing)}")

    def build(self, which: str) -> Any:
        """The faulty one or the twin, with the same numbers at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return getattr(self, which)()

    def __repr__(self) -> str:
        return f"<exhibit {self.id}>"


def report(path: str) -> str:
    """The address of a public report."""
    return f"https://github.com/{path}"


@functools.cache
def given(function: Callable) -> Callable[[], Callable]:
    """The factory of a plain function, the same one every time."""
    return lambda: function


def twins(exhibits: Iterable[Exhibit]) -> list[Exhibit]:
    """One exhibit for each twin, which claims what it claims anywhere."""
    found: dict[tuple, Exhibit] = {}
    for exhibit in exhibits:
        key = (exhibit.twin, exhibit.kind, repr(sorted(exhibit.options.items())))
        known = found.get(key, exhibit)
        law, claims = dict.fromkeys(known.law + exhibit.law), dict.fromkeys(known.claims + exhibit.claims)
        found[key] = replace(known, law=tuple(law), claims=tuple(claims))
    return list(found.values())
