"""torch's own FlopCounterMode, with what it misses on CPU.

torch counts two operations for each multiply-add of the operators it knows, and nothing for all others. On CPU it does
not know the operator that `scaled_dot_product_attention` calls, so that attention is free; nor products with a vector,
products in place, `nn.Bilinear`, `nn.LSTM`; and in the gradient of a grouped convolution's weight it counts every group
as if it saw all channels. The formulas that it lacks are those by which a trace is priced (`trace.operator_formulas`):

    with flop_counter() as counter:         # a counter of its own
        model(x)
    counter.get_total_flops()

    with corrected():                       # for a FlopCounterMode that others make, until the end of the block
        ...
    register(), unregister()                # the same, until further notice

Importing Regard changes no formula of torch's operators. It brings formulas for Regard's own: they count the pairs that
a pattern allows, not the square and not the edges of tiles that a kernel also visits, and backward what is done there:
five products for softmax attention, scores once more among them, and three causal products for linear attention.

Causal attention by torch's kernels counts as the whole square, as torch's formulas for GPUs have it, so that numbers
compare; `causal="triangle"` counts the pairs that `is_causal` leaves. A mask that is a tensor hides nothing from the
count, for the kernels compute what they hide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from regard.cost_model.run_mode import RunMode
from regard.cost_model.trace.operation import Operation, bind_arguments, describe_tensor, named_tensors
from regard.cost_model.trace.operator_arguments import read_constants
from regard.cost_model.trace.operator_costs import cost_of_operator
from regard.errors import CostError

Formula = Callable[..., int]

CAUSAL = ("square", "triangle")
aten = torch.ops.aten


def flop_counter(*, causal: str = "square", depth: int = 2, display: bool = False) -> FlopCounterMode:
    """A `torch.utils.flop_counter.FlopCounterMode` that also counts what torch's table lacks on CPU.

    Args:
        causal: how many pairs `is_causal` has: `"square"`, as in torch's formulas for GPUs, or `"triangle"`.
        depth, display: torch's own: how deep modules are listed, and whether the list is printed at the end.

    >>> from regard.cost_model import flop_counter
    >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
    >>> with flop_counter() as counter:
    ...     mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    >>> counter.get_total_flops() == 2 * (2 * 2 * 5 * 5 * 8)
    True
    """
    return FlopCounterMode(depth=depth, display=display, custom_mapping=formulas(causal))


def formulas(causal: str = "square") -> dict[Any, Formula]:
    """The formulas that torch lacks or has wrong, by operator, as its `custom_mapping` takes them."""
    if causal not in CAUSAL:
        raise CostError(
            f"Causal attention cannot be counted as {causal!r}.",
            asked=f"causal={causal!r}",
            because=f"the ways are {' and '.join(CAUSAL)}",
            instead='causal="square", as torch counts on GPUs, or causal="triangle" for the pairs that are left',
        )
    mode = _KernelMode(backend="native", counts_square=causal == "square")
    # torch's own formulas for the other kernels count the square
    kernels = ("flash_attention_for_cpu",) if causal == "square" else SDPA
    attentions = [f"_scaled_dot_product_{kernel}{way}" for kernel in kernels for way in ("", "_backward")]
    return {packet: _make_formula(packet, mode) for packet in (getattr(aten, name) for name in (*MISSING, *attentions))}


# Operators that torch's table lacks, in place and out of it, and one that it has wrong.
MISSING = ("mv", "dot", "vdot", "_int_mm", "addmv", "addmv_", "addmm_", "addbmm", "addbmm_", "baddbmm_", "addr",
           "addr_", "_addmm_activation", "_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_grouped_mm",
           "_trilinear", "conv_tbc", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
           "_native_multi_head_attention", "_transformer_encoder_layer_fwd")  # fmt: skip
SDPA = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


@dataclass(frozen=True)
class _KernelMode(RunMode):
    """The work of a kernel, which computes the scores once more in backward; with or without pairs that it hides."""

    counts_square: bool = True

    @property
    def counts_hidden_pairs(self) -> bool:
        return self.counts_square


def _make_formula(packet: Any, mode: RunMode) -> Formula:
    """Twice the multiply-adds of an operator, from its arguments and what it returned."""

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        arguments = bind_arguments(packet.default, args, kwargs)
        reads = {name: describe_tensor(tensor, 0) for name, tensor in named_tensors(arguments).items()}
        writes = tuple(describe_tensor(each, 0) for each in tree_leaves(out_val) if isinstance(each, Tensor))
        constants = read_constants(str(packet), arguments, reads)
        return 2 * int(cost_of_operator(Operation(str(packet), "", False, reads, writes, constants), mode).macs)

    flops._get_raw = True  # type: ignore[attr-defined] # by which torch knows that it takes the tensors themselves
    return flops


# Into torch's own table, and out of it again

_replaced: dict[Any, Formula | None] | None = None  # what torch had before; None where it had nothing


def register(causal: str = "square") -> None:
    """Put the formulas into torch's own table, for every `FlopCounterMode` made from now on, until `unregister`."""
    global _replaced
    wanted = formulas(causal)
    unregister()
    _replaced = {packet: flop_registry.get(packet) for packet in wanted}
    flop_registry.update(wanted)


def unregister() -> None:
    """Give torch's table back the formulas it had."""
    global _replaced
    if _replaced is not None:
        _restore(_replaced)
        _replaced = None


@contextlib.contextmanager
def corrected(causal: str = "square") -> Iterator[None]:
    """The formulas in torch's own table until the end of the block. Counters must be made inside it."""
    wanted = formulas(causal)
    before = {packet: flop_registry.get(packet) for packet in wanted}
    flop_registry.update(wanted)
    try:
        yield
    finally:
        _restore(before)


def _restore(before: dict[Any, Formula | None]) -> None:
    for packet, formula in before.items():
        if formula is None:
            flop_registry.pop(packet, None)
        else:
            flop_registry[packet] = formula
