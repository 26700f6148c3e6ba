"""Functions, traced: depth by the longest path, symbols for what varies, and the errors where that fails."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard import cost
from regard.cost_model.symbols import size_symbol
from regard.errors import CostError

# T, J, K and the depth of the layer with a plain and with a stable softmax: TTIC 31230, problems on transformers.
DEPTHS = [(1024, 512, 8, 40, 51), (16, 64, 4, 23, 28), (512, 768, 12, 39, 49), (4096, 1024, 16, 45, 58)]


def stable(x, query, key, value):
    q, k, v = (torch.einsum("tj,kuj->ktu", x, weight) for weight in (query, key, value))
    weights = torch.softmax(torch.einsum("ktu,ksu->kts", q, k), -1)
    return torch.einsum("kts,ksu->tku", weights, v)


def plain(x, query, key, value):
    q, k, v = (torch.einsum("tj,kuj->ktu", x, weight) for weight in (query, key, value))
    e = torch.einsum("ktu,ksu->kts", q, k).exp()
    return torch.einsum("kts,ksu->tku", e / e.sum(-1, keepdim=True), v)


@pytest.mark.parametrize(("T", "J", "K", "shallow", "deep"), DEPTHS)
def test_a_layer_written_with_einsum_is_as_deep_as_the_formula(T, J, K, shallow, deep) -> None:
    weight = (K, J // K, J)
    for function, expected in ((plain, shallow), (stable, deep)):
        found = cost(function, inputs=((T, J), weight, weight, weight), tokens=T)
        assert found.depth == expected
        assert found.macs == 3 * T * J * J + 2 * T * T * J
        assert found.pairs == found.exponentials == K * T * T


def test_depth_has_a_formula_and_can_be_asked_for_otherwise() -> None:
    inputs = ((16, 64), (4, 16, 64), (4, 16, 64), (4, 16, 64))
    found = cost(stable, inputs=inputs, tokens=16)
    assert found.depth.at({size_symbol("N"): 64}) == 28 + 3 * 2
    assert (
        found.macs.formula.subs(size_symbol("N"), 17) == 3 * 17 * 64 * 64 + 2 * 17 * 17 * 64
    )  # heads of 16 are no tokens
    assert cost(stable, inputs=inputs, tokens=16, stable=False).depth == 23
    # 64 + 16 + exp + 15 + division + 16
    assert cost(plain, inputs=inputs, tokens=16, serial=True).depth == 64 + 16 + 1 + 15 + 1 + 16


def test_the_longest_path_goes_through_views_and_what_is_changed_in_place() -> None:
    def winding(x):
        y = x * 2  # 1
        y.t()[0].add_(1)  # 2, into the same memory
        beside = x + 1  # 1, beside the path
        return (y.reshape(-1).sum() + beside.sum()) * 3  # 4 for the sum of 12 numbers, 2

    assert cost(winding, inputs=torch.zeros(3, 4)).depth == 2 + 4 + 2


def test_letters_can_be_named_in_a_shape() -> None:
    found = cost(lambda x, y: x @ y, inputs=(("B", "N", 5), ("B", 5, "T")), batch=2, tokens=7, context_tokens=3)
    B, N, T = size_symbol("B"), size_symbol("N"), size_symbol("T")
    assert found.macs.formula == 5 * B * N * T
    assert found.macs == 2 * 7 * 5 * 3
    assert found.bytes.formula.expand() == 4 * (5 * B * N + 5 * B * T + B * N * T)
    with pytest.raises(CostError, match="'Q' on an axis"):
        cost(lambda x: x, inputs=("B", "Q"))


def test_a_mask_varies_with_the_tokens_on_both_axes() -> None:
    def masked(q, k, v, mask):
        return torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v

    shape = (2, 3, 7, 5)
    found = cost(masked, inputs=(shape, shape, shape, (7, 7)), tokens=7)
    assert found.macs.formula.subs(size_symbol("N"), 9) == 2 * 2 * 3 * 9 * 9 * 5


def test_tensors_are_followed_as_they_are() -> None:
    x, weight = torch.zeros(3, 7, 5, dtype=torch.float64), torch.zeros(5, 2, dtype=torch.float64, requires_grad=True)
    found = cost(lambda x, weight: x @ weight, inputs=(x, weight), step="backward")
    assert found.macs == 3 * 7 * 5 * 2  # only the weight learns
    both = cost(lambda x, weight: x @ weight, inputs=(x.requires_grad_(), weight), step="backward")
    assert both.macs == 2 * 3 * 7 * 5 * 2
    assert x.grad is None
    assert weight.grad is None


def test_a_method_of_a_module_is_followed_in_a_copy() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def again(self, x):
            return self.inner(self.inner(x))

    module = Twice()
    found = cost(module.again, inputs=(2, 5), step="training")
    assert found.macs == 3 * 2 * 2 * 25
    assert found.parameters == 30
    assert module.inner.weight.grad is None


def test_what_is_expanded_is_read_once() -> None:
    found = cost(lambda x, y: x.expand(4, 3, 5) + y, inputs=(torch.zeros(3, 5), torch.zeros(4, 3, 5)))
    assert found.bytes == 4 * (15 + 60 + 60)
    assert cost(lambda x: x * x, inputs=torch.zeros(3, 5)).bytes == 4 * (15 + 15)
    assert cost(lambda x: x.t()[1:], inputs=torch.zeros(3, 5)).bytes == 0


def test_probabilities_of_classes_are_no_pairs() -> None:
    found = cost(lambda x: torch.softmax(x, -1), inputs=(2, 7, 11))
    assert found.exponentials == 2 * 7 * 11
    assert found.pairs == 0
    gate = nn.Sequential(nn.Linear(5, 4), nn.Softmax(-1), nn.Linear(4, 3))  # mixes channels, not tokens
    assert cost(gate, tokens=7).pairs == 0


# Where it cannot be followed


def test_what_looks_at_its_numbers_is_run_for_real_if_it_is_small() -> None:
    def looks(x):
        return x @ x.t() if bool(x.sum() == 0) else x

    found = cost(looks, inputs=(7, 5))
    assert found.macs == 7 * 7 * 5
    assert any("_local_scalar_dense" in note for note in found.notes)


def test_what_looks_at_many_numbers_is_refused_by_name() -> None:
    class Looks(nn.Module):
        def forward(self, x):
            return x[x > 0]

    with pytest.raises(CostError) as caught:
        cost(nn.Sequential(Looks()), inputs=(4096, 4096))
    assert "aten.nonzero in 0 depends on tensor values" in str(caught.value)
    assert caught.value.instead


def test_an_input_of_the_wrong_shape_is_told_with_its_module() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 2))
    with pytest.raises(CostError) as caught:
        cost(module, inputs=(2, 5))
    assert caught.value.asked == "forward with inputs (2, 5)"
    assert caught.value.because == "it fails in 1, after aten.addmm"


def test_the_input_of_a_function_is_not_inferred() -> None:
    with pytest.raises(CostError, match="The inputs of stable cannot be inferred"):
        cost(stable)


def test_a_module_without_a_cache_cannot_decode() -> None:
    with pytest.raises(CostError, match="no cache to decode with"):
        cost(nn.MultiheadAttention(12, 3), tokens=5, step="decode")


def test_a_length_that_changes_the_operations_stays_a_number() -> None:
    def folds(x):
        return [x @ x.transpose(1, 2) for _ in range(x.shape[1])]

    found = cost(folds, inputs=("B", "N", 5), tokens=7)
    assert found.macs == 7 * 7 * 7 * 5
    assert found.macs.formula.free_symbols == {size_symbol("B")}
    assert any(note.startswith("tokens stays the number 7") for note in found.notes)


def test_an_operation_of_others_is_named() -> None:
    with torch.library._scoped_library("regard_test", "FRAGMENT") as library:
        library.define("strange(Tensor x) -> Tensor")
        library.impl("strange", lambda x: x.clone(), "CompositeExplicitAutograd")
        found = cost(lambda x: torch.ops.regard_test.strange(x), inputs=torch.zeros(3, 5))
    assert found.macs == 0
    assert any("regard_test.strange" in note for note in found.notes)
