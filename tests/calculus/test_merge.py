"""Merging attention over disjoint sets of keys."""

import math

import pytest
import torch

from regard.calculus import append_key, logsumexp, merge, remove_key, softmax

INF = math.inf


def attention(scores, value, where=None):
    return softmax(scores, where=where) @ value, logsumexp(scores, where=where)


def problem(queries=5, keys=11, value_dim=3, seed=2):
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(2, queries, keys, dtype=torch.float64, generator=generator)
    return scores, torch.randn(2, keys, value_dim, dtype=torch.float64, generator=generator)


def test_two_equal_halves_by_hand():
    # Two keys of score 0 with mean 2, six keys of score 0 with mean 6: (2 * 2 + 6 * 6) / 8 = 5, lse = ln 8.
    lse = torch.tensor([2.0, 6.0], dtype=torch.float64).log()
    output, total = merge(torch.tensor([[2.0]]), lse[:1], torch.tensor([[6.0]]), lse[1:])
    assert output.item() == pytest.approx(5.0, rel=1e-15, abs=0)
    assert total.item() == pytest.approx(math.log(8), rel=1e-15, abs=0)


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_merging_two_parts_is_attention_over_both(cut):
    scores, value = problem()
    left = attention(scores[..., :cut], value[:, :cut])
    right = attention(scores[..., cut:], value[:, cut:])
    expected = attention(scores, value)
    for merged in (merge(*left, *right), merge(*right, *left)):
        torch.testing.assert_close(merged.output, expected[0], rtol=0, atol=2e-15)
        torch.testing.assert_close(merged.lse, expected[1], rtol=0, atol=4e-15)


def test_appending_keys_one_by_one_builds_the_whole_attention():
    scores, value = problem()
    output, lse = torch.zeros(2, 5, 3, dtype=torch.float64), torch.full((2, 5), -INF, dtype=torch.float64)
    for key in range(11):
        output, lse = append_key(output, lse, scores[..., key], value[:, key])
        expected = attention(scores[..., : key + 1], value[:, : key + 1])
        torch.testing.assert_close(output, expected[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-14)


def test_removing_a_key_undoes_appending_it():
    scores, value = problem()
    output, lse = attention(scores, value)
    rest_output, rest_lse = remove_key(output, lse, scores[..., 10], value[:, 10])
    expected = attention(scores[..., :10], value[:, :10])
    left = 1 - softmax(scores)[..., 10].max().item()
    torch.testing.assert_close(rest_output, expected[0], rtol=0, atol=1e-14 / left)
    torch.testing.assert_close(rest_lse, expected[1], rtol=0, atol=1e-14 / left)


@pytest.mark.parametrize("score", [0.0, 3.7, -40.0, 1e3])
def test_removing_the_only_key_leaves_nothing(score):
    score = torch.tensor([score], dtype=torch.float64)
    value = torch.tensor([[5.0]], dtype=torch.float64)
    output, lse = remove_key(value, score * (1 + 1e-16), score, value[0])
    assert output.tolist() == [[0.0]]
    assert lse.tolist() == [-INF]


def test_removing_a_key_that_was_not_seen_changes_nothing():
    scores, value = problem()
    output, lse = attention(scores, value)
    result = remove_key(output, lse, torch.full_like(lse, -INF), value[:, 0])
    assert (result.output == output).all()
    assert (result.lse == lse).all()


def test_an_empty_part_is_ignored_even_if_its_output_is_nan():
    scores, value = problem()
    output, lse = attention(scores, value)
    for bad in (math.nan, INF):
        merged = merge(output, lse, torch.full_like(output, bad), torch.full_like(lse, -INF))
        assert (merged.output == output).all()
        assert (merged.lse == lse).all()


def test_two_empty_parts_give_zeros_and_zero_gradient():
    nothing = torch.full((3,), -INF, requires_grad=True)
    output = torch.randn(3, 2, requires_grad=True)
    merged = merge(output, nothing, output, nothing)
    assert (merged.output == 0).all()
    assert (merged.lse == -INF).all()
    (merged.output.sum() + merged.lse.sum()).backward()
    assert (nothing.grad == 0).all()
    assert (output.grad == 0).all()


def test_gradients_are_finite_beside_an_empty_part():
    lse_a = torch.tensor([0.3, -INF, -INF], requires_grad=True)
    lse_b = torch.tensor([-INF, 0.7, -INF], requires_grad=True)
    a, b = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    merged = merge(a, lse_a, b, lse_b)
    (merged.output.square().sum() + merged.lse[:2].sum()).backward()
    for tensor in (lse_a, lse_b, a, b):
        assert tensor.grad.isfinite().all()
    assert lse_a.grad.tolist() == [1, 0, 0]
    start = torch.full((3,), -INF, requires_grad=True)
    removed = remove_key(a, start, start, b[0])
    (removed.output.sum()).backward()
    assert start.grad.isfinite().all()


def test_merging_far_apart_scores_neither_overflows_nor_makes_nans():
    lse = torch.tensor([1e4, -1e4])
    merged = merge(torch.ones(2, 3), lse, torch.zeros(2, 3), -lse)
    assert merged.output.tolist() == [[1] * 3, [0] * 3]
    assert merged.lse.tolist() == [1e4, 1e4]


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    assert torch.autograd.gradcheck(merge, (draw(3, 2), draw(3), draw(3, 2), draw(3)))
    assert torch.autograd.gradcheck(append_key, (draw(3, 2), draw(3), draw(3), draw(2)))
    lse, score = draw(3), draw(3)
    assert torch.autograd.gradcheck(
        lambda h, total, s, v: remove_key(h, total + 5, s, v), (draw(3, 2), lse, score, draw(2))
    )


def test_merging_can_be_mapped_and_compiled():
    scores, value = problem()
    parts = (*attention(scores[..., :4], value[:, :4]), *attention(scores[..., 4:], value[:, 4:]))
    expected = merge(*parts)
    compiled = torch.compile(merge, backend="aot_eager", fullgraph=True)
    for found in (torch.func.vmap(merge)(*parts), compiled(*parts)):
        torch.testing.assert_close(found[0], expected.output)
        torch.testing.assert_close(found[1], expected.lse)
