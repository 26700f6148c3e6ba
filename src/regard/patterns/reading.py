"""Reading a pattern back from the expression it prints as, without running any code."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from regard.errors import PatternError
from regard.patterns.base import Pattern


def read(expression: str, names: Mapping[str, type[Pattern]]) -> Pattern:
    """The pattern that prints as `expression`: constructors with literal arguments, joined by `&`, `|`, `~`."""
    try:
        return _pattern(ast.parse(expression.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, TypeError, RecursionError) as problem:
        if isinstance(problem, PatternError):
            raise
        raise PatternError(
            "This is not a pattern.",
            asked=(expression.strip() or "an empty text") if len(expression) < 200 else expression[:199] + "…",
            because=str(problem),
            instead="an expression such as 'Causal() & Window(128, 0)'; known: " + ", ".join(sorted(names)),
        ) from None


def _pattern(node: ast.expr, names: Mapping[str, type[Pattern]]) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return _pattern(node.left, names) & _pattern(node.right, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _pattern(node.left, names) | _pattern(node.right, names)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_pattern(node.operand, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        arguments = [ast.literal_eval(argument) for argument in node.args]
        keywords = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        return names[node.func.id](*arguments, **keywords)
    raise ValueError(f"{ast.unparse(node)!r} is neither a known pattern nor &, | or ~ of patterns")
