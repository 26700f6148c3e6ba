"""What a bias on the scores costs: nothing but an addition, unless it multiplies queries and keys itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import sympy
import torch
from torch import Tensor

from regard.biases import TransformerXL
from regard.biases.base import Bias
from regard.cost_model import depth
from regard.cost_model.attention.shape import Shape
from regard.cost_model.cost_part import ZERO, CostPart, PassCost
from regard.cost_model.run_mode import RunMode
from regard.kernels.bias_table import make_bias_table
from regard.patterns import Lengths


def count_bias(
    bias: Bias | Tensor | None, shape: Shape, mode: RunMode, met: sympy.Expr, area: sympy.Expr
) -> list[CostPart]:
    """The part of a bias, if there is one. A bias by position makes no products; its learned numbers are parameters.

    met: pairs of the pattern, over all heads and rows; area: those that are computed.
    """
    if bias is None:
        return []
    fused = mode.backend in ("native", "blocked")
    moved = ZERO if fused else 3 * mode.item * area
    if isinstance(bias, TransformerXL):
        return [_count_transformer_xl(bias, shape, mode, met, moved)]
    if isinstance(bias, Tensor):
        weights, saved_bytes = sympy.Integer(bias.numel() if bias.requires_grad else 0), ZERO
    else:
        weights, saved_bytes = count_parameters(bias), _count_saved_table(bias, shape, mode) if shape.keeps else ZERO
    one = PassCost(bytes=moved, depth=sympy.Integer(1))
    return [CostPart("bias", parameters=weights, forward=one, backward=PassCost(bytes=moved), saved=saved_bytes)]


def is_learned(bias: Bias | Tensor | None) -> bool:
    """Whether the bias needs the gradient of the scores."""
    if bias is None or isinstance(bias, Tensor):
        return bias is not None and bias.requires_grad
    return any(parameter.requires_grad for parameter in bias.parameters())


def count_parameters(bias: Bias) -> sympy.Integer:
    """The learned parameters of a bias."""
    return sympy.Integer(sum(parameter.numel() for parameter in bias.parameters()))


def _count_transformer_xl(
    bias: TransformerXL, shape: Shape, mode: RunMode, met: sympy.Expr, moved: sympy.Expr
) -> CostPart:
    """`(q + v) . r` for every pair, `u . k` for every key, and `r = W encoding(delta)` for every distinct delta.

    The reference multiplies every query with every distinct delta and looks pairs up. The encoding has no gradient.
    """
    deltas = shape.queries + shape.keys - 1
    if bias.grid is not None:
        rows, columns = bias.grid
        deltas = sympy.Integer((2 * rows - 1) * (2 * columns - 1))
    toward = met * shape.dim
    if mode.backend == "reference":
        toward = shape.batch * shape.heads * shape.queries * deltas * shape.dim
    own = sympy.Integer(bias.heads)
    relative = own * deltas * bias.projection.shape[-1] * shape.dim
    globally = shape.batch * shape.heads * shape.keys * shape.dim
    steps = depth.inner(shape.dim, mode.serial) + 3
    return CostPart(
        "bias",
        parameters=count_parameters(bias),
        forward=PassCost(macs=toward + relative + globally, bytes=moved, depth=steps),
        backward=PassCost(macs=2 * toward + relative + 2 * globally, bytes=moved, depth=steps),
    )


def _count_saved_table(bias: Bias, shape: Shape, mode: RunMode) -> sympy.Expr:
    """A bias by relative position becomes a table, which is saved, as is what its own formula saves."""
    if not bias.relative or shape.lengths is None or mode.step == "decode":
        return ZERO
    lengths = Lengths(*shape.lengths)
    wide = torch.float64 if mode.dtype == torch.float64 else torch.float32
    return sympy.Integer(measure_saved_bytes(lambda: (make_bias_table(bias, lengths)[0].to(wide),)))


def measure_saved_bytes(make: Callable[[], tuple[Tensor, ...]]) -> int:
    """Bytes of the table of a bias, and of the tensors that its formula saves for backward.

    The formula may be a user's, so it is run: for a table with an entry for each difference, not for each pair.
    """
    alive, runs = [], []
    for _ in range(2):  # what both runs save existed before: parameters, buffers
        saved: list[weakref.ref[_SavedTensor]] = []

        def keep(tensor: Tensor, saved: list[weakref.ref[_SavedTensor]] = saved) -> _SavedTensor:
            holder = _SavedTensor(tensor.detach())
            saved.append(weakref.ref(holder))
            return holder

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda holder: holder.tensor):
            made = make()
        alive.append(made)
        storages = [holder.tensor.untyped_storage() for each in saved if (holder := each()) is not None]
        storages += [tensor.untyped_storage() for tensor in made]
        runs.append({storage.data_ptr(): storage.nbytes() for storage in storages})
    once, again = runs
    return sum(size for at, size in again.items() if at not in once)


class _SavedTensor:
    """Replaces a saved tensor in the graph; it is deleted with the node that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
