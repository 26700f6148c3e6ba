"""Blocks that are split over processes: outputs and gradients of every model are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from regard import Alibi, Attention, Causal, Gaussian, Quadratic, RelativeTable, TransformerXL
from regard.biases import Bias
from regard.errors import ConfigError
from regard.models import (
    GPT,
    Bert,
    BertConfig,
    GPTConfig,
    ResNet,
    ResNetConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from regard.models.tensor_parallel import Split, split_model
from tests.distributed.processes import Processes

BIASES: dict[str, Any] = {
    "alibi": lambda: Alibi(4),
    "table": lambda: RelativeTable(4, 5),
    "quadratic": lambda: Quadratic(4),
    "gaussian": lambda: Gaussian(4),
    "shared": lambda: RelativeTable(1, 5),
    "content": lambda: TransformerXL(4, 4),
}


def build(name: str) -> tuple[Any, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    tokens = torch.randint(1, 20, (2, 7))
    if name == "gpt":
        return GPT(GPTConfig(vocab_size=20, context_length=8, dim=16, layers=2, heads=4)), (tokens,)
    if name in BIASES:
        config = GPTConfig(
            vocab_size=20, context_length=8, dim=16, layers=2, heads=4, position="none",
            attention=Attention(bias=BIASES[name]()),
        )  # fmt: skip
        return GPT(config), (tokens,)
    if name == "bert":
        return Bert(BertConfig(vocab_size=20, context_length=8, dim=16, layers=2, heads=4, hidden_dim=24)), (tokens,)
    if name == "vit":
        config = ViTConfig(image=(8, 8), patch=4, dim=16, layers=2, heads=4, classes=5)
        return ViT(config), (torch.randn(2, 3, 8, 8, dtype=torch.float64),)
    config = TransformerConfig(vocab_size=20, dim=16, layers=2, heads=4, hidden_dim=24)
    return Transformer(config), (tokens, tokens.flip(1))


def first_tensor(made: Any) -> Tensor:
    return next(each for each in tree_leaves(made) if isinstance(each, Tensor))


def run_split(rank: int, size: int, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    model, inputs = build(name)
    model = model.double().eval()
    splits = split_model(model, dist.group.WORLD) if size > 1 else {}
    output = first_tensor(model(*inputs))
    output.square().sum().backward()
    grads = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        parts = [torch.empty_like(parameter.grad) for _ in range(size)]
        if key in splits:
            dist.all_gather(parts, parameter.grad.contiguous())
        grads[key] = splits[key].join(parts) if key in splits else parameter.grad
    return output.detach(), grads


@pytest.mark.parametrize("name", ["gpt", "bert", "vit", "transformer", *BIASES])
def test_outputs_and_gradients(two: Processes, name: str) -> None:
    expected, grads = run_split(0, 1, name)
    for output, found in two.run(run_split, name=name):
        torch.testing.assert_close(output, expected, atol=1e-10, rtol=1e-10)
        assert found.keys() == grads.keys()
        for key, grad in grads.items():
            torch.testing.assert_close(found[key], grad, atol=1e-9, rtol=1e-9)


def test_parts_of_a_joint_projection() -> None:
    whole = torch.arange(24.0).reshape(12, 2)
    split = Split(0, (4, 4, 4))
    parts = [split.take(whole, rank, 2) for rank in (0, 1)]
    assert parts[0][:, 0].tolist() == [0, 2, 8, 10, 16, 18]
    assert torch.equal(split.join(parts), whole)


class OwnBias(Bias):
    """A bias of a user's, whose heads are nowhere but in its code."""

    heads = 4

    def scores(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return torch.arange(4.0).reshape(4, 1, 1) * (query_position - key_position)


@pytest.mark.parametrize("name", [name for name in BIASES if name not in ("shared", "content")])
def test_some_heads_of_a_bias(name: str) -> None:
    bias = BIASES[name]().double()
    i, j = torch.arange(7)[:, None], torch.arange(5)
    expected = bias.scores(i, j)[1:3]
    bias.keep_heads(1, 3)
    assert torch.equal(bias.double().scores(i, j), expected)
    assert bias.heads == 2


def refuse(rank: int, size: int, heads: int, position: str, kind: str) -> str:
    if kind == "resnet":
        model: Any = ResNet(ResNetConfig(classes=3))
    else:
        model = GPT(GPTConfig(vocab_size=9, context_length=8, dim=12, layers=1, heads=heads))
        if position == "own":
            layer = model.blocks[0].attention
            layer.attention = Attention(pattern=Causal(), bias=OwnBias())
    with pytest.raises(ConfigError) as failure:
        split_model(model, dist.group.WORLD)
    return str(failure.value)


@pytest.mark.parametrize(
    ("heads", "position", "kind", "words"),
    [(3, "learned", "gpt", "cannot be shared evenly"), (4, "own", "gpt", "how to cut it is not known"),
     (2, "learned", "resnet", "no layer to split")],
)  # fmt: skip
def test_what_is_refused(two: Processes, heads: int, position: str, kind: str, words: str) -> None:
    for text in two.run(refuse, heads=heads, position=position, kind=kind):
        assert words in text
