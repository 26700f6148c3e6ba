"""Errata as text: a list, and an entry with what running it showed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import torch

from regard.book.errata.erratum import Erratum, Outcome
from regard.book.formulas import replace_formulas
from regard.book.unicode_formulas import to_unicode

WIDTH = 110


def format_list(entries: Sequence[Erratum]) -> str:
    """One line for each entry: id, kind and place."""
    width = max(len(entry.id) for entry in entries)
    return "\n".join(f"{entry.id:<{width}}  {entry.kind:<10}  {entry.where}" for entry in entries)


def format_entry(entry: Erratum, outcome: Outcome | None = None) -> str:
    """Claim and correction, and the smallest counterexample if the entry was run."""
    lines = [f"{entry.id}: {entry.where} ({entry.kind})"]
    lines += _wrap("claim", _without_latex(entry.claim)) + _wrap("instead", _without_latex(entry.correction))
    if outcome is None:
        return "\n".join(lines)
    trial, failure = outcome.counterexample, outcome.correction_failure
    if trial is None:
        lines += _wrap("run", f"the claim held in all {len(outcome.trials)} cases: no counterexample was found")
    else:
        lines += _wrap("fails", trial.case)
        lines += _wrap("claimed", format_value(trial.claimed)) + _wrap("computed", format_value(trial.computed))
    if failure is None:
        lines += _wrap("holds", f"the correction, in all {len(outcome.trials)} cases tried")
    else:
        lines += _wrap("WRONG", f"the correction gives {format_value(failure.corrected)} for {failure.case}")
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """A value of a trial on one line; of a large tensor the shape and the first entries."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    numbers = [f"{number:.4g}" for number in value.flatten()[:9].tolist()]
    more = " ..." if value.numel() > len(numbers) else ""
    shape = " x ".join(map(str, value.shape))
    return numbers[0] if value.ndim == 0 else f"{' '.join(numbers)}{more}   ({shape})"


def _without_latex(text: str) -> str:
    return replace_formulas(text, lambda latex, block: to_unicode(latex))


def _wrap(label: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH - 11) or [""]
    return [f"  {label if number == 0 else '':<8} {line}" for number, line in enumerate(wrapped)]
