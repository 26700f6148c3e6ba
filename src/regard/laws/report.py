"""Verdicts together: a table, JSON, a page, and what is printed when a law breaks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.laws.verdict import Verdict, Verdicts


@dataclass
class Report:
    """What the laws say of one subject.

    Attributes:
        subject: its name.
        verdicts: one for each law, in order; a slug or number finds its own.
        seed: the same seed looks at the same cases.
        declared: what was recognised about it.
    """

    subject: str
    kind: str
    verdicts: Verdicts
    seed: int = 0
    declared: str = ""
    fast: bool = False
    probing: bool = False

    @property
    def ok(self) -> bool:
        """Whether no law is broken and none is flaky."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def failed(self) -> Verdicts:
        """The verdicts that are broken or flaky."""
        return Verdicts(verdict for verdict in self.verdicts if not verdict.ok)

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON, written to `path` if one is given."""
        raise NotImplementedError

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one page that needs nothing else, written to `path` if one is given."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(str(verdict) for verdict in self.verdicts)


def violation(verdict: Verdict, seed: int) -> Any:
    raise NotImplementedError


__all__ = ["Report", "json", "violation"]
