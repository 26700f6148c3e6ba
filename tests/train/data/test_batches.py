"""Batches: pure functions of the seed and the step, and packed neighbours that do not see each other."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from agreement import refused
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ConfigError, InputError
from regard.models import GPT, Bert, BertConfig, GPTConfig
from regard.train.data import text

TOKENS = numpy.arange(101, dtype=numpy.uint16)


def make_store(lengths: list[int], path: Path = Path(), seed: int = 0) -> text.TokenStore:
    starts = numpy.concatenate(([0], numpy.cumsum(lengths))).astype(numpy.int64)
    tokens = numpy.random.default_rng(seed).integers(1, 40, starts[-1]).astype(numpy.uint16)
    return text.TokenStore(tokens, starts, numpy.arange(len(starts)), "0" * 64, path)


# Windows


def test_windows_are_consecutive_tokens_and_depend_on_seed_and_step_alone():
    first = text.sample_windows(TOKENS, 5, 7, seed=3, step=11)
    assert (first.shape, first.dtype) == ((5, 8), torch.int64)
    assert torch.equal(first - first[:, :1], torch.arange(8).expand(5, 8))
    text.sample_windows(TOKENS, 5, 7, seed=3, step=4)
    assert torch.equal(first, text.sample_windows(TOKENS, 5, 7, seed=3, step=11))
    assert not torch.equal(first, text.sample_windows(TOKENS, 5, 7, seed=3, step=12))
    assert not torch.equal(first, text.sample_windows(TOKENS, 5, 7, seed=4, step=11))


def test_every_offset_is_drawn_and_none_beyond():
    starts = torch.cat([text.sample_windows(TOKENS, 50, 91, seed=0, step=step)[:, 0] for step in range(20)])
    assert starts.unique().tolist() == list(range(10))  # the last window ends with the last token


@pytest.mark.parametrize("context", [7, 10, 100, 1000])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_sequential_windows_have_every_token_but_the_first_as_a_target_once(context: int, batch_size: int):
    windows = list(text.sequential_windows(TOKENS, batch_size, context))
    targets = torch.cat([window[:, 1:].flatten() for window in windows])
    assert targets.tolist() == list(range(1, 101))
    assert all(window.shape[0] <= batch_size and window.shape[1] <= context + 1 for window in windows)


def test_a_text_shorter_than_the_context_is_refused():
    with refused(InputError, "101 tokens", "context_length=100 or less"):
        text.sample_windows(TOKENS, 2, 101, seed=0, step=0)
    assert text.sample_windows(TOKENS, 2, 100, seed=0, step=0).shape == (2, 101)


# Packing


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    row_length=st.integers(7, 30),
    rows=st.integers(1, 4),
    epoch=st.integers(0, 2),
)
def test_an_epoch_has_every_token_once_in_its_order(lengths: list[int], row_length: int, rows: int, epoch: int):
    store = make_store(lengths)
    packed = text.PackedDocuments(store, row_length, rows=rows, max_length=7, seed=5, pad=99)
    first = sum(packed.count_batches(each) for each in range(epoch))
    batches = [packed.make_batch(first + number) for number in range(packed.count_batches(epoch))]
    assert packed.locate(first) == (epoch, 0)
    found: dict[int, list[list[int]]] = {}
    for batch in batches:
        assert batch.tokens.shape[0] <= rows
        assert batch.tokens.shape[1] <= row_length
        assert (batch.tokens == 99).equal(batch.segment_ids < 0)
        for row, units in enumerate(batch.units):
            for segment, unit in enumerate(units):
                inside = batch.segment_ids[row] == segment
                assert batch.positions[row][inside].tolist() == list(range(int(inside.sum())))
                found.setdefault(unit, []).append(batch.tokens[row][inside].tolist())
    assert sorted(found) == [unit for unit, length in enumerate(lengths) if length]
    for unit, parts in found.items():
        assert all(len(part) <= 7 for part in parts)
        whole = store[unit].tolist()
        assert sorted(parts) == sorted(whole[start : start + 7] for start in range(0, len(whole), 7))


def test_a_batch_does_not_depend_on_earlier_ones():
    lengths = numpy.random.default_rng(1).integers(1, 30, 200).tolist()
    one, other = (text.PackedDocuments(make_store(lengths), 64, rows=3, seed=7) for _ in range(2))
    count = one.batches_per_epoch
    in_order = [one.make_batch(step) for step in range(2 * count + 5)]
    for step in (2 * count + 4, 0, count, 3, count - 1):
        batch = other.make_batch(step)
        assert torch.equal(batch.tokens, in_order[step].tokens)
        assert batch.units == in_order[step].units
    assert in_order[0].units != in_order[one.count_batches(0)].units  # another epoch, another order
    assert in_order[0].units != text.PackedDocuments(make_store(lengths), 64, rows=3, seed=8).make_batch(0).units


def test_rows_are_nearly_full():
    lengths = numpy.random.default_rng(2).integers(5, 100, 3000).tolist()
    packed = text.PackedDocuments(make_store(lengths), 512, rows=8)
    batches = [packed.make_batch(step) for step in range(packed.batches_per_epoch)]
    filled = sum(batch.token_count for batch in batches) / sum(batch.tokens.numel() for batch in batches)
    assert sum(batch.token_count for batch in batches) == sum(lengths)
    assert filled > 0.98


def test_the_order_of_the_store_for_evaluation():
    packed = text.PackedDocuments(make_store([3, 4, 5, 6]), 7, rows=2)
    assert [batch.units for batch in packed.evaluation_batches()] == [[[0, 1], [2]], [[3]]]


def test_next_tokens_by_hand():
    store = make_store([3, 2, 1])
    (batch,) = text.PackedDocuments(store, 8, pad=0).evaluation_batches()
    first, second, third = (store[number].tolist() for number in range(3))
    assert batch.tokens.tolist() == [[*first, *second, *third]]
    assert batch.next_tokens().tolist() == [[first[1], first[2], -100, second[1], -100, -100]]
    padded = text.PackedDocuments(make_store([3, 2]), 3, rows=2).make_batch(0)
    assert (padded.next_tokens() == -100).sum() == 3


@pytest.mark.parametrize(
    "settings", [{"row_length": 0}, {"row_length": 4, "max_length": 5}, {"row_length": 4, "rows": 0}]
)
def test_rows_that_hold_nothing_are_refused(settings: dict):
    with refused(ConfigError, "row_length="):
        text.PackedDocuments(make_store([3]), **settings)


# Neighbours in a row


def logits_of(model: torch.nn.Module, batch: text.PackedBatch, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(model, GPT):
        return model(tokens, positions=batch.positions, pattern=batch.pattern)
    assert isinstance(model, Bert)
    hidden = model.hidden(tokens, positions=batch.positions, pattern=batch.pattern)
    assert model.masked_tokens is not None
    return model.masked_tokens(hidden)


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "context_length": 32, "dim": 16, "layers": 2, "heads": 2}
    if kind == "bert":
        return Bert(BertConfig(**sizes, masked_tokens=True)).eval()
    return GPT(GPTConfig(**sizes, position=kind)).eval()


@pytest.mark.parametrize("kind", ["learned", "rotary", "bert"])
@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_packed_neighbours_do_not_see_each_other(kind: str, rows: int):
    model = build(kind)
    batch = text.PackedDocuments(make_store([7, 5, 11, 3, 13, 2]), 32, rows=rows, pad=0).make_batch(0)
    before = logits_of(model, batch, batch.tokens)
    for row, units in enumerate(batch.units):
        for segment in range(len(units)):
            own = torch.zeros_like(batch.tokens, dtype=torch.bool)
            own[row] = batch.segment_ids[row] == segment
            changed = torch.where(own, (batch.tokens + 17) % 41, batch.tokens)
            after = logits_of(model, batch, changed)
            assert torch.equal(after[~own], before[~own])  # bit for bit
            assert not torch.isclose(after[own], before[own]).all()


@pytest.mark.parametrize("kind", ["learned", "bert"])
@torch.no_grad()
def test_without_the_pattern_they_would(kind: str):
    model = build(kind)
    batch = text.PackedDocuments(make_store([7, 5, 11]), 32).make_batch(0)
    own = batch.segment_ids == 0
    changed = torch.where(own, (batch.tokens + 17) % 41, batch.tokens)
    outputs = []
    for tokens in (batch.tokens, changed):
        hidden = model.hidden(tokens, positions=batch.positions)  # type: ignore[operator]
        outputs.append(hidden)
    assert not torch.isclose(outputs[0][~own], outputs[1][~own]).all()


@pytest.mark.parametrize("kind", ["learned", "rotary", "bert"])
@torch.no_grad()
def test_a_packed_document_has_the_logits_that_it_has_alone(kind: str):
    model = build(kind).double()
    store = make_store([7, 5, 11])
    batch = text.PackedDocuments(store, 32).make_batch(0)
    together = logits_of(model, batch, batch.tokens)
    for segment, unit in enumerate(batch.units[0]):
        tokens = torch.from_numpy(store[unit].astype(numpy.int64))[None]
        alone = model(tokens) if isinstance(model, GPT) else model.masked_tokens(model.hidden(tokens))  # type: ignore
        assert torch.allclose(together[batch.segment_ids == segment], alone[0], atol=1e-12, rtol=0)


# Pairs


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=50),
    budget=st.integers(20, 120),
)
def test_an_epoch_has_every_pair_once_within_the_budget(lengths: list[tuple[int, int]], budget: int):
    sources, targets = (make_store([pair[side] for pair in lengths], seed=side) for side in (0, 1))
    batches = text.PairBatches(sources, targets, budget, seed=2, pad=77)
    for epoch in (0, 3):
        seen = []
        for number in range(batches.batches_per_epoch):
            batch = batches.make_batch(epoch * batches.batches_per_epoch + number)
            seen += batch.indices.tolist()
            for padded, counts, store in (
                (batch.source, batch.source_lengths, sources),
                (batch.target, batch.target_lengths, targets),
            ):
                assert padded.numel() <= budget or len(padded) == 1
                assert padded.shape[1] == counts.max()
                for row, index, count in zip(padded, batch.indices.tolist(), counts.tolist(), strict=True):
                    assert row.tolist() == [*store[index].tolist(), *[77] * (padded.shape[1] - count)]
        assert sorted(seen) == list(range(len(lengths)))
    everything = [index for batch in batches.evaluation_batches() for index in batch.indices.tolist()]
    assert sorted(everything) == list(range(len(lengths)))


def test_pairs_of_similar_length_are_together_and_epochs_differ():
    draws = numpy.random.default_rng(4).integers(1, 60, (2, 2000))
    sources, targets = (make_store(side.tolist(), seed=3) for side in draws)
    batches = text.PairBatches(sources, targets, 1000, seed=1)
    count = batches.batches_per_epoch
    padded = filled = 0
    for step in range(count):
        batch = batches.make_batch(step)
        longer = torch.maximum(batch.source_lengths, batch.target_lengths)
        padded += int(longer.max()) * len(longer)
        filled += int(longer.sum())
    assert filled / padded > 0.97
    orders = [[batches.make_batch(epoch * count + step).indices.tolist() for step in range(5)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_pairs_that_are_too_long_are_left_out_and_counted():
    sources, targets = make_store([3, 9, 4]), make_store([4, 2, 8])
    batches = text.PairBatches(sources, targets, 100, max_length=8)
    assert (batches.dropped, batches.make_batch(0).indices.tolist()) == (1, [0, 2])
    with refused(InputError, "max_length=3", "max_length=4 or more"):
        text.PairBatches(sources, targets, 100, max_length=3)


def test_stores_of_unequal_length_are_refused():
    with refused(InputError, "2 sources and 1 targets"):
        text.PairBatches(make_store([3, 4]), make_store([3]), 100)
