"""The tokens that a run reads, as letters and as numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import sympy

from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import letters
from regard.cost_model.part import ZERO
from regard.cost_model.rules.pieces import Found
from regard.cost_model.setting import Setting

Numbers = dict[sympy.Symbol, Any]


@dataclass(frozen=True)
class Reading:
    """The tokens that a run reads, in letters, and their numbers where they are known.

    Attributes:
        batch: rows of the batch.
        tokens: tokens of each that come in: all, or the one of a decoding step.
        count: how many these are, if that is known.
        past: tokens before them that are cached; `None` outside of a decoding step.
        values: the numbers of the letters.
    """

    batch: sympy.Expr
    tokens: sympy.Expr
    count: int | None
    values: Numbers
    past: sympy.Symbol | None = None

    @property
    def rows(self) -> sympy.Expr:
        """Tokens of all rows together."""
        return self.batch * self.tokens

    def counted(self, name: str, found: Found) -> Counted:
        """What a rule returns. After a decoding step nobody goes back, so that nothing is kept."""
        parts = found.parts
        if self.past is not None:
            parts = [dataclasses.replace(part, kept=ZERO) for part in parts]
        return Counted(name, parts, {**found.values, **self.values}, found.notes)

    @staticmethod
    def of(asked: Asked, setting: Setting, name: str = "N", count: int | None = None) -> Reading:
        """What is asked for; `name` and `count` where the text is another than the one that is written."""
        batch, tokens = letters(f"B {name}")
        count = asked.tokens if name == "N" else count
        values = {batch: asked.batch} | ({} if count is None else {tokens: count})
        if setting.step == "decode" and name == "N":
            return Reading(batch, sympy.Integer(1), 1, values, past=tokens)
        return Reading(batch, tokens, count, values)
