"""What each operation costs. Sizes are whole numbers or formulas; the rules do not mind which.

Multiply-adds are those of matrix products and convolutions. Depth is that of the unit-cost model in `depth.py`: views
and copies take no step, elementwise operations one, sums are trees. Bytes are what an operation reads and writes if
it does so once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import sympy

from regard.cost_model import depth
from regard.cost_model.setting import Setting
from regard.cost_model.trace.operation import Operation, product


class Counts(NamedTuple):
    """What one operation takes."""

    macs: Any = 0
    exponentials: Any = 0
    bytes: Any = 0
    depth: Any = 0
    pairs: Any = 0
    normalised: Any = 0


Rule = Callable[[Operation, Setting], Counts]


def counts(operation: Operation, setting: Setting) -> Counts:
    """What an operation costs; one that nobody knows moves its bytes, takes one step and multiplies nothing."""
    rule = RULES.get(operation.name) or RULES.get(operation.name.removesuffix("_"), _elementwise)
    return rule(operation, setting)._replace(bytes=moved(operation))


class Costs:
    """What operations cost, each kind and size reckoned once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.known: dict[Any, Counts] = {}
        self._steps: dict[Any, int] = {}

    def key(self, operation: Operation) -> Any:
        """What an operation's cost is found by."""
        key = operation.name, tuple(operation.reads.items()), operation.writes, operation.words, operation.numbers
        key = (*key, operation.pairs, operation.backward)
        if key not in self.known:
            made = counts(operation, self.setting)
            if any(size == 0 for size in operation.sizes()):  # nothing to add up takes no step
                made = made._replace(depth=0)
            self.known[key] = Counts(*(sympy.expand(sympy.sympify(each)) for each in made))
        return key

    def steps(self, key: Any, sizes: dict[sympy.Symbol, int]) -> int:
        """The depth of an operation at some sizes."""
        if key not in self._steps:
            self._steps[key] = int(self.known[key].depth.subs(sizes))
        return self._steps[key]

    def totals(self, operations: list[Operation]) -> tuple[sympy.Expr, ...]:
        """Multiply-adds, exponentials, pairs and normalised numbers of all operations."""
        every = [self.known[self.key(operation)] for operation in operations]
        return tuple(
            sympy.expand(sympy.Add(*(getattr(each, name) for each in every)))
            for name in ("macs", "exponentials", "pairs", "normalised")
        )


def is_known(name: str) -> bool:
    """Whether all products of an operation are counted: torch's own are, those of others need a rule."""
    if name in RULES or name.removesuffix("_") in RULES:
        return True
    return name.startswith(("aten.", "prim.", "prims.", "profiler.")) and not name.startswith(HIDING)


# Operations of torch with products inside that nobody counts.
HIDING = ("aten._native_multi_head_attention", "aten._transformer_encoder_layer_fwd", "aten._cdist", "aten._trilinear",
          "aten.linalg_", "aten._linalg_", "aten._fft", "aten.cholesky", "aten.triangular_solve")  # fmt: skip


# Bytes


def moved(operation: Operation) -> Any:
    """Bytes read and written. A tensor that is given twice is read once; of a table only the rows that are wanted."""
    name = operation.name.removesuffix("_")
    if name in UNWRITTEN:
        return 0
    written = sum((operand.bytes for operand in operation.writes), 0)
    if name in LOOKUPS:
        table = LOOKUPS[name]
        others = [operand for key, operand in operation.reads.items() if key != table]
        return 2 * written + sum((operand.bytes for operand in others), 0)
    overwritten = operation.name in OVERWRITERS
    read = [one for key, one in operation.reads.items() if not one.again and not (overwritten and key == "self")]
    return written + sum((operand.bytes for operand in read), 0)


# What is allocated and not written; tables of which few rows are read; what does not read what it replaces.
UNWRITTEN = {f"aten.{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")}
UNWRITTEN |= {"aten.resize"}
LOOKUPS = {"aten.embedding": "weight", "aten.index": "self", "aten.gather": "self", "aten.index_select": "self"}
OVERWRITERS = {"aten.copy_", "aten.fill_", "aten.zero_", "aten.bernoulli_", "aten.normal_", "aten.uniform_"}


# Products


def _matrix(first: str, second: str, added: int = 0) -> Rule:
    """A product of matrices, perhaps of many: rows, inner size, columns."""

    def rule(operation: Operation, setting: Setting) -> Counts:
        one, other = operation.reads[first].shape, operation.reads[second].shape
        columns = other[-1] if len(other) > 1 else 1
        return Counts(macs=product(one) * columns, depth=depth.inner(one[-1], setting.serial) + added)

    return rule


def _outer(operation: Operation, setting: Setting) -> Counts:
    return Counts(macs=operation.reads["vec1"].numel * operation.reads["vec2"].numel, depth=sympy.Integer(2))


def _summed_matrices(operation: Operation, setting: Setting) -> Counts:
    """addbmm: products that are also summed over the batch."""
    one, other = operation.reads["batch1"].shape, operation.reads["batch2"].shape
    return Counts(macs=product(one) * other[-1], depth=depth.inner(one[0] * one[-1], setting.serial) + 1)


def _linear(operation: Operation, setting: Setting) -> Counts:
    read = operation.reads
    x = read["x"] if "x" in read else read["input"] if "input" in read else read["self"]
    weight = read["weight"].shape
    added = 1 if "bias" in read else 0
    return Counts(macs=x.numel * weight[0], depth=depth.inner(weight[-1], setting.serial) + added)


def _convolution(operation: Operation, setting: Setting) -> Counts:
    """Every output number is an inner product with a kernel; in a transposed one every input number meets one."""
    transposed, groups = operation.words[:2]
    weight = operation.reads["weight"].shape
    met = operation.reads["input"].numel if transposed else operation.writes[0].numel
    inner = weight[0] / sympy.Integer(groups) if transposed else weight[1]
    steps = depth.inner(inner * product(weight[2:]), setting.serial) + (1 if "bias" in operation.reads else 0)
    return Counts(macs=met * product(weight[1:]), depth=steps)


def _convolution_backward(operation: Operation, setting: Setting) -> Counts:
    """As many multiply-adds as forward for the gradient of the input, and for that of the kernel, where wanted."""
    transposed, groups, (wants_input, wants_weight, _) = operation.words
    above, weight = operation.reads["grad_output"], operation.reads["weight"].shape
    met = operation.reads["input"].numel if transposed else above.numel
    outputs = weight[1] if transposed else weight[0] / sympy.Integer(groups)
    inner = outputs * product(weight[2:]) if wants_input else above.shape[0] * product(above.shape[2:])
    return Counts(
        macs=met * product(weight[1:]) * (int(wants_input) + int(wants_weight)),
        depth=depth.inner(inner, setting.serial),
    )


def _recurrent(operation: Operation, setting: Setting) -> Counts:
    """A recurrent layer: every token of every row meets the matrices of the input and of the state, in turn."""
    x = operation.reads["input"].shape  # token, row, channel
    inner, state = (operation.reads[name].shape for name in RECURRENT[operation.name])
    rows = x[0] * x[1] * (2 if operation.backward else 1)
    steps = x[0] * (depth.inner(state[-1], setting.serial) + 6)  # a sum, a bend, and four steps for the next state
    return Counts(macs=rows * (product(inner) + product(state)), depth=steps)


# The matrices of the input and of the state, by their names.
RECURRENT = {
    "aten.mkldnn_rnn_layer": ("weight0", "weight1"),
    "aten.mkldnn_rnn_layer_backward": ("weight1", "weight2"),
}


# Attention in one operation


def _attention(operation: Operation, setting: Setting) -> Counts:
    """Scores and the sums of values: P (d + e) multiply-adds for P pairs, and as many exponentials as pairs."""
    query, key, value = (operation.reads[name].shape for name in ("query", "key", "value"))
    pairs = _pairs(operation, setting)
    masked = "attn_mask" in operation.reads or "attn_bias" in operation.reads or "bias" in operation.reads
    hidden = int(masked or (operation.name.startswith("aten") and operation.words[:1] == (True,)))
    steps = depth.inner(query[-1], setting.serial) + 1 + hidden
    steps += depth.softmax(key[-2], stable=setting.stable, serial=setting.serial)
    steps += depth.inner(key[-2], setting.serial)
    return Counts(macs=pairs * (query[-1] + value[-1]), exponentials=pairs, depth=steps, pairs=pairs)


def _attention_backward(operation: Operation, setting: Setting) -> Counts:
    """Gradients of weights, values, queries and keys: P (2 d + 2 e); and the scores once more where they were thrown
    away, which the mathematics does not ask for: see `Setting.backend`."""
    query, key, value = (operation.reads[name].shape for name in ("query", "key", "value"))
    pairs, again = _pairs(operation, setting), setting.backend in ("native", "blocked")
    sums = depth.inner(key[-2], setting.serial)
    if again:  # scores, scaled, less their logarithm, exp; times the difference to the row's mean; scaled; summed
        steps = depth.inner(query[-1], setting.serial) + 1 + 2 + 2 + 1 + sums
    else:
        steps = depth.inner(value[-1], setting.serial) + sums + 2 + 1 + sums
    macs = pairs * (2 * query[-1] + 2 * value[-1] + (query[-1] if again else 0))
    return Counts(macs=macs, exponentials=pairs if again else 0, depth=steps)


def _pairs(operation: Operation, setting: Setting) -> Any:
    """Over all heads and rows: those of the program where there is one, those that torch's `is_causal` shows where the
    mathematics is asked, which begins at the first key for the first query; else the whole square."""
    query, key = operation.reads["query"].shape, operation.reads["key"].shape
    if operation.name.startswith("aten") and operation.words[:1] == (True,) and setting.backend is None:
        queries, keys = sympy.sympify(query[-2]), sympy.sympify(key[-2])
        rising = sympy.Min(queries, keys)
        return product(query[:-2]) * (rising * (rising + 1) / 2 + (queries - rising) * keys)
    if operation.numbers and setting.backend != "reference":
        return product(query[:-2]) * operation.numbers[0] / sympy.Integer(operation.words[0])
    return product(query[:-1]) * key[-2]


def _linear_attention(operation: Operation, setting: Setting) -> Counts:
    """Every key head grows a state d (e + 1) with each token, and every query head reads it."""
    query, key, value = (operation.reads[name].shape for name in ("query", "key", "value"))
    macs = query[0] * (query[1] + key[1]) * query[2] * query[3] * (value[3] + 1)
    steps = 2 + depth.total(query[2], setting.serial) + depth.inner(query[3], setting.serial) + 1
    return Counts(macs=macs, depth=steps)


def _linear_attention_backward(operation: Operation, setting: Setting) -> Counts:
    """Three products of the same kind, for the gradients of query, key and value."""
    forward = _linear_attention(operation, setting)
    return Counts(macs=3 * forward.macs, depth=2 * forward.depth)


# Sums, softmaxes, norms


def _reduced(operation: Operation) -> Any:
    """How many numbers become one."""
    shape = next(iter(operation.reads.values())).shape
    return product(shape[axis] for axis in operation.words[0] if axis < len(shape)) if operation.words else 1


def _tree(before: int = 0, after: int = 0, times: int = 1) -> Rule:
    """A sum, a largest number: `times` trees one after the other, with elementwise steps before and after."""

    def rule(operation: Operation, setting: Setting) -> Counts:
        return Counts(depth=times * depth.total(_reduced(operation), setting.serial) + before + after)

    return rule


def _softmax(after: int = 0) -> Rule:
    def rule(operation: Operation, setting: Setting) -> Counts:
        numbers = operation.writes[0].numel
        steps = depth.softmax(_reduced(operation), stable=setting.stable, serial=setting.serial) + after
        return Counts(exponentials=numbers, depth=steps, pairs=numbers if operation.pairs else 0)

    return rule


def _exp(operation: Operation, setting: Setting) -> Counts:
    """An exponential is one of a softmax if a product sums values with what becomes of it."""
    numbers = operation.writes[0].numel if operation.pairs else 0
    return Counts(exponentials=numbers, depth=sympy.Integer(1), pairs=numbers)


def _layer_norm(centred: bool) -> Rule:
    def rule(operation: Operation, setting: Setting) -> Counts:
        read = operation.reads
        x = read["input"].shape
        affine = int("weight" in read) + int("bias" in read)
        channels = product(x[len(x) - operation.words[0] :])
        steps = depth.norm(channels, centred=centred, affine=affine, serial=setting.serial)
        return Counts(depth=steps, normalised=0 if operation.backward else product(x))

    return rule


def _group_norm(operation: Operation, setting: Setting) -> Counts:
    x = operation.reads["input"].shape
    affine = int("weight" in operation.reads) + int("bias" in operation.reads)
    channels = product(x[1:]) / sympy.Integer(operation.words[0])
    steps = depth.norm(channels, affine=affine, serial=setting.serial)
    return Counts(depth=steps, normalised=0 if operation.backward else product(x))


def _batch_norm(operation: Operation, setting: Setting) -> Counts:
    """Over the batch while it learns; otherwise a product and a sum with numbers that are known already."""
    x = operation.reads["input"].shape
    if operation.words and operation.words[0]:
        steps = depth.norm(x[0] * product(x[2:]), affine=2, serial=setting.serial)
    else:
        steps = sympy.Integer(4)
    return Counts(depth=steps, normalised=0 if operation.backward else product(x))


def _scattered(operation: Operation, setting: Setting) -> Counts:
    """Rows are added where indices say: at worst all in one place."""
    rows = operation.reads.get("indices") or operation.reads.get("index") or operation.reads.get("indices.0")
    return Counts(depth=depth.total(rows.numel if rows is not None else 1, setting.serial))


def _pooled(operation: Operation, setting: Setting) -> Counts:
    """A mean of what one output number stands for."""
    inside = next(iter(operation.reads.values())).numel / sympy.sympify(operation.writes[0].numel)
    return Counts(depth=depth.total(sympy.cancel(inside), setting.serial) + 1)


def _steps(number: int) -> Rule:
    return lambda operation, setting: Counts(depth=sympy.Integer(number))


_elementwise = _steps(1)

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

_ATEN: dict[str, Rule] = {
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

RULES: dict[str, Rule] = {
    **{f"aten.{name}": rule for name, rule in _ATEN.items()},
    **dict.fromkeys(RECURRENT, _recurrent),
    "regard.attention": _attention,
    "regard.attention_backward": _attention_backward,
    "regard.decode": _attention,
    "regard.linear_attention": _linear_attention,
    "regard.linear_attention_backward": _linear_attention_backward,
    "regard.gemv": _linear,
    "regard.gemm": _linear,
}
