"""`part.add_to(residual, x)` is `residual + part(x)`, in one pass where that changes nothing that anyone can see."""

import copy

import pytest
import torch
import torch.nn.functional as F

from regard.kernels import library
from regard.kernels.linear import run_gemm
from regard.layers import FeedForward, MultiHeadAttention, TransformerBlock, linear
from regard.layers.channels import ChannelAttention
from regard.layers.feedforward import PLAIN
from regard.layers.linear import Linear
from regard.layers.windows import WindowAttention
from regard.models import DaViT, DaViTConfig

DIM = 24
PARTS = {
    "attention": lambda: MultiHeadAttention(DIM, 3),
    "channels": lambda: ChannelAttention(DIM, 3),
    "windows": lambda: WindowAttention(DIM, 3, 4),
    "windows over the edge": lambda: WindowAttention(DIM, 3, 5),
    **{name: lambda name=name: FeedForward(DIM, 40, name) for name in (*PLAIN, "swiglu")},
}


def tokens(part, *, batch=2):
    make = torch.Generator().manual_seed(3)
    shape = (batch, 8, 12, DIM) if isinstance(part, WindowAttention) else (batch, 67, DIM)
    return torch.randn(shape, generator=make), torch.randn(shape, generator=make)


@pytest.fixture(params=PARTS.values(), ids=PARTS)
def part(request):
    torch.manual_seed(1)
    return request.param().eval()


@pytest.mark.parametrize("grad", [False, True])
def test_a_part_is_added(part, grad):
    x, residual = tokens(part)
    with torch.set_grad_enabled(grad):
        assert torch.allclose(part.add_to(residual, x), residual + part(x), rtol=1e-5, atol=2e-6)


def test_gradients_are_those_of_the_sum(part):
    twin = copy.deepcopy(part)
    x, residual = tokens(part)
    x.requires_grad_()
    other = x.detach().clone().requires_grad_()
    part.add_to(residual, x).square().sum().backward()
    (residual + twin(other)).square().sum().backward()
    assert torch.allclose(x.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_a_hook_on_a_part_sees_the_part_without_the_residual(part):
    x, residual = tokens(part)
    seen = []
    part.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        made = part.add_to(residual, x)
    assert len(seen) == 1
    assert torch.equal(made, residual + seen[0])


def test_a_hook_on_the_last_layer_of_a_part_is_called(part):
    x, residual = tokens(part)
    last = next(getattr(part, name) for name in ("output", "outer", "proj") if hasattr(part, name))
    last.register_forward_hook(lambda module, inputs, output: output * 0)
    with torch.no_grad():
        assert torch.equal(part.add_to(residual, x), residual)


def test_a_subclass_that_overrides_forward_is_called_itself():
    class Silent(FeedForward):
        def forward(self, x):
            return x * 0

    with torch.no_grad():
        x, residual = tokens(None)
        assert torch.equal(Silent(DIM, 40).eval().add_to(residual, x), residual)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_block_is_the_same_with_and_without_gradients(order):
    torch.manual_seed(2)
    block = TransformerBlock(MultiHeadAttention(DIM, 3), FeedForward(DIM, 40), order=order, dropout=0.2).eval()
    x, _ = tokens(block)
    with torch.no_grad():
        fused = block(x)
    assert torch.allclose(fused, block(x), rtol=1e-5, atol=2e-6)


def test_a_block_drops_while_training():
    torch.manual_seed(2)
    block = TransformerBlock(MultiHeadAttention(DIM, 3), FeedForward(DIM, 40), dropout=0.5).train()
    x, _ = tokens(block)
    with torch.no_grad():
        assert not torch.equal(block(x), block(x))


def make_davit():
    torch.manual_seed(4)
    return DaViT(DaViTConfig(classes=7, dims=(24, 48), heads=(3, 3), depths=(1, 2), window=4)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_davit_is_the_same_with_and_without_gradients(dtype):
    model, images = make_davit().to(dtype), torch.randn(3, 3, 44, 68, dtype=dtype)
    with torch.no_grad():
        fused = model(images)
    assert torch.allclose(fused, model(images), rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("name", ["position1", "norm1"])
def test_a_hook_on_a_position_or_a_norm_of_davit_is_called(name):
    model, images = make_davit(), torch.randn(1, 3, 36, 52)
    seen = []
    getattr(model.stages[0].blocks[0], name).register_forward_hook(lambda *inputs: seen.append(inputs))
    with torch.no_grad():
        model(images)
    assert len(seen) == 1


INSIDE, OUTSIDE, ROWS = 397, 379, 53  # enough for gemm


@pytest.fixture
def layer():
    torch.manual_seed(5)
    return Linear(INSIDE, OUTSIDE).requires_grad_(False)


@pytest.mark.skipif(library.missing() is not None, reason="there are no native kernels")
def test_a_residual_is_fused_where_it_fits_and_added_where_not(layer, monkeypatch):
    fused = []

    def noted(x, weight, bias, activation, residual):
        fused.append(residual)
        return run_gemm(x, weight, bias, activation, residual)

    monkeypatch.setattr(linear, "run_gemm", noted)
    x, residual = torch.randn(2, ROWS, INSIDE), torch.randn(2, ROWS, OUTSIDE)
    expected = F.linear(x, layer.weight, layer.bias) + residual
    made = linear.linear(x, layer.weight, layer.bias, residual=residual)
    assert (made - expected).abs().max() < 1e-4
    strided = residual.mT.contiguous().mT
    assert torch.equal(linear.linear(x, layer.weight, layer.bias, residual=strided), made)
    assert [each is None for each in fused] == [False, False]
    # Another dtype, a row for all, a gradient: the same numbers, added by torch.
    wide = linear.linear(x, layer.weight, layer.bias, residual=residual.double())
    assert wide.dtype == torch.float64
    assert (wide - expected).abs().max() < 1e-4
    one = linear.linear(x, layer.weight, layer.bias, residual=residual[0, :1])
    assert (one - (expected - residual + residual[0, :1])).abs().max() < 1e-4
    learning = residual.clone().requires_grad_()
    linear.linear(x, layer.weight, layer.bias, residual=learning).sum().backward()
    assert torch.equal(learning.grad, torch.ones_like(residual))
    assert fused[2:] == [None] * 3


def test_a_residual_is_added_to_few_rows(layer):
    x, residual = torch.randn(3, INSIDE), torch.randn(3, OUTSIDE)
    made = linear.linear(x, layer.weight, layer.bias, "relu", residual)
    assert (made - (F.linear(x, layer.weight, layer.bias).relu() + residual)).abs().max() < 1e-4
