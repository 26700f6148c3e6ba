"""Several broken laws are often one fault. Which law names it best, and which others probably follow from it.

`FOLLOWS` says, for each law, which others a subject that breaks it usually breaks as well: a module that answers
differently the second time cannot agree with itself on two code paths. A broken law that follows from no other broken
one is a candidate for the cause; candidates are named in the order of `ORDER`. Both were drawn from the faults of the
zoo that break more than one law.
"""

from __future__ import annotations

from collections.abc import Mapping

from regard.laws.law import Case
from regard.laws.variants import HALVES

# The most basic first: outputs without a fixed shape or value cannot be compared at all.
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
    # Outputs of another shape, other outputs of equal calls: nothing that compares two outputs can hold.
    "shape": _COMPARED,
    "statelessness": ("determinism", *_COMPARED),
    "determinism": _COMPARED,
    # A code path that loses the mask, the scale or the causal limit breaks that law wherever it is taken.
    "paths": (
        "causality", "padding", "masked-values", "empty-rows", "row-stochasticity", "scale", "gradients", "reference",
    ),
    # Attention to later tokens also changes with a cache, with fewer queries, and with right padding.
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


# What a mask hides: of these laws, one that breaks in half precision is more specific than `paths`.
_OF_MASKS = ("padding", "masked-values", "empty-rows")


def rank_causes(broken: Mapping[str, Case]) -> dict[str, str]:
    """The slugs of broken laws, likeliest cause first, each with the law that it probably follows from or "".

    `broken` has the case of the counterexample of each, as far as there is one.
    """
    slugs = sorted(broken, key=_find_place)
    above = {slug: [other for other in slugs if _follows(slug, other, broken)] for slug in slugs}
    causes = {
        slug: next((other for other in above[slug] if not above[other]), (above[slug] or [""])[0]) for slug in slugs
    }
    return dict(sorted(causes.items(), key=lambda item: (bool(above[item[0]]), _find_place(item[0]))))


def _follows(effect: str, cause: str, broken: Mapping[str, Case]) -> bool:
    """Whether one broken law probably follows from another one.

    Two paths that differ are the cause of other violations, except where one of them is half precision under a mask:
    `paths` compares precisions without a mask first, so it is the mask that half precision does not obey, and the law
    of masks that breaks in half precision says so.
    """
    path, mask = (broken.get("paths", {}).get(name) for name in ("path", "mask"))
    if path in HALVES and mask != "none" and {effect, cause} & {"paths"}:
        other = cause if effect == "paths" else effect
        if other in _OF_MASKS and broken[other].get("dtype") in HALVES:
            return effect == "paths"
    return effect in FOLLOWS.get(cause, ())


def _find_place(slug: str) -> int:
    return ORDER.index(slug) if slug in ORDER else len(ORDER)
