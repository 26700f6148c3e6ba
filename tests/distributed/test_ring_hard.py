"""Hard attention over several processes equals hard attention on one, ties shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Alibi, Causal, attend
from regard.distributed import SequenceLayout, count_traffic, ring_attend
from tests.distributed.processes import Processes
from tests.distributed.test_ring import PATTERNS, TOKENS, compare, make_inputs, mark_slow, run_whole


def round_inputs(tokens: int, **sizes: Any) -> list:
    """Queries and keys of small whole numbers: many equal scores, on several processes too."""
    return [each.round() if number < 2 else each for number, each in enumerate(make_inputs(tokens, **sizes))]


def run_hard(rank: int, size: int, tokens: int, kind: str, options: dict) -> dict[str, Any]:
    layout = SequenceLayout(tokens, size, kind)
    *inputs, grad = (layout.take(each, rank) for each in round_inputs(tokens))
    inputs = [each.clone().requires_grad_() for each in inputs]
    bias = options.get("bias")
    if isinstance(bias, Tensor):
        options = options | {"bias": layout.take(bias, rank)}
    with count_traffic() as traffic:
        output = ring_attend(*inputs, layout=layout, **options)
        output.backward(grad)
    return {"output": output.detach(), "grads": [each.grad for each in inputs], "sent": traffic.sent}


HARD = {
    "causal": {"pattern": Causal()},
    "the worst": {"pattern": Causal(), "scale": -torch.inf},
    "sinks": {"pattern": PATTERNS["sinks"]},
    "padding": {"pattern": PATTERNS["padding"]},
    "heads": {"pattern": PATTERNS["heads"]},
    "alibi": {"pattern": Causal(), "bias": Alibi(4)},
    "tensor": {"bias": torch.randn(4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(5)).double()},
    "dropout": {"pattern": Causal(), "dropout": 0.4, "dropout_seed": 11},
}


@pytest.mark.parametrize("name", mark_slow(HARD, fast=("causal", "heads", "alibi", "dropout")))
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_hard_attention_shares_ties_over_processes(four: Processes, name: str, kind: str) -> None:
    options = {"scale": torch.inf} | HARD[name]
    made = four.run(run_hard, tokens=TOKENS, kind=kind, options=options)
    *inputs, grad = round_inputs(TOKENS)
    inputs = [each.clone().requires_grad_() for each in inputs]
    output = attend(*inputs, backend="reference", **options)
    output.backward(grad)
    layout = SequenceLayout(TOKENS, 4, kind)
    joined = layout.join([each["output"] for each in made])
    torch.testing.assert_close(joined, output.detach(), atol=1e-12, rtol=1e-12)
    for number, each in enumerate(inputs):
        found = layout.join([part["grads"][number] for part in made])
        expected = torch.zeros_like(each) if each.grad is None else each.grad
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_hard_attention_without_ties_copies_values(two: Processes) -> None:
    """The same bits as the values of the winners, wherever those are."""
    options = {"pattern": Causal(), "scale": torch.inf}
    made = compare(two, TOKENS, "zigzag", options)
    output = SequenceLayout(TOKENS, 2, "zigzag").join([each["output"] for each in made])
    assert torch.equal(output, run_whole(TOKENS, options)[0])
    assert made[0]["sent"]["keys and values"] == 2 * made[0]["sent"]["keys"] * (8 + 6) // 8  # forward and backward
