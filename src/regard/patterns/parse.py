"""Parser of pattern expressions; no code is executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from regard.errors import PatternError
from regard.patterns.base import Pattern


def parse_pattern(expression: str, names: Mapping[str, type[Pattern]]) -> Pattern:
    """The pattern that prints as `expression`: constructors with literal arguments, joined by `&`, `|`, `~`."""
    try:
        return _build_pattern(ast.parse(expression.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, TypeError, RecursionError) as problem:
        if isinstance(problem, PatternError):
            raise
        raise PatternError(
            "This is not a pattern.",
            asked=(expression.strip() or "an empty text") if len(expression) < 200 else expression[:199] + "…",
            because=str(problem),
            instead="an expression such as 'Causal() & Window(128, 0)'; known: " + ", ".join(sorted(names)),
        ) from None


def _build_pattern(node: ast.expr, names: Mapping[str, type[Pattern]]) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return _build_pattern(node.left, names) & _build_pattern(node.right, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _build_pattern(node.left, names) | _build_pattern(node.right, names)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_build_pattern(node.operand, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        arguments = [ast.literal_eval(argument) for argument in node.args]
        keywords = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        return names[node.func.id](*arguments, **keywords)
    raise ValueError(f"{ast.unparse(node)!r} is neither a known pattern nor &, | or ~ of patterns")
