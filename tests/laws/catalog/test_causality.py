"""L1: causal targets hold, however they are built; attention to later tokens is caught on every path."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain import slow
from torch import nn

from regard.laws import check


def past(q, k):
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])


def attention(q, k, v, allowed):
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num() @ v


def causal(q, k, v, mask=None):
    return attention(q, k, v, past(q, k) if mask is None else past(q, k) & mask)


def by_fourier(q, k, v, mask=None):
    """A causal convolution over values, by a transform that mixes all tokens and parts them again."""
    tokens = v.shape[-2]
    kernel = torch.linspace(1, 0.1, tokens, dtype=v.dtype)[:, None]
    spectrum = torch.fft.rfft(v, 2 * tokens, dim=-2) * torch.fft.rfft(kernel, 2 * tokens, dim=-2)
    return torch.fft.irfft(spectrum, 2 * tokens, dim=-2)[..., :tokens, :].contiguous()


def running_sums(q, k, v, mask=None):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    states = (k[..., :, None] * v[..., None, :]).cumsum(2)
    return (q[..., None, :] @ states)[..., 0, :] / (q * k.cumsum(2)).sum(-1, keepdim=True)


class Dropping(nn.Module):
    """A causal layer with dropout of every kind, which must not count in training."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.4, batch_first=True)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, mask=None):
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.drop(self.attention(x, x, x, attn_mask=future, need_weights=False)[0])


class Words(nn.Module):
    """A model of two layers; `sees` says which tokens a token sees."""

    def __init__(self, sees):
        super().__init__()
        self.words, self.positions = nn.Embedding(19, 12), nn.Embedding(200, 12)
        self.inner, self.sees = nn.Linear(12, 12), sees

    def forward(self, ids):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        for _ in range(2):
            x = x + self.inner(attention(x, x, x, self.sees(ids)))
        return x


def all_of_the_past(ids):
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


@pytest.mark.parametrize("seed", [0, *slow(3)])
@pytest.mark.parametrize(
    "target",
    [causal, by_fourier, Words(all_of_the_past), *slow(running_sums, Dropping())],
    ids=["softmax", "fourier", "words", "sums", "dropping"],
)
def test_the_causal_are_not_accused(target, seed):
    report = check(target, claims=["causality"], seed=seed, fast=True)
    assert report.ok, report


def padding_in_place_of_the_past(q, k, v, mask=None):
    return attention(q, k, v, past(q, k) if mask is None else mask)


def open_tail(q, k, v, mask=None):
    """Blocks of sixteen; the last one, cut short, is not masked inside."""
    allowed = past(q, k)
    edge = k.shape[-2] // 16 * 16
    if edge and edge < k.shape[-2] and q.shape == k.shape:
        allowed[edge:, edge:] = True
    return attention(q, k, v, allowed)


def capped_after_the_mask(q, k, v, mask=None):
    scores = (q @ k.mT).masked_fill(~past(q, k), -1e9)
    return (30 * (scores / 30).tanh()).softmax(-1) @ v


class OpenInTraining(Dropping):
    def forward(self, x, mask=None):
        return self.attention(x, x, x, need_weights=False)[0] if self.training else super().forward(x)


def length_by_zeros(ids):
    """Trailing zeros are taken for padding and cut off; then the mask is aligned at what is left."""
    real = int((ids != 0).any(0).nonzero().max()) + 1 if (ids != 0).any() else 1
    allowed = all_of_the_past(ids)
    allowed[:, 0] |= real < ids.shape[1]
    if real < ids.shape[1]:
        allowed[:real, :real] = True
    return allowed


@pytest.mark.parametrize(
    "target",
    [
        padding_in_place_of_the_past,
        open_tail,
        pytest.param(capped_after_the_mask, marks=pytest.mark.slow),
        OpenInTraining(),
        Words(length_by_zeros),
        lambda q, k, v: attention(q, k, v, ~past(q, k)),
        lambda q, k, v: attention(q, k, v, past(q, k).roll(1, -1)),
        lambda q, k, v: causal(q, k, v) + 1e-6 * v.mean(2, keepdim=True),
        lambda q, k, v: causal(q, k, v / (v[:1].norm(dim=2, keepdim=True) + 1)),
    ],
)
def test_attention_to_later_tokens_is_caught(target):
    assert check(target, claims=["causality"], fast=True).verdicts[0].outcome == "broken"
