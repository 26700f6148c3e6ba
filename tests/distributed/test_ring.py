"""Attention over several processes equals attention on one: every pattern, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridWindow,
    Mask,
    Neighborhood,
    Padding,
    Random,
    Segments,
    Selected,
    Strided,
    Where,
    Window,
    attend,
)  # fmt: skip
from regard.distributed import SequenceLayout, count_traffic, ring_attend
from tests.distributed.processes import Processes, start_processes

TOKENS = 48


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with start_processes(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with start_processes(4) as processes:
        yield processes


def make_inputs(tokens: int, heads: int = 4, kv_heads: int = 2, batch: int = 2, dtype: Any = torch.float64) -> list:
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 6), (heads, 6))  # query, key, value, gradient of the output
    return [torch.randn(batch, h, tokens, d, generator=generator, dtype=torch.float64).to(dtype) for h, d in shapes]


def run_ring(rank: int, size: int, tokens: int, kind: str, options: dict, sizes: dict | None = None) -> dict[str, Any]:
    """One process's part: output, gradients, and how much it sent."""
    layout = SequenceLayout(tokens, size, kind)
    *inputs, grad = (layout.take(each, rank) for each in make_inputs(tokens, **(sizes or {})))
    inputs = [each.clone().requires_grad_() for each in inputs]
    bias = options.get("bias")
    with count_traffic() as traffic:
        output = ring_attend(*inputs, layout=layout, **options)
        output.backward(grad)
    learned = [each.grad for each in bias.parameters()] if hasattr(bias, "parameters") else []
    return {"output": output.detach(), "grads": [each.grad for each in inputs], "sent": traffic.sent,
            "learned": learned}  # fmt: skip


def run_whole(tokens: int, options: dict, sizes: dict | None = None) -> tuple[Tensor, list[Tensor]]:
    *inputs, grad = make_inputs(tokens, **(sizes or {}))
    inputs = [each.clone().requires_grad_() for each in inputs]
    output = attend(*inputs, **options)
    output.backward(grad)
    return output.detach(), [each.grad for each in inputs if each.grad is not None]


def compare(processes: Processes, tokens: int, kind: str, options: dict, sizes: dict | None = None, tolerance=1e-11):
    made = processes.run(run_ring, tokens=tokens, kind=kind, options=options, sizes=sizes)
    output, grads = run_whole(tokens, options, sizes)
    layout = SequenceLayout(tokens, processes.size, kind)
    torch.testing.assert_close(layout.join([each["output"] for each in made]), output, atol=tolerance, rtol=tolerance)
    for number, expected in enumerate(grads):
        joined = layout.join([each["grads"][number] for each in made])
        torch.testing.assert_close(joined, expected, atol=tolerance, rtol=tolerance)
    return made


def only_even(i: Tensor, j: Tensor) -> Tensor:
    return (i + j) % 2 == 0


IDS = [[0] * 20 + [1] * 7 + [2] * 21, [0] * 3 + [1] * 40 + [-1] * 5]
MASK = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.3
PATTERNS = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & Window(5, 0),
    "both sides": Window(3, 9),
    "dilated": Window(6, 6, step=3),
    "long window": Causal() & Window(30, 0),
    "sinks": Causal() & (Window(4, 0) | First(2)),
    "global": Window(2, 2) | First(3) | Selected([17, 40]),
    "strided": Causal() & Strided(5),
    "blocks": Blocks(12),
    "odd blocks": Blocks(7),
    "not": Causal() & ~Window(4, 0),
    "segments": Segments(IDS) & Causal(),
    "padding": Padding([31, 48]),
    "left padding": Padding([31, 48], side="left") & Causal(),
    "neighbourhood": Neighborhood((6, 8), 2),
    "grid windows": GridWindow((6, 8), 3),
    "axial": Axial((6, 8)),
    "random": Random(6, seed=2),
    "where": Where(only_even),
    "mask": Mask(MASK),
    "heads": Mask(MASK.expand(2, 4, -1, -1).clone().logical_xor(torch.arange(4)[:, None, None] == 2)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_on_two_processes(two: Processes, name: str) -> None:
    compare(two, TOKENS, "contiguous", {"pattern": PATTERNS[name]})
    compare(two, TOKENS, "zigzag", {"pattern": PATTERNS[name]})


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_on_four_processes(four: Processes, name: str) -> None:
    compare(four, TOKENS, "zigzag", {"pattern": PATTERNS[name]})
    compare(four, TOKENS, "contiguous", {"pattern": PATTERNS[name]})


@pytest.mark.parametrize("tokens", [1, 3, 5, 13, 61])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_lengths_that_do_not_divide(four: Processes, tokens: int, kind: str) -> None:
    """Also fewer tokens than processes: some have none."""
    for pattern in (Causal(), Window(2, 1), Blocks(3)):
        compare(four, tokens, kind, {"pattern": pattern})


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales(two: Processes, scale: float) -> None:
    compare(two, 21, "zigzag", {"pattern": Causal(), "scale": scale})


@pytest.mark.parametrize("pattern", [Causal(), Causal() & (Window(9, 0) | First(2)), Segments(IDS)])
def test_dropout_is_the_mask_of_one_process(four: Processes, pattern: Any) -> None:
    for kind in ("contiguous", "zigzag"):
        compare(four, TOKENS, kind, {"pattern": pattern, "dropout": 0.4, "dropout_seed": 11})


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_lower_precisions(two: Processes, precision: torch.dtype) -> None:
    tolerance = 2e-6 if precision == torch.float32 else 2e-2
    compare(two, TOKENS, "zigzag", {"pattern": Causal()}, {"dtype": precision}, tolerance=tolerance)


@pytest.mark.parametrize("feature_map", ["elu1", "relu"])
@pytest.mark.parametrize("name", ["full", "causal", "padding", "left padding"])
def test_linear_attention_sends_sums(four: Processes, feature_map: str, name: str) -> None:
    for kind in ("contiguous", "zigzag"):
        made = compare(four, TOKENS, kind, {"pattern": PATTERNS[name], "feature_map": feature_map})
        assert set(made[0]["sent"]) == {"gather"}
