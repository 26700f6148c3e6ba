"""Attention weights are recovered from a layer that does not return them, whatever operators compute its products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapters import adapt, attention_watch
from regard.laws import check

BATCH, TOKENS, HEADS, DIM = 2, 11, 3, 5


def _by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / DIM**0.5).softmax(-1) @ v


def _by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).div(DIM**0.5).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def _by_dots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...ij,...jd->...id", F.softmax(torch.einsum("...id,...jd->...ij", q, k) / DIM**0.5, -1), v)


def _by_flat_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    return torch.bmm(torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, alpha=DIM**-0.5).softmax(-1), v)


def _by_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.mT @ (q @ k.mT / DIM**0.5).softmax(-1).mT


def _by_spreading(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT / DIM**0.5).softmax(-1)[..., None] * v[..., None, :, :]).sum(-2)


def _by_dividing_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raised = (q @ k.mT / DIM**0.5).exp()
    return (raised @ v) / raised.sum(-1, keepdim=True)


def _by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


ATTENTIONS = [
    _by_matmul,
    _by_einsum,
    _by_dots,
    _by_flat_heads,
    _by_columns,
    _by_spreading,
    _by_dividing_last,
    _by_torch,
]


@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda attention: attention.__name__[1:])
def test_every_matrix_product_operator_gives_the_same_weights(attention) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, DIM, dtype=torch.float64)
    maps = attention_watch.weights(lambda: attention(q, k, v), BATCH, TOKENS)
    assert len(maps) == 1
    torch.testing.assert_close(maps[0], (q @ k.mT / DIM**0.5).softmax(-1))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_multihead_attention_is_opened(need_weights: bool, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(HEADS * 4, HEADS, batch_first=batch_first).eval()
    x = torch.randn(*((BATCH, TOKENS) if batch_first else (TOKENS, BATCH)), HEADS * 4)
    call = attention_watch.calls(lambda: layer(x, x, x, need_weights=need_weights), BATCH, TOKENS)[0]
    torch.testing.assert_close(call.weights, layer(x, x, x, average_attn_weights=False)[1])
    assert call.query is not None
    assert call.query.shape == (BATCH, HEADS, TOKENS, 4)


def test_a_mask_after_the_softmax_shows_in_what_multiplies_the_values() -> None:
    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, DIM)
    mask = torch.ones(TOKENS, TOKENS).tril()
    (maps,) = attention_watch.weights(lambda: ((q @ k.mT).softmax(-1) * mask) @ v, BATCH, TOKENS)
    assert float(maps.sum(-1).min()) < 0.99


def test_sums_over_tokens_that_are_no_attention_are_not_weights() -> None:
    x = torch.randn(BATCH, TOKENS, DIM)
    assert attention_watch.weights(lambda: torch.ones(TOKENS, TOKENS).tril() @ x, BATCH, TOKENS) == []


def test_weights_that_are_normalised_out_of_sight_are_not_shown() -> None:
    def running(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raised = (q @ k.mT).exp()
        total = 0 + raised.sum(-1, keepdim=True)
        return (torch.zeros_like(v) + raised @ v) / total

    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, DIM)
    assert attention_watch.weights(lambda: running(q, k, v), BATCH, TOKENS) == []


def test_a_length_that_is_also_another_size_is_not_fair() -> None:
    layer = adapt(nn.TransformerEncoderLayer(14, 2, dim_feedforward=11, batch_first=True), "layer")
    assert attention_watch.fair_lengths(layer, 3, 7, 11, 13, 3) == [13]


def test_watching_changes_no_output() -> None:
    layer = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(BATCH, TOKENS, 12)
    outputs = []
    attention_watch.observe(lambda: outputs.append(layer(x, x, x)[0]), BATCH, TOKENS)
    torch.testing.assert_close(outputs[0], layer(x, x, x)[0])


def test_a_layer_of_torch_passes_what_is_observed_on_it() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, dim_feedforward=17, batch_first=True)
    report = check(layer, kind="layer", claims=["row-stochasticity", "scale"], fast=True)
    assert [verdict.outcome for verdict in report.verdicts] == ["holds", "holds"]
