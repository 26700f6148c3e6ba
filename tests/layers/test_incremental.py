"""Incremental attention equals the attention of the whole sequence."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import attend
from regard.errors import CacheError, ShapeError
from regard.layers import incremental as module
from regard.layers.incremental import IncrementalAttention

BETAS = [None, 0.0, 1.7, -0.6]


def tokens(count, *, batch=(2,), heads=6, kv_heads=3, dim=5, value_dim=7, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*batch, heads, count, dim), (*batch, kv_heads, count, dim), (*batch, kv_heads, count, value_dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def some(parts, start, stop):
    return [part[..., start:stop, :] for part in parts]


def without(parts, gone):
    stays = [place for place in range(parts[0].shape[-2]) if place not in gone]
    return [part[..., stays, :] for part in parts]


def grown(parts, cuts, scale=None):
    running = IncrementalAttention(scale)
    for start, stop in zip([0, *cuts], [*cuts, parts[0].shape[-2]], strict=True):
        running.append(*some(parts, start, stop))
    return running


def assert_within(found, expected, bound):
    assert found.shape == expected.shape
    worst = float((found.double() - expected.double()).abs().max()) if found.numel() else 0.0
    assert worst <= bound, f"off by {worst:.3g}, bound {bound:.3g}"


def drift(parts, steps, scale=None, amplified=1.0):
    """How far rounding carries the output away in so many steps, with V the largest value.

    A score s of `dim` products is off by eps (dim + 2) |s|, which moves an output by twice that times V. A step rounds
    the log-sum-exp l by eps (2 + |l|), which shifts weight between old and new (again twice, times V), and the output
    by 4 eps V. Steps round independently, so n of them are worth 3 sqrt(n) of one (Higham and Mary 2019, three
    standard deviations). Removal may amplify all of it.
    """
    query, key, value = (part.double() for part in parts)
    eps, dim, group = torch.finfo(parts[0].dtype).eps, query.shape[-1], query.shape[-3] // key.shape[-3]
    scores = (dim**-0.5 if scale is None else scale) * query @ key.repeat_interleave(group, -3).mT
    score, lse = float(scores.abs().max()), float(scores.logsumexp(-1).abs().max())
    step = 4 + 2 * (2 + lse)
    return amplified * eps * float(value.abs().max()) * (2 * (dim + 2) * score + 3 * math.sqrt(steps) * step)


@pytest.fixture
def one_thread():
    """Many small steps: a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("scale", BETAS)
@pytest.mark.parametrize("cuts", [[1], [1, 2, 3], list(range(1, 23)), [11], [13, 14, 20]])
def test_appending_equals_the_whole_sequence(scale, cuts):
    parts = tokens(23)
    assert_within(grown(parts, cuts, scale).output, attend(*parts, scale=scale), 1e-12)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (5, 1)])
def test_batches_and_grouped_heads_are_kept_apart(batch, heads, kv_heads):
    parts = tokens(11, batch=batch, heads=heads, kv_heads=kv_heads)
    running = grown(parts, [4, 5])
    assert_within(running.output, attend(*parts), 1e-12)
    running.remove([0, 6])
    assert_within(running.output, attend(*without(parts, {0, 6})), 1e-12)


@pytest.mark.parametrize("scale", BETAS)
@pytest.mark.parametrize("gone", [[0], [22], [-1], [3, 4, 5], [20, 1, -5, 1], list(range(1, 23))])
def test_removing_equals_never_having_had_the_token(scale, gone):
    parts = tokens(23)
    running = grown(parts, [9], scale)
    output = running.remove(gone[0] if len(gone) == 1 else gone)
    expected = attend(*without(parts, {place % 23 for place in gone}), scale=scale)
    # Errors may have grown sixteenfold before a row is computed afresh.
    assert_within(output, expected, 16e-12)
    assert len(running) == expected.shape[-2]


def test_removing_a_token_that_had_all_the_weight_computes_its_rows_afresh():
    query, key, value = tokens(13)
    key[..., 6, :] = 40 * query[:, ::2, 2]  # query 2 of every other head sees hardly anything else
    running = grown([query, key, value], [12], 1.0)
    weight = (query[0, 0, 2] * key[0, 0, 6]).sum() - (query[0, 0, 2] @ key[0, 0].T).logsumexp(0)
    assert 1 - float(weight.exp()) < 1e-15  # nothing could be divided by what is left
    output = running.remove(6)
    assert_within(output, attend(*without([query, key, value], {6}), scale=1.0), 16e-12)


def test_without_the_rule_that_removal_would_be_wrong(monkeypatch):
    monkeypatch.setattr(module, "MOST_AMPLIFIED", 1e300)
    query, key, value = tokens(13)
    key[..., 6, :] = 3 * query[:, ::2, 2]  # nearly all the weight: some digits are left, not twelve
    running = grown([query, key, value], [12], 1.0)
    truth = attend(*without([query, key, value], {6}), scale=1.0)
    assert float((running.remove(6) - truth).abs().max()) > 1e-10
    monkeypatch.undo()
    running = grown([query, key, value], [12], 1.0)
    assert_within(running.remove(6), truth, 16e-12)


def test_only_rows_that_lost_their_weight_are_computed_afresh(monkeypatch):
    rows = []
    afresh = IncrementalAttention._compute_rows
    monkeypatch.setattr(
        IncrementalAttention, "_compute_rows", lambda self, query: rows.append(query.shape[-2]) or afresh(self, query)
    )
    query, key, value = tokens(29)
    key[..., 6, :] = 40 * query[:, ::2, 2]
    running = grown([query, key, value], [28], 0.1)
    rows.clear()
    running.remove(11)
    assert rows == []
    running.remove(6)
    assert len(rows) == 1
    assert 0 < rows[0] < 27


@pytest.mark.parametrize(("which", "what"), [(1, math.nan), (2, math.inf), (2, math.nan)])
def test_a_token_that_was_not_a_number_leaves_no_trace(which, what):
    parts = tokens(9)
    spoiled = [part.clone() for part in parts]
    spoiled[which][..., 3, 0] = what
    running = grown(spoiled, [3, 6])
    assert not bool(running.output.isfinite().all())
    assert_within(running.remove(3), attend(*without(parts, {3})), 1e-12)


def test_all_tokens_may_leave_and_others_come():
    parts = tokens(5)
    running = grown(parts, [2])
    assert running.remove(range(5)).shape == (2, 6, 0, 7)
    assert len(running) == 0
    running.append(*some(parts, 1, 4))
    assert_within(running.output, attend(*some(parts, 1, 4)), 1e-12)


def test_nothing_may_be_appended():
    parts = tokens(5)
    running = grown(parts, [2])
    assert_within(running.append(*some(parts, 0, 0)), attend(*parts), 1e-12)
    assert IncrementalAttention().append(*some(parts, 0, 0)).shape == (2, 6, 0, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("one_thread")
def test_a_thousand_appends_do_not_drift_beyond_their_rounding(dtype):
    parts = tokens(1000, batch=(), heads=2, kv_heads=1, dtype=dtype)
    with torch.no_grad():
        running = grown(parts, list(range(1, 1000)))
    truth = attend(*(part.double() for part in parts))
    assert_within(running.output, truth, drift(parts, 1000))
    if dtype == torch.float64:
        assert_within(running.output, truth, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("one_thread")
def test_a_window_that_slides_by_appending_and_removing_does_not_drift(dtype):
    parts = tokens(400, batch=(), heads=2, kv_heads=1, dtype=dtype)
    running = IncrementalAttention(1.3)
    with torch.no_grad():
        running.append(*some(parts, 0, 31))
        for step in range(31, 400):
            running.append(*some(parts, step, step + 1))
            running.remove(0)
    truth = attend(*(part.double() for part in some(parts, 369, 400)), scale=1.3)
    assert_within(running.output, truth, drift(parts, 2 * 31, 1.3, amplified=16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    parts = tokens(17, dtype=dtype)
    output = grown(parts, [1, 5]).output
    assert output.dtype == dtype
    truth = attend(*(part.double() for part in parts))
    assert_within(output, truth, torch.finfo(dtype).eps * float(truth.abs().max()) / 2 + 1e-5)


def test_gradients_flow_through_appending_and_removing():
    parts = [part.requires_grad_() for part in tokens(11)]
    found = grown(parts, [3, 4, 8]).remove([2, 9])
    upstream = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).reshape(found.shape).cos()
    mine = torch.autograd.grad(found, parts, upstream)
    truth = torch.autograd.grad(attend(*without(parts, {2, 9})), parts, upstream)
    for a, b in zip(mine, truth, strict=True):
        assert_within(a, b, 1e-11)


@pytest.mark.parametrize("count", [37, 101])
def test_a_token_costs_as_many_products_as_there_are_tokens(count):
    parts = tokens(count + 1)
    running = grown(some(parts, 0, count), [])
    with FlopCounterMode(display=False) as counter:
        running.append(*some(parts, count, count + 1))
    rows = 2 * 6  # batch and heads
    # Old queries meet the new key; the new query meets all keys and their values. The rest is elementwise.
    assert counter.get_total_flops() == 2 * rows * (count * 5 + (count + 1) * (5 + 7))
    with FlopCounterMode(display=False) as counter:
        running.remove(3)
    assert counter.get_total_flops() == 2 * rows * count * 5


def test_the_square_never_exists(monkeypatch):
    monkeypatch.setattr(module, "QUERIES_AT_ONCE", 4)
    parts = tokens(23)
    query_counts = []
    some_queries = module._attend
    monkeypatch.setattr(module, "_attend", lambda q, *rest: query_counts.append(q.shape[-2]) or some_queries(q, *rest))
    assert_within(grown(parts, [13]).output, attend(*parts), 1e-12)
    assert max(query_counts) == 4


def test_what_does_not_fit_is_refused():
    running = IncrementalAttention()
    with pytest.raises(CacheError, match="no output yet"):
        _ = running.output
    with pytest.raises(CacheError, match="append tokens first"):
        running.remove(0)
    with pytest.raises(ShapeError, match="finite scale"):
        IncrementalAttention(math.inf)
    query, key, value = tokens(3)
    with pytest.raises(ShapeError, match="not the same new tokens"):
        running.append(query, key[..., :2, :], value[..., :2, :])
    running.append(query, key, value)
    with pytest.raises(CacheError, match="do not fit"):
        running.append(*tokens(1, batch=(3,)))
    with pytest.raises(CacheError, match="do not fit"):
        running.append(*tokens(1, dtype=torch.float32))
    with pytest.raises(CacheError, match="at least -3 and below 3"):
        running.remove(3)
    assert_within(running.output, attend(query, key, value), 1e-12)
