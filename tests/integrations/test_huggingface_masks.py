"""Mask functions of Hugging Face become patterns with the same pairs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the twins are not installed")
from transformers import masking_utils as library

import regard.integrations.transformers  # noqa: F401  registers "regard"
from regard import Blocks, Causal, Full, Mask, Padding, Segments, Window
from regard.integrations import huggingface_masks
from regard.integrations.huggingface_masks import make_pattern_mask
from regard.integrations.pattern_mask import PatternMask

IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3]])
LEFT, RIGHT, HOLES = (torch.ones(2, 11, dtype=torch.bool) for _ in range(3))
LEFT[1, :4] = RIGHT[1, 7:] = HOLES[1, 3:5] = False
CAUSAL, FULL = library.causal_mask_function, library.bidirectional_mask_function
SLIDING = library.sliding_window_causal_mask_function(4)
CHUNKED = library.chunked_causal_mask_function
PREFIX = library.or_masks(CAUSAL, library.blockwise_overlay(torch.where(IDS == 0, 0, -1)))
PACKED = library.and_masks(CAUSAL, library.packed_sequence_mask_function(IDS))

FUNCTIONS = {
    "causal": (CAUSAL, None, Causal()),
    "bidirectional": (FULL, None, Full()),
    "sliding": (SLIDING, None, Window(3, 0)),
    "sliding bidirectional": (library.sliding_window_bidirectional_mask_function(3), None, Window(3, 3)),
    "chunked": (CHUNKED(3, torch.tensor([0, 0])), None, Blocks(3) & Causal()),
    "chunked after padding": (CHUNKED(3, torch.tensor([0, 4])), LEFT, None),
    "packed": (PACKED, None, Causal() & Segments(IDS)),
    "prefix": (PREFIX, None, Causal() | Segments(torch.where(IDS == 0, 0, -1))),
    "left": (CAUSAL, LEFT, Causal() & Padding([11, 7], side="left")),
    "right": (FULL, RIGHT, Padding([11, 7])),
    "holes": (CAUSAL, HOLES, Causal() & Mask(HOLES[:, None, None])),
    "sliding left": (SLIDING, LEFT, Window(3, 0) & Padding([11, 7], side="left")),
}


def make_arguments(function, attention_mask, queries, first_query, keys=11, key_offset=0):
    return {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": first_query,
        "kv_offset": key_offset,
        "mask_function": function,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": False,
    }


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("queries", [11, 3, 1])
def test_a_mask_function_and_its_pattern_allow_the_same_pairs(name, queries):
    function, attention_mask, pattern = FUNCTIONS[name]
    arguments = make_arguments(function, attention_mask, queries, 11 - queries)
    mask = make_pattern_mask(**arguments)
    assert isinstance(mask, PatternMask)
    assert torch.equal(mask.to_dense(), library.sdpa_mask(**arguments))
    if pattern is not None:
        assert repr(mask.pattern) == repr(pattern)


@pytest.mark.parametrize("name", ["causal", "sliding", "left", "sliding left", "packed"])
def test_free_slots_of_a_static_cache_are_not_read(name):
    function, attention_mask, _ = FUNCTIONS[name]
    arguments = make_arguments(function, attention_mask, 3, 5)
    mask = make_pattern_mask(**arguments)
    assert mask.used_keys == 8
    assert torch.equal(mask.to_dense(), library.sdpa_mask(**arguments))


@pytest.mark.parametrize("name", ["sliding", "sliding left", "chunked after padding", "packed", "holes"])
def test_a_rolling_cache_keeps_absolute_positions(name):
    function, attention_mask, _ = FUNCTIONS[name]
    arguments = make_arguments(function, attention_mask, 2, 9, keys=6, key_offset=5)
    assert torch.equal(make_pattern_mask(**arguments).to_dense(), library.sdpa_mask(**arguments))


def test_rows_of_a_padding_mask_beyond_the_batch_are_not_read():
    arguments = make_arguments(CAUSAL, LEFT, 11, 0) | {"batch_size": 1}
    mask = make_pattern_mask(**arguments)
    assert mask is not None
    assert mask.shape == (1, 1, 11, 11)
    assert torch.equal(torch.as_tensor(mask.to_dense()), library.sdpa_mask(**arguments))


def test_an_unknown_function_is_evaluated_and_explained_once(monkeypatch):
    monkeypatch.setattr(huggingface_masks, "_explained", set())
    arguments = make_arguments(lambda batch, head, i, j: (i + j) % 3 == batch, None, 5, 6)
    with pytest.warns(UserWarning, match="no pattern, because the mask function"):
        mask = make_pattern_mask(**arguments)
    assert torch.equal(mask.to_dense(), library.sdpa_mask(**arguments))
    make_pattern_mask(**arguments)  # a second warning would be an error


def test_a_kind_whose_meaning_changed_is_no_longer_recognised(monkeypatch):
    def sliding_window_overlay(sliding_window):
        return lambda batch, head, i, j: j >= i - sliding_window

    monkeypatch.setattr(library, "sliding_window_overlay", sliding_window_overlay)
    huggingface_masks._list_kinds.cache_clear()
    try:
        assert sliding_window_overlay(3).__code__ not in huggingface_masks._list_kinds()
    finally:
        monkeypatch.undo()
        huggingface_masks._list_kinds.cache_clear()


def test_whatever_a_model_does_with_a_mask_it_sees_the_dense_one():
    mask, dense = PatternMask(Causal(), (2, 1, 5, 7), 7), Causal().matrix(5, 7).expand(2, 1, 5, 7)
    assert isinstance(mask[:, :, :, :7], PatternMask)
    assert torch.equal(mask[:, :, 1:, :6], dense[:, :, 1:, :6])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(torch.cat([mask, mask], -1), torch.cat([dense, dense], -1))
    assert torch.equal(~mask, ~dense)
    mask.masked_fill_(torch.tensor(True), False)
    assert mask.pattern is None
    assert not mask.to_dense().any()
