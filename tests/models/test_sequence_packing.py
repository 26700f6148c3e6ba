"""Packing of texts of unequal length: accepted forms, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agreement import refused

from regard.errors import ConfigError, InputError
from regard.models import Bert, BertConfig
from regard.models.sequence_packing import check_pooling, pack_texts

TEXTS = [[3, 1, 4], [1], [5, 9]]


def bert() -> Bert:
    torch.manual_seed(1)
    return Bert(BertConfig(vocab_size=11, context_length=7, dim=6, layers=1, heads=2)).eval()


@pytest.mark.parametrize(
    "texts",
    [
        tuple(map(tuple, TEXTS)),
        [torch.tensor(text) for text in TEXTS],
        [torch.tensor(text, dtype=torch.uint8) for text in TEXTS],
        [np.array(text, dtype=np.int16) for text in TEXTS],
        [list(torch.tensor(text)) for text in TEXTS],
    ],
    ids=["tuples", "tensors", "bytes", "arrays", "numbers of torch"],
)
def test_texts_may_be_given_in_many_forms(texts):
    (row,) = pack_texts(texts, 100, 7, 11)
    assert row.tokens.tolist() == [[1, 5, 9, 3, 1, 4]]
    assert row.tokens.dtype == torch.int64
    assert row.texts.tolist() == [1, 2, 0]


def test_rows_of_a_tensor_are_texts():
    assert torch.equal(bert().embed(torch.tensor([[3, 1], [4, 5]])), bert().embed([[3, 1], [4, 5]]))


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (["abc"], "texts[0] = 'abc'"),
        ([[1], ["abc"]], "texts[1] = ['abc']"),
        ([1, 2, 3], "texts[0] = 1"),
        ([[1.5]], "texts[0] = [1.5]"),
        ([[True]], "texts[0] = [True]"),
        ([None], "texts[0] = None"),
        (torch.tensor([1, 2]), "texts (2,) of torch.int64"),
        ([torch.tensor([0.5])], "texts[0] = tensor([0.5"),
        ([["x" * 500]], " ..."),
    ],
)
def test_what_is_no_text_is_refused(texts, word):
    with refused(InputError, "list of token ids", word):
        bert().embed(texts)


@pytest.mark.parametrize("texts", [5, None])
def test_what_are_no_texts_is_refused(texts):
    with refused(InputError, "list of token ids", repr(texts)):
        next(pack_texts(texts, 100, 7))


def test_a_pooling_that_there_is_not_is_refused():
    for pooling in ("mean", "first", "pooled"):
        check_pooling(pooling)
    with refused(ConfigError, "pooling='max'"):
        check_pooling("max")
    with refused(ConfigError, "pooling='max'"):
        bert().embed(TEXTS, pooling="max")
