"""Work and depth: how many steps a computation takes if everything that can run at once does.

Every binary operation takes one step, and there are processors enough. A sum of n numbers is then a tree of

    ceil(log2 n)

steps, or n - 1 steps if it is added up one after the other. The model is the one of TTIC 31230's problems on
transformers; a product and the sum over it, an inner product of n numbers, take 1 + ceil(log2 n).
"""

from __future__ import annotations

import math
from typing import Any

import sympy


class Log2Up(sympy.Function):
    """`ceil(log2 n)`, which stays a symbol until n is a number."""

    nargs = 1
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, *arguments: Any) -> Any:
        (n,) = arguments
        if n.is_Integer and n > 0:
            return sympy.Integer((int(n) - 1).bit_length())
        if n.is_number and n.is_positive:
            return sympy.Integer(math.ceil(math.log2(n)))
        return None

    def _sympystr(self, printer: Any) -> str:
        return f"ceil(lg({printer._print(self.args[0])}))"

    def _latex(self, printer: Any, exp: Any = None) -> str:
        base = rf"\lceil \lg {printer._print(self.args[0])} \rceil"
        return base if exp is None else rf"{{{base}}}^{{{exp}}}"


def total(n: Any, serial: bool = False) -> sympy.Expr:
    """Steps of a sum, or a maximum, of n numbers."""
    steps: Any = sympy.sympify(n) - 1 if serial else Log2Up(sympy.sympify(n))
    return steps


def inner(n: Any, serial: bool = False) -> sympy.Expr:
    """Steps of an inner product of n numbers."""
    return 1 + total(n, serial)


def softmax(n: Any, *, stable: bool = True, serial: bool = False) -> sympy.Expr:
    """Steps of a softmax over n numbers: exp, sum, divide; and before them the largest and a difference if stable."""
    plain = 1 + total(n, serial) + 1
    return plain + total(n, serial) + 1 if stable else plain


def norm(n: Any, *, centred: bool = True, affine: int = 2, serial: bool = False) -> sympy.Expr:
    """Steps of a norm over n channels: mean and difference if centred, squares, mean, eps, root, product, affine."""
    mean = total(n, serial) + 1
    return (mean + 1 if centred else 0) + 1 + mean + 1 + 1 + 1 + affine
