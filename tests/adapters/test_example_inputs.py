"""Example inputs are those that a module takes, with a symbol on each axis that varies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.adapters.attention_readers import find_reader
from regard.adapters.example_inputs import ExampleInputs, InputSpec, infer_inputs
from regard.layers import MultiHeadAttention
from regard.layers.modes import eval_mode
from regard.models import GPT, GPTConfig

SIZES = {"B": 2, "N": 5, "M": 7, "T": 3, "R": 16, "W": 24}


def axes(module: nn.Module, *known: str) -> list[tuple]:
    inputs = infer_inputs(module, SIZES, set(known))
    assert inputs is not None
    args, kwargs = inputs.make(inputs.sizes, torch.float32)
    with torch.no_grad():
        module(*args, **kwargs)  # what was inferred is what it takes
    return [spec.axes for spec in inputs.specs()]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.TransformerEncoderLayer(12, 3), [("N", "B", 12)]),
        (nn.TransformerDecoderLayer(12, 3, batch_first=True), [("B", "N", 12), ("B", "T", 12)]),
        (
            nn.MultiheadAttention(12, 3, kdim=4, vdim=6, batch_first=True),
            [("B", "N", 12), ("B", "M", 4), ("B", "M", 6)],
        ),
        (MultiHeadAttention(12, heads=3), [("B", "N", 12)]),
        (GPT(GPTConfig(vocab_size=11, context_length=16, dim=12, layers=1, heads=3)), [("B", "N")]),
        (nn.Sequential(nn.GELU(), nn.LSTM(6, 4)), [("N", "B", 6)]),
        (nn.Sequential(nn.ReLU(), nn.Conv2d(3, 5, 1)), [("B", 3, "R", "W")]),
    ],
)
def test_inputs_are_inferred_from_the_class_or_the_first_layer(module, expected):
    assert axes(module) == expected


def test_keys_of_another_length_are_inputs_of_their_own():
    assert axes(nn.MultiheadAttention(12, 3, batch_first=True), "M") == [("B", "N", 12), ("B", "M", 12), ("B", "M", 12)]


def test_an_unknown_module_with_two_inputs_has_no_example_inputs():
    assert infer_inputs(nn.Bilinear(2, 3, 4), SIZES, set()) is None


def test_one_spec_in_two_places_is_one_tensor():
    spec = InputSpec(("B", 3), requires_grad=True)
    (first, second), named = ExampleInputs((spec, [spec]), {"third": spec}).make({"B": 2}, torch.float64)
    assert first is second[0] is named["third"]
    assert (first.shape, first.dtype, first.requires_grad) == ((2, 3), torch.float64, True)


def test_a_length_that_was_not_given_stays_within_the_positions_there_are():
    inputs = ExampleInputs(sizes={"N": 128, "T": 96}, known={"T"})
    inputs.limit(40)
    inputs.limit(40, "T")
    assert inputs.sizes == {"N": 40, "T": 96}
    assert inputs.limits == {"N": 40, "T": 40}


def test_eval_mode_ends_with_every_part_in_its_own_mode():
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    module[1].eval()
    before = [part.training for part in module.modules()]
    with eval_mode(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == before
    with pytest.raises(TypeError), eval_mode(module):
        module(None, None)
    assert [part.training for part in module.modules()] == before
    assert any(before)


def test_rows_of_weights_cover_the_whole_batch():
    layer, x = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12)
    reader = find_reader(layer)
    assert reader is not None
    found = reader("attention", layer, (x, x, x), {})
    expected = layer(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(found.rows([3, 1]), expected[:, :, [3, 1]])
    assert find_reader(nn.Linear(2, 3)) is None
