"""NativeSoftmax attention over a program, as torch operators: `regard::attention` and `regard::attention_backward`.

Tensors are `(batch, head, token, dim)`. NaN and infinities follow `regard.nonfinite`. The kernels only report that
a number is not finite; only then the slow path, three runs, is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.batching import map_one_by_one, merge_mapped_axis, split_mapped_axis
from regard.dropout import find_threshold, keep_scale
from regard.errors import BackendError
from regard.kernels.eager import is_plain_eager
from regard.kernels.head_layout import allocate_grads, allocate_output
from regard.kernels.library import (
    ATTENTION,
    DTYPE_CODES,
    NO_MEMORY,
    NOT_FINITE,
    TOO_TALL,
    address_and_strides,
    empty_output,
    last_axis_dense,
    native,
    num_threads,
)
from regard.kernels.registration import refuse_second_gradient, register_operator, save_nothing
from regard.nonfinite import find_nonfinite_rows, zero_nan_bias, zero_nonfinite

_NOTHING = (0, 0, 0, 0, 0)
_NO_DROPOUT = (0, 0, 1.0, 0, 0)
_NO_GRADS = (0,) * 18


class Score(NamedTuple):
    """The arguments of the operators beside query, key and value, in their order."""

    table: Tensor | None  # (head or 1, entry)
    query_code: Tensor | None  # (query,) int32: the bias of a pair is table[query_code - key_code]
    key_code: Tensor | None  # (key,) int32
    bias: Tensor | None  # (batch or 1, head or 1, query or 1, key or 1)
    words: Tensor  # the program
    masks: Tensor
    scale: float
    dropout: float = 0.0
    seed: Tensor | None = None  # () int64: of the dropout


class TokenNumbers(NamedTuple):
    """The numbers of queries and keys in a longer sequence, `(query,)` and `(key,)` int32: dropout depends on them."""

    query: Tensor
    key: Tensor


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _broadcast_strides(bias: Tensor) -> list[int]:
    """Strides of a bias; an axis of one entry is the same for all."""
    return [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)]


def _describe_inputs(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, score: Score, numbers: TokenNumbers | None
) -> tuple:
    batch, heads, queries, dim = query.shape
    table, bias = score.table, score.bias
    about_table = _NOTHING
    if table is not None:
        assert score.query_code is not None
        assert score.key_code is not None
        step = 0 if len(table) == 1 else table.stride(0)
        about_table = (table.data_ptr(), step, table.shape[1], score.query_code.data_ptr(), score.key_code.data_ptr())
    about_dropout = _NO_DROPOUT
    if score.dropout:
        assert score.seed is not None
        places = (0, 0) if numbers is None else (numbers.query.data_ptr(), numbers.key.data_ptr())
        about_dropout = (find_threshold(score.dropout), int(score.seed), keep_scale(score.dropout), *places)
    return (
        DTYPE_CODES[query.dtype],
        num_threads(),
        batch,
        heads,
        key.shape[1],
        queries,
        key.shape[2],
        dim,
        value.shape[3],
        score.scale,
        *about_dropout,
        *address_and_strides(query),
        *address_and_strides(key),
        *address_and_strides(value),
        *address_and_strides(output),
        lse.data_ptr(),
        score.words.data_ptr(),
        score.masks.data_ptr(),
        *about_table,
        *(_NOTHING if bias is None else (bias.data_ptr(), *_broadcast_strides(bias))),
    )


def _is_finite(status: int) -> bool:
    """Whether all results are finite."""
    if status == TOO_TALL:
        raise BackendError(
            "The program was made for wider vectors.",
            asked="a program with more queries in a tile than this machine's vectors hold",
            because="it was exported on a machine with a larger instruction set",
            instead="export it again here",
        )
    if status == NO_MEMORY:
        raise MemoryError("the native kernels found no memory for their tiles")
    return status != NOT_FINITE


def _prepare_bias(score: Score, dtype: torch.dtype) -> Score:
    """Biases in the dtype of the computation, as the kernel reads them."""
    table = None if score.table is None else score.table.to(dtype).contiguous()
    bias = None if score.bias is None else score.bias.to(dtype)
    return score._replace(table=table, bias=bias)


# Forward


def _run_forward(
    query: Tensor, key: Tensor, value: Tensor, score: Score, numbers: TokenNumbers | None = None
) -> tuple[Tensor, Tensor, bool]:
    assert native is not None
    dtype = _accumulation_dtype(query.dtype)
    output = allocate_output(query, value.shape[3], dtype)
    lse = empty_output(*query.shape[:3], dtype=dtype)
    fields = ATTENTION.pack(*_describe_inputs(query, key, value, output, lse, score, numbers), *_NO_GRADS)
    return output, lse, _is_finite(native.regard_attention(fields))


def forward(
    query, key, value, table, query_code, key_code, bias, words, masks, scale, dropout, seed
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a program, by a plain call."""
    return run_forward(
        query, key, value, Score(table, query_code, key_code, bias, words, masks, scale, dropout, seed), None
    )


def run_forward(
    query: Tensor, key: Tensor, value: Tensor, score: Score, numbers: TokenNumbers | None
) -> tuple[Tensor, Tensor]:
    """The same; with `numbers`, for tokens of a longer sequence."""
    query, key, value = last_axis_dense(query), last_axis_dense(key), last_axis_dense(value)
    scale = score.scale
    if score.table is not None or score.bias is not None:
        score = _prepare_bias(score, _accumulation_dtype(query.dtype))
    output, lse, finite = _run_forward(query, key, value, score, numbers)
    if finite:
        return output, lse
    nonfinite, nan_rows = ~torch.isfinite(value), torch.zeros((), dtype=torch.bool)
    if scale == 0:  # neither queries nor keys are read; products that are not finite may only come out as 0 * nan
        query = torch.zeros_like(query)
    else:
        nonfinite, nan_rows = nonfinite | find_nonfinite_rows(key), find_nonfinite_rows(query)
        if not bool(nonfinite.any()) and not bool(nan_rows.any()):
            return output, lse  # scores that overflowed, or a bias that is not finite: the kernel keeps the rule
    output, lse, _ = _run_forward(zero_nonfinite(query), zero_nonfinite(key), zero_nonfinite(value), score, numbers)
    # The mean of marks is positive for queries that see a non-finite key or value; the log-sum-exp says which see any.
    mean, mean_lse, _ = _run_forward(
        *_zero_queries_keys(query, key), nonfinite.to(value.dtype), _with_equal_scores(score)
    )
    return torch.where((mean > 0) | (nan_rows & (mean_lse > -torch.inf).unsqueeze(-1)), torch.nan, output), lse


def _with_equal_scores(score: Score) -> Score:
    """The same pairs, all with the same score and none dropped; a bias of minus infinity still hides its own."""
    table, bias = (None if tensor is None else _keep_hiding(tensor) for tensor in (score.table, score.bias))
    return score._replace(table=table, bias=bias, scale=0.0, dropout=0.0)


def _keep_hiding(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).masked_fill_(scores == -torch.inf, -torch.inf)


def _zero_queries_keys(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_zeros(*query.shape[:3], 1), key.new_zeros(*key.shape[:3], 1)


# Backward


def _run_backward(
    grad_output, query, key, value, score: Score, output, lse, learn_table, learn_bias, numbers=None
) -> tuple:
    assert native is not None
    dtype = _accumulation_dtype(query.dtype)
    grads = allocate_grads(query, key, value, dtype)
    table_grad, bias_grad = torch.empty(0, dtype=dtype, device="cpu"), torch.empty(0, dtype=dtype, device="cpu")
    if learn_table:
        assert score.table is not None
        table_grad = torch.zeros(query.shape[0], query.shape[1], score.table.shape[1], dtype=dtype, device="cpu")
    if learn_bias:
        assert score.bias is not None
        bias = score.bias.contiguous()  # its gradient has the strides of a dense tensor
        score, bias_grad = score._replace(bias=bias), torch.zeros_like(bias)
    common = _describe_inputs(query, key, value, output, lse, score, numbers)
    addresses = [field for tensor in (grad_output, *grads) for field in address_and_strides(tensor)]
    addresses += [table_grad.data_ptr() if learn_table else 0, bias_grad.data_ptr() if learn_bias else 0]
    finite = _is_finite(native.regard_attention_backward(ATTENTION.pack(*common, *addresses)))
    if learn_table and score.table is not None:
        # One table for all heads sums their gradients, in their order.
        table_grad = table_grad[0] if len(score.table) > 1 else _sum_rows(table_grad[0])
    return (*grads, table_grad, bias_grad), finite


def _sum_rows(rows: Tensor) -> Tensor:
    """The sum of rows, one after the other: the same bits for any number of threads."""
    total = rows[:1].clone()
    for row in rows[1:]:
        total += row
    return total


def backward(
    grad_output,
    query,
    key,
    value,
    table,
    query_code,
    key_code,
    bias,
    words,
    masks,
    scale,
    dropout,
    seed,
    output,
    lse,
    learn_table,
    learn_bias,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, table and bias (empty where not wanted), by a plain call."""
    score = Score(table, query_code, key_code, bias, words, masks, scale, dropout, seed)
    return run_backward(grad_output, query, key, value, score, output, lse, (learn_table, learn_bias), None)


def run_backward(
    grad_output, query, key, value, score: Score, output, lse, wanted: tuple[bool, bool], numbers: TokenNumbers | None
) -> tuple[Tensor, ...]:
    """The same; with `numbers`, for tokens of a longer sequence. `wanted`: whether table and bias learn.

    With output and log-sum-exp of more keys than these, it returns what these keys contribute.
    """
    query, key, value = last_axis_dense(query), last_axis_dense(key), last_axis_dense(value)
    scale = score.scale
    score = _prepare_bias(score, _accumulation_dtype(query.dtype))
    grad_output, output, lse = last_axis_dense(grad_output), last_axis_dense(output), lse.contiguous()
    grads, finite = _run_backward(grad_output, query, key, value, score, output, lse, *wanted, numbers)
    if finite:
        return grads
    # Outputs that became NaN by a non-finite input carry no gradient.
    is_nan = torch.isnan(output)
    grad_output, output = torch.where(is_nan, 0, grad_output), torch.where(is_nan, 0, output)
    key, value = zero_nonfinite(key), zero_nonfinite(value)
    # A row whose scores overflowed, or that saw a bias of NaN or plus infinity, has no weights: 2^(score - inf).
    nan_rows = ~(lse < torch.inf)
    query, lse = (
        torch.where(nan_rows.unsqueeze(-1) | (scale == 0), 0, zero_nonfinite(query)),
        torch.where(nan_rows, torch.inf, lse),
    )
    table, bias = (None if tensor is None else zero_nan_bias(tensor) for tensor in (score.table, score.bias))
    score = score._replace(table=table, bias=bias)
    nonfinite = ~torch.isfinite(grad_output)
    grads, _ = _run_backward(zero_nonfinite(grad_output), query, key, value, score, output, lse, *wanted, numbers)
    if not bool(nonfinite.any()):
        return grads
    return _spread_nan(grads, _mark_grads(nonfinite.to(output.dtype), query, key, value, score, *wanted), nonfinite)


def _mark_grads(marks, query, key, value, score: Score, learn_table, learn_bias) -> tuple[Tensor, ...]:
    """Gradients that are positive where a marked entry of the output's gradient arrives."""
    ones, equal = torch.ones_like(value), _zero_queries_keys(query, key)
    plain = _with_equal_scores(score)
    output, lse, _ = _run_forward(*equal, ones, plain)
    # With an output of zero every gradient is positive.
    marked, _ = _run_backward(marks, *equal, ones, plain, torch.zeros_like(output), lse, learn_table, learn_bias)
    return (lse, *marked[1:])


def _spread_nan(grads: tuple[Tensor, ...], marked: tuple[Tensor, ...], nonfinite: Tensor) -> tuple[Tensor, ...]:
    """NaN where a non-finite gradient arrives: its query, and all keys, values and biases that this query sees."""
    query, key, value, table, bias = grads
    lse, _, value_touched, table_touched, bias_touched = marked
    from_query = nonfinite.any(-1, keepdim=True) & (lse > -torch.inf).unsqueeze(-1)
    return (
        torch.where(from_query, torch.nan, query),
        torch.where((value_touched > 0).any(-1, keepdim=True), torch.nan, key),
        torch.where(value_touched > 0, torch.nan, value),
        torch.where(table_touched > 0, torch.nan, table),
        torch.where(bias_touched > 0, torch.nan, bias),
    )


# Operators


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? table, Tensor? query_code, Tensor? key_code, Tensor? bias, "
    "Tensor words, Tensor masks, float scale, float dropout, Tensor? seed"
)


def _make_fake(query, key, value, *_):
    dtype = _accumulation_dtype(query.dtype)
    output = allocate_output(query, value.shape[3], dtype, query.new_empty)
    return output, query.new_empty(query.shape[:3], dtype=dtype)


def _make_fake_grads(grad_output, query, key, value, table, query_code, key_code, bias, *rest):
    *_, learn_table, learn_bias = rest
    dtype = _accumulation_dtype(query.dtype)
    like = allocate_grads(query, key, value, dtype, query.new_empty)
    for wanted, tensor in ((learn_table, table), (learn_bias, bias)):
        like.append(query.new_empty(tensor.shape if wanted else (0,), dtype=dtype))
    return tuple(like)


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.scale, ctx.dropout, seed = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, seed, *output)


def _compute_grads(ctx, call, grad_output) -> tuple:
    *inputs, seed, output, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grads = call(grad_output, *inputs, ctx.scale, ctx.dropout, seed, output, lse, needs[3], needs[6])
    query, key, value, table, bias = (
        grad.to(tensor.dtype) if needed else None
        for grad, tensor, needed in zip(grads, (*inputs[:4], inputs[6]), (*needs[:4], needs[6]), strict=True)
    )
    return query, key, value, table, None, None, bias, None, None, None, None, None


def _registered_backward(ctx, grad_output, _):
    return _compute_grads(ctx, torch.ops.regard.attention_backward, grad_output)


_refuse_second_gradient = refuse_second_gradient("native", "its scores are not kept after the first backward pass")


def _batch_forward(call, info, dims, *arguments) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """vmap: the mapped axis joins the batch, unless a bias is mapped or belongs to one batch row, or there is dropout.

    The mask of dropout depends on the batch row, which must not depend on the samples beside it.
    """
    bias, dropout = arguments[6], arguments[10]
    if dropout or any(dim is not None for dim in dims[3:]) or (bias is not None and len(bias) > 1):
        results = map_one_by_one(info.batch_size, dims, arguments, call)
    else:
        merged = merge_mapped_axis(info.batch_size, dims[:3], arguments[:3])
        results = split_mapped_axis(info.batch_size, call(*merged, *arguments[3:]))
    return results, (0,) * len(results)


class NativeSoftmax(torch.autograd.Function):
    """The forward pass under autograd or a functorch transform: cheaper than the registered operator."""

    @staticmethod
    def forward(*arguments):
        return forward(*arguments) if is_plain_eager(*arguments[:3]) else torch.ops.regard.attention(*arguments)

    setup_context = staticmethod(_save_for_backward)

    @staticmethod
    def backward(ctx, *gradients):
        return _compute_grads(ctx, NativeSoftmaxBackward.apply, gradients[0])

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _batch_forward(NativeSoftmax.apply, info, in_dims, *arguments)


class NativeSoftmaxBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that vmap can batch it too."""

    @staticmethod
    def forward(*arguments):
        return (
            backward(*arguments) if is_plain_eager(*arguments[:4]) else torch.ops.regard.attention_backward(*arguments)
        )

    setup_context = staticmethod(save_nothing)
    backward = staticmethod(_refuse_second_gradient)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _batch_backward(NativeSoftmaxBackward.apply, info, in_dims, *arguments)


def _batch_backward(call, info, dims, *arguments) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    size, bias, dropout = info.batch_size, arguments[7], arguments[11]
    # One sample's gradient of the bias must not be added to another's; for dropout see `_batch_forward`.
    alone = arguments[-2] or arguments[-1] or dropout
    if alone or any(dim is not None for dim in dims[4:13]) or (bias is not None and len(bias) > 1):
        results = map_one_by_one(size, dims, arguments, call)
        return results, (0,) * len(results)
    first, last = (
        merge_mapped_axis(size, dims[:4], arguments[:4]),
        merge_mapped_axis(size, dims[13:15], arguments[13:15]),
    )
    grads = call(*first, *arguments[4:13], *last, False, False)
    nothing = [grad.new_empty(size, 0) for grad in grads[3:]]
    return (*split_mapped_axis(size, grads[:3]), *nothing), (0,) * 5


def attention(query: Tensor, key: Tensor, value: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """Output `(batch, head, query, value_dim)` and log-sum-exp `(batch, head, query)`, differentiable.

    The output is float32 for half-precision inputs.
    """
    tensors = (query, key, value, score.table, score.bias)
    if is_plain_eager(*tensors):
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            return NativeSoftmax.apply(query, key, value, *score)
        return forward(query, key, value, *score)
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        if torch.autograd.forward_ad._current_level >= 0:
            return NativeSoftmax.apply(query, key, value, *score)
        return torch.ops.regard.attention(query, key, value, *score)
    return NativeSoftmax.apply(query, key, value, *score)


# FLOP formulas


def _count_pairs(query, key, words) -> int:
    """Allowed pairs of all batch rows. A fake program holds no values: then all pairs count."""
    if isinstance(words, torch._subclasses.FakeTensor):
        return query.shape[0] * query.shape[2] * key.shape[2]
    rows, low, high = words[3:6].tolist()
    return query.shape[0] * ((high << 31) + low) // rows


def _count_flops(query, key, value, table, query_code, key_code, bias, words, *_, **__) -> int:
    return 2 * query.shape[1] * _count_pairs(query, key, words) * (query.shape[3] + value.shape[3])


def _count_backward_flops(grad_output, query, key, value, table, query_code, key_code, bias, words, *_, **__) -> int:
    """Five products: two to recompute the weights and their gradients, three for query, key and value."""
    return 2 * query.shape[1] * _count_pairs(query, key, words) * (3 * query.shape[3] + 2 * value.shape[3])


register_operator(
    f"attention({_ARGUMENTS}) -> (Tensor, Tensor)",
    forward,
    fake=_make_fake,
    backward=_registered_backward,
    setup_context=_save_for_backward,
    vmap=_batch_forward,
    flops=_count_flops,
)
register_operator(
    f"attention_backward(Tensor grad_output, {_ARGUMENTS}, Tensor output, Tensor lse, "
    "bool learn_table, bool learn_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    backward,
    fake=_make_fake_grads,
    backward=_refuse_second_gradient,
    vmap=_batch_backward,
    flops=_count_backward_flops,
)
