"""Parameters that several devices share.

FSDP2 gathers them in units: the blocks of a model, and the root, which holds the rest.

A parameter is cut along its first axis; shards are padded to equal size, so that of K devices each has

    ceiling(rows / K) / rows   of a parameter.

Tensor parallelism cuts the projections of attention and both matrices of a feed-forward layer, with the biases of what
comes first; norms, and the biases that are added to a sum, are on every device (see `regard.models.tensor_parallel`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import sympy
from torch import Tensor, nn

from regard.cost_model.cost import Cost
from regard.cost_model.symbols import size_symbols, substitute_numbers
from regard.layers import FeedForward, MultiHeadAttention
from regard.models.parallelize import list_units

K, L, D = size_symbols("K L D")


@dataclass(frozen=True)
class Units:
    """How many parameters there are, padding included: in all blocks together, in the largest one, in the root.

    Attributes:
        count: how many blocks there are.
        is_padded: whether some parameter has a first axis that the devices do not divide.
    """

    blocks: sympy.Expr
    block: sympy.Expr
    root: sympy.Expr
    count: sympy.Expr
    is_padded: bool = False

    @property
    def total(self) -> sympy.Expr:
        return self.blocks + self.root


def find_units(model: nn.Module, cost: Cost, devices: int) -> Units:
    """The units of a model: formulas in the letters of its cost if all shards are equal, else in K alone."""
    units = [list(unit.parameters()) for unit in list_units(model)]
    inside = {id(each) for unit in units for each in unit}
    root = [each for each in model.parameters() if id(each) not in inside]
    largest = max(units, key=lambda unit: sum(each.numel() for each in unit))
    is_padded = any(_count_rows(each) % devices for each in model.parameters())
    count = sympy.Integer(len(units))
    if not is_padded:
        formula = sympy.expand(cost.parameters.formula)
        block, rest = formula.coeff(L, 1), formula.coeff(L, 0)
        numbers = [_count(largest), _count(root), len(units)]
        if sympy.expand(block * L + rest - formula) == 0 and numbers == [
            each.xreplace({letter: sympy.sympify(value) for letter, value in cost.values.items()})
            for each in (block, rest, L)
        ]:
            return Units(sympy.expand(block * L), block, rest, L)
    blocks = sum((_pad(unit) for unit in units), sympy.Integer(0))
    return Units(blocks, _pad(largest), _pad(root), count, is_padded)


def find_split_parameters(model: nn.Module, cost: Cost) -> sympy.Expr:
    """How many parameters tensor parallelism cuts: a formula where the rest of a block is a multiple of the width."""
    units = list_units(model)
    whole, split = (sum(count(unit) for unit in units) for count in (_count_all, _count_split))
    by_block = sympy.expand(cost.parameters.formula).coeff(L, 1) * L
    rest, width = whole - split, cost.values.get(D)
    if width is not None and substitute_numbers(by_block, cost.values) == whole and rest % (len(units) * width) == 0:
        return sympy.expand(by_block - rest // (len(units) * width) * D * L)
    return sympy.Integer(split)


def _count_all(unit: nn.Module) -> int:
    return _count(unit.parameters())


def _count_split(unit: nn.Module) -> int:
    total = 0
    for module in unit.modules():
        if isinstance(module, MultiHeadAttention):
            total += _count(module.projections.parameters()) + module.output.weight.numel()
        elif isinstance(module, FeedForward):
            total += _count(module.inner.parameters()) + module.outer.weight.numel()
    return total


def _count_rows(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.ndim else 1


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(each.numel() for each in parameters)


def _pad(parameters: Iterable[Tensor]) -> sympy.Expr:
    """How many numbers all devices hold together, padding included."""
    total: sympy.Expr = sympy.Integer(0)
    for each in parameters:
        rows = _count_rows(each)
        total += math.prod(each.shape[1:]) * K * sympy.ceiling(sympy.Integer(rows) / K)
    return total
