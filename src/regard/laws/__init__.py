"""Laws that any attention must obey, and a search for the smallest case in which one does not."""

from regard.laws.articles import LAWS
from regard.laws.checking import assert_laws, check, probe
from regard.laws.law import Law
from regard.laws.report import Report
from regard.laws.subjects import Conventions, Subject, read
from regard.laws.verdict import Verdict, Verdicts, Witness

__all__ = [
    "LAWS",
    "Conventions",
    "Law",
    "Report",
    "Subject",
    "Verdict",
    "Verdicts",
    "Witness",
    "assert_laws",
    "check",
    "probe",
    "read",
]
