"""Blocks against torch's encoder and decoder layers, in every order of norms, at every depth."""

import copy

import pytest
import torch
from torch import nn

from regard import Attention, Causal, Padding
from regard.errors import ConfigError, InputError
from regard.layers import AttentionSizes, CrossCache, FeedForward, MultiHeadAttention, TransformerBlock

F64 = torch.float64
# A token passes about ten sums of at most 48 products, normalised to size one in between.
TOLERANCE = {F64: 1e-12, torch.float32: 40 * 48 * 2.0**-24}


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(dim=24, heads=3, hidden=48, *, order="pre", activation="relu", cross=False, pattern=None, **words):
    return TransformerBlock(
        MultiHeadAttention(dim, heads, attention=Attention(pattern=pattern)),
        FeedForward(dim, hidden, activation),
        cross=MultiHeadAttention(dim, heads) if cross else None,
        order=order,
        **words,
    )


def assert_close(found, expected, tolerance):
    assert found.shape == expected.shape
    difference = float((found.detach() - expected.detach()).abs().max())
    assert difference <= tolerance, f"off by {difference:.3g}, bound {tolerance:.3g}"


def copy_numbers(ours, theirs):
    pairs = [(ours.attention, theirs.self_attn), (ours.feed_forward.inner, theirs.linear1)]
    pairs += [(ours.feed_forward.outer, theirs.linear2), (ours.attention_norm, theirs.norm1)]
    if ours.cross is not None:
        pairs += [(ours.cross, theirs.multihead_attn), (ours.cross_norm, theirs.norm2)]
    pairs += [(ours.feed_forward_norm, theirs.norm3 if ours.cross is not None else theirs.norm2)]
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())


def filled(layer, dtype):
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.add_(random(*parameter.shape, seed=index) * 0.1)
    return layer.to(dtype)


def assert_same_gradients(ours, theirs, inputs, found, expected, tolerance):
    upstream = random(*found.shape, seed=9, dtype=found.dtype)
    mine = torch.autograd.grad(found, [*inputs, *ours.parameters()], upstream)
    truth = torch.autograd.grad(expected, [*inputs, *theirs.parameters()], upstream)
    # Gradients have the names of their parameters: their layer's, copied into ours as if they were weights.
    slopes, moved = copy.deepcopy(theirs), copy.deepcopy(ours)
    with torch.no_grad():
        for parameter, slope in zip(slopes.parameters(), truth[len(inputs) :], strict=True):
            parameter.copy_(slope)
    copy_numbers(moved, slopes)
    for one, other in zip(mine, [*truth[: len(inputs)], *moved.parameters()], strict=True):
        assert_close(one, other, tolerance)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_an_encoder_block_is_torchs(order, activation, dtype):
    theirs = nn.TransformerEncoderLayer(
        24, 3, 48, dropout=0.0, activation=activation, batch_first=True, norm_first=order == "pre"
    )
    theirs = filled(theirs, dtype)
    ours = make(order=order, activation=activation).to(dtype)
    copy_numbers(ours, theirs)
    x = random(2, 7, 24, dtype=dtype).requires_grad_()
    hidden = torch.arange(7) >= torch.tensor([[7], [4]])
    expected, found = theirs(x, src_key_padding_mask=hidden), ours(x, pattern=Padding([7, 4]))
    assert_close(found, expected, TOLERANCE[dtype])
    assert_same_gradients(ours, theirs, [x], found, expected, 40 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_decoder_block_is_torchs(order, activation, dtype):
    theirs = nn.TransformerDecoderLayer(
        24, 3, 48, dropout=0.0, activation=activation, batch_first=True, norm_first=order == "pre"
    )
    theirs = filled(theirs, dtype)
    ours = make(order=order, activation=activation, cross=True, pattern=Causal()).to(dtype)
    copy_numbers(ours, theirs)
    x, context = (random(2, n, 24, seed=n, dtype=dtype).requires_grad_() for n in (7, 11))
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    hidden = torch.arange(11) >= torch.tensor([[5], [11]])
    expected = theirs(x, context, tgt_mask=mask, memory_key_padding_mask=hidden)
    found = ours(x, context=context, context_pattern=Padding([5, 11]))
    assert_close(found, expected, TOLERANCE[dtype])
    assert_same_gradients(ours, theirs, [x, context], found, expected, 40 * TOLERANCE[dtype])


def test_parameters_of_the_transformers_blocks():
    with torch.device("meta"):
        encoder, decoder = make(512, 8, 2048, order="post"), make(512, 8, 2048, order="post", cross=True)
    assert sum(p.numel() for p in encoder.parameters()) == 3_152_384
    assert sum(p.numel() for p in decoder.parameters()) == 4_204_032


@pytest.mark.parametrize("order", ["pre", "post"])
def test_every_depth_keeps_the_shape(order):
    x = random(2, 3, 24)
    for block in range(24):
        x = make(order=order).double()(x)
        assert x.shape == (2, 3, 24), block
        assert bool(x.isfinite().all())


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_block_decodes_from_its_caches(order):
    block = make(order=order, cross=True, pattern=Causal()).double().eval()
    x, context = random(2, 9, 24), random(2, 5, 24, seed=1)
    with torch.no_grad():
        whole = block(x, context=context)
        cache, cross = block.attention.new_cache(), CrossCache()
        found = [block(x[:, :4], cache=cache, context=context, cross_cache=cross)]
        found += [block(x[:, i : i + 1], cache=cache, cross_cache=cross) for i in range(4, 9)]
        assert_close(torch.cat(found, 1), whole, 1e-12)
        padded = make(order=order, pattern=Causal()).double().eval()
        first = padded(x, cache=padded.attention.new_cache(), lengths=[9, 4])
        assert_close(first[1:, 5:], padded(x[1:, 5:]), 1e-12)


def test_dropout_is_off_in_eval():
    block, x = make(dropout=0.5), torch.randn(2, 7, 24)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_matrix_leads_past_a_part_that_changes_the_size(order):
    attention = MultiHeadAttention(AttentionSizes(13, 3, key=4, output=17))
    block = TransformerBlock(attention, FeedForward(17, 5), order=order, shortcut="project").double()
    x = random(2, 7, 13)
    read = block.attention_norm(x) if order == "pre" else x
    y = x @ block.shortcut.weight.T + block.attention(read)
    y = y if order == "pre" else block.attention_norm(y)
    z = y + block.feed_forward(block.feed_forward_norm(y) if order == "pre" else y)
    z = z if order == "pre" else block.feed_forward_norm(z)
    assert block(x).shape == (2, 7, 17)
    assert_close(block(x), z, 1e-13)
    assert make(shortcut="project").shortcut is None


def test_norms_can_be_chosen():
    block = make(norm=nn.RMSNorm, eps=1e-3)
    assert isinstance(block.attention_norm, nn.RMSNorm)
    assert block.feed_forward_norm.eps == 1e-3
    assert repr(block).startswith("TransformerBlock(\n  order='pre'")


def test_sizes_that_do_not_add_up_are_refused_with_both_sizes():
    cases = [
        (
            lambda: TransformerBlock(MultiHeadAttention(AttentionSizes(13, 3, key=4, output=17)), FeedForward(17, 5)),
            (13, 17),
        ),
        (lambda: TransformerBlock(MultiHeadAttention(12, 3), FeedForward(13, 5)), (12, 13)),
        (
            lambda: TransformerBlock(MultiHeadAttention(12, 3), FeedForward(12, 5), cross=MultiHeadAttention(14, 2)),
            (12, 14),
        ),
    ]
    for build, sizes in cases:
        with pytest.raises(ConfigError) as caught:
            build()
        assert isinstance(caught.value, ValueError)
        assert all(str(size) in str(caught.value) for size in sizes)
        assert caught.value.asked
        assert caught.value.instead
    for words in ({"order": "middle"}, {"shortcut": "none"}):
        with pytest.raises(ConfigError) as caught:
            make(**words)
        assert caught.value.because


def test_a_block_with_a_second_text_needs_it():
    block, x = make(cross=True), torch.randn(2, 7, 24)
    for words in ({}, {"cross_cache": CrossCache()}):
        with pytest.raises(InputError, match="needs a context") as caught:
            block(x, **words)
        assert caught.value.asked
