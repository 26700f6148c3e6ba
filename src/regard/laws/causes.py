"""Several broken laws are often one fault. Which law names it best, and which others probably follow from it.

`FOLLOWS` says, for each law, which others a subject that breaks it usually breaks as well: a module that answers
differently the second time cannot agree with itself on two code paths. A broken law that follows from no other broken
one is a candidate for the cause; candidates are named in the order of `ORDER`. Both were drawn from the faults of the
zoo that break more than one law.
"""

from __future__ import annotations

from collections.abc import Iterable

# The most basic first: what has no fixed shape or answer cannot be compared at all.
ORDER = (
    "shape",
    "statelessness",
    "determinism",
    "paths",
    "causality",
    "alignment",
    "row-stochasticity",
    "head-groups",
    "relative-position",
    "scale",
    "empty-rows",
    "padding",
    "masked-values",
    "support",
    "permutation",
    "batch-independence",
    "gradients",
    "jacobian",
    "range",
    "table-precision",
    "cache",
    "cache-algebra",
    "cost",
    "reference",
)

_COMPARED = (
    "causality", "alignment", "cache", "padding", "masked-values", "empty-rows", "row-stochasticity", "support",
    "permutation", "batch-independence", "paths", "gradients", "scale", "relative-position", "head-groups", "range",
    "cache-algebra", "table-precision", "jacobian", "reference",
)  # fmt: skip

FOLLOWS: dict[str, tuple[str, ...]] = {
    # Outputs of another shape, other answers to equal calls: nothing that compares two outputs can hold.
    "shape": _COMPARED,
    "statelessness": ("determinism", *_COMPARED),
    "determinism": _COMPARED,
    # A code path that loses the mask, the scale or the causal limit breaks that law wherever it is taken.
    "paths": (
        "causality", "padding", "masked-values", "empty-rows", "row-stochasticity", "scale", "gradients", "reference",
    ),
    # Who sees the future sees another one with a cache, with fewer queries, and with padding behind the text.
    "causality": ("alignment", "cache", "cache-algebra", "padding", "support", "batch-independence", "reference"),
    "row-stochasticity": ("permutation", "batch-independence", "range", "scale", "jacobian", "padding", "reference"),
    "head-groups": ("support", "scale", "gradients", "jacobian", "reference"),
    "relative-position": ("cache", "cache-algebra", "reference"),
    "scale": ("jacobian", "reference"),
    # A row beside a longer one is padded; hidden keys that count have gradients and may be NaN.
    "padding": ("batch-independence", "gradients", "masked-values", "support", "reference"),
    "masked-values": ("empty-rows",),
    "gradients": ("jacobian",),
    "cache": ("cache-algebra",),
    "support": ("reference",),
    "permutation": ("reference",),
    "batch-independence": ("reference",),
}  # fmt: skip


def rank(broken: Iterable[str]) -> dict[str, str]:
    """The slugs of broken laws, likeliest cause first, each with the law that it probably follows from or ""."""
    slugs = sorted(set(broken), key=_place)
    above = {slug: [other for other in slugs if slug in FOLLOWS.get(other, ())] for slug in slugs}
    causes = {
        slug: next((other for other in above[slug] if not above[other]), (above[slug] or [""])[0]) for slug in slugs
    }
    return dict(sorted(causes.items(), key=lambda item: (bool(above[item[0]]), _place(item[0]))))


def _place(slug: str) -> int:
    return ORDER.index(slug) if slug in ORDER else len(ORDER)
