"""Values in prose: `{{ weights }}` and `{{ error:.2g }}` are replaced by values of the page's namespace.

A page is code of this package, so its expressions are evaluated by Python; text of a user never gets here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType
from typing import Any

# A space on both sides is required: LaTeX has {{ and }} without.
VALUE = re.compile(r"\{\{\s+(.+?)\s+\}\}", re.DOTALL)


def split_format(text: str) -> tuple[CodeType, str]:
    """An expression and its format: the text after the last colon that leaves an expression before it.

    >>> from regard.book.values import split_format
    >>> split_format("x[1:3]")[1], split_format("x[1:3].sum():.3g")[1]
    ('', '.3g')
    """
    text = " ".join(text.split())
    try:
        return compile(text, "<value>", "eval"), ""
    except SyntaxError:
        colon = text.rfind(":")
        while colon > 0:
            try:
                return compile(text[:colon].strip(), "<value>", "eval"), text[colon + 1 :].strip()
            except SyntaxError:
                colon = text.rfind(":", 0, colon)
        raise


def format_value(value: Any, spec: str = "") -> str:
    """A value as text: tensors of one number as numbers, and numbers without a format with six digits at most."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if spec:
        return format(value, spec)
    return format(value, ".6g") if isinstance(value, float) else str(value)


def fill_values(text: str, evaluate: Callable[[str], str]) -> str:
    """The text with every `{{ ... }}` replaced."""
    return VALUE.sub(lambda match: evaluate(match[1]), text)
