"""Softmax attention over a program, as operators of torch: `regard::attention` and `regard::attention_backward`.

Tensors are `(batch, head, token, dim)`. What is not finite is treated as everywhere in Regard: a hidden key or value
never touches an output, and one that is visible makes it NaN. The kernels only report that a number is not finite; the
careful way, which costs three runs, is taken then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.errors import BackendError
from regard.finite import cleaned
from regard.folding import fold, one_by_one, unfold
from regard.kernels.library import (
    ATTENTION,
    NO_MEMORY,
    NOT_FINITE,
    NUMBERS,
    TOO_TALL,
    fresh,
    last_axis_dense,
    native,
    placed,
)
from regard.kernels.watched import unwatched

_NOTHING = (0, 0, 0, 0, 0)


class Score(NamedTuple):
    """What makes the scores beside query and key, in the order the operators take it."""

    table: Tensor | None  # (head or 1, entry)
    query_code: Tensor | None  # (query,) int32: the bias of a pair is table[query_code - key_code]
    key_code: Tensor | None  # (key,) int32
    bias: Tensor | None  # (batch or 1, head or 1, query or 1, key or 1)
    words: Tensor  # the program
    masks: Tensor
    beta: float


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _steps(bias: Tensor) -> list[int]:
    """Strides of a bias; an axis of one entry is the same for all."""
    return [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)]


def _common(query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor, score: Score) -> tuple:
    batch, heads, queries, dim = query.shape
    table, bias = score.table, score.bias
    about_table = _NOTHING
    if table is not None:
        assert score.query_code is not None
        assert score.key_code is not None
        step = 0 if len(table) == 1 else table.stride(0)
        about_table = (table.data_ptr(), step, table.shape[1], score.query_code.data_ptr(), score.key_code.data_ptr())
    return (
        NUMBERS[query.dtype],
        torch.get_num_threads(),
        batch,
        heads,
        key.shape[1],
        queries,
        key.shape[2],
        dim,
        value.shape[3],
        score.beta,
        *placed(query),
        *placed(key),
        *placed(value),
        output.data_ptr(),
        sums.data_ptr(),
        score.words.data_ptr(),
        score.masks.data_ptr(),
        *about_table,
        *(_NOTHING if bias is None else (bias.data_ptr(), *_steps(bias))),
    )


def _check(answer: int) -> bool:
    """Whether all results are finite."""
    if answer == TOO_TALL:
        raise BackendError(
            "The program was made for wider vectors.",
            asked="a program with more queries in a tile than this machine's vectors hold",
            because="it was exported on a machine with a larger instruction set",
            instead="export it again here",
        )
    if answer == NO_MEMORY:
        raise MemoryError("the native kernels found no memory for their tiles")
    return answer != NOT_FINITE


def _dense(score: Score, dtype: torch.dtype) -> Score:
    """Biases in the dtype of the computation, as the kernel reads them."""
    table = None if score.table is None else score.table.to(dtype).contiguous()
    bias = None if score.bias is None else score.bias.to(dtype)
    return score._replace(table=table, bias=bias)


# Forward


def _run(query: Tensor, key: Tensor, value: Tensor, score: Score) -> tuple[Tensor, Tensor, bool]:
    assert native is not None
    dtype = _wide(query.dtype)
    batch, heads, queries, _ = query.shape
    output = fresh(batch, heads, queries, value.shape[3], dtype=dtype)
    sums = fresh(batch, heads, queries, dtype=dtype)
    fields = ATTENTION.pack(*_common(query, key, value, output, sums, score), 0, 0, 0, 0, 0, 0)
    return output, sums, _check(native.regard_attention(fields))


def forward(query, key, value, table, query_code, key_code, bias, words, masks, beta) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a program, by a plain call."""
    query, key, value = last_axis_dense(query), last_axis_dense(key), last_axis_dense(value)
    score = Score(table, query_code, key_code, bias, words, masks, beta)
    if table is not None or bias is not None:
        score = _dense(score, _wide(query.dtype))
    output, sums, finite = _run(query, key, value, score)
    if finite:
        return output, sums
    broken = ~torch.isfinite(value)
    if beta != 0 or table is not None or bias is not None:  # the plain mean reads no key
        broken = broken | ~torch.isfinite(key).all(-1, keepdim=True)
    if beta == 0:
        query = cleaned(query)  # nor does it read a query; it may only come out as 0 * nan
    elif not bool(broken.any()):
        return output, sums
    output, sums, _ = _run(query, cleaned(key), cleaned(value), score)
    # Who sees something broken? The mean of marks is positive for those who do.
    mean, _, _ = _run(*_equal_scores(query, key), broken.to(value.dtype), _plain(score))
    return torch.where(mean > 0, torch.nan, output), sums


def _plain(score: Score) -> Score:
    """The same pairs, all with the same score; a bias of minus infinity still hides its own."""
    table, bias = (None if tensor is None else _hidden(tensor) for tensor in (score.table, score.bias))
    return score._replace(table=table, bias=bias, beta=0.0)


def _hidden(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).masked_fill_(scores == -torch.inf, -torch.inf)


def _equal_scores(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_zeros(*query.shape[:3], 1), key.new_zeros(*key.shape[:3], 1)


# Backward


def _run_back(upstream, query, key, value, score: Score, output, sums, learn_table, learn_bias) -> tuple:
    assert native is not None
    dtype = _wide(query.dtype)
    slopes = [fresh(*tensor.shape, dtype=dtype) for tensor in (query, key, value)]
    table_slope, bias_slope = torch.empty(0, dtype=dtype, device="cpu"), torch.empty(0, dtype=dtype, device="cpu")
    if learn_table:
        assert score.table is not None
        table_slope = torch.zeros(query.shape[0], query.shape[1], score.table.shape[1], dtype=dtype, device="cpu")
    if learn_bias:
        assert score.bias is not None
        bias = score.bias.contiguous()  # its gradient has the strides of a dense tensor
        score, bias_slope = score._replace(bias=bias), torch.zeros_like(bias)
    common = _common(query, key, value, output, sums, score)
    addresses = [upstream.data_ptr(), *(slope.data_ptr() for slope in slopes)]
    addresses += [table_slope.data_ptr() if learn_table else 0, bias_slope.data_ptr() if learn_bias else 0]
    finite = _check(native.regard_attention_backward(ATTENTION.pack(*common, *addresses)))
    if learn_table and score.table is not None:
        # One table for all heads has learned from all of them, in their order.
        table_slope = table_slope[0] if len(score.table) > 1 else _summed(table_slope[0])
    return (*slopes, table_slope, bias_slope), finite


def _summed(rows: Tensor) -> Tensor:
    """The sum of rows, one after the other: the same bits for any number of threads."""
    total = rows[:1].clone()
    for row in rows[1:]:
        total += row
    return total


def backward(
    upstream,
    query,
    key,
    value,
    table,
    query_code,
    key_code,
    bias,
    words,
    masks,
    beta,
    output,
    sums,
    learn_table,
    learn_bias,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, table and bias (empty where not wanted), by a plain call."""
    query, key, value = last_axis_dense(query), last_axis_dense(key), last_axis_dense(value)
    score = _dense(Score(table, query_code, key_code, bias, words, masks, beta), _wide(query.dtype))
    upstream, output, sums = upstream.contiguous(), output.contiguous(), sums.contiguous()
    slopes, finite = _run_back(upstream, query, key, value, score, output, sums, learn_table, learn_bias)
    if finite:
        return slopes
    # Outputs that were spoiled by something not finite carry no gradient.
    spoiled = torch.isnan(output)
    upstream, output = torch.where(spoiled, 0, upstream), torch.where(spoiled, 0, output)
    key, value = cleaned(key), cleaned(value)
    query = cleaned(query) if beta == 0 else query
    broken = ~torch.isfinite(upstream)
    wanted = (learn_table, learn_bias)
    slopes, _ = _run_back(cleaned(upstream), query, key, value, score, output, sums, *wanted)
    if not bool(broken.any()):
        return slopes
    return _spoil(slopes, _touched(broken.to(output.dtype), query, key, value, score, *wanted), broken)


def _touched(marks, query, key, value, score: Score, learn_table, learn_bias) -> tuple[Tensor, ...]:
    """Gradients that are positive where a marked entry of the output's gradient arrives."""
    ones, equal = torch.ones_like(value), _equal_scores(query, key)
    plain = _plain(score)
    output, sums, _ = _run(*equal, ones, plain)
    # With an output of zero every slope is positive.
    touched, _ = _run_back(marks, *equal, ones, plain, torch.zeros_like(output), sums, learn_table, learn_bias)
    return (sums, *touched[1:])


def _spoil(slopes: tuple[Tensor, ...], touched: tuple[Tensor, ...], broken: Tensor) -> tuple[Tensor, ...]:
    """NaN where a broken gradient arrives: its query, and all keys, values and biases which that query saw."""
    query, key, value, table, bias = slopes
    sums, _, value_touched, table_touched, bias_touched = touched
    asked = broken.any(-1, keepdim=True) & (sums > -torch.inf).unsqueeze(-1)
    return (
        torch.where(asked, torch.nan, query),
        torch.where((value_touched > 0).any(-1, keepdim=True), torch.nan, key),
        torch.where(value_touched > 0, torch.nan, value),
        torch.where(table_touched > 0, torch.nan, table),
        torch.where(bias_touched > 0, torch.nan, bias),
    )


# Operators


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? table, Tensor? query_code, Tensor? key_code, Tensor? bias, "
    "Tensor words, Tensor masks, float beta"
)
_library = torch.library.Library("regard", "FRAGMENT")
_library.define(f"attention({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor upstream, {_ARGUMENTS}, Tensor output, Tensor sums, bool learn_table, bool learn_bias)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("attention", forward, "CPU")
_library.impl("attention_backward", backward, "CPU")


@torch.library.register_fake("regard::attention", lib=_library)
def _fake(query, key, value, table, query_code, key_code, bias, words, masks, beta):
    dtype = _wide(query.dtype)
    shape = query.shape[:3]
    return query.new_empty((*shape, value.shape[3]), dtype=dtype), query.new_empty(shape, dtype=dtype)


@torch.library.register_fake("regard::attention_backward", lib=_library)
def _fake_backward(upstream, query, key, value, table, query_code, key_code, bias, words, masks, beta, *rest):
    *_, learn_table, learn_bias = rest
    dtype = _wide(query.dtype)
    like = [query.new_empty(tensor.shape, dtype=dtype) for tensor in (query, key, value)]
    for wanted, tensor in ((learn_table, table), (learn_bias, bias)):
        like.append(query.new_empty(tensor.shape if wanted else (0,), dtype=dtype))
    return tuple(like)


def _remember(ctx, inputs, output):
    query, key, value, table, query_code, key_code, bias, words, masks, beta = inputs
    ctx.beta = beta
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, table, query_code, key_code, bias, words, masks, *output)


def _slopes(ctx, call, upstream) -> tuple:
    *inputs, output, sums = ctx.saved_tensors
    needs = ctx.needs_input_grad
    slopes = call(upstream, *inputs, ctx.beta, output, sums, needs[3], needs[6])
    query, key, value, table, bias = (
        slope.to(tensor.dtype) if needed else None
        for slope, tensor, needed in zip(slopes, (*inputs[:4], inputs[6]), (*needs[:4], needs[6]), strict=True)
    )
    return query, key, value, table, None, None, bias, None, None, None


def _registered_backward(ctx, upstream, _):
    return _slopes(ctx, torch.ops.regard.attention_backward, upstream)


def _once(*_):
    raise BackendError(
        "'native' differentiates once, not twice.",
        asked="a gradient of a gradient",
        because="its scores are gone after the first backward pass",
        instead='backend="reference" for second derivatives',
    )


torch.library.register_autograd("regard::attention", _registered_backward, setup_context=_remember, lib=_library)
torch.library.register_autograd("regard::attention_backward", _once, lib=_library)


def _by_folding(call, mapped: int, info, dims, arguments) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """vmap: the mapped axis joins the batch, unless the bias itself is mapped or belongs to one batch row."""
    bias = arguments[mapped + 3]
    if any(dim is not None for dim in dims[mapped:]) or (bias is not None and len(bias) > 1):
        results = one_by_one(info.batch_size, dims, arguments, call)
    else:
        folded = fold(info.batch_size, dims[:mapped], arguments[:mapped])
        results = unfold(info.batch_size, call(*folded, *arguments[mapped:]))
    return results, (0,) * len(results)


class Softmax(torch.autograd.Function):
    """The forward pass where autograd or a transform of `torch.func` looks on: cheaper than the registered operator."""

    @staticmethod
    def forward(*arguments):
        return forward(*arguments) if unwatched(*arguments[:3]) else torch.ops.regard.attention(*arguments)

    setup_context = staticmethod(_remember)

    @staticmethod
    def backward(ctx, *gradients):
        return _slopes(ctx, Gradient.apply, gradients[0])

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _by_folding(Softmax.apply, 3, info, in_dims, arguments)


class Gradient(torch.autograd.Function):
    """The way back as an operation of its own, so that vmap can batch it too."""

    @staticmethod
    def forward(*arguments):
        return backward(*arguments) if unwatched(*arguments[:4]) else torch.ops.regard.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        return None

    @staticmethod
    def backward(ctx, *gradients):
        return _once()

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _gradients_by_folding(Gradient.apply, info, in_dims, arguments)


def _gradients_by_folding(call, info, dims, arguments) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    size, bias = info.batch_size, arguments[7]
    alone = arguments[-2] or arguments[-1]  # one sample's gradient of the bias must not meet another's
    if alone or any(dim is not None for dim in dims[4:11]) or (bias is not None and len(bias) > 1):
        results = one_by_one(size, dims, arguments, call)
        return results, (0,) * len(results)
    first, last = fold(size, dims[:4], arguments[:4]), fold(size, dims[11:13], arguments[11:13])
    slopes = call(*first, *arguments[4:11], *last, False, False)
    nothing = [slope.new_empty(size, 0) for slope in slopes[3:]]
    return (*unfold(size, slopes[:3]), *nothing), (0,) * 5


def _vmap(info, in_dims, *arguments):
    return _by_folding(torch.ops.regard.attention, 3, info, in_dims, arguments)


def _vmap_backward(info, in_dims, *arguments):
    return _gradients_by_folding(torch.ops.regard.attention_backward, info, in_dims, arguments)


torch.library.register_vmap("regard::attention", _vmap, lib=_library)
torch.library.register_vmap("regard::attention_backward", _vmap_backward, lib=_library)


def attention(query: Tensor, key: Tensor, value: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """Output `(batch, head, query, value_dim)` and log-sum-exp `(batch, head, query)`, differentiable.

    The output is float32 for half-precision inputs.
    """
    tensors = (query, key, value, score.table, score.bias)
    if unwatched(*tensors):
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            return Softmax.apply(query, key, value, *score)
        return forward(query, key, value, *score)
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        if torch.autograd.forward_ad._current_level >= 0:
            return Softmax.apply(query, key, value, *score)
        return torch.ops.regard.attention(query, key, value, *score)
    return Softmax.apply(query, key, value, *score)


# What it costs, for torch's FLOP counter, which does not know the operators of others.


def _pairs(query, key, words) -> int:
    """Allowed pairs of all batch rows. A program that is being traced has no numbers: then all pairs count."""
    if isinstance(words, torch._subclasses.FakeTensor):
        return query.shape[0] * query.shape[2] * key.shape[2]
    rows, low, high = words[3:6].tolist()
    return query.shape[0] * ((high << 31) + low) // rows


@register_flop_formula(torch.ops.regard.attention, get_raw=True)
def _flops(query, key, value, table, query_code, key_code, bias, words, *_, **__) -> int:
    return 2 * query.shape[1] * _pairs(query, key, words) * (query.shape[3] + value.shape[3])


@register_flop_formula(torch.ops.regard.attention_backward, get_raw=True)
def _backward_flops(upstream, query, key, value, table, query_code, key_code, bias, words, *_, **__) -> int:
    """Five products: two to have the weights and their slopes again, three for query, key and value."""
    return 2 * query.shape[1] * _pairs(query, key, words) * (3 * query.shape[3] + 2 * value.shape[3])
