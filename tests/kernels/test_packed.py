"""Weights that are kept packed for gemm: the same bits as without, and never those of a weight that has changed."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.kernels import packed
from regard.kernels.linear import gemm
from regard.kernels.packed import find_packed, forget_packed, keep_packed, pack
from regard.layers.linear import MIN_WEIGHTS, Linear, forget_weights, pack_weights

INSIDE, OUTSIDE, ROWS = 397, 379, 53
assert INSIDE * OUTSIDE >= MIN_WEIGHTS


@pytest.fixture
def layer():
    torch.manual_seed(5)
    return Linear(INSIDE, OUTSIDE).requires_grad_(False)


@pytest.fixture
def x():
    return torch.randn(ROWS, INSIDE, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 31), (33, 769), (131, 40)])
def test_packing_changes_no_bit(kernels, dtype, shape):
    make = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=make, dtype=dtype)
    x, residual = torch.randn(19, shape[1], dtype=dtype), torch.randn(19, shape[0], dtype=dtype)
    before = gemm(x, weight, None, "gelu", residual)
    keep_packed(weight)
    assert torch.equal(gemm(x, weight, None, "gelu", residual), before)


def test_vectors_and_their_scalar_twin_pack_the_same_numbers(using, kernels):
    weight = torch.randn(37, 23)
    panels = pack(weight).panels
    assert torch.equal(panels.transpose(1, 2).reshape(-1, 23)[:37], weight)
    assert not panels.transpose(1, 2).reshape(-1, 23)[37:].any()
    with using("scalar"):
        twin = pack(weight).panels
    assert torch.equal(twin.transpose(1, 2).reshape(-1, 23)[:37], weight)


def test_rows_of_a_weight_may_lie_apart(kernels):
    wide = torch.randn(37, 50)
    assert torch.equal(pack(wide[:, 3:26]).panels, pack(wide[:, 3:26].clone()).panels)


def test_panels_are_used_where_they_fit(layer, x, monkeypatch):
    """The panels themselves are multiplied: numbers changed there, behind everyone's back, come out."""
    pack_weights(layer)
    find_packed(layer.weight).panels.zero_()
    assert torch.equal(layer(x), layer.bias.expand(ROWS, -1))


def assign_data(layer):
    layer.weight.data = 2 * layer.weight.data


def assign_data_of_the_same_memory(layer):
    """The old memory is handed back and taken again; an address alone would not tell."""
    shape = layer.weight.shape
    layer.weight.data = torch.empty(0)
    gc.collect()
    layer.weight.data = torch.randn(shape)


def multiply_data(layer):
    layer.weight.data.mul_(2)


def copy_into_data(layer):
    layer.weight.data.copy_(torch.randn(OUTSIDE, INSIDE))


def change_one_number_in_place(layer):
    layer.weight[7, 11] += 3


def load_state(layer):
    layer.load_state_dict(Linear(INSIDE, OUTSIDE).state_dict())


def load_state_by_assignment(layer):
    layer.load_state_dict(Linear(INSIDE, OUTSIDE).state_dict(), assign=True)


def step_of(make):
    def change(layer):
        layer.requires_grad_(True)
        optimizer = make(layer.parameters())
        layer(torch.ones(2, INSIDE)).sum().backward()
        optimizer.step()
        layer.requires_grad_(False)

    return change


def put_another_parameter(layer):
    layer.weight = nn.Parameter(torch.randn(OUTSIDE, INSIDE), requires_grad=False)


def take_a_transposed_memory(layer):
    layer.weight.data = torch.randn(INSIDE, OUTSIDE).T


CHANGES = {
    "assignment to data": assign_data,
    "assignment to data of the same memory": assign_data_of_the_same_memory,
    "product in place, through data": multiply_data,
    "copy through data": copy_into_data,
    "one number in place": change_one_number_in_place,
    "load_state_dict": load_state,
    "load_state_dict by assignment": load_state_by_assignment,
    "another parameter": put_another_parameter,
    "transposed memory": take_a_transposed_memory,
    "SGD": step_of(lambda weights: torch.optim.SGD(weights, 0.1)),
    "AdamW, one by one": step_of(lambda weights: torch.optim.AdamW(weights, 0.1, foreach=False)),
    "AdamW, together": step_of(lambda weights: torch.optim.AdamW(weights, 0.1, foreach=True)),
    "AdamW, fused": step_of(lambda weights: torch.optim.AdamW(weights, 0.1, fused=True)),
    "another dtype": lambda layer: layer.double().weight.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_weight_is_never_stale(layer, x, change):
    pack_weights(layer)
    before = layer(x)
    change(layer)
    x = x.to(layer.weight.dtype)
    after = layer(x)
    assert (after - before).abs().max() > 0.01
    error = (after - F.linear(x, layer.weight, layer.bias)).abs().max()
    assert error < 1e-4 * after.abs().max()
    assert torch.equal(layer(x), after)


def test_the_test_of_stale_weights_can_fail(layer, x, monkeypatch):
    pack_weights(layer)
    before = layer(x)
    monkeypatch.setattr(packed.PackedWeight, "fits", lambda self, weight: True)
    multiply_data(layer)
    assert torch.equal(layer(x), before)


def test_other_kernels_pack_anew(layer, x, using):
    pack_weights(layer)
    for name in ("plain", "scalar"):
        with using(name):
            assert (layer(x) - F.linear(x, layer.weight, layer.bias)).abs().max() < 1e-4
    assert (layer(x) - F.linear(x, layer.weight, layer.bias)).abs().max() < 1e-4


def test_nothing_is_packed_unless_asked_for(layer, x):
    layer(x)
    assert find_packed(layer.weight) is None


def test_small_weights_other_dtypes_and_gradients_are_left_alone(x):
    assert pack_weights(Linear(7, 5)) == 0
    assert pack_weights(Linear(INSIDE, OUTSIDE).bfloat16()) == 0
    layer = Linear(INSIDE, OUTSIDE)
    assert pack_weights(layer) > 0
    layer(x).sum().backward()  # torch's own product
    assert layer.weight.grad is not None


def test_a_packed_copy_leaves_with_its_weight():
    layer = Linear(INSIDE, OUTSIDE)
    pack_weights(layer)
    panels = weakref.ref(find_packed(layer.weight))
    del layer
    gc.collect()
    assert panels() is None


def test_memory_can_be_given_back(layer, x):
    made = layer(x)
    pack_weights(layer)
    forget_weights(layer)
    assert find_packed(layer.weight) is None
    assert torch.equal(layer(x), made)
    forget_packed(layer.weight)  # nothing is left to forget


def test_a_copy_of_a_layer_has_its_own_weights(layer, x):
    pack_weights(layer)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.mul_(3)
    assert (twin(x) - F.linear(x, twin.weight, twin.bias)).abs().max() < 1e-3
    assert (layer(x) - F.linear(x, layer.weight, layer.bias)).abs().max() < 1e-4
