"""Channel attention: its equation, its two implementations, its scale and its cost."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.attention import attend
from regard.errors import ConfigError, InputError
from regard.layers import channels
from regard.layers.channels import ChannelAttention


def literal(layer: ChannelAttention, x: torch.Tensor) -> torch.Tensor:
    """The equation in index notation: n a token, g a group, c a query channel, d a key channel."""
    tokens = x.flatten(1, -2)
    query, key, value = layer.qkv(tokens).unflatten(-1, (3, layer.groups, -1)).unbind(2)
    beta = (layer.dim / layer.groups if layer.scale == "dim" else tokens.shape[1]) ** -0.5
    weight = torch.softmax(beta * torch.einsum("bngc,bngd->bgcd", query, key), -1)
    return layer.proj(torch.einsum("bgcd,bngd->bngc", weight, value).flatten(2)).reshape(x.shape)


@pytest.mark.parametrize("scale", ["dim", "tokens"])
@pytest.mark.parametrize("groups", [1, 3, 11])
@pytest.mark.parametrize("tokens", [(13,), (5, 7), (1,)])
def test_channel_attention_follows_its_equation(groups, tokens, scale):
    torch.manual_seed(1)
    layer = ChannelAttention(33, groups, scale).double()
    x = torch.randn(2, *tokens, 33, dtype=torch.float64, requires_grad=True)
    output, expected = layer(x), literal(layer, x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    slope, inputs = torch.randn_like(output), (x, *layer.parameters())
    slopes, wanted = (torch.autograd.grad(made, inputs, slope) for made in (output, expected))
    for one, other in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mix", [channels._mix_by_group, channels._mix_batched])
def test_both_implementations_are_attention_with_channels_as_tokens(mix):
    parts = torch.randn(2, 7, 3, 5, 3, dtype=torch.float64)
    query, key, value = parts.permute(2, 0, 3, 4, 1).unbind(0)  # batch, group, channel, token
    expected = attend(query, key, value, scale=0.3).permute(0, 3, 1, 2).flatten(2)
    torch.testing.assert_close(mix(parts, 0.3), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", [32**-0.5, 3136**-0.5])
@pytest.mark.parametrize("mix", [channels._mix_by_group, channels._mix_batched])
def test_scores_of_many_tokens_stay_within_float16(mix, beta):
    # 3136 * 8 * 8 is beyond 65504, beta times it is not. All scores are equal, so every channel gets the mean.
    generator = torch.Generator().manual_seed(2)
    parts = torch.full((1, 3136, 3, 2, 32), 8.0)
    parts[:, :, 2] = torch.randn(1, 3136, 2, 32, generator=generator)
    parts = parts.half()
    expected = parts[:, :, 2].double().mean(-1, keepdim=True).expand(-1, -1, -1, 32).flatten(2)
    # Weights of 1 / 32 are exact up to half a unit; 32 values below 5 are summed, then rounded.
    torch.testing.assert_close(mix(parts, beta).double(), expected, rtol=0, atol=2 * 2**-11 * 5)


@pytest.mark.parametrize("few", [0, 99])
def test_slopes_are_those_of_finite_differences(few, monkeypatch):
    monkeypatch.setattr(channels, "FEW_GROUPS", few)
    layer = ChannelAttention(6, 2).double()
    assert torch.autograd.gradcheck(layer, torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("groups", [2, 14])
def test_float32_is_right_to_rounding(groups):
    torch.manual_seed(3)
    layer, x = ChannelAttention(28, groups), torch.randn(2, 11, 5, 28)
    exact = ChannelAttention(28, groups).double()
    exact.load_state_dict(layer.state_dict())
    # Sums over at most 55 tokens and 28 channels; scores grow with the tokens, and e^score with them.
    torch.testing.assert_close(layer(x).double(), exact(x.double()), rtol=0, atol=55 * 28 * 2**-23)


def test_the_order_of_tokens_does_not_matter():
    layer, x = ChannelAttention(6, 3).double(), torch.randn(2, 7, 6, dtype=torch.float64)
    order = torch.randperm(7)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=1e-12, atol=1e-12)


def test_scores_scaled_by_tokens_have_unit_variance_and_by_channels_do_not():
    # Queries and keys of unit variance over 784 tokens, in groups of 32 channels: the standard deviation of a score is
    # sqrt(N / C) = 4.95 or 1. The layer's weights A give its scores back, but for a number in each row: log A.
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, 784, 320, generator=generator, dtype=torch.float64)
    for scale, expected in (("dim", (784 / 32) ** 0.5), ("tokens", 1.0)):
        layer = ChannelAttention(320, 10, scale).double()
        with torch.no_grad():
            # Keys of a group are the channels of the next one: no product occurs twice.
            key = torch.eye(320).roll(32, 0)
            layer.qkv.weight.copy_(torch.cat((torch.eye(320), key, torch.zeros(320, 320))))
            layer.qkv.bias.zero_()
            layer.proj.weight.copy_(torch.eye(320))
            layer.proj.bias.zero_()
            rows = []
            for channel in range(32):
                # A value of one in this channel of every group, by the bias: the output is this column of A.
                layer.qkv.bias[640:].zero_().view(10, 32)[:, channel] = 1
                rows.append(layer(x)[0, 0].view(10, 32))
        logarithm = torch.stack(rows, -1).log()  # (group, query channel, key channel)
        scores = logarithm - logarithm.mean(-1, keepdim=True)
        # The mean of 32 scores is taken from each row; 10,240 products are known to 0.7 %; four of these.
        assert (scores.square().mean() * 32 / 31).sqrt().item() == pytest.approx(expected, rel=0.028)


def test_the_layer_uses_its_scale():
    torch.manual_seed(5)
    by_dim, by_tokens = ChannelAttention(6, 2).double(), ChannelAttention(6, 2, "tokens").double()
    by_tokens.load_state_dict(by_dim.state_dict())
    same, other = torch.randn(1, 3, 6, dtype=torch.float64), torch.randn(1, 12, 6, dtype=torch.float64)
    torch.testing.assert_close(by_dim(same), by_tokens(same), rtol=1e-14, atol=1e-14)  # as many tokens as channels
    assert (by_dim(other) - by_tokens(other)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("groups", "scores", "both"),
    [(1, 67_108_864, 134_217_728), (16, 4_194_304, 8_388_608), (2, 33_554_432, 67_108_864)],
)
def test_sixteen_by_sixteen_patches_of_512_channels_cost_what_the_textbook_says(groups, scores, both):
    layer, x = ChannelAttention(512, groups), torch.randn(1, 16, 16, 512)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    counts = {str(name): count // 2 for name, count in counter.get_flop_counts()["Global"].items()}
    assert counts == {"aten.bmm": both, "aten.addmm": 4 * 256 * 512**2}  # scores and sum; projections
    assert both == 2 * scores
    if groups == 1:
        assert sum(counts.values()) == 402_653_184 == 6 * 256 * 512**2


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="equal groups"):
        ChannelAttention(7, 2)
    with pytest.raises(ConfigError, match="tokens"):
        ChannelAttention(6, 2, "rows")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="channels come last"):
        ChannelAttention(6, 2)(torch.zeros(2, 6, 5, 7))
