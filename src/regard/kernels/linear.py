"""Causal linear attention after a state, as operators of torch: `regard::linear_attention` and its gradient.

    output_i = phi(q_i)^T S_i / phi(q_i)^T z_i,   S_i = state + sum_{j <= i} phi(k_j) v_j^T,   z_i likewise without v_j

Tensors are `(batch, head, token, dim)`, float32 or float64, equally many queries and keys. phi is nothing for numbers
that are features already, or `elu(x) + 1`, which the kernel applies as it reads. Nothing is done about numbers that are
not finite: `attempt` says whether there are any, and the caller knows what they mean.

The same in plain torch stands below, `chunked`: for other devices, for derivatives of derivatives, and for gradients
that are not finite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from regard.features import Elu1
from regard.folding import fold, unfold
from regard.kernels.library import (
    LINEAR,
    NO_MEMORY,
    NOT_FINITE,
    NUMBERS,
    fresh,
    last_axis_dense,
    missing,
    native,
    placed,
)
from regard.kernels.watched import unwatched

CHUNK = 64


class Phi(NamedTuple):
    """What makes features of query and key: `map(scale * x)`, with 0 for no map and 1 for elu(x) + 1."""

    map: int = 0
    query_scale: float = 1.0
    key_scale: float = 1.0


def serves(*tensors: Tensor) -> bool:
    """Whether the kernel can take these tensors; forward-mode derivatives are left to plain torch, which has them."""
    return (
        missing() is None
        and forward_ad._current_level < 0
        and all(tensor.device.type == "cpu" for tensor in tensors)
        and all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors)
    )


# Plain calls


def _common(query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, norm: Tensor | None, phi: Phi) -> tuple:
    batch, heads, tokens, dim = query.shape
    shape = (batch, heads, key.shape[1], tokens, dim, value.shape[3])
    places = (*placed(query), *placed(key), *placed(value), _address(state), _address(norm))
    return (NUMBERS[query.dtype], torch.get_num_threads(), *shape, *phi, *places)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _is_finite(answer: int) -> bool:
    if answer == NO_MEMORY:
        raise MemoryError("the native kernels found no memory for their chunks")
    return answer != NOT_FINITE


def _run(query, key, value, state, norm, phi: Phi) -> tuple[tuple[Tensor, ...], bool]:
    """Output, normaliser, next state and next norm; and whether they are finite, as is what phi was given."""
    assert native is not None
    query, key, value = last_axis_dense(query), last_axis_dense(key), last_axis_dense(value)
    state, norm = _dense(state), _dense(norm)
    made = (
        fresh(*query.shape[:3], value.shape[3], dtype=query.dtype),
        fresh(*query.shape[:3], dtype=query.dtype),
        query.new_empty(*key.shape[:2], key.shape[3], value.shape[3]),
        query.new_empty(*key.shape[:2], key.shape[3]),
    )
    addresses = [tensor.data_ptr() for tensor in made]
    fields = LINEAR.pack(*_common(query, key, value, state, norm, phi), *addresses, 0, 0, 0, 0, 0, 0, 0, 0)
    return made, _is_finite(native.regard_linear(fields))


def _forward(query, key, value, state, norm, map, query_scale, key_scale) -> tuple[Tensor, ...]:
    return _run(query, key, value, state, norm, Phi(map, query_scale, key_scale))[0]


def _backward(
    upstream, state_above, norm_above, query, key, value, state, norm, output, total, map, query_scale, key_scale
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, state and norm, the last two empty where there was no state."""
    assert native is not None
    phi = Phi(map, query_scale, key_scale)
    rows = [last_axis_dense(tensor) for tensor in (query, key, value)]
    past, above = (_dense(state), _dense(norm)), [_dense(t) for t in (upstream, state_above, norm_above)]
    slopes = [fresh(*tensor.shape, dtype=query.dtype) for tensor in (query, key, value)]
    slopes += [query.new_empty(0 if tensor is None else tensor.shape) for tensor in (state, norm)]
    output, total = output.contiguous(), total.contiguous()
    addresses = [output.data_ptr(), total.data_ptr(), 0, 0, _address(above[0])]
    addresses += [*(slope.data_ptr() for slope in slopes[:3]), _address(above[1]), _address(above[2])]
    addresses += [0, 0] if state is None else [slope.data_ptr() for slope in slopes[3:]]
    if _is_finite(
        native.regard_linear_backward(
            LINEAR.pack(*_common(rows[0], rows[1], rows[2], past[0], past[1], phi), *addresses)
        )
    ):
        return tuple(slopes)
    with torch.enable_grad():
        return _pulled_back((query, key, value, state, norm), phi, (upstream, state_above, norm_above))


# The same in plain torch


def chunked(query: Tensor, key: Tensor, columns: Tensor, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Causal sums of equally many queries and keys after a state, and the next state, in chunks of `size` tokens.

    A state is `(batch, kv_head, feature, column)`. Costs N C D + 2 N D^2 for chunks of C tokens.
    """
    tokens, group = query.shape[2], query.shape[1] // key.shape[1]
    size = max(min(size, tokens), 1)
    short = -tokens % size
    chunks = (tokens + short) // size
    query, key, columns = (pad(tensor, (0, 0, 0, short)) for tensor in (query, key, columns))
    # Grouped heads stand below one another in a chunk: (batch, kv_head, chunk, group * size, feature)
    query = query.unflatten(2, (chunks, size)).unflatten(1, (-1, group)).transpose(2, 3).flatten(3, 4)
    key, columns = (tensor.unflatten(2, (chunks, size)) for tensor in (key, columns))
    # Summed up from the left and never subtracted from: what is zero stays exactly zero.
    running = torch.cat((state.unsqueeze(2), key.mT @ columns), dim=2).cumsum(2)
    earlier = torch.ones(size, size, dtype=torch.bool, device=query.device).tril().repeat(group, 1)
    own = torch.where(earlier, query @ key.mT, 0)
    output = query @ running[:, :, :-1] + own @ columns
    output = output.unflatten(3, (group, size)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return output[:, :, :tokens], running[:, :, -1]


def normalised(summed: Tensor) -> Tensor:
    """Sums divided by their last column; a normaliser of exactly zero divides by one."""
    total = summed[..., -1:]
    return summed[..., :-1] / torch.where(total == 0, 1, total)


def _formula(query, key, value, state, norm, phi: Phi) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes: output, next state and next norm."""
    if phi.map:
        query, key = Elu1()(query * phi.query_scale), Elu1()(key * phi.key_scale)
    past = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3] + 1)
    if state is not None:
        past = torch.cat((state, norm.unsqueeze(-1)), -1)
    summed, future = chunked(query, key, pad(value, (0, 1), value=1.0), past, CHUNK)
    return normalised(summed), future[..., :-1], future[..., -1]


def _pulled_back(inputs, phi: Phi, above) -> tuple[Tensor, ...]:
    """Gradients of the formula, themselves differentiable; those of an absent state are empty."""
    given = [tensor for tensor in inputs if tensor is not None]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, state, norm = (*tensors, None, None)[:5]
        return _formula(query, key, value, state, norm, phi)

    results, pull = torch.func.vjp(run, *given)[:2]
    slopes = pull(tuple(torch.zeros_like(r) if a is None else a for r, a in zip(results, above, strict=True)))
    return (*slopes, *(inputs[0].new_empty(0) for _ in range(5 - len(given))))


# Operators


_library = torch.library.Library("regard", "FRAGMENT")
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? state, Tensor? norm"
_PHI = "int map, float query_scale, float key_scale"
_library.define(f"linear_attention({_INPUTS}, {_PHI}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"linear_attention_backward(Tensor upstream, Tensor? state_above, Tensor? norm_above, {_INPUTS}, "
    f"Tensor output, Tensor total, {_PHI}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("linear_attention", _forward, "CPU")
_library.impl("linear_attention_backward", _backward, "CPU")


@torch.library.register_fake("regard::linear_attention", lib=_library)
def _fake(query, key, value, state, norm, map, query_scale, key_scale):
    return (
        query.new_empty((*query.shape[:3], value.shape[3])),
        query.new_empty(query.shape[:3]),
        query.new_empty((*key.shape[:2], key.shape[3], value.shape[3])),
        query.new_empty((*key.shape[:2], key.shape[3])),
    )


@torch.library.register_fake("regard::linear_attention_backward", lib=_library)
def _fake_backward(
    upstream, state_above, norm_above, query, key, value, state, norm, output, total, map, query_scale, key_scale
):
    like = [query.new_empty(tensor.shape) for tensor in (query, key, value)]
    return (*like, *(query.new_empty((0,) if tensor is None else tensor.shape) for tensor in (state, norm)))


def _remember(ctx, inputs, output) -> None:
    ctx.phi = Phi(*inputs[5:8])
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], *output[:2])


def _slopes(ctx, call, upstream, state_above, norm_above) -> tuple:
    *inputs, output, total = ctx.saved_tensors
    if upstream is None:
        upstream = torch.zeros_like(output)
    slopes = call(upstream, state_above, norm_above, *inputs, output, total, *ctx.phi)
    kept = [None if tensor is None else slope for slope, tensor in zip(slopes, inputs, strict=True)]
    return (*kept, None, None, None)


def _registered_backward(ctx, upstream, _, state_above, norm_above):
    return _slopes(ctx, torch.ops.regard.linear_attention_backward, upstream, state_above, norm_above)


def _remember_gradient(ctx, inputs, output) -> None:
    ctx.phi = Phi(*inputs[10:13])
    ctx.save_for_backward(*inputs[:8])


def _twice(ctx, *slopes):
    """The gradient of the gradient, by plain torch: the kernel knows only the first."""
    above_and_inputs = ctx.saved_tensors
    given = [tensor for tensor in above_and_inputs if tensor is not None]
    absent = [tensor is None for tensor in above_and_inputs]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        rest = list(tensors)
        full = [None if gone else rest.pop(0) for gone in absent]
        return _pulled_back(full[3:], ctx.phi, full[:3])

    pull = torch.func.vjp(run, *given)[1]
    found = list(pull(tuple(slopes)))
    return *(None if gone else found.pop(0) for gone in absent), None, None, None, None, None


torch.library.register_autograd("regard::linear_attention", _registered_backward, setup_context=_remember, lib=_library)
torch.library.register_autograd(
    "regard::linear_attention_backward", _twice, setup_context=_remember_gradient, lib=_library
)


def _by_folding(call, tensors: int, info, dims, arguments) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """vmap: the mapped axis joins the batch."""
    size = info.batch_size
    made = call(*fold(size, dims[:tensors], arguments[:tensors]), *arguments[tensors:])
    # A gradient that is empty because there was no state has no batch to take apart.
    taken = [unfold(size, [each])[0] if each.ndim > 1 else each.new_empty(size, 0) for each in made]
    return tuple(taken), (0,) * len(taken)


def _vmap(info, in_dims, *arguments):
    return _by_folding(torch.ops.regard.linear_attention, 5, info, in_dims, arguments)


def _vmap_backward(info, in_dims, *arguments):
    return _by_folding(torch.ops.regard.linear_attention_backward, 10, info, in_dims, arguments)


torch.library.register_vmap("regard::linear_attention", _vmap, lib=_library)
torch.library.register_vmap("regard::linear_attention_backward", _vmap_backward, lib=_library)


class LinearAttention(torch.autograd.Function):
    """The forward pass where autograd or `torch.func` looks on: cheaper than the registered operator.

    `made` are its results where they are known already.
    """

    @staticmethod
    def forward(*arguments):
        *inputs, made = arguments
        if made is not None:
            return made
        return _forward(*inputs) if unwatched(*inputs[:5]) else torch.ops.regard.linear_attention(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        _remember(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *gradients):
        upstream, _, state_above, norm_above = gradients
        return *_slopes(ctx, Gradient.apply, upstream, state_above, norm_above), None

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _by_folding(LinearAttention.apply, 5, info, in_dims, arguments)


class Gradient(torch.autograd.Function):
    """The way back as an operation of its own, so that vmap can batch it and autograd can differentiate it again."""

    @staticmethod
    def forward(*arguments):
        if unwatched(*arguments[:10]):
            return _backward(*arguments)
        return torch.ops.regard.linear_attention_backward(*arguments)

    setup_context = staticmethod(_remember_gradient)

    @staticmethod
    def backward(ctx, *gradients):
        return _twice(ctx, *gradients)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _by_folding(Gradient.apply, 10, info, in_dims, arguments)


# What the backend calls


def attention(query, key, value, state, norm, phi: Phi) -> tuple[Tensor, Tensor, Tensor]:
    """Output, next state `(batch, kv_head, dim, value_dim)` and next norm `(batch, kv_head, dim)`, differentiable."""
    arguments = (query, key, value, state, norm, *phi)
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if transformed and not torch.compiler.is_compiling():
        output, _, next_state, next_norm = LinearAttention.apply(*arguments, None)
    elif not unwatched(*arguments[:5]):
        output, _, next_state, next_norm = torch.ops.regard.linear_attention(*arguments)
    else:
        made, _ = _run(query, key, value, state, norm, phi)
        output, _, next_state, next_norm = _attached(arguments, made)
    return output, next_state, next_norm


def attempt(query, key, value, state, norm, phi: Phi) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same, or `None` if a result, or a number that phi was given, is not finite, or if that cannot be asked."""
    arguments = (query, key, value, state, norm, *phi)
    if not unwatched(*arguments[:5]):
        return None
    made, finite = _run(query, key, value, state, norm, phi)
    if not finite:
        return None
    output, _, next_state, next_norm = _attached(arguments, made)
    return output, next_state, next_norm


def _attached(arguments: tuple, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Results that autograd can go back from, if somebody asks for gradients."""
    learns = any(tensor is not None and tensor.requires_grad for tensor in arguments[:5])
    return LinearAttention.apply(*arguments, made) if learns and torch.is_grad_enabled() else made


# What it costs, for torch's FLOP counter: the state is read by every query head and grown by every key head.


@register_flop_formula(torch.ops.regard.linear_attention)
def _flops(query, key, value, *_, **__) -> int:
    batch, heads, tokens, dim = query
    return 2 * batch * (heads + key[1]) * tokens * dim * (value[3] + 1)


@register_flop_formula(torch.ops.regard.linear_attention_backward)
def _flops_backward(upstream, state_above, norm_above, query, key, value, *_, **__) -> int:
    # Three products of the same kind: gradients of query, key and value.
    return 3 * _flops(query, key, value)
