"""Which laws a subject claims when none are given."""

from __future__ import annotations

from regard.adapters import Adapter
from regard.adapters.known_layer import ATTENTION_CLAIMS

# What a query yields that sees nothing is a convention, of which there are several; it is not inferred.
OF_OPERATORS = ("range",)


def infer_claims(subject: Adapter) -> list[str]:
    """The claims of a subject: those of its class where it was recognised, else those that hold for every attention."""
    if subject.claims:
        return list(subject.claims)
    claims = [*ATTENTION_CLAIMS, *(OF_OPERATORS if subject.kind == "operator" else ())]
    if subject.caching is not None:
        claims += ["cache", "cache-algebra"]
    if subject.conventions.pattern is not None:
        claims += ["support"]
    return claims
