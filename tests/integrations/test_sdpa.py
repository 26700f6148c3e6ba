"""`regard.sdpa()`: every argument of torch's function has torch's meaning, and what torch alone takes stays torch's."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


Q, K, V = draw(2, 4, 5, 3), draw(2, 4, 7, 3, seed=1), draw(2, 4, 7, 6, seed=2)
VISIBLE = draw(2, 1, 5, 7, seed=3) > -0.5
SCORES = draw(4, 5, 7, seed=4)
MISSING = torch.zeros(5, 7, dtype=torch.float64)
MISSING[2] = -torch.inf

# What attend computes: arguments and keywords.
OURS = {
    "plain": ((Q, K, V), {}),
    "all by name": ((), {"query": Q, "key": K, "value": V}),
    "one by name": ((Q, K), {"value": V, "is_causal": True}),
    "positions": ((Q, K, V, None, 0.0, True), {}),
    "longer queries": ((K, Q, Q), {"is_causal": True}),
    "booleans": ((Q, K, V, VISIBLE), {}),
    "scores": ((Q, K, V, SCORES), {}),
    "mask and causal": ((Q, Q, Q, SCORES[0, :, :5]), {"is_causal": True}),
    "two axes": ((Q[0, 0], K[0, 0], V[0, 0], SCORES[0]), {}),
    "three axes": ((Q[0], K[0], V[0]), {"is_causal": True}),
    "five axes": ((Q[None], K[None], V[None], VISIBLE), {}),
    "one row of keys": ((Q, K[:1], V[:1]), {}),
    "one head of keys": ((Q, K[:, :1], V[:, :1]), {}),
    "shared heads": ((Q, K[:, :2], V[:, :2], SCORES), {"enable_gqa": True}),
    "a row that sees nothing": ((Q, K, V, MISSING), {}),
    "no booleans at all": ((Q, K, V, torch.zeros(5, 7, dtype=torch.bool)), {}),
    "scale": ((Q, K, V), {"scale": -2}),
    "scale 0": ((Q, K, V), {"scale": 0.0}),
    "no queries": ((Q[:, :, :0], K, V), {}),
    "no batch": ((Q[:0], K[:0], V[:0]), {}),
    "bfloat16": ((Q.bfloat16(), K.bfloat16(), V.bfloat16()), {"is_causal": True}),
    "float16 and scores": ((Q.half(), K.half(), V.half(), SCORES.float()), {}),
    "token by token": ((Q.transpose(1, 2).contiguous().transpose(1, 2), K, K), {}),
}
# What stays torch's, because it alone takes or refuses it.
THEIRS = {
    "causal from the start": ((Q, K, V, causal_upper_left(5, 7)), {}),
    "causal from the end": ((Q, K, V, causal_lower_right(5, 7)), {}),
    "other heads of values": ((Q, K[:, :2], V[:, :1]), {"enable_gqa": True}),
    "meta": ((Q.to("meta"), K.to("meta"), V.to("meta")), {}),
    "infinite scale": ((Q, K, V), {"scale": float("inf")}),
    "other heads": ((Q, K[:, :2], V[:, :2]), {}),
    "other dtypes": ((Q, K.float(), V), {}),
    "integers": ((Q.long(), K.long(), V.long()), {}),
    "a mask of integers": ((Q, K, V, torch.ones(5, 7, dtype=torch.long)), {}),
    "a mask of one axis": ((Q, K, V, torch.ones(7, dtype=torch.bool)), {}),
    "a mask of more rows": ((Q[:1], K[:1], V[:1], VISIBLE), {}),
    "dropout above 1": ((Q, K, V), {"dropout_p": 1.5}),
    "no such keyword": ((Q, K, V), {"heads": 4}),
    "nothing": ((), {}),
}


def call(args: tuple, kwargs: dict) -> torch.Tensor | type[Exception]:
    try:
        return F.scaled_dot_product_attention(*args, **kwargs)
    except Exception as failure:
        return type(failure)


@pytest.mark.parametrize("name", OURS)
def test_a_call_means_what_it_means_to_torch(name):
    args, kwargs = OURS[name]
    expected = call(args, kwargs)
    with regard.sdpa() as mode:
        actual = call(args, kwargs)
    assert isinstance(expected, torch.Tensor)
    assert isinstance(actual, torch.Tensor)
    assert mode.calls == 1
    assert actual.dtype == expected.dtype
    bound = BOUNDS[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
    if name == "token by token":
        assert actual.stride() == expected.stride()


@pytest.mark.parametrize("name", THEIRS)
def test_what_torch_alone_takes_or_refuses_is_left_to_torch(name):
    args, kwargs = THEIRS[name]
    expected = call(args, kwargs)
    with regard.sdpa() as mode:
        actual = call(args, kwargs)
    assert mode.calls == 0
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor) and not expected.is_meta:
        assert torch.equal(
            actual,
            expected,
        ) or bool(expected.isnan().any())
    elif not isinstance(expected, torch.Tensor):
        assert actual is expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_torch():
    rows = [draw(3, 4, 6, dtype=torch.float32), draw(5, 4, 6, dtype=torch.float32)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with regard.sdpa() as mode:
        output = F.scaled_dot_product_attention(nested, nested, nested)
    assert mode.calls == 0
    alone = rows[1].transpose(0, 1)
    torch.testing.assert_close(output.unbind()[1], F.scaled_dot_product_attention(alone, alone, alone))


def test_autocast_casts_as_it_does_around_torchs_function():
    query, key, value = Q.float(), K.float(), V.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(query, key, value)
        with regard.sdpa() as mode:
            actual = F.scaled_dot_product_attention(query, key, value)
    assert mode.calls == 1
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


def test_gradients_of_a_mask_of_scores():
    results = []
    for context in (torch.enable_grad(), regard.sdpa()):
        query, scores = Q.clone().requires_grad_(), SCORES[:, :1].clone().requires_grad_()
        with context:
            F.scaled_dot_product_attention(query, K, V, scores).square().sum().backward()
        results.append((query.grad, scores.grad))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_it_ends_with_the_block_also_after_an_error_and_other_threads_do_not_see_it():
    with regard.sdpa() as mode:
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=(Q, K, V))
        thread.start()
        thread.join()
    with pytest.raises(KeyError), regard.sdpa() as failing:
        raise KeyError
    F.scaled_dot_product_attention(Q, K, V)
    assert mode.calls == failing.calls == 0


def test_an_inner_mode_counts_and_the_outer_one_goes_on():
    with regard.sdpa() as outer:
        with regard.sdpa() as inner:
            F.scaled_dot_product_attention(Q, K, V)
        F.scaled_dot_product_attention(Q, K, V)
    assert (outer.calls, inner.calls) == (1, 1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": draw(5, 5)},
        {"attn_mask": draw(6, 5, 5)},
        {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True},
        {"key_padding_mask": torch.tensor([[False] * 4 + [True], [False] * 3 + [True] * 2])},
    ],
)
def test_multi_head_attention_and_its_masks(options, batched, grad):
    layer = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64).eval()
    x = draw(2, 5, 12)
    if not batched:
        x = x[0]
        cut = {"key_padding_mask": lambda mask: mask[0], "attn_mask": lambda mask: mask[:3] if mask.ndim == 3 else mask}
        options = {name: cut[name](value) if name in cut else value for name, value in options.items()}
    run = partial(layer, x, x, x, need_weights=False, **options)
    with torch.set_grad_enabled(grad):
        expected = run()[0]
        with regard.sdpa() as mode:
            actual = run()[0]
    assert mode.calls == 1
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_weights_of_multi_head_attention_are_torchs_own():
    layer, x = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64), draw(2, 5, 12)
    expected = layer(x, x, x)
    with regard.sdpa() as mode:
        actual = layer(x, x, x)
    assert mode.calls == 0
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right)
