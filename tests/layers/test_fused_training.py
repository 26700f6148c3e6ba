"""Blocks that train by fused kernels give what their modules give one by one, and step back where they must."""

import copy
from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from regard import Alibi, Attention, Causal, Window
from regard.errors import BackendError
from regard.kernels import library, training
from regard.layers import FeedForward, MultiHeadAttention, Rotary, TransformerBlock, fused_training
from regard.layers.projections import AttentionSizes

FUSED = ("_Linear", "_Norm", "_FeedForward", "_ProjectHeads")


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    if (reason := library.missing()) is not None:
        pytest.skip(f"there are no native kernels: {reason}")
    monkeypatch.setattr(training, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(fused_training, "MIN_NUMBERS", 0)


def make_block(
    *,
    order: Literal["pre", "post"] = "pre",
    norm=nn.LayerNorm,
    cross=False,
    activation="gelu_tanh",
    dropout=0.0,
    **words,
):
    torch.manual_seed(3)
    sizes = words.pop("sizes", AttentionSizes(14, 2))
    block = TransformerBlock(
        MultiHeadAttention(sizes, **{"attention": Attention(pattern=Causal()), **words}),
        FeedForward(14, 23, activation),
        cross=MultiHeadAttention(14, 2) if cross else None,
        norm=norm,
        order=order,
        dropout=dropout,
    )
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.4)
    return block.double()


def run(block, x, **words):
    """Output and all gradients, and the names of the fused functions in the graph."""
    x = x.clone().requires_grad_()
    output = block(x, **words)
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    fused = {name for name in FUSED if any(node.name() == name + "Backward" for node in seen)}
    grad = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape).cos()
    asked = [x, *(p for p in block.parameters() if p.requires_grad)]
    return [output.detach(), *torch.autograd.grad(output, asked, grad)], fused


def run_plainly(block, x, monkeypatch, **words):
    with monkeypatch.context() as patch:
        patch.setattr(training, "MIN_PRODUCTS", 1 << 60)
        patch.setattr(fused_training, "MIN_NUMBERS", 1 << 60)
        made, fused = run(block, x, **words)
    assert not fused
    return made


def assert_alike(made, wanted, tolerance=1e-10):
    for mine, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * 10)


BLOCKS = {
    "GPT": {},
    "post": {"order": "post", "activation": "gelu"},
    "RMS, rotary": {
        "norm": nn.RMSNorm,
        "activation": "silu",
        "rotary": Rotary(6),
        "sizes": AttentionSizes(14, 4, 2, key=6),
    },
    "no biases": {"bias": False, "activation": "relu"},
    "some biases": {"bias": "qo"},
    "ALiBi, window": {"attention": Attention(pattern=Causal() & Window(3, 0), bias=Alibi(2))},
    "grouped, other values": {"sizes": AttentionSizes(14, 4, 2, key=5, value=3)},
    "gated": {"activation": "swiglu"},
    "cross": {"cross": True},
    "cross, post": {"cross": True, "order": "post"},
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("batch", [(2,), (2, 3), ()], ids=str)
def test_a_block_gives_what_its_modules_give_one_by_one(monkeypatch, name, batch):
    block, x = make_block(**BLOCKS[name]), torch.randn(*batch, 11, 14, dtype=torch.float64)
    words = {"context": torch.randn(*batch, 5, 14, dtype=torch.float64)} if block.cross is not None else {}
    made, fused = run(block, x, **words)
    assert fused == set(FUSED) - ({"_FeedForward"} if name == "gated" else set())
    assert_alike(made, run_plainly(block, x, monkeypatch, **words))


def test_a_block_in_float32_is_as_near_to_float64_as_its_modules(monkeypatch):
    block, x = make_block(), torch.randn(3, 40, 14, dtype=torch.float64)
    exact = run_plainly(block, x, monkeypatch)
    single = copy.deepcopy(block).float()
    plain = run_plainly(single, x.float(), monkeypatch)
    made, fused = run(single, x.float())
    assert fused == set(FUSED)
    for mine, theirs, truth in zip(made, plain, exact, strict=True):
        error = (mine.double() - truth).abs().max()
        # Another order of summation: a few times the error of torch's own, or the rounding of the largest number.
        assert error <= 4 * (theirs.double() - truth).abs().max() + 4e-7 * truth.abs().max()


def test_a_block_agrees_with_torch(monkeypatch):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(14, 2, 23, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64)
    ours = make_block(activation="gelu", attention=Attention())
    ours.attention = MultiHeadAttention.from_torch(theirs.self_attn)
    pairs = ((ours.feed_forward.inner, theirs.linear1), (ours.feed_forward.outer, theirs.linear2))
    pairs += ((ours.attention_norm, theirs.norm1), (ours.feed_forward_norm, theirs.norm2))
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())
    x = torch.randn(3, 11, 14, dtype=torch.float64)
    made, fused = run(ours, x)
    assert fused == set(FUSED)
    y = x.clone().requires_grad_()
    output = theirs(y)
    grad = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape).cos()
    torch.testing.assert_close(made[0], output, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made[1], torch.autograd.grad(output, y, grad)[0], rtol=1e-10, atol=1e-10)


def test_padded_rows_get_the_same_gradients(monkeypatch):
    block, x = (
        make_block(attention=Attention(pattern=Causal(), bias=Alibi(2))),
        torch.randn(3, 11, 14, dtype=torch.float64),
    )
    made, fused = run(block, x, lengths=torch.tensor([11, 4, 7]))
    assert fused == set(FUSED)
    assert_alike(made, run_plainly(block, x, monkeypatch, lengths=torch.tensor([11, 4, 7])))


def test_dropout_drops_the_same_in_both(monkeypatch):
    block, x = make_block(dropout=0.3), torch.randn(3, 11, 14, dtype=torch.float64)
    torch.manual_seed(5)
    made, fused = run(block, x)
    assert fused == set(FUSED)
    torch.manual_seed(5)
    assert_alike(made, run_plainly(block, x, monkeypatch))


def test_checkpointing_recomputes_the_same(monkeypatch):
    block, x = make_block(), torch.randn(3, 11, 14, dtype=torch.float64)
    made, _ = run(block, x)
    x = x.clone().requires_grad_()
    for reentrant in (False, True):
        output = checkpoint(block, x, use_reentrant=reentrant)
        grad = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape).cos()
        block.zero_grad()
        x.grad = None
        output.backward(grad)
        for mine, theirs in zip([x.grad, *(p.grad for p in block.parameters())], made[1:], strict=True):
            assert mine is not None
            assert torch.equal(mine, theirs)


def test_hooks_of_inner_modules_are_called():
    block, x = make_block(), torch.randn(2, 5, 14, dtype=torch.float64)
    names = [name for name, _ in block.named_modules() if name and name != "dropout"]
    for name in names:
        called = []
        hook = block.get_submodule(name).register_forward_hook(lambda *_, called=called: called.append(1))
        run(block, x)
        hook.remove()
        assert called or name == "feed_forward.dropout" or name == "attention.projections", name
        module = block.get_submodule(name)
        if any(True for _ in module.parameters()):
            hook = module.register_full_backward_hook(lambda *_, called=called: called.append(2))
            run(block, x)
            hook.remove()
            assert 2 in called, name


@pytest.mark.parametrize("name", ["feed_forward.inner", "feed_forward.outer", "attention.output"])
def test_a_parametrized_weight_is_the_one_that_is_used(monkeypatch, name):
    block, x = make_block(), torch.randn(2, 5, 14, dtype=torch.float64)
    weight_norm(block.get_submodule(name))
    made, _ = run(block, x)
    assert_alike(made, run_plainly(block, x, monkeypatch))


def test_a_subclass_of_a_norm_is_called():
    class Doubled(nn.LayerNorm):
        def forward(self, input):
            return 2 * super().forward(input)

    block, x = make_block(), torch.randn(2, 5, 14, dtype=torch.float64)
    plain = block(x)
    for name in ("attention_norm", "feed_forward_norm"):
        norm = Doubled(14, dtype=torch.float64)
        norm.load_state_dict(getattr(block, name).state_dict())
        setattr(block, name, norm)
    assert not torch.allclose(block(x), plain)


def test_autocast_compile_and_transforms_take_torchs_layers(monkeypatch):
    block, x = make_block().float(), torch.randn(2, 5, 14)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(block, x)[1] == set()
    parameters = dict(block.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(block, parameters, (x,)).square().sum()

    grads = torch.func.grad(loss)(parameters, x)
    block(x).square().sum().backward()
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-3)


def test_a_second_derivative_is_refused_by_the_attention_and_given_by_the_rest():
    block, x = make_block(), torch.randn(2, 5, 14, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(block(x).sin().sum(), x, create_graph=True)
    with pytest.raises(BackendError, match="differentiates once"):
        grad.sum().backward()
    made = fused_training.feed_forward_with_residual(block.feed_forward, x, block.feed_forward_norm)
    assert made is not None
    (grad,) = torch.autograd.grad(made.sin().sum(), x, create_graph=True)
    plain = x + block.feed_forward(block.feed_forward_norm(x))
    (wanted,) = torch.autograd.grad(plain.sin().sum(), x, create_graph=True)
    mine, theirs = (torch.autograd.grad(each.cos().sum(), x)[0] for each in (grad, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_any_number_of_threads_gives_the_same_bits():
    block, x = make_block().float(), torch.randn(7, 331, 14)
    before = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(run(block, x)[0])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, found[0], strict=True))
