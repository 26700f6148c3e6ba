"""Laws that any attention must obey, and a search for the smallest case in which one does not."""

from regard.laws.catalog import LAWS
from regard.laws.checking import assert_laws, check, probe
from regard.laws.law import Law
from regard.laws.report import Report
from regard.laws.verdict import Counterexample, Verdict, Verdicts

__all__ = [
    "LAWS",
    "Counterexample",
    "Law",
    "Report",
    "Verdict",
    "Verdicts",
    "assert_laws",
    "check",
    "probe",
]
