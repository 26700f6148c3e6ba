"""Which laws a subject claims when nobody says."""

from __future__ import annotations

from regard.laws.subjects import Subject
from regard.laws.subjects.known import UNIVERSAL

# What a query yields that sees nothing is a convention, of which there are several; it is not guessed.
OF_OPERATORS = ("range",)


def infer(subject: Subject) -> list[str]:
    """The claims of a subject: those of its class where it was recognised, else what every attention promises."""
    if subject.claims:
        return list(subject.claims)
    claims = [*UNIVERSAL, *(OF_OPERATORS if subject.kind == "operator" else ())]
    if subject.caching is not None:
        claims += ["cache", "cache-algebra"]
    if subject.conventions.pattern is not None:
        claims += ["support"]
    return claims
