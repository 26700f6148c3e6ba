"""Every bias: right scores for any positions, gradients, no square matrix, and a faithful repr."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import biases

# Before, on and behind a grid of 15 tokens, also with two tokens in front of it.
QUERIES = torch.tensor([-3, 0, 1, 2, 4, 7, 11, 14, 15, 16, 19])
KEYS = torch.tensor([-2, 0, 1, 3, 5, 6, 12, 13, 15, 16, 17, 23, 1000])


def assert_close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_scores_equal_a_loop_over_heads_and_pairs(case):
    bias = case.make(dtype=torch.float64)
    expected = [
        [[case.oracle(bias, h, i, j) for j in KEYS.tolist()] for i in QUERIES.tolist()] for h in range(bias.heads)
    ]
    found = bias.scores(QUERIES[:, None], KEYS)
    assert found.shape == (bias.heads, len(QUERIES), len(KEYS))
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_the_loop_notices_swapped_positions(case):
    bias = case.make(dtype=torch.float64)
    swapped = bias.scores(KEYS[:, None], QUERIES).mT
    same = torch.allclose(swapped, bias.scores(QUERIES[:, None], KEYS), rtol=0, atol=1e-6)
    assert same == case.name.startswith("alibi")  # the one score that is symmetric


def test_tiles_of_pairs_equal_the_whole(case):
    bias = case.make(dtype=torch.float64)
    whole = bias.scores(torch.arange(17)[:, None], torch.arange(17))
    rows = torch.tensor([[0, 1, 2], [7, 8, 9]])
    columns = torch.tensor([[3, 4, 5, 6, 7], [10, 11, 12, 13, 16]])
    tiles = bias.scores(rows[:, :, None], columns[:, None, :])
    assert tiles.shape == (bias.heads, 2, 3, 5)
    assert_close(tiles, whole[:, rows[:, :, None], columns[:, None, :]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scalar_positions_under_vmap_equal_the_batched_call(case, dtype):
    bias = case.make(dtype=torch.float64)
    queries, keys = QUERIES.to(dtype), KEYS.to(dtype)
    over_keys = torch.vmap(bias.scores, in_dims=(None, 0), out_dims=-1)
    over_pairs = torch.vmap(over_keys, in_dims=(0, None), out_dims=-2)
    assert_close(over_pairs(queries, keys), bias.scores(queries[:, None], keys))


def test_gradients_in_every_parameter_are_right(case):
    bias = case.make(dtype=torch.float64)
    names = [name for name, _ in bias.named_parameters()]
    if not names:
        pytest.skip("nothing is learned")

    def scores(*values):
        arguments = (QUERIES[1:6, None], KEYS[2:7])
        return torch.func.functional_call(bias, dict(zip(names, values, strict=True)), arguments)

    values = tuple(p.detach().clone().requires_grad_() for p in bias.parameters())
    assert torch.autograd.gradcheck(scores, values)
    assert any(gradient.any() for gradient in torch.autograd.grad(scores(*values).square().sum(), values))


def test_the_score_of_one_head_equals_that_row_of_all_scores(case):
    bias = case.make(dtype=torch.float64)
    expected = bias.scores(QUERIES[:, None], KEYS)
    for head in range(bias.heads):
        assert torch.equal(bias.score(torch.tensor(head), QUERIES[:, None], KEYS), expected[head])
    heads = torch.arange(bias.heads).flip(0)
    assert torch.equal(bias.score(heads[:, None, None], QUERIES[:, None], KEYS), expected.flip(0))
    scalars = bias.score
    for place in ((None, None, 0), (None, 0, None), (0, None, None)):
        scalars = torch.vmap(scalars, in_dims=place)
    assert_close(scalars(heads, QUERIES, KEYS), expected.flip(0))


def test_a_bias_with_one_head_serves_every_head():
    for bias in (
        biases.Alibi(1),
        biases.RelativeTable(1, 3),
        biases.RowColumn(1, (3, 5)),
        biases.Quadratic(1),
    ):
        assert torch.equal(bias.score(torch.tensor(6), QUERIES, KEYS[:11]), bias.scores(QUERIES, KEYS[:11])[0])


@pytest.mark.slow
@pytest.mark.long  # tests/backends/test_flex.py compiles some of them
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_a_compiled_flex_attention_takes_the_score_of_one_head(case):
    from torch.nn.attention.flex_attention import flex_attention

    bias = case.make().requires_grad_(False)
    heads, tokens = bias.heads, 19
    query, key, value = torch.randn(3, 1, heads, tokens, 16).unbind()
    token = torch.arange(tokens)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias.scores(token[:, None], token)[None]
    )

    def score_mod(score, _batch, head, i, j):
        return score + bias.score(head, i, j)

    torch._dynamo.reset()
    found = torch.compile(flex_attention)(query, key, value, score_mod=score_mod)
    # each output is an average of 19 values of about 1: float32 rounding, with room for another order of sums
    torch.testing.assert_close(found, expected, rtol=0, atol=19 * 2.0**-23)


class LargestTensor(TorchDispatchMode):
    """HasCache the number of entries of the largest tensor that any operation gave."""

    entries = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        answer = function(*arguments, **(keywords or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return answer


def test_nothing_larger_than_the_pairs_or_the_parameters_is_built(case):
    bias = case.make()
    state = max((value.numel() for value in [*bias.parameters(), *bias.buffers()]), default=0)
    rows, columns = torch.arange(3)[:, None], torch.arange(50_000, 50_007)
    with LargestTensor() as largest:
        bias.scores(rows, columns)
    assert 0 < largest.entries <= max(state, bias.heads * 3 * 7)


def test_the_dtype_can_be_chosen_and_changed(any_case):
    assert {value.dtype for value in any_case.make().state_dict().values()} <= {torch.float32}
    bias = any_case.make(dtype=torch.float64)
    assert {value.dtype for value in bias.state_dict().values()} <= {torch.float64}
    buffers = any_case.make().to(torch.float64).buffers()
    assert {value.dtype for value in buffers if value.is_floating_point()} <= {torch.float64}


def test_scores_have_the_dtype_of_the_parameters(case):
    for dtype in (torch.float32, torch.float64):
        assert case.make().to(dtype).scores(QUERIES[:, None], KEYS).dtype == dtype


def test_one_seed_gives_the_same_parameters_in_both_dtypes(any_case):
    torch.manual_seed(11)
    single = any_case.make(dtype=torch.float32).state_dict()
    torch.manual_seed(11)
    double = any_case.make(dtype=torch.float64).state_dict()
    for name, value in single.items():
        assert torch.equal(value, double[name].float())


def test_a_generator_decides_the_learned_parameters(any_case):
    if not list(any_case.make().parameters()):
        pytest.skip("nothing is learned")
    first, second = (any_case.make(generator=torch.Generator().manual_seed(13)) for _ in range(2))
    other = any_case.make(generator=torch.Generator().manual_seed(17))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert any(not torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True))


def test_repr_builds_the_same_bias(any_case):
    bias = any_case.make()
    rebuilt = eval(repr(bias), vars(biases))
    assert repr(rebuilt) == repr(bias)
    assert {n: v.shape for n, v in rebuilt.state_dict().items()} == {n: v.shape for n, v in bias.state_dict().items()}


def test_copies_and_state_dictionaries_keep_the_scores(case):
    bias, other = case.make(), case.make()
    expected = bias.scores(QUERIES[:, None], KEYS)
    other.load_state_dict(bias.state_dict())
    for twin in (copy.deepcopy(bias), other):
        assert torch.equal(twin.scores(QUERIES[:, None], KEYS), expected)


def test_every_public_bias_is_tested_here():
    from pathlib import Path

    registry = Path(__file__).with_name("conftest.py").read_text()
    for name in biases.__all__:
        public = getattr(biases, name)
        if isinstance(public, type) and public is not biases.Bias:
            assert f"{name}(" in registry.split("EVERY = ")[1]
