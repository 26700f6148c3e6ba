"""The questions about cost that textbooks ask, answered as tables of formulas and numbers.

Every function takes sizes and returns a `Table`: rows with a label and a `Quantity` each. Print it, or read its rows.

    >>> from regard.cost_model import textbook
    >>> textbook.append(255, 512)["one token more"]
    1,048,576 = 3*D**2 + 2*D*N + 2*D
"""

from __future__ import annotations

from regard.cost_model.textbook.attention import append, attention, linear, mha, parameters
from regard.cost_model.textbook.images import davit, panels, patterns
from regard.cost_model.textbook.merging import merge
from regard.cost_model.textbook.operations import encoding, parallel
from regard.cost_model.textbook.table import Row, Table

QUESTIONS = {
    "attention": attention,
    "mha": mha,
    "append": append,
    "linear": linear,
    "merge": merge,
    "davit": davit,
    "encoding": encoding,
    "parallel": parallel,
    "patterns": patterns,
    "panels": panels,
    "parameters": parameters,
}

__all__ = [
    "QUESTIONS",
    "Row",
    "Table",
    "append",
    "attention",
    "davit",
    "encoding",
    "linear",
    "merge",
    "mha",
    "panels",
    "parallel",
    "parameters",
    "patterns",
]
