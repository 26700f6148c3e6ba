"""Few queries against a long cache: the kernel against the definition in float64, and the intervals it is given."""

import math

import catalog
import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from regard import Blocks, Causal, First, Full, Padding, Strided, Window
from regard.errors import BackendError, PatternError
from regard.kernels import library
from regard.kernels.decode import run_decode
from regard.kernels.key_intervals import find_key_intervals
from regard.patterns import Lengths

# batch, heads, kv_heads, queries, keys, dim, value_dim: one key, parts of vectors, several pieces of 1024 keys
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 2, 37, 5, 7),
    (2, 6, 2, 3, 1100, 13, 33),
    (1, 2, 2, 1, 2500, 64, 64),
    (1, 4, 1, 8, 1024, 72, 136),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BETA = 0.3


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Tensors this small only make threads wait for one another; the tests of threads ask for more themselves."""
    threads(1)


@pytest.fixture(params=["best", "plain", "scalar"])
def chosen(request, using):
    """The kernels of this machine, those of any machine, and the scalar twins."""
    with using(library.name() if request.param == "best" else request.param):
        yield request.param


def problem(size, dtype=torch.float64, seed=0):
    """Query, key, value, start and stop; the first query sees everything, others something, perhaps nothing."""
    batch, heads, kv_heads, queries, keys, dim, value_dim = size
    make = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim))
    tensors = [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]
    start, stop = (torch.randint(0, keys + 1, (batch, queries), generator=make) for _ in range(2))
    start[0, 0], stop[0, 0] = 0, keys
    return *tensors, start, stop


def definition(query, key, value, start, stop, scale):
    group = query.shape[1] // key.shape[1]
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    place = torch.arange(key.shape[2])
    visible = (place >= start[:, None, :, None]) & (place < stop[:, None, :, None])
    scores = (scale * query @ key.mT).masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0)
    return weights @ value, scores.logsumexp(-1), weights @ value.abs()


def assert_defined(made, inputs, scale):
    """Within the roundings of a score, of its exponential, and of the sums over keys."""
    output, sums, sizes = definition(*inputs, scale)
    query, key = inputs[0].double(), inputs[1].double()
    dtype, dim = made[0].dtype, query.shape[-1]
    largest = abs(scale) * float(query.norm(dim=-1).max() * key.norm(dim=-1).max())
    relative = torch.finfo(dtype).eps * (2 * (dim + 8) * largest + 16 + math.sqrt(key.shape[2]))
    excess = (made[0].double() - output).abs() - 2 * relative * (sizes + output.abs())
    assert excess.max() <= 0, f"the output is beyond its bound by {float(excess.max()):.3g}"
    nothing = torch.isinf(sums)
    assert torch.equal(nothing, torch.isinf(made[1]))
    assert ((made[1].double() - sums)[~nothing].abs() <= relative * (1 + sums[~nothing].abs())).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_what_it_is_defined_as(chosen, dtype):
    for size in SIZES:
        inputs = problem(size, dtype)
        assert_defined(run_decode(*inputs, BETA), inputs, BETA)
    assert_defined(run_decode(*inputs, -BETA), inputs, -BETA)


def test_the_bound_can_be_broken():
    query, key, value, start, stop = problem(SIZES[2])
    moved = run_decode(query, key, value, start, (stop - 1).clamp(min=0), BETA)
    with pytest.raises(AssertionError):
        assert_defined(moved, (query, key, value, start, stop), BETA)


def test_one_key_by_hand():
    one = torch.tensor([2.0]).reshape(1, 1, 1, 1)
    key, value = torch.tensor([0.0, 3.0]).reshape(1, 1, 2, 1), torch.tensor([4.0, 8.0]).reshape(1, 1, 2, 1)
    edge = torch.tensor([[0]]), torch.tensor([[2]])
    output, sums = run_decode(one, key, value, *edge, math.log(3) / 6)  # scores 0 and log 3: weights 1/4 and 3/4
    assert output.item() == pytest.approx(7.0, rel=1e-6)
    assert sums.item() == pytest.approx(math.log(4), rel=1e-6)


def test_large_scores_do_not_overflow():
    query, key, value, start, stop = problem((1, 2, 1, 2, 1500, 8, 3), torch.float32)
    output, sums = run_decode(1e4 * query, key, value, start, stop, 1.0)
    assert torch.isfinite(output).all()
    best = (1e4 * query.double() @ key.double().mT)[0, :, 0].amax(-1)
    torch.testing.assert_close(sums[0, :, 0].double(), best, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_batch_queries_and_strides_change_no_bit(threads, dtype):
    query, key, value, start, stop = inputs = problem((3, 4, 2, 3, 2300, 40, 24), dtype)
    threads(1)
    output, sums = run_decode(*inputs, BETA)
    for count in (2, 5):
        threads(count)
        again = run_decode(*inputs, BETA)
        assert torch.equal(again[0], output)
        assert torch.equal(again[1], sums)
    row = [tensor[1:2] for tensor in inputs]
    assert torch.equal(run_decode(*row, BETA)[0], output[1:2])
    one = run_decode(query[:, :, 1:2], key, value, start[:, 1:2], stop[:, 1:2], BETA)[0]
    assert torch.equal(one, output[:, :, 1:2])
    by_token = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    assert torch.equal(run_decode(*by_token, start, stop, BETA)[0], output)
    by_column = [tensor.mT.contiguous().mT for tensor in (query, key, value)]
    assert torch.equal(run_decode(*by_column, start, stop, BETA)[0], output)


def test_one_row_of_intervals_serves_the_whole_batch():
    query, key, value, start, stop = problem((3, 2, 1, 2, 60, 5, 3))
    shared = run_decode(query, key, value, start[:1], stop[:1], BETA)
    each = run_decode(query, key, value, start[:1].repeat(3, 1), stop[:1].repeat(3, 1), BETA)
    assert torch.equal(shared[0], each[0])


def test_without_keys_there_are_zeros():
    query, key, value, start, stop = problem((2, 2, 1, 3, 50, 5, 3))
    output, sums = run_decode(query, key, value, start, torch.minimum(start, stop), BETA)
    assert (output[1] == 0).all()
    assert (sums[1] == -torch.inf).all()
    for keys, channels in [(0, 3), (50, 0)]:
        short = key[:, :, :keys], value[:, :, :keys, :channels]
        output, sums = run_decode(query, *short, 0 * start, 0 * stop + keys, BETA)
        assert output.shape == (2, 2, 3, channels)
        assert (output == 0).all()
        assert torch.isinf(sums).all() == (keys == 0)


# What is not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_reaches_exactly_the_queries_that_attend_to_it(chosen, bad):
    query, key, value, _, _ = problem((2, 4, 2, 3, 1300, 5, 3))
    start, stop = torch.tensor([[0, 100, 1200]] * 2), torch.tensor([[1300, 1100, 1250]] * 2)
    expected, _ = run_decode(query, key, value, start, stop, BETA)
    broken_key, broken_value = key.clone(), value.clone()
    broken_key[0, 1, 50, 2], broken_value[1, 0, 1150, 1] = bad, bad
    found, _ = run_decode(query, broken_key, broken_value, start, stop, BETA)
    spoiled = torch.zeros_like(found, dtype=torch.bool)
    spoiled[0, 2:, 0], spoiled[1, :2, 0, 1] = True, True
    assert torch.equal(torch.isnan(found), spoiled)
    torch.testing.assert_close(found[~spoiled], expected[~spoiled], rtol=1e-12, atol=1e-12)


def test_hidden_keys_are_never_read():
    query, key, value, _, _ = problem((1, 1, 1, 2, 300, 8, 8))
    start, stop = torch.tensor([[100, 120]]), torch.tensor([[200, 210]])
    expected = run_decode(query, key, value, start, stop, BETA)
    key[:, :, :100], key[:, :, 210:], value[:, :, :100], value[:, :, 210:] = math.nan, math.inf, math.inf, math.nan
    found = run_decode(query, key, value, start, stop, BETA)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_a_nan_that_carries_bits_of_its_own_is_one():
    query, key, value, start, stop = problem((1, 1, 1, 1, 40, 8, 3), torch.float32)
    key.view(torch.int32)[0, 0, 5, 2] = 0x7FC00001
    assert torch.isnan(run_decode(query, key, value, start, stop, BETA)[0]).all()


# As an operator


def test_the_operator_is_what_torch_expects():
    inputs = problem((2, 4, 2, 3, 40, 5, 3), torch.float32)
    opcheck(torch.ops.regard.decode.default, (*inputs, BETA))


def test_samples_can_be_mapped():
    query, key, value, start, stop = problem((3, 4, 2, 2, 40, 5, 3))
    many = [torch.stack([tensor, tensor.flip(0)]) for tensor in (query, key, value)]
    expected = torch.stack([run_decode(*(t[n] for t in many), start, stop, BETA)[0] for n in range(2)])
    found, _ = torch.func.vmap(lambda *x: run_decode(*x, start, stop, BETA))(*many)
    assert torch.equal(found, expected)
    edges = torch.stack([start, start * 0]), torch.stack([stop, stop * 0 + 7])
    found, _ = torch.func.vmap(lambda a, b: run_decode(query, key, value, a, b, BETA))(*edges)
    assert torch.equal(found[1], run_decode(query, key, value, edges[0][1], edges[1][1], BETA)[0])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_there_is_no_gradient_and_it_raises():
    query, key, value, start, stop = problem((1, 1, 1, 1, 9, 3, 2))
    output, _ = run_decode(query.requires_grad_(), key, value, start, stop, BETA)
    with pytest.raises(BackendError, match="no gradient"):
        output.sum().backward()
    with forward_ad.dual_level(), pytest.raises(BackendError, match="no gradient"):
        run_decode(query, forward_ad.make_dual(key, key), value, start, stop, BETA)


def test_operations_are_counted():
    query, key, value, _, _ = problem((2, 4, 2, 2, 40, 5, 3))
    start, stop = torch.tensor([[0, 10]]), torch.tensor([[40, 30]])
    with FlopCounterMode(display=False) as counter:
        run_decode(query, key, value, start, stop, BETA)
    assert counter.get_total_flops() == 2 * 2 * 4 * (40 + 20) * (5 + 3)


# Intervals


@pytest.mark.parametrize("lengths", [(1, catalog.TOKENS), (3, catalog.TOKENS), (8, catalog.TOKENS), (5, 3)])
def test_intervals_are_the_pattern_or_there_are_none(lengths):
    known = 0
    for pattern in catalog.PATTERNS:
        if not catalog.fits(pattern, lengths) or (found := find_key_intervals(pattern, Lengths(*lengths))) is None:
            continue
        known += 1
        start, stop = found
        place = torch.arange(lengths[1])
        mine = (place >= start[..., None]) & (place < stop[..., None])
        mask = pattern.matrix(*lengths)
        assert torch.equal(mine.expand(len(mine), *lengths), mask.expand(len(mine), *lengths)), pattern
    assert known >= 12


@pytest.mark.parametrize(
    ("pattern", "edges"),
    [
        (Full(), ([[0, 0]], [[7, 7]])),
        (Causal(), ([[0, 0]], [[6, 7]])),
        (Causal() & Window(2, 0), ([[3, 4]], [[6, 7]])),
        (Causal() & (Window(2, 0) | First(4)), ([[0, 0]], [[6, 7]])),
        (Causal() & (Window(2, 0) | First(3)), None),
        (Causal() & Padding([3, 7], side="left"), ([[4, 4], [0, 0]], [[6, 7], [6, 7]])),
        (Padding([2, 0]), ([[0, 0], [0, 0]], [[2, 2], [0, 0]])),
        (Blocks(6), ([[0, 6]], [[6, 7]])),
        (Strided(2), None),
        (Window(2, 0, step=2), None),
        (~Causal(), ([[6, 0]], [[7, 0]])),
    ],
    ids=repr,
)
def test_intervals_by_hand(pattern, edges):
    found = find_key_intervals(pattern, Lengths(2, 7))
    assert found is None if edges is None else [edge.tolist() for edge in found] == list(edges)


def test_many_queries_have_no_intervals_and_wrong_lengths_are_refused():
    assert find_key_intervals(Causal(), Lengths(9, 20)) is None
    with pytest.raises(PatternError):
        find_key_intervals(Padding([30]), Lengths(1, 20))


def test_an_interval_beyond_the_cache_ends_with_it():
    query, key, value, _, _ = problem((1, 2, 1, 1, 9, 3, 2))
    beyond, whole = (torch.tensor([[-5]]), torch.tensor([[10**6]])), (torch.tensor([[0]]), torch.tensor([[9]]))
    found, expected = (run_decode(query, key, value, *edges, BETA)[0] for edges in (beyond, whole))
    assert torch.equal(found, expected)
