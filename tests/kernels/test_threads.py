"""No bit of a result depends on the number of threads, or on the batch around a row."""

import pytest
import torch
from catalog import bias_tensors, make_bias, tensors

from regard import Causal, First, Neighborhood, Padding, Random, Window, attend
from regard.kernels import library
from regard.kernels.program import program
from regard.kernels.softmax import Score, attention
from regard.patterns import Lengths

TOKENS = 150
PATTERNS = [
    Causal(),
    Window(9, 4),
    Window(3, 3, step=4) | First(2),  # two parts
    Random(2, 1, block=8),
    Padding([TOKENS, 40, 97]),
    Neighborhood((10, 15), 2),
]
# Shared by batch rows, by heads, by queries, by keys, or not at all.
SHAPES = [(1, 1, TOKENS, TOKENS), (3, 1, TOKENS, 1), (1, 4, 1, TOKENS), (3, 4, TOKENS, TOKENS), (1, 1, 1, 1)]
BIASES = ["none", "table", *SHAPES]


def everything(pattern, kind, *, rows=slice(None), dtype=torch.float32, dim=13):
    """Output and every gradient of one attention with two query heads to each key head."""
    inputs = tensors((TOKENS, TOKENS), batch=3, heads=4, kv_heads=2, dim=dim, value_dim=6, dtype=dtype, seed=1)
    query, key, value = (tensor.detach()[rows].contiguous().requires_grad_() for tensor in inputs)
    bias = make_bias(kind, 4, dim, dtype) if isinstance(kind, str) else None
    if not isinstance(kind, str):
        bias = torch.randn(kind, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()
    output = attend(query, key, value, pattern=pattern, bias=bias, backend="native")
    grad_output = torch.linspace(-3, 3, inputs[0][..., 0].numel(), dtype=dtype).reshape(3, 4, TOKENS, 1)[rows].cos()
    grads = torch.autograd.grad(output, [query, key, value, *bias_tensors(bias)], grad_output.expand_as(output))
    return [output, *grads]


def assert_same_bits(one, other):
    for number, (mine, truth) in enumerate(zip(one, other, strict=True)):
        difference = (mine.detach() - truth.detach()).abs().max()
        assert torch.equal(mine, truth), f"result {number} differs by {float(difference):.3g}"


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_any_number_of_threads_gives_the_same_bits(threads, segments, pattern):
    for turn, kind in enumerate(BIASES):
        dtype = (torch.float32, torch.float64)[(turn + PATTERNS.index(pattern)) % 2]
        threads(1)
        expected = everything(pattern, kind, dtype=dtype)
        for count in (2, 3):
            threads(count)
            assert_same_bits(everything(pattern, kind, dtype=dtype), expected)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_threads_agree_on_the_log_sum_exp(threads, pattern):
    query, key, value = (tensor.detach() for tensor in tensors((TOKENS, TOKENS), batch=3))
    made = program(pattern, Lengths(TOKENS, TOKENS), library.lanes(torch.float64))
    score = Score(None, None, None, None, made.words, made.masks, 0.7)
    threads(1)
    expected = attention(query, key, value, score)
    for count in (2, 3):
        threads(count)
        assert_same_bits(attention(query, key, value, score), expected)


@pytest.mark.parametrize("kind", ["none", "table", (1, 4, TOKENS, TOKENS)], ids=str)
def test_a_row_alone_has_the_bits_it_has_in_its_batch(threads, segments, kind):
    for pattern in (pattern for pattern in PATTERNS if pattern.rows is None):
        threads(2)
        together = everything(pattern, kind)
        threads(1)
        for row in range(3):
            alone = everything(pattern, kind, rows=slice(row, row + 1))
            assert_same_bits(alone[:4], [result[row : row + 1] for result in together[:4]])


def test_a_second_run_has_the_bits_of_the_first(threads):
    threads(2)
    for _ in range(5):
        assert_same_bits(everything(Causal(), "table"), everything(Causal(), "table"))


def test_the_comparison_of_bits_can_fail():
    one = everything(Causal(), "table")
    assert_same_bits(one, one)
    nudged = [torch.nextafter(one[0], one[0] + 1), *one[1:]]
    with pytest.raises(AssertionError, match="result 0 differs"):
        assert_same_bits(nudged, one)


def test_many_threads_wait_for_their_turn_without_end(threads, small_segments):
    """Segments of one head are added in order, whichever thread computes them, without deadlock."""
    with small_segments():
        threads(1)
        expected = everything(Causal(), "table")
        threads(16)
        for _ in range(20):
            assert_same_bits(everything(Causal(), "table"), expected)
