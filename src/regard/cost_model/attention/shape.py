"""The sizes of an attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy

from regard.cost_model.symbols import substitute_numbers


@dataclass(frozen=True)
class Shape:
    """The sizes of an attention, as formulas, and the numbers of their symbols.

    Attributes:
        batch, queries, keys, heads, kv_heads, dim, value_dim: sympy expressions.
        values: the number of every symbol that has one.
        sides: rows and columns of the pattern's grid in these symbols; see `count_pairs`.
        keeps: whether activation bytes are computed; inside a trace they are those of the tensors that autograd saves.
    """

    batch: sympy.Expr
    queries: sympy.Expr
    keys: sympy.Expr
    heads: sympy.Expr
    kv_heads: sympy.Expr
    dim: sympy.Expr
    value_dim: sympy.Expr
    values: dict[sympy.Symbol, Any] = field(default_factory=dict)
    sides: tuple[Any, ...] = ()
    keeps: bool = True

    def number(self, formula: sympy.Expr) -> int | None:
        """What a formula comes to, if its symbols have numbers."""
        found = substitute_numbers(formula, self.values)
        return int(found) if found.is_Integer else None

    @property
    def lengths(self) -> tuple[int, int] | None:
        queries, keys = self.number(self.queries), self.number(self.keys)
        return None if queries is None or keys is None else (queries, keys)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return (self.number(self.heads) or 1) // (self.number(self.kv_heads) or 1) or 1

    # Numbers in each tensor

    @property
    def query(self) -> sympy.Expr:
        return self.batch * self.heads * self.queries * self.dim

    @property
    def key(self) -> sympy.Expr:
        return self.batch * self.kv_heads * self.keys * self.dim

    @property
    def value(self) -> sympy.Expr:
        return self.batch * self.kv_heads * self.keys * self.value_dim

    @property
    def output(self) -> sympy.Expr:
        return self.batch * self.heads * self.queries * self.value_dim

    def given(self, numbers: sympy.Expr) -> sympy.Expr:
        """Elements of query, key or value, where saved activations are counted here."""
        return numbers if self.keeps else sympy.Integer(0)

    @property
    def rows(self) -> sympy.Expr:
        """Softmaxes: one for each query, head and batch row."""
        return self.batch * self.heads * self.queries
