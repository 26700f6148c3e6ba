"""Models of Regard in training mode, with dropout of attention weights: it changes no product and builds no square."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import cost
from regard.cost_model import flop_counter
from regard.models import Bert, BertConfig, SpatialConfig, SpatialTransformer, Transformer, TransformerConfig

IDS = torch.zeros(2, 13, dtype=torch.long)


def bert(dropout: float) -> Bert:
    return Bert(BertConfig(vocab_size=11, context_length=40, dim=12, layers=2, heads=3, dropout=dropout)).train()


def transformer(dropout: float) -> Transformer:
    config = TransformerConfig(vocab_size=11, dim=12, layers=1, heads=3, hidden_dim=20, dropout=dropout)
    return Transformer(config).train()


# A model, its inputs, their sizes, and how many attentions it has.
MODELS: dict[str, tuple[Any, tuple[torch.Tensor, ...], dict[str, int], int]] = {
    "bert": (bert, (IDS,), {"batch": 2, "tokens": 13}, 2),
    "transformer": (transformer, (IDS, IDS[:, :7]), {"batch": 2, "tokens": 7, "context_tokens": 13}, 3),
}


def count_flops(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    with flop_counter() as counter:
        output = model(*inputs)
        every = output if isinstance(output, tuple) else (output,)
        sum(each.sum() for each in every if each is not None).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["bert", pytest.param("transformer", marks=pytest.mark.slow)])
def test_dropout_of_attention_weights_costs_a_seed_for_each_attention(name: str) -> None:
    make, inputs, sizes, attentions = MODELS[name]
    without, dropped = (cost(make(dropout), step="training", **sizes) for dropout in (0.0, 0.25))
    for quantity in ("parameters", "macs", "pairs", "exponentials", "depth"):
        assert (without.quantity(quantity).formula - dropped.quantity(quantity).formula).expand() == 0, quantity
    for quantity in ("bytes", "activation_bytes"):
        assert dropped.quantity(quantity) - without.quantity(quantity) == 8 * attentions
    recomputed = 2 * dropped.pairs * 4  # the kernels compute the scores of 4 channels again in backward
    assert dropped.flops + recomputed == count_flops(make(0.25), inputs)


def test_separable_heads_with_dropout_multiply_with_every_weight() -> None:
    """Weights of single pairs are dropped, so that they are no product over rows and columns any more."""
    sizes: dict[str, Any] = {"image": (8, 12), "dim": 16, "layers": 1, "heads": 3, "hidden_dim": 24, "dropout": 0.0}
    models = [SpatialTransformer(SpatialConfig(attention_dropout=p, **sizes)).train() for p in (0.0, 0.25)]
    separable, dropped = (cost(each, batch=2, step="training") for each in models)
    pixels = 4 * 6
    assert separable.pairs == dropped.pairs == 2 * 3 * pixels**2
    assert dropped.exponentials == dropped.pairs
    assert dropped.macs - separable.macs == 3 * 2 * 3 * 16 * (pixels**2 - pixels * (4 + 6))
    # The kernels multiply with queries of 4 channels that are zero, in backward.
    assert dropped.flops + 2 * dropped.pairs * 4 == count_flops(models[1], (torch.zeros(2, 3, 8, 12),))
