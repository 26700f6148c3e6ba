"""Blocks that fuse their residuals are traced, compiled and exported as they were."""

import pytest
import torch

from regard.layers import FeedForward, MultiHeadAttention, TransformerBlock
from regard.models import DaViT, DaViTConfig, ViT, ViTConfig

MODELS = {
    "block": lambda: (TransformerBlock(MultiHeadAttention(24, 3), FeedForward(24, 40)), torch.randn(2, 67, 24)),
    "vit": lambda: (
        ViT(ViTConfig(image=(8, 12), patch=4, classes=5, dim=8, layers=2, heads=2)),
        torch.randn(2, 3, 8, 12),
    ),
    "davit": lambda: (
        DaViT(DaViTConfig(classes=7, dims=(24, 48), heads=(3, 3), depths=(1, 1), window=3)),
        torch.randn(2, 3, 24, 48),
    ),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def case(request):
    torch.manual_seed(3)
    model, x = request.param()
    return model.eval().requires_grad_(False), x


def test_a_compiled_model_is_one_graph(case):
    model, x = case
    if isinstance(model, DaViT):
        pytest.skip("Dynamo cannot build the pattern of a window inside a graph")
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected, rtol=1e-4, atol=1e-5)


def test_an_exported_model_says_the_same(case):
    model, x = case
    exported = torch.export.export(model, (x,)).module()
    assert torch.allclose(exported(x), model(x), rtol=1e-4, atol=1e-5)
