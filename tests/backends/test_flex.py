"""FlexAttention: its block table is the plan's, and its output is the reference's."""

import math
import shutil

import pytest
import torch
from plain import long

import regard
from regard import (
    Alibi,
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    Gaussian,
    GridStride,
    GridWindow,
    Mask,
    Neighborhood,
    Padding,
    Quadratic,
    Random,
    RelativeTable,
    RowColumn,
    Segments,
    Selected,
    Strided,
    TransformerXL,
    Where,
    Window,
    attend,
)
from regard.backends import find
from regard.backends.flex import BLOCK, _run_compiled, block_mask, find_key_blocks, is_pointwise, run_with
from regard.errors import BackendError
from regard.patterns import EVERY, Lengths

GRID = (17, 23)
TOKENS = 17 * 23  # three blocks of 128 and a short one


def striped(i, j):
    return (i * j) % 3 == 0


# A new pattern is one new line here.
PATTERNS = [
    Full(),
    Causal(),
    Window(11, 5),
    Window(3, 2, step=7),
    Strided(5),
    First(3),
    Selected([1, 211]),
    Random(2, 7, block=13),
    Blocks(97),
    Segments(torch.arange(2 * TOKENS).reshape(2, TOKENS) // 61),
    Padding([131, TOKENS]),
    Padding([0, 257], side="left"),
    Neighborhood(GRID, 2),
    Neighborhood(GRID, (1, 2), step=2, edges="shift"),
    GridWindow(GRID, (5, 7), shift=2),
    GridStride(GRID, (2, 3)),
    Axial(GRID),
    Mask(torch.rand(2, 1, 1, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.9),
    Where(striped),
    Causal() & Padding([3, 211]),
    Window(7, 0) | First(2),
    ~Window(257, 0),
]


def tensors(queries, keys=TOKENS, *, dtype=torch.float64, heads=6, kv_heads=3, dim=5, value_dim=7):
    torch.manual_seed(3)
    shapes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim))
    return [torch.randn(2, *shape, dtype=dtype) for shape in shapes]


def assert_agrees(q, k, v, bound=1e-13, **fields):
    with torch.no_grad():
        expected = attend(q, k, v, backend="reference", **fields)
        found = attend(q, k, v, backend="flex", **fields)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=bound, equal_nan=True)


def shown(pattern):
    return repr(pattern)[:40]


def test_every_pattern_is_here():
    assert {type(pattern) for pattern in PATTERNS} >= set(EVERY)


@pytest.fixture(params=["computed", pytest.param("traced", marks=pytest.mark.slow)])
def tracing(monkeypatch, request):
    """On a CPU FlexAttention is traced anew for each pattern, which takes ten times as long as computing it."""
    if request.param == "computed":
        monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("pattern", PATTERNS, ids=shown)
def test_every_pattern_equals_the_reference(tracing, pattern):
    assert_agrees(*tensors(131), pattern=pattern)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [TOKENS, *long(401, 1)])
@pytest.mark.parametrize("pattern", PATTERNS, ids=shown)
def test_every_pattern_equals_the_reference_at_other_lengths(pattern, queries):
    assert_agrees(*tensors(queries), pattern=pattern)


BIASES = {
    "alibi": Alibi(6),
    "table on a line": RelativeTable(6, distance=5),
    "table on a grid": RelativeTable(6, grid=GRID),
    "row and column": RowColumn(6, GRID),
    "quadratic": Quadratic(6, GRID),
    "quadratic of one head": Quadratic(1),
    "gaussian": Gaussian(6, GRID),
    "whole tensor": torch.randn(2, 6, 131, TOKENS, generator=torch.Generator().manual_seed(1)),
    "tensor by head and key": torch.randn(6, 1, TOKENS, generator=torch.Generator().manual_seed(1)),
    "tensor by row": torch.randn(2, 1, 131, 1, generator=torch.Generator().manual_seed(1)),
    "one number": torch.tensor(0.7),
    "forbidding tensor": torch.zeros(131, 1).masked_fill(torch.arange(131)[:, None] < 5, -torch.inf),
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_every_bias_equals_the_reference(tracing, bias):
    assert_agrees(*tensors(131), pattern=Causal() & Padding([0, 307]), bias=bias)


@pytest.mark.parametrize("scale", [0, 0.3, -2.0])
@pytest.mark.parametrize("bias", [None, Alibi(6)], ids=["content alone", "bias"])
def test_beta_means_what_it_means_in_the_reference(tracing, bias, scale):
    q, k, v = tensors(131)
    assert_agrees(q, k, v, pattern=Window(5, 0), bias=bias, scale=scale)
    q[0, 1, 3], k[1, 2, 5] = torch.nan, torch.nan
    if scale == 0:
        assert_agrees(q, k, v, pattern=Window(5, 0), bias=bias, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_precisions_equal_the_reference(tracing, dtype):
    q, k, v = tensors(131, dtype=dtype)
    # Two roundings of a value of about one: the weights' and the output's.
    assert_agrees(q, k, v, 4 * torch.finfo(dtype).eps, pattern=Causal())


# Empty rows and what is not finite


def test_a_query_that_sees_nothing_has_zeros():
    q, k, v = tensors(401)
    output = attend(q, k, v, pattern=Causal() & Padding([0, 5]), backend="flex")
    assert (output[0] == 0).all()
    assert (output[1, :, :10] == 0).all()  # ten queries stand before the first key
    assert (output[1, :, 10:] != 0).all()


@pytest.mark.parametrize("pattern", [Causal(), Padding([300, 5])], ids=repr)
def test_nan_spoils_exactly_what_saw_it(tracing, pattern):
    q, k, v = tensors(131)
    k[0, 1, 301], v[1, 2, 307, 3], v[0, 0, 390] = torch.nan, torch.inf, -torch.inf
    assert_agrees(q, k, v, pattern=pattern)
    # A weight that underflows to zero was still seen.
    assert_agrees(q, 50 * k, v, pattern=pattern, bias=Alibi(6))


# The block table


@pytest.mark.parametrize("queries", [TOKENS, 131, 401, 128, 1])
@pytest.mark.parametrize("pattern", PATTERNS, ids=shown)
def test_the_block_table_is_that_of_the_dense_matrix(pattern, queries):
    dense = pattern.matrix(queries, TOKENS).reshape(-1, queries, TOKENS)
    padded = torch.zeros(len(dense), -(-queries // BLOCK) * BLOCK, -(-TOKENS // BLOCK) * BLOCK, dtype=torch.bool)
    padded[:, :queries, :TOKENS] = dense
    tiles = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # row, down, query, across, key
    blocks = find_key_blocks(pattern, Lengths(queries, TOKENS))
    full, partial = (torch.zeros(tiles.shape[0], tiles.shape[1], tiles.shape[3], dtype=torch.int64) for _ in "ab")
    for table, count, index in [
        (full, blocks.full_count, blocks.full),
        (partial, blocks.partial_count, blocks.partial),
    ]:
        for row, down in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
            for block in index[row, down, : count[row, down]]:
                table[row, down, block] += 1
    assert (full + partial <= 1).all()
    assert tiles.all(2).all(-1)[full > 0].all()
    assert not tiles.any(2).any(-1)[(full + partial) == 0].any()


def test_whole_blocks_of_plain_patterns_are_found():
    blocks = find_key_blocks(Causal(), Lengths(512, 512))
    assert blocks.full_count.tolist() == [[0, 1, 2, 3]]
    assert blocks.partial_count.tolist() == [[1, 1, 1, 1]]
    assert find_key_blocks(Full(), Lengths(512, 384)).full_count.tolist() == [[3, 3, 3, 3]]
    assert find_key_blocks(Window(100, 0), Lengths(512, 512)).partial_count.tolist() == [[1, 2, 2, 2]]


def test_a_long_sequence_never_meets_its_square():
    blocks = find_key_blocks(Window(500, 500) | First(3), Lengths(100_003, 100_003))
    assert blocks.partial.shape == (1, 782, 782)
    # At most eleven blocks of a window and the one with the global keys; the first block of queries sees all.
    assert blocks.partial_count.sum() + blocks.full_count.sum() < 782 * 13 + 782


def test_a_block_mask_is_made_once():
    cpu = torch.device("cpu")
    assert block_mask(Window(11, 5), Lengths(7, 13), cpu, 2) is block_mask(Window(11, 5), Lengths(7, 13), cpu, 2)


# What it refuses


def refusal(*arguments, **fields):
    with pytest.raises(BackendError) as caught:
        attend(*arguments, backend="flex", **fields)
    error = caught.value
    assert all((error.headline, error.asked, error.because, error.instead))
    return error.because


def test_it_refuses_gradients_on_a_cpu_in_four_parts():
    q, k, v = tensors(7, 11)
    q.requires_grad_()
    assert "no backward pass on a CPU" in refusal(q, k, v)
    assert "no backward pass on a CPU" in refusal(*tensors(7, 11), bias=Quadratic(6))
    with torch.no_grad():
        assert attend(q, k, v, backend="flex", bias=Quadratic(6)).shape == (2, 6, 7, 7)


def test_it_refuses_what_flexattention_cannot_do():
    q, k, v = tensors(7, 11)
    assert "hard limit" in refusal(q, k, v, scale=math.inf)
    assert "feature map" in refusal(q, k, v, feature_map="elu1")
    assert "query and key" in refusal(q, k, v, bias=TransformerXL(6, 5))
    assert "nothing" in refusal(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(BackendError, match=r"torch\.func"):
        torch.func.vmap(lambda q: attend(q, k, v, backend="flex"))(torch.stack([q, q]))


def test_auto_never_takes_it_on_a_cpu():
    found = regard.explain(*tensors(7, 11), pattern=Window(3, 0))
    assert found.backend != "flex"
    assert "for GPUs" in found.reasons["flex"]


def test_patterns_are_pointwise_or_listed_as_not():
    # On a GPU a pattern that reduces would compile to a wrong mask; there it is refused.
    cpu, lengths = torch.device("cpu"), Lengths(TOKENS, TOKENS)
    table = torch.arange(3 * TOKENS).reshape(TOKENS, 3)
    assert not is_pointwise(Where(lambda i, j: (table[i] == j[..., None]).any(-1)), lengths, cpu)
    assert is_pointwise(Where(lambda i, j: table[i, j % 3] > 5), lengths, cpu)
    reducing = {type(pattern).__name__ for pattern in PATTERNS if not is_pointwise(pattern, lengths, cpu)}
    assert reducing <= {"Random"}


# The compiled kernel, here that for CPUs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles its CPU kernels with a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("queries", [131, *long(TOKENS)])
@pytest.mark.parametrize(
    ("pattern", "bias"),
    [
        (Causal(), Alibi(6)),
        pytest.param(Window(40, 7), RelativeTable(6, grid=GRID), marks=pytest.mark.long),
        pytest.param(Segments(torch.arange(2 * TOKENS).reshape(2, TOKENS) // 61), None, marks=pytest.mark.long),
        pytest.param(Neighborhood(GRID, 2), Gaussian(6, GRID), marks=pytest.mark.long),
        pytest.param(Causal() & Padding([3, 211]), BIASES["tensor by head and key"], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_compiled_kernel_equals_the_reference(monkeypatch, pattern, bias, queries):
    monkeypatch.setattr(type(find("flex")), "run", lambda self, request: run_with(request, _run_compiled))
    q, k, v = tensors(queries, dtype=torch.float32)
    v[1, 1, 127] = torch.nan
    # Sums of 391 float32 numbers of about one.
    assert_agrees(q, k, v, TOKENS * torch.finfo(torch.float32).eps, pattern=pattern, bias=bias)
