"""Formulas of answers: parsed to a small set of syntax, never executed by Python, evaluated with fifty digits.

    formula = parse_formula("3D^2 + 3D", ["N", "D"])
    formula.evaluate({"N": 3, "D": 4})    # 60

Numbers, the symbols of the question, + - * / ** (also ^), parentheses and the functions below. Every bound holds before
the operation that it concerns: length and depth before Python's parser, sizes of powers before they are computed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mpmath

from regard.errors import AnswerError

if TYPE_CHECKING:
    import sympy

LONGEST = 1_000  # characters
DEEPEST = 40  # parentheses inside of one another, and levels of the tree
MOST_BITS = 4_096  # of a power, as the exponent of two
MOST_TERMS = 2_000  # of an expanded polynomial; a longer one is compared by values alone
DIGITS = 50
context = mpmath.mp.clone()
context.dps = DIGITS
# Names of functions, their values, and their names in sympy.
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "exp": (lambda x: _exp(x), "exp"),
    "log": (lambda x: context.log(_positive(x)), "log"),
    "ln": (lambda x: context.log(_positive(x)), "log"),
    "log2": (lambda x: _log2(x), "log2"),
    "lg": (lambda x: _log2(x), "log2"),
    "log10": (lambda x: context.log10(_positive(x)), "log10"),
    "sqrt": (lambda x: context.sqrt(_positive(x, zero=True)), "sqrt"),
    "ceil": (lambda x: context.ceil(x), "ceiling"),
    "floor": (lambda x: context.floor(x), "floor"),
    "abs": (lambda x: abs(x), "Abs"),
    "min": (lambda *x: min(x), "Min"),
    "max": (lambda *x: max(x), "Max"),
    "sin": (lambda x: context.sin(_bounded(x)), "sin"),
    "cos": (lambda x: context.cos(_bounded(x)), "cos"),
    "tanh": (lambda x: context.tanh(_bounded(x)), "tanh"),
    "sigmoid": (lambda x: 1 / (1 + _exp(-x)), "sigmoid"),
}
CONSTANTS: dict[str, Any] = {"pi": context.pi}
SPELLINGS = {"^": "**", "·": "*", "×": "*", "−": "-", "²": "**2", "³": "**3", "√": "sqrt", "⌈": "ceil(", "⌉": ")"}
SPELLINGS |= {"⌊": "floor(", "⌋": ")", "½": "(1/2)", "π": "pi", "β": "beta", "α": "alpha", "σ": "sigma", "ε": "eps"}
SPELLINGS |= {"γ": "gamma", "δ": "delta", "μ": "mu"}
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: _divide(a, b),
    ast.FloorDiv: lambda a, b: context.floor(_divide(a, b)),
    ast.Pow: lambda a, b: _power(a, b),
}


class OutsideDomain(ArithmeticError):
    """The formula has no value here: a division by zero, a logarithm of zero, or a number too large to compute."""


@dataclass(frozen=True)
class Formula:
    """A parsed answer; `tree` has only the nodes that `parse_formula` allows."""

    text: str
    tree: ast.expr
    symbols: tuple[str, ...]

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """The value with fifty digits; raises `OutsideDomain` where there is none."""
        numbers = {name: context.mpf(value) for name, value in values.items()}
        return _evaluate(self.tree, {**CONSTANTS, **numbers})

    @property
    def used(self) -> set[str]:
        """The symbols that the formula contains."""
        return {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)} & set(self.symbols)

    def to_sympy(self) -> sympy.Expr | None:
        """The same formula in sympy, or None if it is too large to be expanded."""
        return _to_sympy(self.tree) if _count_terms(self.tree) <= MOST_TERMS else None


def parse_formula(text: str, symbols: Sequence[str]) -> Formula:
    """The formula of a text in these symbols; anything else is refused with its reason."""
    if len(text) > LONGEST:
        raise _refuse(text, f"it has {len(text):,} characters, at most {LONGEST:,} are read")
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise _refuse(text, f"parentheses are nested {deepest} deep, at most {DEEPEST} are read")
    if "#" in text:
        raise _refuse(text, "'#' is not part of a formula")  # to Python it would begin a comment
    normal = _normalise(text, symbols)
    try:
        tree = ast.parse(normal, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as failure:
        reason = failure.msg if isinstance(failure, SyntaxError) else type(failure).__name__
        raise _refuse(text, f"it is not a formula: {reason}") from failure
    _check(tree, tuple(symbols), text, 0)
    return Formula(text, tree, tuple(symbols))


def parse_number(text: str) -> Any:
    """A number, or an expression of numbers such as 3*4**2, with fifty digits; commas and spaces group digits."""
    grouped = re.sub(r"(?<=\d)[,_ \u00a0\u202f](?=\d{3}(?!\d))", "", text.strip()[: LONGEST + 1])
    formula = parse_formula(grouped if len(text) <= LONGEST else text, [])
    try:
        return formula.evaluate({})
    except OutsideDomain as failure:
        raise _refuse(text, str(failure)) from failure


def _normalise(text: str, symbols: Sequence[str]) -> str:
    """Usual spellings: ^ for powers, 3D and D(N + 1) for products, and signs such as × and ²."""
    for sign, spelling in SPELLINGS.items():
        text = text.replace(sign, spelling)
    text = text.strip().replace("\n", " ")
    # A number before a letter or a parenthesis is a factor; 2e5 is a number, log2( a name.
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)(?![eE][+-]?\d)\s*(?=[A-Za-z(])", r"\1*", text)
    text = re.sub(r"\)\s*(?=[A-Za-z0-9(])", ")*", text)
    for name in symbols:
        text = re.sub(rf"(?<!\w){re.escape(name)}\s*\(", f"{name}*(", text)
    return text


def _check(node: ast.AST, symbols: tuple[str, ...], text: str, level: int) -> None:
    """Raise for the first node that is not part of a formula."""
    if level > DEEPEST * 2:
        raise _refuse(text, f"it is nested more than {DEEPEST * 2} levels deep")
    if isinstance(node, ast.Constant):
        value = node.value
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if len(str(value)) > 400 or not math.isfinite(number):
            raise _refuse(text, f"{str(node.value)[:20]!r} is not a number")
        return
    if isinstance(node, ast.Name):
        if node.id not in symbols and node.id not in CONSTANTS:
            raise _refuse(text, _explain_name(node.id, symbols), symbols)
        return
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        children: list[ast.AST] = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        children = [node.operand]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        name, count = node.func.id, len(node.args)
        if node.keywords or count == 0 or (count != 1 and name not in ("min", "max")) or count > 8:
            raise _refuse(text, f"{name} takes one number" + (" or more" if name in ("min", "max") else ""))
        children = list(node.args)
    else:
        raise _refuse(text, f"{_name_node(node)} is not part of a formula", symbols)
    for child in children:
        _check(child, symbols, text, level + 1)
    if not any(isinstance(part, ast.Name) and part.id in symbols for part in ast.walk(node)):
        try:
            _evaluate(node, CONSTANTS)  # numbers alone: too large a power, or a division by zero, is refused here
        except OutsideDomain as failure:
            raise _refuse(text, str(failure)) from failure


def _explain_name(name: str, symbols: Sequence[str]) -> str:
    if len(name) > 1 and all(letter in symbols for letter in name):
        return f"{name!r} is not a symbol; a product is written {'*'.join(name)}"
    return f"{name[:30]!r} is not a symbol of this question"


def _name_node(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)[:30]
        return f"the function {name!r}"
    return {
        "Attribute": "a dot after a name",
        "Subscript": "an index",
        "Lambda": "a function",
        "Compare": "a comparison",
    }.get(type(node).__name__, type(getattr(node, "op", node)).__name__)


def _refuse(text: str, because: str, symbols: Sequence[str] = ()) -> AnswerError:
    allowed = f"a formula in {', '.join(symbols)}" if symbols else "a formula or a number"
    return AnswerError(
        "The answer cannot be read.",
        asked=repr(text if len(text) <= 60 else f"{text[:57]}..."),
        because=because,
        instead=f"{allowed}, with + - * / ** and {' '.join(FUNCTIONS)}",
    )


# Values


def _evaluate(node: ast.AST, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return context.mpf(repr(node.value) if isinstance(node.value, float) else node.value)
    if isinstance(node, ast.Name):
        return values[node.id] + 0
    if isinstance(node, ast.UnaryOp):
        value = _evaluate(node.operand, values)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values))
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return FUNCTIONS[node.func.id][0](*(_evaluate(part, values) for part in node.args))


def _divide(a: Any, b: Any) -> Any:
    if b == 0:
        raise OutsideDomain("it divides by zero")
    return a / b


def _power(base: Any, exponent: Any) -> Any:
    if base == 0:
        if exponent < 0:
            raise OutsideDomain("it divides by zero")
        return context.mpf(0 if exponent else 1)
    if base < 0 and exponent != context.floor(exponent):
        raise OutsideDomain("it has a root of a negative number")
    if abs(exponent * context.log(abs(base), 2)) > MOST_BITS:
        raise OutsideDomain(f"it has a power of more than {MOST_BITS:,} bits")
    return base**exponent


def _exp(x: Any) -> Any:
    if abs(x) > MOST_BITS:
        raise OutsideDomain(f"it has an exponential of more than {MOST_BITS:,}")
    return context.exp(x)


def _log2(x: Any) -> Any:
    """Exact for powers of two, so that ceil(log2(8)) is 3."""
    value = context.log(_positive(x), 2)
    near = context.nint(value)
    return near if abs(value - near) < context.mpf(10) ** (5 - DIGITS) else value


def _positive(x: Any, zero: bool = False) -> Any:
    if x < 0 or (x == 0 and not zero):
        raise OutsideDomain("it has a logarithm or a root of a number that is not positive")
    return x


def _bounded(x: Any) -> Any:
    if abs(x) > 2 ** MOST_BITS.bit_length():
        raise OutsideDomain("the argument of a function is too large")
    return x


# sympy


def _count_terms(node: ast.AST) -> int:
    """An upper bound of the terms after expansion."""
    if isinstance(node, ast.BinOp):
        left, right = _count_terms(node.left), _count_terms(node.right)
        if isinstance(node.op, ast.Add | ast.Sub):
            return left + right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Pow):
            value = node.right.value if isinstance(node.right, ast.Constant) else None
            power = int(value) if isinstance(value, int | float) and 0 <= value < 64 else 64
            return 1 if left == 1 else MOST_TERMS + 1 if power == 64 else min(left**power, MOST_TERMS + 1)
        return left * right
    return sum(_count_terms(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)) or 1


def _to_sympy(node: ast.AST) -> Any:
    import sympy

    if isinstance(node, ast.Constant):
        return sympy.Rational(repr(node.value))
    if isinstance(node, ast.Name):
        return sympy.pi if node.id == "pi" else sympy.Symbol(node.id, positive=True)
    if isinstance(node, ast.UnaryOp):
        return -_to_sympy(node.operand) if isinstance(node.op, ast.USub) else _to_sympy(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _to_sympy(node.left), _to_sympy(node.right)
        if isinstance(node.op, ast.Pow):
            return sympy.Pow(left, right)
        if isinstance(node.op, ast.FloorDiv):
            return sympy.floor(left / right)
        return OPERATORS[type(node.op)](left, right) if not isinstance(node.op, ast.Div) else left / right
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    name, parts = FUNCTIONS[node.func.id][1], [_to_sympy(part) for part in node.args]
    if name in ("log2", "log10"):
        return sympy.log(parts[0]) / sympy.log(int(name[3:]))
    if name == "sigmoid":
        return 1 / (1 + sympy.exp(-parts[0]))
    return getattr(sympy, name)(*parts)
