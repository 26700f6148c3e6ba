"""The vector kernels give what their scalar twins give: outputs, log-sum-exp and every gradient."""

from dataclasses import replace

import pytest
import torch
from catalog import GRID, TOKENS, assert_agree, bounds, make_bias, tensors

from regard import Causal, First, Full, Neighborhood, Padding, Random, Window
from regard.kernels import library
from regard.kernels.bias_table import make_bias_table
from regard.kernels.program import program
from regard.kernels.softmax import Score, attention, backward
from regard.patterns import Lengths

HALVES = (torch.bfloat16, torch.float16)
PATTERNS = [
    Causal(),
    Window(3, 2),
    Window(3, 1, step=4),
    Window(2, 2) | First(1) | Random(1, 3, block=5),  # one part after another
    Window(2, 2, step=3) | First(2),
    Padding([TOKENS, 9]),
    Neighborhood(GRID, 1),
    ~(Full() | Causal()),  # nothing to see
]
make = program  # where a crooked one can be put
BIASES = ["none", "table", "grid table", "tensor", "table and tensor"]


def cell(pattern, bias, dtype, lengths, *, kv_heads=1, scale=0.6, dim=5, value_dim=7, dropout=0.0, seed=None):
    """Inputs and the score of one case, with a program for the kernels in use."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [x.detach() for x in tensors(lengths, kv_heads=kv_heads, dtype=dtype, dim=dim, value_dim=value_dim)]
    table = query_code = key_code = tensor = None
    if "table" in bias:
        name = "grid table" if bias == "grid table" else "table"
        table, query_code, key_code = make_bias_table(make_bias(name, 3, 5, wide), Lengths(*lengths))
        table = table.detach() * 20
    if "tensor" in bias:
        generator = torch.Generator().manual_seed(8)
        tensor = torch.randn(2, 1, 1, lengths[1], dtype=wide, generator=generator)
    made = make(pattern, Lengths(*lengths), library.lanes(wide))
    seed = None if seed is None else torch.tensor(seed)
    return inputs, Score(table, query_code, key_code, tensor, made.words, made.masks, scale, dropout, seed)


def everything(inputs, score):
    """Output, gradients of query, key, value, table and tensor, and the log-sum-exp."""
    output, sums = attention(*inputs, score)
    grad_output = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape).cos()
    learn = (score.table is not None, score.bias is not None)
    grads = backward(grad_output, *inputs, *score, output, sums, *learn)
    return [output, *grads[:3], *(grad for grad, wanted in zip(grads[3:], learn, strict=True) if wanted)], sums


def assert_twins(using, name, dtype, **words):
    found = {}
    for kernels in ("scalar", name):
        with using(kernels):
            inputs, score = cell(dtype=dtype, **words)
            found[kernels] = everything(inputs, score)
    (expected, true_sums), (results, sums) = found["scalar"], found[name]
    wide = results[0].dtype
    # What dropout keeps is multiplied by 1 / (1 - p), weights and their gradients alike.
    kept = 1 / (1 - words.get("dropout", 0.0))
    limits = {name: kept * limit for name, limit in bounds(*inputs, words.get("scale", 0.6), wide).items()}
    assert_agree(results, expected, limits)
    assert torch.equal(sums == -torch.inf, true_sums == -torch.inf)
    nonempty = true_sums != -torch.inf
    # A weight is off by `relative`, and so is their sum; its logarithm is rounded a few times more.
    relative = limits["output"] / float(inputs[2].abs().max())
    limit = relative + 4 * torch.finfo(wide).eps * true_sums[nonempty].abs()
    assert bool(((sums - true_sums)[nonempty].abs() <= limit).all())


def vary(pattern, turn):
    """A pattern with other biases, lengths and heads at each turn."""
    return {
        "pattern": pattern,
        "bias": BIASES[turn % len(BIASES)],
        "lengths": [(TOKENS, TOKENS), (11, TOKENS)][turn % 2],
        "kv_heads": [1, 3][turn // 2 % 2],
    }


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_vectors_equal_their_scalar_twins(using, kernels, pattern):
    for number, dtype in enumerate((torch.float32, torch.float64, *HALVES)):
        assert_twins(using, kernels, dtype, **vary(pattern, number + PATTERNS.index(pattern)))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_vectors_drop_what_their_scalar_twins_drop(using, kernels, segments, pattern):
    for number, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
        turn = number + PATTERNS.index(pattern)
        seed = (0, -1, 0x1234_5678_9ABC_DEF0)[turn % 3]
        assert_twins(using, kernels, dtype, **vary(pattern, turn), dropout=0.4, seed=seed)


def test_twins_with_dropout_differ_from_those_without(using, kernels):
    for name in ("scalar", kernels):
        with using(name):
            plain, lse = everything(*cell(Causal(), "tensor", torch.float64, (TOKENS, TOKENS)))
            dropped, same_lse = everything(
                *cell(Causal(), "tensor", torch.float64, (TOKENS, TOKENS), dropout=0.4, seed=1)
            )
            other, _ = everything(*cell(Causal(), "tensor", torch.float64, (TOKENS, TOKENS), seed=1))
        assert not any(torch.allclose(one, two) for one, two in zip(plain, dropped, strict=True))
        assert all(torch.equal(one, two) for one, two in zip(plain, other, strict=True))  # no dropout, any seed
        assert torch.equal(lse, same_lse)  # of all keys


@pytest.mark.parametrize("bias", BIASES)
def test_every_bias_at_every_temperature_equals_its_scalar_twin(using, kernels, bias):
    for scale in (0.0, -1.3, 30.0):
        words = dict(bias=bias, scale=scale, lengths=(TOKENS, TOKENS))
        for dtype, pattern in ((torch.float32, Window(4, 9)), (torch.float64, Causal()), (torch.bfloat16, First(3))):
            assert_twins(using, kernels, dtype, pattern=pattern, **words)


def test_every_width_of_rows_equals_its_scalar_twin(using, kernels):
    """Rows shorter than a vector, as long as one, and with every remainder of the register tiles."""
    for dim in range(1, 20):
        words = dict(pattern=Causal(), bias="none", lengths=(13, 13), dim=dim, value_dim=20 - dim, scale=dim**-0.5)
        assert_twins(using, kernels, torch.float32, **words)
        assert_twins(using, kernels, torch.float64, **words)


def test_every_number_of_queries_and_keys_equals_its_scalar_twin(using, kernels):
    """Tiles that are not full, and every remainder of the strips of keys."""
    for queries in (*range(1, 10), 15, 16, 17, 23, 24, 25, 47, 48, 49):
        words = dict(bias="table", lengths=(queries, queries + 3), dim=3, value_dim=2)
        assert_twins(using, kernels, torch.float32, pattern=Causal(), **words)
        assert_twins(using, kernels, torch.float64, pattern=Full(), **words)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype)[6:])
def test_every_half_precision_number_is_read_as_torch_reads_it(kernels, dtype):
    """One key each, so that the output is the value: all 65,536 of them but NaN and infinity."""
    value = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).reshape(1, 1, -1, 1)
    value = value[value.isfinite()].reshape(1, 1, -1, 1)
    zeros = torch.zeros_like(value)
    made = program(Window(0, 0), Lengths(value.shape[2], value.shape[2]), library.lanes(torch.float32))
    output, _ = attention(zeros, zeros, value, Score(None, None, None, None, made.words, made.masks, 1.0))
    assert torch.equal(output, value.float())


def test_the_comparison_of_twins_can_fail(using, kernels, monkeypatch):
    made = program(Causal(), Lengths(TOKENS, TOKENS), library.lanes(torch.float32))
    masks = made.masks.clone()
    masks[-1] ^= 1

    def crooked(*asked):
        return program(*asked) if library.name() == "scalar" else replace(made, masks=masks)

    monkeypatch.setitem(globals(), "make", crooked)
    with pytest.raises(AssertionError, match="off by"):
        assert_twins(using, kernels, torch.float32, pattern=Causal(), bias="none", lengths=(TOKENS, TOKENS))
