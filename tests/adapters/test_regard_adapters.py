"""Adapters of Regard's operators, layers and models, and the conversion of masks to patterns and lengths."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from regard import Alibi, Attention, Causal, Full, Mask, Padding, Window, attend
from regard.adapters import adapt
from regard.adapters.mask_patterns import count_positions, is_padding, pattern_of_mask
from regard.adapters.rng import Rng
from regard.errors import InputError
from regard.layers import FeedForward, IncrementalAttention, MultiHeadAttention, TransformerBlock
from regard.models import GPT, Bert, BertConfig, GPTConfig


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


def dense(query, key, value, mask):
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return torch.where(mask.any(-1, keepdim=True), scores, 0.0).softmax(-1).masked_fill(~mask, 0.0) @ value


@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (1, 1, 5, 7), (2, 3, 5, 7), (2, 1, 5, 7), (5, 7)])
def test_a_mask_of_any_shape_becomes_a_pattern(shape: tuple[int, ...]):
    subject = adapt(attend, kind="operator")
    query, key, value = subject.tensors(Rng(0), 2, 5, 7)
    mask = Rng(1).integers(0, 3, *shape) > 0
    mask[..., 0, :] = mask[..., 0, :] & (len(shape) == 4 and shape[2] == 1)  # a query that sees nothing yields zeros
    wanted = dense(query, key, value, mask.expand(2, 3, 5, 7))
    torch.testing.assert_close(subject.attend(query, key, value, mask), wanted)


def test_the_pattern_of_a_mask_is_padding_where_it_is_padding():
    right = torch.tensor([[True, True, False], [True, False, False]])
    assert pattern_of_mask(right[:, None], 2, 3) == Padding([2, 1])
    assert pattern_of_mask(right.flip(-1)[:, None], 2, 3) == Padding([2, 1], side="left")
    mask = torch.tensor([[[True, False, True]]])
    assert pattern_of_mask(mask, 2, 3) == Mask(mask[:, None])
    assert is_padding(right, "right")
    assert not is_padding(right, "left")
    assert count_positions(torch.tensor([[False, True, False, True]])).tolist() == [[0, 0, 0, 1]]


def test_claims_of_a_description_follow_from_its_fields():
    causal = adapt(Attention(pattern=Causal()))
    assert {"causality", "alignment", "support", "empty-rows"} <= set(causal.claims)
    assert "permutation" not in causal.claims
    assert causal.conventions.pattern == Causal()
    plain = adapt(partial(attend, backend="reference"))
    assert "permutation" in plain.claims
    assert plain.conventions.pattern == Full()
    assert "scale" not in adapt(Attention(scale=2.0)).claims


def test_a_bias_is_converted_to_float64_with_its_own_heads():
    subject = adapt(partial(attend, bias=Alibi(4), pattern=Causal()))
    assert subject.heads == 4
    double = subject.at(torch.float64)
    assert double is not None
    assert double.eps < 1e-12
    assert double.run(double.draw(1, 5, Rng(0))).dtype == torch.float64


def test_a_bias_for_one_length_is_called_at_that_length():
    subject = adapt(Attention(bias=torch.randn(7, 7)))
    assert (subject.min_length, subject.max_length) == (7, 7)
    assert "lengths" not in subject.abilities
    assert subject.run(subject.draw(2, 7, Rng(0))).shape[:2] == (2, 7)


def test_a_description_of_one_batch_is_refused():
    with pytest.raises(InputError, match="fixes the batch size"):
        adapt(Attention(pattern=Padding([2, 3])))


def test_incremental_attention_equals_the_whole_one():
    subject = adapt(IncrementalAttention())
    query, key, value = subject.tensors(Rng(0), 2, 7, 7)
    torch.testing.assert_close(subject.attend(query, key, value), attend(query, key, value))


@torch.no_grad()
def test_a_cache_pads_its_first_piece_on_the_left():
    subject = adapt(MultiHeadAttention(12, 3, attention=Attention(pattern=Window(3, 0))))
    x, mask = subject.draw(2, 7, Rng(0)), torch.ones(2, 7, dtype=torch.bool)
    mask[0, :2] = False
    state, rows = subject.caching.start(2, 7), []
    for stop, piece in ((4, x[:, :4]), (5, x[:, 4:5]), (7, x[:, 5:])):
        output, state = subject.caching.step(state, piece, mask[:, :stop])
        rows.append(output)
    torch.testing.assert_close(torch.cat(rows, 1)[mask], subject.run(x, mask)[mask])


def test_a_block_with_another_text_is_causal_and_has_no_cache():
    causal = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal()))
    alone = adapt(TransformerBlock(causal, FeedForward(12, 20)))
    assert {"causality", "cache"} <= set(alone.claims)
    assert "cache" in alone.abilities
    assert (
        "cache" not in adapt(TransformerBlock(causal, FeedForward(12, 20), cross=MultiHeadAttention(12, 3))).abilities
    )


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_models_take_padding_anywhere(side: str):
    mask = torch.ones(1, 5, dtype=torch.bool)
    mask[0, {"left": [0, 1], "right": [3, 4], "between": [1, 3]}[side]] = False
    gpt = GPT(GPTConfig(vocab_size=11, context_length=16, dim=12, layers=2, heads=3))
    bert = Bert(BertConfig(vocab_size=11, context_length=16, dim=12, layers=2, heads=3))
    for model in (gpt, bert):
        subject = adapt(model)
        ids = subject.draw(1, 5, Rng(0))
        torch.testing.assert_close(subject.run(ids, mask)[mask], subject.run(ids[mask][None])[0])
