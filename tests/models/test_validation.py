"""Validation of tokens, lengths and images of models."""

from __future__ import annotations

import pytest
import torch
from agreement import refused

from regard.errors import InputError
from regard.models import GPT, Bert, BertConfig, GPTConfig
from regard.models.validation import check_segments, check_tokens

SIZES = dict(vocab_size=11, context_length=7, dim=6, layers=1, heads=2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_of_the_embeddings_types_are_read(dtype):
    tokens = torch.tensor([[3, 1, 4]], dtype=dtype)
    check_tokens(tokens, 11, 7)
    check_segments(tokens - tokens, tokens, 2)
    assert GPT(GPTConfig(**SIZES))(tokens).shape == (1, 3, 11)
    assert Bert(BertConfig(**SIZES))(tokens, torch.zeros_like(tokens)).hidden.shape == (1, 3, 6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16])
def test_tokens_of_smaller_types_are_refused_before_torch_does(dtype):
    tokens = torch.tensor([[3, 1, 4]], dtype=dtype)
    with refused(InputError, "Expected token ids", str(dtype), "tokens.long()"):
        GPT(GPTConfig(**SIZES))(tokens)
    with refused(InputError, "These segments do not fit", str(dtype), "int64 or int32"):
        Bert(BertConfig(**SIZES))(tokens.long(), tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_what_are_no_numbers_of_tokens_is_refused(dtype):
    with refused(InputError, "Expected token ids", str(dtype), "two brackets"):
        check_tokens(torch.ones(1, 3).to(dtype), 11)
