"""Causal linear attention after a state, as torch operators: `regard::linear_attention` and its gradient.

    output_i = phi(q_i)^T S_i / phi(q_i)^T z_i,   S_i = state + sum_{j <= i} phi(k_j) v_j^T,   z_i likewise without v_j

Tensors are `(batch, head, token, dim)`, float32 or float64, equally many queries and keys. phi is the identity for
inputs that are features already, or `elu(x) + 1`, which the kernel applies as it reads. NaN and infinities are left to
the caller: `try_attention` returns `None` where there are any.

The same in plain torch is `sum_in_chunks`: for other devices, for second derivatives, and for non-finite gradients.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from regard.batching import merge_mapped_axis, split_mapped_axis
from regard.features import Elu1
from regard.kernels.eager import is_plain_eager
from regard.kernels.library import (
    DTYPE_CODES,
    LINEAR_ATTENTION,
    NO_MEMORY,
    NOT_FINITE,
    address_and_strides,
    empty_output,
    last_axis_dense,
    missing,
    native,
    num_threads,
)
from regard.kernels.registration import register_operator

CHUNK = 64


class Phi(NamedTuple):
    """The feature map `map(scale * x)` of query and key: 0 is the identity, 1 is elu(x) + 1."""

    map: int = 0
    query_scale: float = 1.0
    key_scale: float = 1.0


def is_supported(*tensors: Tensor) -> bool:
    """Whether the kernel can take these tensors; forward-mode derivatives are left to plain torch."""
    return (
        missing() is None
        and forward_ad._current_level < 0
        and all(tensor.device.type == "cpu" for tensor in tensors)
        and all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors)
    )


# Plain calls


def _describe_inputs(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, norm: Tensor | None, phi: Phi
) -> tuple:
    batch, heads, tokens, dim = query.shape
    shape = (batch, heads, key.shape[1], tokens, dim, value.shape[3])
    tensors = (
        *address_and_strides(query),
        *address_and_strides(key),
        *address_and_strides(value),
        _address(state),
        _address(norm),
    )
    return (DTYPE_CODES[query.dtype], num_threads(), *shape, *phi, *tensors)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _as_contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _is_finite(status: int) -> bool:
    if status == NO_MEMORY:
        raise MemoryError("the native kernels found no memory for their chunks")
    return status != NOT_FINITE


def _run(query, key, value, state, norm, phi: Phi) -> tuple[tuple[Tensor, ...], bool]:
    """Output, normaliser, next state and next norm; and whether they are finite, as is what phi was given."""
    assert native is not None
    query, key, value = last_axis_dense(query), last_axis_dense(key), last_axis_dense(value)
    state, norm = _as_contiguous(state), _as_contiguous(norm)
    results = (
        empty_output(*query.shape[:3], value.shape[3], dtype=query.dtype),
        empty_output(*query.shape[:3], dtype=query.dtype),
        query.new_empty(*key.shape[:2], key.shape[3], value.shape[3]),
        query.new_empty(*key.shape[:2], key.shape[3]),
    )
    addresses = [tensor.data_ptr() for tensor in results]
    fields = LINEAR_ATTENTION.pack(
        *_describe_inputs(query, key, value, state, norm, phi), *addresses, 0, 0, 0, 0, 0, 0, 0, 0
    )
    return results, _is_finite(native.regard_linear_attention(fields))


def _forward(query, key, value, state, norm, map, query_scale, key_scale) -> tuple[Tensor, ...]:
    return _run(query, key, value, state, norm, Phi(map, query_scale, key_scale))[0]


def _backward(
    grad_output, grad_state, grad_norm, query, key, value, state, norm, output, normaliser, map, query_scale, key_scale
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, state and norm, the last two empty where there was no state."""
    assert native is not None
    phi = Phi(map, query_scale, key_scale)
    rows = [last_axis_dense(tensor) for tensor in (query, key, value)]
    past, grad_outputs = (
        (_as_contiguous(state), _as_contiguous(norm)),
        [_as_contiguous(t) for t in (grad_output, grad_state, grad_norm)],
    )
    grads = [empty_output(*tensor.shape, dtype=query.dtype) for tensor in (query, key, value)]
    grads += [query.new_empty(0 if tensor is None else tensor.shape) for tensor in (state, norm)]
    output, normaliser = output.contiguous(), normaliser.contiguous()
    addresses = [output.data_ptr(), normaliser.data_ptr(), 0, 0, _address(grad_outputs[0])]
    addresses += [*(grad.data_ptr() for grad in grads[:3]), _address(grad_outputs[1]), _address(grad_outputs[2])]
    addresses += [0, 0] if state is None else [grad.data_ptr() for grad in grads[3:]]
    if _is_finite(
        native.regard_linear_attention_backward(
            LINEAR_ATTENTION.pack(*_describe_inputs(rows[0], rows[1], rows[2], past[0], past[1], phi), *addresses)
        )
    ):
        return tuple(grads)
    with torch.enable_grad():
        return _pull_back((query, key, value, state, norm), phi, (grad_output, grad_state, grad_norm))


# The same in plain torch


def sum_in_chunks(query: Tensor, key: Tensor, columns: Tensor, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Causal sums of equally many queries and keys after a state, and the next state, in chunks of `size` tokens.

    A state is `(batch, kv_head, feature, column)`. Costs N C D + 2 N D^2 for chunks of C tokens.
    """
    tokens, group = query.shape[2], query.shape[1] // key.shape[1]
    size = max(min(size, tokens), 1)
    short = -tokens % size
    chunks = (tokens + short) // size
    query, key, columns = (pad(tensor, (0, 0, 0, short)) for tensor in (query, key, columns))
    # Grouped heads are stacked along the queries of a chunk: (batch, kv_head, chunk, group * size, feature)
    query = query.unflatten(2, (chunks, size)).unflatten(1, (-1, group)).transpose(2, 3).flatten(3, 4)
    key, columns = (tensor.unflatten(2, (chunks, size)) for tensor in (key, columns))
    # Summed up from the left and never subtracted from: what is zero stays exactly zero.
    running = torch.cat((state.unsqueeze(2), key.mT @ columns), dim=2).cumsum(2)
    earlier = torch.ones(size, size, dtype=torch.bool, device=query.device).tril().repeat(group, 1)
    own = torch.where(earlier, query @ key.mT, 0)
    output = query @ running[:, :, :-1] + own @ columns
    output = output.unflatten(3, (group, size)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return output[:, :, :tokens], running[:, :, -1]


def normalise(summed: Tensor) -> Tensor:
    """Sums divided by their last column; a normaliser of exactly zero divides by one."""
    normaliser = summed[..., -1:]
    return summed[..., :-1] / torch.where(normaliser == 0, 1, normaliser)


def compute_in_torch(query, key, value, state, norm, phi: Phi) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes, in plain torch: output, next state and next norm."""
    if phi.map:
        query, key = Elu1()(query * phi.query_scale), Elu1()(key * phi.key_scale)
    past = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3] + 1)
    if state is not None:
        past = torch.cat((state, norm.unsqueeze(-1)), -1)
    summed, future = sum_in_chunks(query, key, pad(value, (0, 1), value=1.0), past, CHUNK)
    return normalise(summed), future[..., :-1], future[..., -1]


def _pull_back(inputs, phi: Phi, grad_outputs) -> tuple[Tensor, ...]:
    """Gradients of the formula, themselves differentiable; those of an absent state are empty."""
    given = [tensor for tensor in inputs if tensor is not None]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, state, norm = (*tensors, None, None)[:5]
        return compute_in_torch(query, key, value, state, norm, phi)

    results, pull = torch.func.vjp(run, *given)[:2]
    grads = pull(tuple(torch.zeros_like(r) if a is None else a for r, a in zip(results, grad_outputs, strict=True)))
    return (*grads, *(inputs[0].new_empty(0) for _ in range(5 - len(given))))


# Operators


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? state, Tensor? norm"
_PHI = "int map, float query_scale, float key_scale"


def _make_fake(query, key, value, state, norm, map, query_scale, key_scale):
    return (
        query.new_empty((*query.shape[:3], value.shape[3])),
        query.new_empty(query.shape[:3]),
        query.new_empty((*key.shape[:2], key.shape[3], value.shape[3])),
        query.new_empty((*key.shape[:2], key.shape[3])),
    )


def _make_fake_grads(grad_output, grad_state, grad_norm, query, key, value, state, norm, *_):
    like = [query.new_empty(tensor.shape) for tensor in (query, key, value)]
    return (*like, *(query.new_empty((0,) if tensor is None else tensor.shape) for tensor in (state, norm)))


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.phi = Phi(*inputs[5:8])
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], *output[:2])


def _compute_grads(ctx, call, grad_output, grad_state, grad_norm) -> tuple:
    *inputs, output, normaliser = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    grads = call(grad_output, grad_state, grad_norm, *inputs, output, normaliser, *ctx.phi)
    kept = [None if tensor is None else grad for grad, tensor in zip(grads, inputs, strict=True)]
    return (*kept, None, None, None)


def _registered_backward(ctx, grad_output, _, grad_state, grad_norm):
    return _compute_grads(ctx, torch.ops.regard.linear_attention_backward, grad_output, grad_state, grad_norm)


def _save_for_second_backward(ctx, inputs, output) -> None:
    ctx.phi = Phi(*inputs[10:13])
    ctx.save_for_backward(*inputs[:8])


def _differentiate_twice(ctx, *grads):
    """The second gradient, in plain torch: the kernel has only the first."""
    saved = ctx.saved_tensors
    given = [tensor for tensor in saved if tensor is not None]
    absent = [tensor is None for tensor in saved]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        rest = list(tensors)
        full = [None if is_absent else rest.pop(0) for is_absent in absent]
        return _pull_back(full[3:], ctx.phi, full[:3])

    pull = torch.func.vjp(run, *given)[1]
    grads_of_given = list(pull(tuple(grads)))
    return *(None if is_absent else grads_of_given.pop(0) for is_absent in absent), None, None, None, None, None


def _batch(tensors: int, call, info, dims, *arguments) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """vmap: the mapped axis of the first arguments, which are tensors, joins the batch."""
    size = info.batch_size
    results = call(*merge_mapped_axis(size, dims[:tensors], arguments[:tensors]), *arguments[tensors:])
    # A gradient that is empty because there was no state has no batch to split.
    split = [split_mapped_axis(size, [each])[0] if each.ndim > 1 else each.new_empty(size, 0) for each in results]
    return tuple(split), (0,) * len(split)


_batch_forward, _batch_backward = functools.partial(_batch, 5), functools.partial(_batch, 10)


class NativeLinearAttention(torch.autograd.Function):
    """The forward pass under autograd or a functorch transform: cheaper than the registered operator.

    The last argument is its results where they are known already, else `None`.
    """

    @staticmethod
    def forward(*arguments):
        *inputs, results = arguments
        if results is not None:
            return results
        return _forward(*inputs) if is_plain_eager(*inputs[:5]) else torch.ops.regard.linear_attention(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        _save_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *gradients):
        grad_output, _, grad_state, grad_norm = gradients
        return *_compute_grads(ctx, NativeLinearAttentionBackward.apply, grad_output, grad_state, grad_norm), None

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _batch_forward(NativeLinearAttention.apply, info, in_dims, *arguments)


class NativeLinearAttentionBackward(torch.autograd.Function):
    """The backward pass as a function of its own: vmap can batch it and autograd can differentiate it again."""

    @staticmethod
    def forward(*arguments):
        if is_plain_eager(*arguments[:10]):
            return _backward(*arguments)
        return torch.ops.regard.linear_attention_backward(*arguments)

    setup_context = staticmethod(_save_for_second_backward)

    @staticmethod
    def backward(ctx, *gradients):
        return _differentiate_twice(ctx, *gradients)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _batch_backward(NativeLinearAttentionBackward.apply, info, in_dims, *arguments)


# What the backend calls


def attention(query, key, value, state, norm, phi: Phi) -> tuple[Tensor, Tensor, Tensor]:
    """Output, next state `(batch, kv_head, dim, value_dim)` and next norm `(batch, kv_head, dim)`, differentiable."""
    arguments = (query, key, value, state, norm, *phi)
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if transformed and not torch.compiler.is_compiling():
        output, _, next_state, next_norm = NativeLinearAttention.apply(*arguments, None)
    elif not is_plain_eager(*arguments[:5]):
        output, _, next_state, next_norm = torch.ops.regard.linear_attention(*arguments)
    else:
        results, _ = _run(query, key, value, state, norm, phi)
        output, _, next_state, next_norm = _attach_graph(arguments, results)
    return output, next_state, next_norm


def try_attention(query, key, value, state, norm, phi: Phi) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same, or `None` if a result or an argument of phi is not finite, or if values cannot be read."""
    arguments = (query, key, value, state, norm, *phi)
    if not is_plain_eager(*arguments[:5]):
        return None
    results, finite = _run(query, key, value, state, norm, phi)
    if not finite:
        return None
    output, _, next_state, next_norm = _attach_graph(arguments, results)
    return output, next_state, next_norm


def _attach_graph(arguments: tuple, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results, in the graph of the inputs that require a gradient."""
    needs_grad = any(tensor is not None and tensor.requires_grad for tensor in arguments[:5])
    return NativeLinearAttention.apply(*arguments, results) if needs_grad and torch.is_grad_enabled() else results


# The state is read by every query head and updated by every key head.


def _count_flops(query, key, value, *_, **__) -> int:
    batch, heads, tokens, dim = query.shape
    return 2 * batch * (heads + key.shape[1]) * tokens * dim * (value.shape[3] + 1)


def _count_backward_flops(grad_output, grad_state, grad_norm, query, key, value, *_, **__) -> int:
    """Three products of the same kind: gradients of query, key and value."""
    return 3 * _count_flops(query, key, value)


register_operator(
    f"linear_attention({_INPUTS}, {_PHI}) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    fake=_make_fake,
    backward=_registered_backward,
    setup_context=_save_for_backward,
    vmap=_batch_forward,
    flops=_count_flops,
)
register_operator(
    f"linear_attention_backward(Tensor grad_output, Tensor? grad_state, Tensor? grad_norm, {_INPUTS}, "
    f"Tensor output, Tensor normaliser, {_PHI}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    fake=_make_fake_grads,
    backward=_differentiate_twice,
    setup_context=_save_for_second_backward,
    vmap=_batch_backward,
    flops=_count_backward_flops,
)
