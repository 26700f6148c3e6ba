"""Attention over several processes equals attention on one: every pattern, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Alibi,
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridWindow,
    Mask,
    Neighborhood,
    Padding,
    Quadratic,
    Random,
    RelativeTable,
    Segments,
    Selected,
    Strided,
    TransformerXL,
    Where,
    Window,
    attend,
)
from regard.distributed import SequenceLayout, context_parallel, count_traffic, exchange, ring_attend
from regard.errors import RegardError
from regard.models import GPT, GPTConfig
from tests.distributed.processes import Processes

TOKENS = 48


def make_inputs(tokens: int, heads: int = 4, kv_heads: int = 2, batch: int = 2, dtype: Any = torch.float64) -> list:
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 6), (heads, 6))  # query, key, value, gradient of the output
    return [torch.randn(batch, h, tokens, d, generator=generator, dtype=torch.float64).to(dtype) for h, d in shapes]


def run_ring(
    rank: int, size: int, tokens: int, kind: str, options: dict, sizes: dict | None = None, piece: int = 256
) -> dict[str, Any]:
    """One process's part: output, gradients, and how much it sent. `piece`: most keys of a message, if it is small."""
    exchange.PIECE_TOKENS = piece
    exchange.plan_exchange.cache_clear()
    layout = SequenceLayout(tokens, size, kind)
    *inputs, grad = (layout.take(each, rank) for each in make_inputs(tokens, **(sizes or {})))
    inputs = [each.clone().requires_grad_() for each in inputs]
    bias = options.get("bias")
    if isinstance(bias, Tensor):
        bias = bias if bias.shape[-2] == 1 else layout.take(bias, rank)
        options = options | {"bias": bias.clone().requires_grad_()}
    with count_traffic() as traffic:
        output = ring_attend(*inputs, layout=layout, **options)
        output.backward(grad)
    bias = options.get("bias")
    parameters = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias.parameters())
    learned = [each.grad for each in parameters]
    return {"output": output.detach(), "grads": [each.grad for each in inputs], "sent": traffic.sent,
            "learned": learned}  # fmt: skip


def run_whole(tokens: int, options: dict, sizes: dict | None = None) -> tuple[Tensor, list[Tensor]]:
    *inputs, grad = make_inputs(tokens, **(sizes or {}))
    inputs = [each.clone().requires_grad_() for each in inputs]
    output = attend(*inputs, **options)
    output.backward(grad)
    return output.detach(), [each.grad for each in inputs if each.grad is not None]


def compare(
    processes: Processes, tokens: int, kind: str, options: dict, sizes: dict | None = None, tolerance=1e-11, piece=256
) -> list[dict[str, Any]]:
    made = processes.run(run_ring, tokens=tokens, kind=kind, options=options, sizes=sizes, piece=piece)
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


def mark_slow(names: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """All but a few are slow tests: more of the same."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_on_two_processes(two: Processes, name: str) -> None:
    compare(two, TOKENS, "contiguous", {"pattern": PATTERNS[name]})
    compare(two, TOKENS, "zigzag", {"pattern": PATTERNS[name]})


@pytest.mark.parametrize("name", mark_slow(PATTERNS, fast=("causal", "sinks", "segments", "heads")))
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


@pytest.mark.parametrize("tokens", [1, 5])
def test_linear_attention_waits_for_processes_without_tokens(four: Processes, tokens: int) -> None:
    for kind in ("contiguous", "zigzag"):
        for name in ("causal", "full"):
            compare(four, tokens, kind, {"pattern": PATTERNS[name], "feature_map": "elu1"})


@pytest.mark.parametrize(
    "name", ["full", "causal", "sinks", "global", "strided", "segments", "random", "neighbourhood"]
)
def test_keys_travel_in_small_pieces(four: Processes, name: str) -> None:
    for kind in ("contiguous", "zigzag"):
        for piece in (1, 5):
            compare(four, 47 if name in ("full", "causal", "sinks", "strided") else TOKENS, kind,
                    {"pattern": PATTERNS[name]}, piece=piece)  # fmt: skip


# Biases


def sum_learned(made: list[dict[str, Any]]) -> list[Tensor]:
    return [torch.stack(grads).sum(0) for grads in zip(*(each["learned"] for each in made), strict=True)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Alibi(4),
        lambda: RelativeTable(4, 6),
        lambda: Quadratic(4, grid=(6, 8)),
        lambda: TransformerXL(4, 8),
    ],
)
def test_biases_speak_of_positions_in_the_whole(two: Processes, make: Any) -> None:
    """Kernels read a table of them; what reads queries and keys goes through tiles of torch."""
    torch.manual_seed(0)
    bias = make().double()
    options = {"bias": bias, "pattern": Causal() & Window(20, 0)}
    expected = [each.detach().clone() for each in bias.parameters()]
    for kind in ("contiguous", "zigzag"):
        bias.zero_grad()
        made = compare(two, TOKENS, kind, options)
        whole = [each.grad.clone() if each.grad is not None else torch.zeros_like(each) for each in bias.parameters()]
        for mine, other in zip(sum_learned(made), whole, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-10, rtol=1e-10)
    assert len(expected) == len(list(bias.parameters()))


@pytest.mark.parametrize("shape", [(2, 4, TOKENS, TOKENS), (1, 1, TOKENS, TOKENS), (4, 1, TOKENS), (2, 1, 1, TOKENS)])
def test_a_tensor_as_bias_has_own_rows_and_all_columns(two: Processes, shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = bias.clone().requires_grad_()
    *inputs, grad = make_inputs(TOKENS)
    attend(*inputs, bias=whole, pattern=Causal()).backward(grad)
    for kind in ("contiguous", "zigzag"):
        made = compare(two, TOKENS, kind, {"bias": bias, "pattern": Causal()})
        learned = [each["learned"][0] for each in made]
        layout = SequenceLayout(TOKENS, 2, kind)
        found = sum(learned) if bias.shape[-2] == 1 else layout.join(learned)
        torch.testing.assert_close(found, whole.grad, atol=1e-11, rtol=1e-11)


def run_mixed(rank: int, size: int) -> tuple[Tensor, Tensor]:
    layout = SequenceLayout(24, size)
    wholes = make_inputs(24, dtype=torch.float32)
    query, key, value, grad = (layout.take(each, rank) for each in wholes)
    value = value.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = ring_attend(query, key, value, pattern=Causal(), layout=layout)
    output.backward(grad.bfloat16())
    assert value.grad is not None
    return output.detach(), value.grad


def test_dtypes_that_autocast_made_differ(two: Processes) -> None:
    query, key, value, grad = make_inputs(24, dtype=torch.float32)
    value = value.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(query, key, value, pattern=Causal())
    output.backward(grad.bfloat16())
    made = two.run(run_mixed)
    layout = SequenceLayout(24, 2)
    for number, expected in enumerate((output.detach(), value.grad)):
        joined = layout.join([each[number] for each in made])
        assert joined.dtype == torch.bfloat16
        torch.testing.assert_close(joined, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("make", [lambda: Alibi(4), lambda: RelativeTable(4, 6), lambda: Quadratic(4, grid=(6, 8))])
def test_a_bias_beside_masks_of_single_heads(two: Processes, make: Any) -> None:
    torch.manual_seed(0)
    bias = make().double()
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    for kind in ("contiguous", "zigzag"):
        bias.zero_grad()
        made = compare(two, TOKENS, kind, {"bias": bias, "pattern": PATTERNS["heads"]})
        whole = [each.grad for each in bias.parameters()]
        for mine, other in zip(sum_learned(made), whole, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-10, rtol=1e-10)


# NaN


def run_nonfinite(rank: int, size: int, which: int, number: float, options: dict) -> dict[str, Any]:
    layout = SequenceLayout(TOKENS, size, "zigzag")
    *inputs, grad = (layout.take(each, rank) for each in make_nonfinite(which, number))
    inputs = [each.clone().requires_grad_() for each in inputs]
    output = ring_attend(*inputs, layout=layout, **options)
    output.backward(grad)
    return {"output": output.detach(), "grads": [each.grad for each in inputs]}


def make_nonfinite(which: int, number: float) -> list[Tensor]:
    inputs = make_inputs(TOKENS)
    inputs[which][1, 0, 7, 2] = number
    return inputs


@pytest.mark.parametrize("options", [{"pattern": Causal()}, {"pattern": Window(2, 2), "scale": torch.inf}])
@pytest.mark.parametrize(("which", "number"), [(0, torch.nan), (1, torch.inf), (2, torch.nan)])
def test_what_is_not_finite_reaches_those_who_see_it(two: Processes, which: int, number: float, options: dict) -> None:
    made = two.run(run_nonfinite, which=which, number=number, options=options)
    *inputs, grad = make_nonfinite(which, number)
    inputs = [each.clone().requires_grad_() for each in inputs]
    output = attend(*inputs, backend="reference", **options)
    output.backward(grad)
    assert bool(output.isnan().any())
    layout = SequenceLayout(TOKENS, 2, "zigzag")
    joined = layout.join([each["output"] for each in made])
    torch.testing.assert_close(joined, output.detach(), atol=1e-11, rtol=1e-11, equal_nan=True)
    for place, each in enumerate(inputs):
        expected = torch.zeros_like(each) if each.grad is None else each.grad
        found = layout.join([part["grads"][place] for part in made])
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11, equal_nan=True)


# Queries and keys of two sequences


def run_crossed(rank: int, size: int, queries: int, kinds: tuple[str, str], options: dict) -> dict[str, Any]:
    layouts = SequenceLayout(queries, size, kinds[0]), SequenceLayout(TOKENS, size, kinds[1])
    inputs, grad = take_crossed(queries, layouts, rank)
    output = ring_attend(*inputs, layout=layouts[0], key_layout=layouts[1], **options)
    output.backward(grad)
    return {"output": output.detach(), "grads": [each.grad for each in inputs]}


def take_crossed(queries: int, layouts: tuple[SequenceLayout, ...], rank: int) -> tuple[list[Tensor], Tensor]:
    query, key, value, grad = make_inputs(TOKENS)
    parts = [layouts[0].take(each[:, :, :queries], rank) for each in (query, grad)]
    parts[1:1] = [layouts[1].take(each, rank) for each in (key, value)]
    return [each.clone().requires_grad_() for each in parts[:3]], parts[3]


@pytest.mark.parametrize("kinds", [("contiguous", "contiguous"), ("zigzag", "contiguous")])
@pytest.mark.parametrize("options", [{"pattern": Causal()}, {"pattern": Window(9, 2)}, {"feature_map": "elu1"}, {}])
def test_queries_and_keys_of_two_sequences(two: Processes, kinds: tuple[str, str], options: dict) -> None:
    made = two.run(run_crossed, queries=19, kinds=kinds, options=options)
    one = SequenceLayout(19, 1), SequenceLayout(TOKENS, 1)
    inputs, grad = take_crossed(19, one, 0)
    output = attend(*inputs, **options)
    output.backward(grad)
    layouts = SequenceLayout(19, 2, kinds[0]), SequenceLayout(TOKENS, 2, kinds[1])
    joined = layouts[0].join([each["output"] for each in made])
    torch.testing.assert_close(joined, output.detach(), atol=1e-11, rtol=1e-11)
    for number, each in enumerate(inputs):
        found = layouts[min(number, 1)].join([part["grads"][number] for part in made])
        torch.testing.assert_close(found, each.grad, atol=1e-11, rtol=1e-11)


# What travels


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_a_window_sends_its_border_whatever_the_length(four: Processes, tokens: int) -> None:
    made = four.run(run_ring, tokens=tokens, kind="contiguous", options={"pattern": Causal() & Window(5, 0)})
    key = 2 * 2 * 5 * (8 + 6) * 8  # batch, key heads, keys of the border, channels of key and value, bytes
    assert [each["sent"].get("keys and values", 0) for each in made] == [2 * key, 2 * key, 2 * key, 0]
    assert [each["sent"].get("gradients", 0) for each in made] == [0, key, key, key]


def test_blocks_send_nothing(four: Processes) -> None:
    assert all(not each["sent"] for each in compare(four, TOKENS, "contiguous", {"pattern": Blocks(12)}))


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_what_no_other_process_takes_part_in_is_the_same_bits(two: Processes, precision: torch.dtype) -> None:
    """Queries that see only keys of their own process are computed as on one process, from tiles that begin alike."""
    sizes, options = {"dtype": precision}, {"pattern": Blocks(48)}
    made = compare(two, 192, "contiguous", options, sizes, tolerance=1e-5)
    output, grads = run_whole(192, options, sizes)
    layout = SequenceLayout(192, 2)
    assert torch.equal(layout.join([each["output"] for each in made]), output)
    for number, grad in enumerate(grads):
        assert torch.equal(layout.join([each["grads"][number] for each in made]), grad)


def test_a_causal_pattern_is_balanced_zigzag() -> None:
    """All processes have equally many pairs, to the diagonal, where in order the last one has most."""
    pairs = {}
    for kind in ("zigzag", "contiguous"):
        layout = SequenceLayout(512, 4, kind)
        pairs[kind] = []
        for rank in range(4):
            plan = exchange.plan_exchange(Causal(), layout, layout, rank)
            pieces = [plan.local, *(each.received for each in plan.transfers)]
            pairs[kind].append(sum(count_pairs(piece) for piece in pieces if piece is not None))
    assert len(set(pairs["zigzag"])) == 1
    assert sum(pairs["zigzag"]) == sum(pairs["contiguous"]) == Causal().pairs(512)
    assert pairs["contiguous"][-1] > 6 * pairs["contiguous"][0]


def count_pairs(piece: exchange.Piece) -> int:
    tokens = [sum(stop - start for start, stop in runs) for runs in (piece.queries, piece.keys)]
    return piece.pattern.pairs(*tokens)


# Refusals


def refuse(rank: int, size: int, **options: Any) -> str:
    layout = options.pop("layout", SequenceLayout(TOKENS, size))
    *inputs, _ = (SequenceLayout(TOKENS, size).take(each, rank) for each in make_inputs(TOKENS))
    with pytest.raises(RegardError) as failure:
        ring_attend(*inputs, layout=layout, **options)
    return str(failure.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool)}, "Mask(mask)"),
        ({"layout": SequenceLayout(TOKENS, 3)}, "2 processes in the group"),
        ({"layout": SequenceLayout(TOKENS + 6, 2)}, "not the part of this process"),
        ({"pattern": Segments([[0] * 24] * 2)}, "Segments does not fit"),
        ({"feature_map": "elu1", "pattern": Window(2, 2)}, "over several processes"),
        ({"pattern": PATTERNS["heads"], "bias": TransformerXL(4, 8)}, "differs between heads"),
    ],
)
def test_what_is_refused(two: Processes, options: dict, words: str) -> None:
    for text in two.run(refuse, **options):
        assert words in text
        assert "instead" in text


def test_a_second_derivative_is_refused(two: Processes) -> None:
    assert all(two.run(differentiate_twice))


def differentiate_twice(rank: int, size: int) -> bool:
    layout = SequenceLayout(8, size)
    *inputs, _ = (layout.take(each, rank).requires_grad_() for each in make_inputs(8))
    output = ring_attend(*inputs, layout=layout)
    (grad,) = torch.autograd.grad(output.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RegardError, match="differentiates once"):
        grad.sum().backward()
    return True


# Whole models


def run_model(rank: int, size: int, kind: str, config: dict, dropout_layers: bool) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=17, context_length=64, dim=16, layers=2, heads=4, **config)).double()
    if dropout_layers:
        for block in model.blocks:
            block.attention.dropout = 0.3
    tokens = torch.randint(0, 17, (2, 40), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(100 + rank)  # generators need not agree
    if size == 1:
        logits = model(tokens)
    else:
        layout = SequenceLayout(40, size, kind)
        with context_parallel(layout):
            logits = model(layout.take(tokens, rank, -1), positions=layout.positions(rank))
    logits.square().sum().backward()
    return logits.detach(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"position": "rotary", "kv_heads": 2, "norm": "rms", "feed_forward": "swiglu"},
        {"position": "alibi"},
        {"window": 6},
    ],
)
def test_a_model_runs_unchanged_on_its_part_of_the_tokens(two: Processes, kind: str, config: dict) -> None:
    made = two.run(run_model, kind=kind, config=config, dropout_layers=False)
    logits, grads = run_model(0, 1, kind, config, dropout_layers=False)
    joined = SequenceLayout(40, 2, kind).join([each[0] for each in made], dim=1)
    torch.testing.assert_close(joined, logits, atol=1e-10, rtol=1e-10)
    for name, grad in grads.items():
        torch.testing.assert_close(sum(each[1][name] for each in made), grad, atol=1e-9, rtol=1e-9)


def test_attention_dropout_draws_one_seed_for_all(two: Processes) -> None:
    """With other seeds the processes would drop other weights of the same attention."""
    made = two.run(run_model, kind="zigzag", config={}, dropout_layers=True)
    joined = SequenceLayout(40, 2, "zigzag").join([each[0] for each in made], dim=1)
    assert bool(torch.isfinite(joined).all())
    logits, _ = run_model(0, 1, "zigzag", {}, dropout_layers=True)
    torch.testing.assert_close(joined, logits, atol=1e-10, rtol=1e-10)  # rank 0 has the seed of one process
