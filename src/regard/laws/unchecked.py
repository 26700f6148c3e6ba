"""The laws that a check leaves out: why, and what to write to have them checked too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from regard.adapters import Adapter
from regard.laws.catalog import LAWS
from regard.laws.law import Law

# Why a law is not assumed of a subject that claims nothing itself.
NOT_ASSUMED = {
    "causality": "attention may look ahead unless it claims to be causal",
    "alignment": "how unequal lengths are aligned is a convention",
    "cache": "decoding with a cache is not assumed",
    "padding": "invariance to padding is not assumed",
    "masked-values": "zero times NaN is NaN in many correct implementations",
    "empty-rows": "the output of a query that sees nothing is a convention",
    "row-stochasticity": "weights need not sum to one: sigmoid attention, attention sinks",
    "support": "no pattern is declared: pattern= or window= does",
    "permutation": "positions make the order of tokens matter",
    "batch-independence": "independence of rows is not assumed",
    "paths": "several code paths are not assumed",
    "determinism": "determinism is not assumed",
    "gradients": "gradients are not assumed",
    "scale": "scores may be scaled by another factor than 1/sqrt(dim)",
    "relative-position": "positions may be absolute, or there may be none",
    "head-groups": "fewer key heads than query heads are not assumed",
    "range": "scores beyond the usual range are not assumed",
    "cache-algebra": "reordering and cropping a cache are not assumed",
    "cost": "no cost is declared: growth=1 or growth=2 does",
    "table-precision": "positions in half precision are not assumed",
    "jacobian": "weights need not be a softmax",
    "statelessness": "independence of earlier calls is not assumed",
    "shape": "the shape of the output is not assumed",
}
REFERENCE = "wrong values that keep every law are seen only beside a reference"


@dataclass(frozen=True)
class Unchecked:
    """A law that was not checked: its slug and number, why, and the flag or argument that would have it checked.

    `flag` is what to add on a command line and `argument` what to add in Python; both are empty for a law that does
    not apply to the subject.
    """

    slug: str
    id: str
    reason: str
    flag: str = ""
    argument: str = ""


def list_unchecked(subject: Adapter, chosen: Iterable[Law], explicit: bool, reference: bool) -> list[Unchecked]:
    """Every law that is not among the chosen, and the reference if there was none.

    `explicit` is whether the claims were given by the user.
    """
    chosen = list(chosen)
    found = []
    for law in LAWS:
        if law in chosen:
            continue
        reason = _why_not_applicable(law, subject)
        if reason is not None:
            found.append(Unchecked(law.slug, law.id, f"does not apply: {reason}"))
            continue
        why = "not among the claims" if explicit else NOT_ASSUMED[law.slug]
        found.append(Unchecked(law.slug, law.id, why, f"--also {law.slug}", f'also=["{law.slug}"]'))
    if not reference:
        found.append(Unchecked("reference", "", REFERENCE, "--reference module:object", "reference=function"))
    return found


def _why_not_applicable(law: Law, subject: Adapter) -> str | None:
    try:
        return law.applies(subject)
    except Exception:  # a subject may refuse the call; then the law would report it
        return None
