"""Errata: mistakes of the problem sets, with the smallest case in which each claim fails and a proof of its correction.

    erratum = find_erratum("udl-12.1:biases")
    outcome = erratum.run()          runs the claim and its correction on cases of rising size
    outcome.counterexample           the first case in which the claim is wrong

An entry computes three things for each case: what the source claims, what is true, and what the correction says.
"""

from regard.book.errata.collection import find_erratum, list_errata
from regard.book.errata.erratum import Erratum, Outcome, Trial

__all__ = ["Erratum", "Outcome", "Trial", "find_erratum", "list_errata"]
