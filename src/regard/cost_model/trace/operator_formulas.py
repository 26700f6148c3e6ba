"""What each operator costs. Sizes are integers or expressions; the formulas work on both.

Multiply-adds are those of matrix products and convolutions. Depth is that of the unit-cost model in `depth.py`: views
and copies take no step, elementwise operations one, sums are trees. Bytes are counted in `operator_costs`. The one
table, `FORMULAS`, serves traces and `flop_counter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import sympy
import torch
from torch.utils.flop_counter import flop_registry

from regard.cost_model import depth
from regard.cost_model.run_mode import RunMode
from regard.cost_model.trace.operation import Operation, product


class OperatorCost(NamedTuple):
    """What one operation takes; `name` tells the steps of an attention apart."""

    macs: Any = 0
    exponentials: Any = 0
    bytes: Any = 0
    depth: Any = 0
    pairs: Any = 0
    normalised: Any = 0
    name: str = ""


Formula = Callable[[Operation, RunMode], OperatorCost]


# Products


def _matrix(first: str, second: str, added: int = 0) -> Formula:
    """A product of matrices, perhaps of many: rows, inner size, columns."""

    def rule(operation: Operation, mode: RunMode) -> OperatorCost:
        one, other = operation.reads[first].shape, operation.reads[second].shape
        columns = other[-1] if len(other) > 1 else 1
        return OperatorCost(macs=product(one) * columns, depth=depth.inner(one[-1], mode.serial) + added)

    return rule


def _outer(operation: Operation, mode: RunMode) -> OperatorCost:
    return OperatorCost(macs=operation.reads["vec1"].numel * operation.reads["vec2"].numel, depth=sympy.Integer(2))


def _summed_matrices(operation: Operation, mode: RunMode) -> OperatorCost:
    """addbmm: products that are also summed over the batch."""
    one, other = operation.reads["batch1"].shape, operation.reads["batch2"].shape
    return OperatorCost(macs=product(one) * other[-1], depth=depth.inner(one[0] * one[-1], mode.serial) + 1)


def _linear(operation: Operation, mode: RunMode) -> OperatorCost:
    read = operation.reads
    x = read["input"] if "input" in read else read["self"]
    weight = read["weight"].shape
    added = 1 if "bias" in read else 0
    return OperatorCost(macs=x.numel * weight[0], depth=depth.inner(weight[-1], mode.serial) + added)


def _linear_kernel(operation: Operation, mode: RunMode) -> OperatorCost:
    """A linear layer by a kernel of Regard, which has registered its FLOPs with torch."""
    x, weight, bias = (operation.reads.get(name) for name in ("x", "weight", "bias"))
    assert weight is not None
    flops = flop_registry[getattr(torch.ops.regard, operation.name.removeprefix("regard."))](x, weight, bias)
    steps = depth.inner(weight.shape[-1], mode.serial) + (0 if bias is None else 1)
    return OperatorCost(macs=sympy.sympify(flops) / 2, depth=steps)


def _packed_matrix(operation: Operation, mode: RunMode) -> OperatorCost:
    """Weights that are packed: the channels of the output tell how many there are."""
    inner = operation.reads["self"].shape[-1]
    return OperatorCost(macs=inner * operation.writes[0].numel, depth=depth.inner(inner, mode.serial))


def _grouped_matrices(operation: Operation, mode: RunMode) -> OperatorCost:
    """A product for each group. Groups are an axis of both, or divide the rows, columns or channels of one."""
    left, right = operation.reads["self"].shape, operation.reads["mat2"].shape
    groups = left[0] if len(left) == len(right) == 3 else 1
    macs = groups * left[-2] * left[-1] * right[-1]
    return OperatorCost(macs=macs, depth=depth.inner(left[-1], mode.serial))


def _trilinear(operation: Operation, mode: RunMode) -> OperatorCost:
    """Two products, one after the other, as of `x W y`; the constants are the axes that an operand lacks, and those
    that are summed. What the third operand lacks is summed at once, the rest together with it."""
    *lacking, summed = operation.constants
    shapes = []
    for name, axes in zip(("i1", "i2", "i3"), lacking, strict=True):
        shape = list(operation.reads[name].shape)
        for axis in sorted(axes):
            shape.insert(axis, 1)
        shapes.append(shape)
    first = [_larger(*pair) for pair in zip(shapes[0], shapes[1], strict=True)]
    between = [1 if axis in summed and axis in lacking[2] else size for axis, size in enumerate(first)]
    second = [_larger(*pair) for pair in zip(between, shapes[2], strict=True)]
    inner = product(_larger(first[axis], shapes[2][axis]) for axis in summed)
    return OperatorCost(macs=product(first) + product(second), depth=1 + depth.inner(inner, mode.serial))


def _larger(one: Any, other: Any) -> Any:
    """The size of an axis on which one of two operands may be broadcast."""
    return other if one == 1 else one


def _convolution(operation: Operation, mode: RunMode) -> OperatorCost:
    """Every output number is an inner product with a kernel; in a transposed one every input number meets one."""
    transposed, groups = operation.constants[:2]
    weight = operation.reads["weight"].shape
    met = operation.reads["input"].numel if transposed else operation.writes[0].numel
    inner = weight[0] / sympy.Integer(groups) if transposed else weight[1]
    steps = depth.inner(inner * product(weight[2:]), mode.serial) + (1 if "bias" in operation.reads else 0)
    return OperatorCost(macs=met * product(weight[1:]), depth=steps)


def _convolution_in_time(operation: Operation, mode: RunMode) -> OperatorCost:
    """Axes are (time, batch, channel), of the weight (width, in, out)."""
    weight, output = operation.reads["weight"].shape, operation.writes[0].shape
    steps = depth.inner(weight[0] * weight[1], mode.serial) + 1
    return OperatorCost(macs=output[0] * output[1] * product(weight), depth=steps)


def _convolution_backward(operation: Operation, mode: RunMode) -> OperatorCost:
    """As many multiply-adds as forward for the gradient of the input, and for that of the kernel, where wanted."""
    transposed, _, (wants_input, wants_weight, _) = operation.constants
    above, weight = operation.reads["grad_output"], operation.reads["weight"].shape
    met = operation.reads["input"].numel if transposed else above.numel
    outputs = weight[1] if transposed else weight[0] * weight[1] / sympy.sympify(operation.reads["input"].shape[1])
    inner = outputs * product(weight[2:]) if wants_input else above.shape[0] * product(above.shape[2:])
    return OperatorCost(
        macs=met * product(weight[1:]) * (int(wants_input) + int(wants_weight)),
        depth=depth.inner(inner, mode.serial),
    )


def _recurrent(operation: Operation, mode: RunMode) -> OperatorCost:
    """A recurrent layer: every token of every row meets the matrices of the input and of the state, in turn."""
    x = operation.reads["input"].shape  # token, row, channel
    inner, state = (operation.reads[name].shape for name in RECURRENT[operation.name])
    rows = x[0] * x[1] * (2 if operation.name.endswith("_backward") else 1)
    steps = x[0] * (depth.inner(state[-1], mode.serial) + 6)  # a sum, a bend, and four steps for the next state
    return OperatorCost(macs=rows * (product(inner) + product(state)), depth=steps)


# The matrices of the input and of the state, by their names.
RECURRENT = {
    "aten.mkldnn_rnn_layer": ("weight0", "weight1"),
    "aten.mkldnn_rnn_layer_backward": ("weight1", "weight2"),
}


def _whole_layer(*matrices: str) -> Formula:
    """A fused layer of torch: every matrix meets every token, and the tokens of a row meet each other twice.

    The constants are the tokens of each row and the channels of all heads. A trace runs the layer without fusion.
    """

    def rule(operation: Operation, mode: RunMode) -> OperatorCost:
        lengths, width = operation.constants
        weights = sum(operation.reads[matrix].numel for matrix in matrices)
        return OperatorCost(macs=sum(n * weights + 2 * n * n * width for n in lengths))

    return rule


# Attention in one operation


def _attention(operation: Operation, mode: RunMode) -> OperatorCost:
    """Scores and the sums of values: P (d + e) multiply-adds for P pairs, and as many exponentials as pairs."""
    query, key, value = (operation.reads[name].shape for name in ("query", "key", "value"))
    pairs = _pairs(operation, mode)
    masked = "attn_mask" in operation.reads or "attn_bias" in operation.reads or "bias" in operation.reads
    hidden = int(masked or (operation.name.startswith("aten") and operation.constants[:1] == (True,)))
    steps = depth.inner(query[-1], mode.serial) + 1 + hidden
    steps += depth.softmax(key[-2], stable=mode.stable, serial=mode.serial)
    steps += depth.inner(key[-2], mode.serial)
    return OperatorCost(macs=pairs * (query[-1] + value[-1]), exponentials=pairs, depth=steps, pairs=pairs)


def _attention_backward(operation: Operation, mode: RunMode) -> OperatorCost:
    """Gradients of weights, values, queries and keys: P (2 d + 2 e); and the scores once more where they were thrown
    away, which the mathematics does not ask for: see `RunMode.backend`."""
    query, key, value = (operation.reads[name].shape for name in ("query", "key", "value"))
    pairs, again = _pairs(operation, mode), mode.backend in ("native", "blocked")
    sums = depth.inner(key[-2], mode.serial)
    if again:  # scores, scaled, less their logarithm, exp; times the difference to the row's mean; scaled; summed
        steps = depth.inner(query[-1], mode.serial) + 1 + 2 + 2 + 1 + sums
    else:
        steps = depth.inner(value[-1], mode.serial) + sums + 2 + 1 + sums
    macs = pairs * (2 * query[-1] + 2 * value[-1] + (query[-1] if again else 0))
    return OperatorCost(macs=macs, exponentials=pairs if again else 0, depth=steps)


def _pairs(operation: Operation, mode: RunMode) -> Any:
    """Over all heads and rows: those of the program where there is one, those that torch's `is_causal` shows where the
    mathematics is asked, which begins at the first key for the first query; else the whole square."""
    query, key = operation.reads["query"].shape, operation.reads["key"].shape
    if operation.name.startswith("aten") and operation.constants[:1] == (True,) and not mode.counts_hidden_pairs:
        queries, keys = sympy.sympify(query[-2]), sympy.sympify(key[-2])
        rising = sympy.Min(queries, keys)
        return product(query[:-2]) * (rising * (rising + 1) / 2 + (queries - rising) * keys)
    return product(query[:-1]) * key[-2]


# Sums, softmaxes, norms


def _reduced(operation: Operation) -> Any:
    """How many numbers become one."""
    shape = next(iter(operation.reads.values())).shape
    return product(shape[axis] for axis in operation.constants[0] if axis < len(shape)) if operation.constants else 1


def _tree(before: int = 0, after: int = 0, times: int = 1) -> Formula:
    """A sum, a largest number: `times` trees one after the other, with elementwise steps before and after."""

    def rule(operation: Operation, mode: RunMode) -> OperatorCost:
        return OperatorCost(depth=times * depth.total(_reduced(operation), mode.serial) + before + after)

    return rule


def _softmax(after: int = 0) -> Formula:
    def rule(operation: Operation, mode: RunMode) -> OperatorCost:
        numbers = operation.writes[0].numel
        steps = depth.softmax(_reduced(operation), stable=mode.stable, serial=mode.serial) + after
        return OperatorCost(exponentials=numbers, depth=steps, pairs=_pairs_of_weights(operation))

    return rule


def _exp(operation: Operation, mode: RunMode) -> OperatorCost:
    """An exponential is one of a softmax if a product sums values with what becomes of it."""
    numbers = operation.writes[0].numel if operation.is_attention else 0
    return OperatorCost(exponentials=numbers, depth=sympy.Integer(1), pairs=_pairs_of_weights(operation))


def _pairs_of_weights(operation: Operation) -> Any:
    return operation.writes[0].numel if operation.is_attention and not operation.is_factor else 0


def _layer_norm(centred: bool) -> Formula:
    def rule(operation: Operation, mode: RunMode) -> OperatorCost:
        read = operation.reads
        x = read["input"].shape
        affine = int("weight" in read) + int("bias" in read)
        channels = product(x[len(x) - operation.constants[0] :])
        steps = depth.norm(channels, centred=centred, affine=affine, serial=mode.serial)
        return OperatorCost(depth=steps, normalised=0 if operation.backward else product(x))

    return rule


def _group_norm(operation: Operation, mode: RunMode) -> OperatorCost:
    x = operation.reads["input"].shape
    affine = int("weight" in operation.reads) + int("bias" in operation.reads)
    channels = product(x[1:]) / sympy.Integer(operation.constants[0])
    steps = depth.norm(channels, affine=affine, serial=mode.serial)
    return OperatorCost(depth=steps, normalised=0 if operation.backward else product(x))


def _batch_norm(operation: Operation, mode: RunMode) -> OperatorCost:
    """Over the batch while it learns; otherwise a product and a sum with numbers that are known already."""
    x = operation.reads["input"].shape
    if operation.constants and operation.constants[0]:
        steps = depth.norm(x[0] * product(x[2:]), affine=2, serial=mode.serial)
    else:
        steps = sympy.Integer(4)
    return OperatorCost(depth=steps, normalised=0 if operation.backward else product(x))


def _scattered(operation: Operation, mode: RunMode) -> OperatorCost:
    """Rows are added where indices say: at worst all in one place."""
    rows = operation.reads.get("indices") or operation.reads.get("index") or operation.reads.get("indices.0")
    return OperatorCost(depth=depth.total(rows.numel if rows is not None else 1, mode.serial))


def _pooled(operation: Operation, mode: RunMode) -> OperatorCost:
    """A mean of what one output number stands for."""
    inside = next(iter(operation.reads.values())).numel / sympy.sympify(operation.writes[0].numel)
    return OperatorCost(depth=depth.total(sympy.cancel(inside), mode.serial) + 1)


def _steps(number: int) -> Formula:
    return lambda operation, mode: OperatorCost(depth=sympy.Integer(number))


count_elementwise = _steps(1)

# Data that is moved and not computed with.
MOVES = ("clone", "copy", "_to_copy", "cat", "stack", "index", "gather", "index_select", "embedding", "select_scatter",
         "slice_scatter", "slice_backward", "select_backward", "constant_pad_nd", "repeat", "repeat_interleave", "roll",
         "flip", "im2col", "unfold_backward", "fill", "zero", "zeros", "ones", "full", "zeros_like", "ones_like",
         "full_like", "new_zeros", "new_ones", "new_full", "arange", "linspace", "scalar_tensor", "eye", "tril", "triu",
         "rand", "randn", "randint", "randperm", "bernoulli", "normal", "uniform", "rand_like", "randn_like",
         "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "scatter", "_reshape_copy", "lift_fresh_copy",
         "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "upsample_nearest2d",
         "tril_indices", "triu_indices", "nonzero", "diagonal_copy", "diag_embed", "view_copy", "permute_copy",
         "expand_copy", "split_with_sizes_copy", "_unsafe_index", "unbind_copy", "empty", "new_empty", "empty_like",
         "empty_strided", "new_empty_strided", "resize", "set", "_efficientzerotensor", "glu_jvp")  # fmt: skip
SDPA = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
        "fused_attention_overrideable")  # fmt: skip

_ATEN: dict[str, Formula] = {
    **{name: _steps(0) for name in MOVES},
    "mm": _matrix("self", "mat2"),
    "bmm": _matrix("self", "mat2"),
    "addmm": _matrix("mat1", "mat2", 1),
    "_addmm_activation": _matrix("mat1", "mat2", 2),
    "baddbmm": _matrix("batch1", "batch2", 1),
    "addbmm": _summed_matrices,
    "mv": _matrix("self", "vec"),
    "addmv": _matrix("mat", "vec", 1),
    "dot": _matrix("self", "tensor"),
    "vdot": _matrix("self", "other"),
    "addr": _outer,
    "_int_mm": _matrix("self", "mat2"),
    "_scaled_mm": _matrix("self", "mat2"),
    "_weight_int8pack_mm": _packed_matrix,
    "_weight_int4pack_mm_for_cpu": _packed_matrix,
    "_grouped_mm": _grouped_matrices,
    "_trilinear": _trilinear,
    "conv_tbc": _convolution_in_time,
    "_native_multi_head_attention": _whole_layer("qkv_weight", "proj_weight"),
    "_transformer_encoder_layer_fwd": _whole_layer("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2"),
    "linear": _linear,
    "mkldnn_linear": _linear,
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
    "convolution_backward_overrideable": _convolution_backward,
    **{f"_scaled_dot_product_{name}": _attention for name in SDPA},
    **{f"_scaled_dot_product_{name}_backward": _attention_backward for name in SDPA},
    "_softmax": _softmax(),
    "_safe_softmax": _softmax(),
    "_log_softmax": _softmax(after=1),
    "exp": _exp,
    "logsumexp": _tree(after=4, times=2),
    "_softmax_backward_data": _tree(before=1, after=2),
    "_log_softmax_backward_data": _tree(after=2),
    **{name: _tree() for name in ("sum", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin",
                                  "cumsum", "cumprod", "topk", "sort", "median", "logcumsumexp")},
    "mean": _tree(after=1),
    "var": _tree(after=4, times=2),
    "var_mean": _tree(after=4, times=2),
    "std": _tree(after=5, times=2),
    "std_mean": _tree(after=5, times=2),
    "norm": _tree(before=1, after=1),
    "linalg_vector_norm": _tree(before=1, after=1),
    "native_layer_norm": _layer_norm(centred=True),
    "native_layer_norm_backward": _layer_norm(centred=True),
    "_fused_rms_norm": _layer_norm(centred=False),
    "_fused_rms_norm_backward": _layer_norm(centred=False),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm,
    "embedding_dense_backward": _scattered,
    "index_put": _scattered,
    "_unsafe_index_put": _scattered,
    "_index_put_impl": _scattered,
    "index_add": _scattered,
    "scatter_add": _scattered,
    "_adaptive_avg_pool2d": _pooled,
    "avg_pool2d": _pooled,
    "max_pool2d_with_indices": _pooled,
    "addcmul": _steps(2),
    "addcdiv": _steps(2),
    "lerp": _steps(3),
    "upsample_bilinear2d": _steps(4),
    "upsample_bicubic2d": _steps(8),
    "_upsample_bicubic2d_aa": _steps(8),
    "_upsample_bilinear2d_aa": _steps(4),
}  # fmt: skip

FORMULAS: dict[str, Formula] = {
    **{f"aten.{name}": rule for name, rule in _ATEN.items()},
    **dict.fromkeys(RECURRENT, _recurrent),
    "regard.normalise": lambda operation, mode: OperatorCost(normalised=operation.reads["input"].numel),
    "regard.separable_attention": lambda operation, mode: OperatorCost(pairs=operation.reads["input"].numel),
    "regard.gemv": _linear_kernel,
    "regard.gemm": _linear_kernel,
}
