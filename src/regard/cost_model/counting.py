"""torch's own FlopCounterMode, with what it misses on CPU.

torch counts two operations for each multiply-add of the operators it knows, and nothing for all others. On CPU it does
not know the operator that `scaled_dot_product_attention` calls, so that attention is free; nor products with a vector,
products in place, `nn.Bilinear`, `nn.LSTM`; and in the gradient of a grouped convolution's weight it counts every group
as if it saw all channels. What stands here is the rest of the table. It is used when somebody asks for it:

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
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

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
            f"There is no way {causal!r} to count causal attention.",
            asked=f"causal={causal!r}",
            because=f"the ways are {' and '.join(CAUSAL)}",
            instead='causal="square", as torch counts on GPUs, or causal="triangle" for the pairs that are left',
        )
    found = {**_PRODUCTS, **_attentions(_CPU, causal)}
    if causal == "triangle":  # torch's own formulas for the others count the square
        found |= _attentions(_GPU, causal)
    return {packet: _marked(formula) for packet, formula in found.items()}


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


def _marked(formula: Formula) -> Formula:
    """With the mark by which torch knows a formula that wants the tensors themselves, not their shapes."""
    formula._get_raw = True  # pyright: ignore[reportFunctionMemberAccess]
    return formula


# Products of matrices and vectors. A formula takes the arguments of its operator, and what came out as `out_val`.


def _product(first: int) -> Formula:
    """Of a matrix or a batch of them, argument `first`, and what follows it: `2 rows inside columns`."""

    def flops(*arguments: Any, **_: Any) -> int:
        left, right = arguments[first : first + 2]
        # A vector on the right is one column; on the left, as in a scalar product, one row.
        return 2 * left.numel() * (right.shape[-1] if right.dim() == left.dim() > 1 else 1)

    return flops


def _outer(_into: Tensor, left: Tensor, right: Tensor, **_: Any) -> int:
    return 2 * left.numel() * right.numel()


def _packed(x: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Weights that are packed: the channels that come out say how many there are."""
    return 2 * x.shape[-1] * out_val.numel()


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """A product for each group. Groups are an axis of both, or share out the rows, columns or channels of one."""
    groups = len(left) if left.dim() == right.dim() == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _trilinear(
    one: Tensor,
    two: Tensor,
    three: Tensor,
    expand1: list,
    expand2: list,
    expand3: list,
    summed: list,
    *_: Any,
    **__: Any,
) -> int:
    """Two products, one after the other, as of `x W y`: `expand` are the axes that an operand lacks."""
    shapes = []
    for tensor, lacking in ((one, expand1), (two, expand2), (three, expand3)):
        shape = list(tensor.shape)
        for axis in sorted(lacking):
            shape.insert(axis, 1)
        shapes.append(shape)
    first = [max(pair) for pair in zip(shapes[0], shapes[1], strict=True)]
    # What the third operand lacks is summed at once; the rest together with it.
    between = [1 if axis in summed and axis in expand3 else size for axis, size in enumerate(first)]
    return 2 * (prod(first) + prod(max(pair) for pair in zip(between, shapes[2], strict=True)))


# Convolutions and recurrent layers


def _convolution_backward(
    upstream: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    wanted: list[bool],
    **_: Any,
) -> int:
    """As many as forward for each gradient that is wanted: that of the input, and that of the weight.

    The weight is `(out, in / groups, ...)`, so the groups are in its size. torch counts `in` for its gradient.
    """
    places = (x if transposed else upstream).shape[2:]
    return 2 * x.shape[0] * prod(places) * weight.numel() * sum(wanted[:2])


def _convolution_in_time(x: Tensor, weight: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Axes are (time, batch, channel), of the weight (width, in, out)."""
    return 2 * out_val.shape[0] * out_val.shape[1] * weight.numel()


def _recurrent(times: int) -> Formula:
    """A layer whose weights meet every token of every row; backward for the gradients of both."""

    def flops(x: Tensor, inner: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
        tokens = x.numel() // x.shape[-1]
        return 2 * times * tokens * (inner.numel() + recurrent.numel())

    return flops


# Whole layers as one operator: what scripted and optimised transformers call


def _fused(packet: Any, tokens: str, *matrices: str) -> Formula:
    """Every matrix meets every token, and tokens of a text meet each other twice; texts may be nested tensors."""
    names = [argument.name for argument in packet.default._schema.arguments]

    def flops(*arguments: Any, **words: Any) -> int:
        given = dict(zip(names, arguments, strict=False)) | words
        lengths = [len(text) for text in given[tokens].unbind()]
        weights = sum(given[matrix].numel() for matrix in matrices)
        return 2 * sum(n * weights + 2 * n * n * given["embed_dim"] for n in lengths)

    return flops


_PRODUCTS: dict[Any, Formula] = {
    **{getattr(aten, name): _product(0) for name in ("mv", "dot", "vdot", "_int_mm")},
    **{getattr(aten, name): _product(1) for name in ("addmv", "addbmm", "_addmm_activation")},
    # In place they are other operators, which torch has forgotten.
    **{getattr(aten, name): _product(1) for name in ("addmv_", "addmm_", "addbmm_", "baddbmm_")},
    **{getattr(aten, name): _outer for name in ("addr", "addr_")},
    **{getattr(aten, name): _packed for name in ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu")},
    aten._grouped_mm: _grouped,
    aten._trilinear: _trilinear,
    aten.convolution_backward: _convolution_backward,
    aten.conv_tbc: _convolution_in_time,
    aten.mkldnn_rnn_layer: _recurrent(1),
    aten.mkldnn_rnn_layer_backward: _recurrent(2),
    aten._native_multi_head_attention: _fused(aten._native_multi_head_attention, "query", "qkv_weight", "proj_weight"),
    aten._transformer_encoder_layer_fwd: _fused(
        aten._transformer_encoder_layer_fwd, "src", "qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2"
    ),
}


# Softmax attention by torch's kernels, `(batch, head, token, dim)`; key and value may have fewer heads

_CPU = ("flash_attention_for_cpu",)
_GPU = ("flash_attention", "efficient_attention", "cudnn_attention")


def _attentions(kinds: tuple[str, ...], causal: str) -> dict[Any, Formula]:
    """Forward two products, backward five: the scores once more, then the slopes of weights, values, queries, keys."""
    found: dict[Any, Formula] = {}
    for kind in kinds:
        for suffix, dims, value_dims in (("", 1, 1), ("_backward", 3, 2)):
            packet = getattr(aten, f"_scaled_dot_product_{kind}{suffix}")
            found[packet] = _attention(packet, causal, dims, value_dims)
    return found


def _attention(packet: Any, causal: str, dims: int, value_dims: int) -> Formula:
    names = [argument.name for argument in packet.default._schema.arguments]

    def flops(*arguments: Any, out_val: Any = None, **words: Any) -> int:
        given = dict(zip(names, arguments, strict=False)) | words
        batch, heads, queries, dim = given["query"].shape
        keys, value_dim = given["value"].shape[2:]
        pairs = queries * keys
        if causal == "triangle" and given.get("is_causal", False):
            # torch puts the first query on the first key: query i sees i + 1 keys, as long as there are so many.
            square = min(queries, keys)
            pairs = square * (square + 1) // 2 + (queries - square) * keys
        return 2 * batch * heads * pairs * (dims * dim + value_dims * value_dim)

    return flops
