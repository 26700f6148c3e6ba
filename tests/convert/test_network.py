"""Whole networks of convolutions, as attention and back, with the same logits."""

import math

import pytest
import torch
from torch import nn

from regard.convert import convert_network, restore_network
from regard.errors import ConfigError
from regard.layers import SpatialAttention, TableAttention


class Net(nn.Module):
    """A small network with everything that gets in the way: blocks, shared layers, lists, a norm, a residual."""

    def __init__(self, axes=2):
        super().__init__()
        conv, pool, norm = (
            (nn.Conv2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d)
            if axes == 2
            else (nn.Conv1d, nn.AdaptiveAvgPool1d, nn.BatchNorm1d)
        )
        self.stem = nn.Sequential(conv(3, 8, 5, stride=2, padding=2), norm(8), nn.ReLU())
        self.shared = conv(8, 8, 3, padding=1, groups=4, padding_mode="reflect")
        self.blocks = nn.ModuleList(conv(8, 8, 3, padding="same", dilation=step, bias=False) for step in (1, 2))
        self.named = nn.ModuleDict({"last": conv(8, 12, 2, padding=1, padding_mode="circular")})
        self.pool, self.head = pool(1), nn.Linear(12, 10)

    def forward(self, image):
        x = self.stem(image)
        x = self.shared(self.shared(x)).relu()
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(self.pool(self.named["last"](x)).flatten(1))


def convs_in(model):
    return [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d)]


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_are_equal_there_and_back(axes, dtype):
    torch.manual_seed(0)
    model = Net(axes).to(dtype).eval()
    image = torch.randn(4, 3, *(19, 23)[:axes], dtype=dtype)
    attentive = convert_network(model)
    restored = restore_network(attentive)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    truth = model(image)
    assert (attentive(image) - truth).abs().max() <= bound * truth.abs().max()
    assert torch.equal(restored(image), truth)
    assert not convs_in(attentive)
    assert len(convs_in(model)) == len(convs_in(restored)) == 5
    assert not attentive.training
    assert attentive.shared in attentive.modules()
    assert {name: value.shape for name, value in restored.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    for name, value in model.state_dict().items():
        assert torch.equal(value, restored.state_dict()[name]), name


def test_a_layer_in_two_places_stays_one():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), conv)
    attentive = convert_network(model)
    assert attentive[0] is attentive[2]
    assert model[0] is conv  # the network that was given is as it was
    back = restore_network(attentive)
    assert back[0] is back[2]


def test_gradients_of_every_parameter_are_equal():
    torch.manual_seed(1)
    model = Net().double()
    attentive = convert_network(model)
    image = torch.randn(4, 3, 13, 17, dtype=torch.float64)
    for network in (model, attentive):
        network(image).sin().sum().backward()
    theirs = dict(model.named_parameters())
    for name, parameter in attentive.named_parameters():
        expected = theirs[name].grad
        torch.testing.assert_close(parameter.grad, expected.reshape(parameter.shape), rtol=1e-9, atol=1e-9)


def test_a_single_convolution_is_a_network():
    conv = nn.Conv1d(3, 4, 3)
    attentive = convert_network(conv)
    restored = restore_network(attentive)
    assert isinstance(attentive, SpatialAttention)
    assert isinstance(restored, nn.Conv1d)
    signal = torch.randn(2, 3, 11)
    torch.testing.assert_close(attentive(signal), conv(signal))
    assert torch.equal(restored(signal), conv(signal))


def test_options_reach_every_layer_and_other_layers_stay():
    model = nn.Sequential(nn.Conv2d(1, 3, 5, padding=2), nn.ConvTranspose2d(3, 3, 2), nn.Conv2d(3, 2, 3))
    few = convert_network(model, heads="minimal")
    assert isinstance(few[0], TableAttention) or few[0].heads <= 4
    assert isinstance(few[1], nn.ConvTranspose2d)
    soft = convert_network(model, exact=False, tolerance=1e-5)
    image = torch.randn(2, 1, 7, 11)
    torch.testing.assert_close(soft(image), model(image), rtol=1e-3, atol=1e-3)
    with pytest.raises(ConfigError, match="soft"):
        restore_network(soft)
    soft[0], soft[2] = soft[0].with_alpha(math.inf), soft[2].with_alpha(math.inf)
    torch.testing.assert_close(restore_network(soft)(image), model(image))


def test_frozen_parts_stay_frozen_in_both_directions():
    model = Net()
    model.shared.requires_grad_(False)
    model.stem[0].weight.requires_grad_(False)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for changed in (convert_network(model), restore_network(convert_network(model))):
        assert {name: parameter.requires_grad for name, parameter in changed.named_parameters()} == wanted


def test_a_converted_network_is_saved_and_read(tmp_path):
    torch.manual_seed(2)
    model, other = Net().eval(), Net().eval()
    file = tmp_path / "network.pt"
    torch.save(convert_network(model).state_dict(), file)
    reader = convert_network(other)
    reader.load_state_dict(torch.load(file, weights_only=True))
    image = torch.randn(2, 3, 13, 11)
    torch.testing.assert_close(reader(image), model(image))
