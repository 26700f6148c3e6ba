"""Layers of torch, followed: products against torch's own counter on real runs, letters against other sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from cost_model.counting import in_input_sizes
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from regard import cost
from regard.cost_model.symbols import size_symbol
from regard.errors import CostError

QUANTITIES = ("macs", "bytes", "activation_bytes", "pairs", "exponentials")


def counted(run) -> int:
    """Multiply-adds that torch's counter sees while something runs."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2


def there_and_back(module, *inputs) -> None:
    output = module(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    output.sum().backward()


def open_layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("kind", ["encoder layer", "attention", "linear", "norms"])
def test_products_are_those_that_torch_counts(kind: str) -> None:
    x = torch.randn(2, 7, 12, requires_grad=True)
    if kind == "encoder layer":
        # torch's counter knows no attention on the CPU; products of the seven tokens are added by hand.
        module, inputs, missing = open_layer(), (x,), 2 * 3 * 7 * 7 * 8
    elif kind == "attention":
        module, inputs, missing = nn.MultiheadAttention(12, 3, batch_first=True), (x, x, x), 0
    elif kind == "linear":
        module, inputs, missing = nn.Linear(12, 5), (x,), 0
    else:
        module, inputs, missing = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3)), (x,), 0
    forward = cost(module, batch=2, tokens=7)
    both = cost(module, batch=2, tokens=7, step="training")
    real = copy.deepcopy(module)
    assert forward.macs == counted(lambda: real(*inputs)) + missing
    assert both.macs == counted(lambda: there_and_back(real, *inputs)) + 3 * missing
    assert both.macs == 3 * forward.macs.value
    assert forward.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("step", ["forward", "training"])
def test_formulas_hold_at_sizes_that_were_never_followed(step: str) -> None:
    layer = open_layer()
    near = cost(layer, batch=2, tokens=10, step=step)
    there = cost(layer, batch=5, tokens=29, step=step)
    for name in QUANTITIES:
        assert near.quantity(name).at({size_symbol("B"): 5, size_symbol("N"): 29}) == there.quantity(name), name


def test_a_size_that_is_not_given_stays_a_letter() -> None:
    found = cost(nn.MultiheadAttention(12, 3, batch_first=True))
    B, N = size_symbol("B"), size_symbol("N")
    assert in_input_sizes(found.macs).expand() == (4 * 12 * 12 * B * N + 2 * 12 * B * N**2).expand()
    assert in_input_sizes(found.pairs) == 3 * B * N**2
    assert any("tokens" in note for note in found.notes)
    with pytest.raises(CostError, match="how large N is"):
        found.macs.value  # noqa: B018


def test_keys_of_another_length_have_their_own_letter() -> None:
    found = cost(nn.MultiheadAttention(12, 3, batch_first=True), tokens=5, keys=11)
    assert found.macs == 2 * 12 * 12 * (5 + 11) + 2 * 12 * 5 * 11
    assert size_symbol("M") in found.macs.formula.free_symbols


def test_an_encoder_and_a_decoder_have_two_lengths() -> None:
    module = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)
    found = cost(module, tokens=5, context_tokens=7)
    reads = 7 * (4 * 144 + 2 * 12 * 20) + 2 * 12 * 7 * 7
    writes = 5 * (6 * 144 + 2 * 12 * 20) + 7 * 2 * 144 + 2 * 12 * (5 * 5 + 5 * 7)
    assert found.macs == reads + writes


def test_parts_have_the_paths_of_modules_and_stars_for_layers_that_are_alike() -> None:
    stack = nn.TransformerEncoder(open_layer(), 3, enable_nested_tensor=False)
    found = cost(stack, tokens=7).by_part()
    assert found["layers.*.linear1"].macs == 3 * 7 * 12 * 20
    assert found["layers.*.linear1"].parameters == 3 * (12 * 20 + 20)
    mixed = nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3))
    assert {"0", "2"} <= set(cost(mixed, tokens=7).by_part())


def test_backward_products_belong_to_the_module_of_their_forward_products() -> None:
    stack = nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 3))
    found = cost(stack, tokens=7, step="backward").by_part()
    assert found["0"].macs == 2 * 7 * 12 * 5
    assert found["1"].macs == 2 * 7 * 5 * 3


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_counted_both_ways(groups: int) -> None:
    module = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups), nn.ConvTranspose2d(6, 8, 2, stride=2)
    )
    x = torch.randn(2, 4, 12, 20)
    forward = cost(module, batch=2, image=(12, 20))
    first, second = 2 * 6 * 6 * 10 * 4 * 9 // groups, 2 * 6 * 6 * 10 * 8 * 4
    assert forward.macs == first + second == counted(lambda: module(x))
    # The image itself learns nothing.
    assert cost(module, batch=2, image=(12, 20), step="backward").macs == first + 2 * second
    small = forward.macs.at({size_symbol("R"): 12 + 32, size_symbol("W"): 20 + 64})
    assert small == cost(module, batch=2, image=(44, 84)).macs


def test_a_recurrent_layer_multiplies_its_two_matrices_at_every_token() -> None:
    found = cost(nn.LSTM(5, 3, batch_first=True), batch=2, tokens=7)
    assert found.macs == 2 * 7 * 4 * (5 * 3 + 3 * 3)


def test_the_module_is_as_it_was() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    versions = [tensor._version for tensor in module.state_dict().values()]
    attributes = [set(vars(each)) for each in module.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for step in ("forward", "training"):
        cost(module, image=(8, 8), step=step)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [tensor._version for tensor in module.state_dict().values()] == versions
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert all(each.training for each in module.modules())
    assert [set(vars(each)) for each in module.modules()] == attributes
    assert not any(each._forward_hooks for each in module.modules())


def test_dropout_changes_no_count() -> None:
    without, dropped = open_layer(), nn.TransformerEncoderLayer(12, 3, 20, dropout=0.5, batch_first=True)
    for step in ("forward", "training"):
        one, other = (cost(each, tokens=7, step=step) for each in (without, dropped))
        for name in (*QUANTITIES, "depth"):
            assert one.quantity(name) == other.quantity(name), (step, name)


def test_a_module_without_memory_costs_the_same() -> None:
    with torch.device("meta"):
        on_meta = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
    one, other = (cost(each, tokens=7, step="training") for each in (open_layer(), on_meta))
    for name in QUANTITIES:
        assert one.quantity(name) == other.quantity(name), name


def test_another_dtype_moves_other_bytes_and_multiplies_as_much() -> None:
    module = nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3))
    wide, narrow = (cost(module, tokens=7, dtype=dtype) for dtype in (None, torch.bfloat16))
    assert wide.macs == narrow.macs
    assert wide.bytes == 2 * narrow.bytes.value == 4 * (7 * (12 + 5 + 5 + 5 + 5 + 3) + 12 * 5 + 5 + 5 * 3 + 3)


@pytest.mark.parametrize("training", [False, True])
def test_what_is_kept_is_what_autograd_saves_on_a_real_run(training: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(2), nn.Linear(48, 5), nn.Softmax(-1)
    )
    module.train(training)
    x = torch.randn(2, 3, 8, 10)
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *module.state_dict().values())}
    saved: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive.append(module(x))
    for step in ("forward", "training"):
        assert cost(module, batch=2, image=(8, 10), step=step).activation_bytes == sum(saved.values())
