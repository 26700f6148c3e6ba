"""From a target to its adapter: kinds, sizes, masks, and error messages."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from agreement import refused
from torch import nn

from regard.adapters import ImageModelAdapter, LayerAdapter, ModelAdapter, OperatorAdapter, adapt
from regard.adapters.rng import Rng
from regard.errors import InputError
from regard.laws import check
from regard.patterns import Causal, Window


def operator(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SelfAttention(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x, mask=None):
        return self.attention(x, x, x, key_padding_mask=None if mask is None else ~mask, need_weights=False)[0]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(29, 6), nn.Embedding(13, 6)
        self.layer = SelfAttention(6)

    def forward(self, ids, mask=None):
        return self.layer(self.words(ids) + self.positions(torch.arange(ids.shape[1])), mask)


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.layer = SelfAttention(6)

    def forward(self, image):
        return self.layer(self.patches(image).flatten(2).mT).mean(1)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (operator, OperatorAdapter),
        (functools.partial(operator), OperatorAdapter),
        (SelfAttention(), LayerAdapter),
        (Words(), ModelAdapter),
    ],
)
def test_the_kind_is_seen_from_the_signature(target, kind):
    assert type(adapt(target)) is kind


def test_a_module_with_a_convolution_first_takes_pictures():
    subject = adapt(Picture())
    assert isinstance(subject, ImageModelAdapter)
    assert subject.draw(2, 1, Rng(0)).shape == (2, 3, 32, 32)
    assert "aligned" not in subject.abilities


def test_an_operator_with_fixed_heads_is_called_with_them():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]

    def alibi(q, k, v, mask=None):
        distance = (torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])).abs()
        return (q @ k.mT / q.shape[-1] ** 0.5 - slopes * distance).softmax(-1) @ v

    assert adapt(alibi, "operator").heads == 4


def test_the_width_of_a_layer_is_found_in_its_matrices():
    assert adapt(SelfAttention(), "layer").channels == 10
    matrix = torch.randn(11, 11)
    assert adapt(lambda x: x @ matrix, "layer").channels == 11


def test_a_model_is_no_longer_than_its_table_of_positions():
    subject = adapt(Words())
    assert (subject.vocab_size, subject.max_length) == (29, 13)
    assert subject.lengths(5, 17, 40) == [5]


def test_a_mask_called_key_padding_mask_hides():
    seen = {}

    def layer(x, key_padding_mask=None):
        seen["mask"] = key_padding_mask
        return x * 1

    subject = adapt(layer, "layer", channels=4)
    subject.run(subject.draw(1, 3, Rng(0)), torch.tensor([[True, True, False]]))
    assert seen["mask"].tolist() == [[False, False, True]]


def test_a_mask_that_must_be_numbers_is_given_as_numbers():
    def layer(x, mask=None):
        scores = x @ x.mT if mask is None else x @ x.mT + (1 - mask)[:, None, :] * -1e9
        return scores.softmax(-1) @ x

    subject = adapt(layer, "layer", channels=4)
    assert subject.form is not None
    assert subject.form.dtype == torch.long


def test_a_window_in_keys_becomes_a_pattern():
    assert adapt(operator, window=4).conventions.pattern == Causal() & Window(3, 0)


def test_tokens_first_layouts_are_turned():
    layer = nn.MultiheadAttention(6, 2)
    report = check(
        lambda x: layer(x, x, x)[0], kind="layer", channels=6, claims=["causality"], layout="tokens", fast=True
    )
    assert not report.ok  # it sees both ways; what matters is that tokens are tokens
    assert adapt(lambda x: layer(x, x, x)[0], "layer", channels=6, layout="tokens").run(torch.zeros(2, 5, 6)).shape == (
        2,
        5,
        6,
    )


def test_a_model_of_measurements_takes_rows_of_numbers():
    layer = nn.Linear(7, 7)
    subject = adapt(lambda series: layer(series), "model", channels=7)
    assert subject.kind == "model"
    assert subject.draw(1, 3, Rng(0)).shape == (1, 3, 7)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: adapt(operator, "operatr"), ("operatr", 'kind="layer"')),
        (lambda: adapt(3), ("cannot be called", "int")),
        (lambda: adapt(SelfAttention), ("is a class", "check(SelfAttention(...))")),
        (lambda: adapt(lambda x: 3, "layer"), ("does not run as a layer", "channels=")),
        (lambda: adapt(lambda q, k, v: q[0], "operator"), ("does not run as an operator", "heads=")),
        (lambda: adapt(Words(), "model", heads=3), ("Unknown option 'heads'", "vocab_size")),
        (lambda: check(operator, claims=["casuality"]), ("casuality", "causality")),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_reason(call, words):
    with refused(InputError, *words):
        call()
