"""Costs on several devices: equal to what real processes send, to the byte; their memory within a tenth."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import pytest
import sympy
import torch

from regard import Attention, Causal, First, Full, Mask, Strided, Window, cost
from regard.cli import main
from regard.cost_model import ParallelCost
from regard.cost_model.parallel.ring_traffic import find_ring_tokens
from regard.cost_model.symbols import size_symbols
from regard.distributed import SequenceLayout
from regard.errors import CostError
from regard.models import GPT, GPTConfig
from tests.cost_model.parallel_runs import count_ring, count_step, make_model, measure_peak
from tests.distributed.processes import Processes

SMALL = {"vocab_size": 101, "context_length": 32, "dim": 48, "layers": 3, "heads": 4}  # 101 rows are padded
EVEN = {**SMALL, "vocab_size": 96}
WINDOW = {**EVEN, "window": 3}
GROUPED = {**EVEN, "kv_heads": 2, "layers": 2}
RATES = {"link_gbps": 8, "device_tflops": 0.001}  # 10^9 bytes and 10^9 FLOPs a second
K, c, N = size_symbols("K c N")


@pytest.fixture(params=[2, 4])
def processes(request: pytest.FixtureRequest) -> Processes:
    return request.getfixturevalue({2: "two", 4: "four"}[request.param])


@functools.cache
def _trace(config: tuple, batch: int, tokens: int, param_dtype: torch.dtype | None) -> ParallelCost:
    strategy = {} if param_dtype is None else {"strategy": "fsdp", "param_dtype": param_dtype}
    return cost(make_model(**dict(config)), batch=batch, tokens=tokens, devices=2, **strategy)


def predict(config: dict, batch: int, tokens: int, param_dtype: Any = None, **options: Any) -> ParallelCost:
    """One trace for all the ways in which a step is spread."""
    return _trace(tuple(config.items()), batch, tokens, param_dtype).using(**options)


def sum_payloads(found: ParallelCost) -> dict[str, int]:
    """By kind, of what is not ring attention."""
    total: dict[str, int] = {}
    for each in found.collectives:
        if not each.is_attention:
            total[each.kind] = total.get(each.kind, 0) + found.payload_by_collective[each.name].value
    return total


# Bytes


@pytest.mark.parametrize("config", [SMALL, EVEN], ids=["padded", "even"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_payloads_of_collectives_are_those_of_real_processes(processes: Processes, strategy: str, config: dict) -> None:
    found = predict(config, 2, 16, devices=processes.size, strategy=strategy)
    for made in processes.run(count_step, config=config, strategy={"strategy": strategy}, batch=2, tokens=16):
        layers = config["layers"]
        assert made["payload"] == sum_payloads(found)
        if config is EVEN:
            assert made["parameters"] == found.memory["parameters"]
        if strategy == "tensor":
            assert made["calls"] == {"all-reduce": 4 * layers}
        if strategy == "fsdp":
            assert made["calls"] == {"all-gather": 2 * layers + 1, "reduce-scatter": layers + 1}
            assert sum(each.calls for each in found.collectives).subs(found.values) == 3 * layers + 2


def test_mixed_precision_gathers_half_and_reduces_in_float32(two: Processes) -> None:
    options = {"strategy": "fsdp", "param_dtype": torch.bfloat16}
    found = predict(EVEN, 2, 16, devices=2, **options)
    plain = predict(EVEN, 2, 16, devices=2, strategy="fsdp")
    for made in two.run(count_step, config=EVEN, strategy=options, batch=2, tokens=16):
        assert made["payload"] == sum_payloads(found)
    assert 2 * found.sent_by_collective["parameters"].value == plain.sent_by_collective["parameters"].value
    assert found.sent_by_collective["gradients"] == plain.sent_by_collective["gradients"]
    assert found.memory["parameters"] == plain.memory["parameters"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tcp_info is read as Linux lays it out")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sockets_send_what_rings_send(processes: Processes, strategy: str) -> None:
    """The factors of the collectives, on the wire; gloo's own headers come on top, some 50 bytes for each message."""
    config = {**EVEN, "dim": 96}
    found = predict(config, 2, 16, devices=processes.size, strategy=strategy)
    expected = found.sent.value
    if strategy == "fsdp":  # gloo reduces and scatters by an all-reduce
        expected += found.sent_by_collective["gradients"].value
    for made in processes.run(count_step, config=config, strategy={"strategy": strategy}, batch=2, tokens=16):
        assert expected <= made["sockets"] <= 1.02 * expected


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (EVEN, {"strategy": "context"}),
        (GROUPED, {"strategy": "context"}),
        (WINDOW, {"strategy": "context", "layout": "contiguous"}),
        (EVEN, {"strategy": "ddp", "context": 2}),
        (WINDOW, {"strategy": "fsdp", "context": 2, "recompute": True}),
    ],
)
def test_ring_attention_of_a_model_sends_what_is_predicted(four: Processes, config: dict, options: dict) -> None:
    found = predict(config, 2, 32, devices=4, **options)
    made = four.run(count_step, config=config, strategy=options, batch=2, tokens=32)
    names = {
        "keys and values": ("keys and values", "keys and values again"),
        "gradients": ("gradients of keys and values",),
    }
    rings = {each.name: each.by_device for each in found.collectives if each.is_attention}
    shared = found.strategy.shared_by
    for rank, each in enumerate(made):
        expected = {kind: sum(rings[name][rank % shared] for name in several) for kind, several in names.items()}
        assert each["ring"] == {kind: size for kind, size in expected.items() if size}
        assert each["payload"] == sum_payloads(found)
    for name, quantity in found.sent_by_collective.items():
        if name in rings:
            assert quantity == max(rings[name])
            assert quantity.formula.free_symbols


PATTERNS = {
    "full": {"pattern": Full()},
    "causal": {"pattern": Causal()},
    "window": {"pattern": Window(5, 0)},
    "both sides": {"pattern": Window(3, 7)},
    "sinks": {"pattern": Causal() & (Window(4, 0) | First(2))},
    "strided": {"pattern": Causal() & Strided(5)},
    "hard": {"pattern": Causal(), "scale": float("inf")},
    "heads": {"pattern": Mask(torch.rand(4, 53, 53, generator=torch.Generator().manual_seed(0)) < 0.1)},
    "linear": {"pattern": Causal(), "feature_map": "elu1"},
    "linear, taylor": {"pattern": Full(), "feature_map": "taylor2"},
}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("tokens", [48, 53])
def test_every_pattern_sends_what_is_predicted(processes: Processes, name: str, layout: str, tokens: int) -> None:
    if name == "heads" and tokens != 53:
        pytest.skip("the mask is of 53 tokens")
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "dim": 8, "value_dim": 6}
    found = cost(Attention(**PATTERNS[name]), tokens=tokens, devices=processes.size, strategy="context", layout=layout,
                 **sizes)  # fmt: skip
    made = processes.run(count_ring, tokens=tokens, layout=layout, sizes=sizes, options=PATTERNS[name])
    for rank, sent in enumerate(made):
        assert sum(sent.values()) == sum(each.by_device[rank] for each in found.collectives if each.is_attention)


def test_gradients_return_in_the_accumulation_dtype(two: Processes) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "dim": 8, "value_dim": 8, "dtype": torch.bfloat16}
    made = two.run(count_ring, tokens=16, layout="zigzag", sizes=sizes, options={"pattern": Full()})
    found = cost(Attention(pattern=Full()), tokens=16, devices=2, strategy="context", **sizes)
    assert [found.sent_by_collective[f"{each}keys and values"].value for each in ("", "gradients of ")] == [512, 1024]
    assert made[0] == {"keys and values": 2 * 512, "gradients": 1024}


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("processes", [2, 3, 8])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(6, 0), Window(1, 0)])
def test_closed_forms_of_what_travels(pattern: Any, processes: int, kind: str) -> None:
    for chunk in (8, 16):
        found = find_ring_tokens(pattern, SequenceLayout(2 * chunk * processes, processes, kind))
        assert found.most.free_symbols, (pattern, chunk)
    if pattern == Window(6, 0):
        assert N not in found.most.xreplace({c: sympy.Integer(processes)}).free_symbols or kind == "contiguous"
        assert max(found.sent) <= 12  # whatever the length is


def test_a_zigzag_is_balanced_and_chunks_in_order_are_not() -> None:
    causal = [find_ring_tokens(Causal(), SequenceLayout(64, 4, kind)).imbalance for kind in ("zigzag", "contiguous")]
    pairs = [sum(i + 1 for i in range(16 * rank, 16 * rank + 16)) for rank in range(4)]
    assert causal == pytest.approx([1.0, 4 * max(pairs) / sum(pairs)])
    window = find_ring_tokens(Window(5, 0), SequenceLayout(64, 4, "contiguous"))
    assert window.imbalance == pytest.approx(4 * 16 * 6 / Window(5, 0).pairs(64))


# Memory

WIDE = {"vocab_size": 512, "context_length": 512, "dim": 128, "layers": 6, "heads": 4}
LONG = {**WIDE, "dim": 64, "heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "batch", "tokens", "options"),
    [
        (WIDE, 2, 64, {"strategy": "ddp"}),
        (WIDE, 8, 256, {"strategy": "ddp"}),
        (WIDE, 1, 32, {"strategy": "fsdp"}),
        (WIDE, 2, 128, {"strategy": "fsdp"}),
        (WIDE, 8, 256, {"strategy": "fsdp"}),
        (WIDE, 8, 256, {"strategy": "fsdp", "recompute": True}),
        (WIDE, 2, 128, {"strategy": "fsdp", "param_dtype": torch.bfloat16}),
        (LONG, 2, 512, {"strategy": "context"}),
        (LONG, 2, 512, {"strategy": "fsdp", "context": 2}),
    ],
)
def test_peak_memory_of_a_process_is_within_a_tenth(
    processes: Processes, config: dict, batch: int, tokens: int, options: dict
) -> None:
    found = predict(config, batch, tokens, devices=processes.size, **options).peak.value
    made = max(processes.run(measure_peak, config=config, strategy=options, batch=batch, tokens=tokens))
    print(f"{processes.size} {options} {batch}x{tokens}: predicted {found:,} measured {made:,} {found / made - 1:+.1%}")
    assert found == pytest.approx(made, rel=0.1)


# Formulas


def test_formulas_are_those_of_the_textbooks() -> None:
    model, spread = make_model(**EVEN), predict(EVEN, 2, 16, devices=4, strategy="ddp", **RATES)
    size = 4 * sum(each.numel() for each in model.parameters())
    assert spread.sent == 2 * 3 * size // 4
    assert spread.memory["optimizer_state"] == 2 * size + 4 * len(list(model.parameters()))
    assert spread.sent.at({K: 1}) == 0
    sharded = predict(EVEN, 2, 16, devices=4, strategy="fsdp", **RATES)
    root = 4 * sum(each.numel() for name, each in model.named_parameters() if not name.startswith("blocks"))
    assert sharded.sent == 3 * (3 * size - root) // 4
    assert 4 * sharded.memory["parameters"].value == size


def test_times_add_up() -> None:
    found = predict(EVEN, 2, 16, devices=4, strategy="ddp", **RATES)
    times = {name: each.value for name, each in found.seconds.items()}
    assert times["communication"] == pytest.approx(found.sent.value / 1e9)
    assert times["compute"] == pytest.approx(found.cost.flops.value / 1e9)
    # All gradients fit one bucket, which is complete when backward is.
    assert times["exposed"] == pytest.approx(times["communication"])
    assert times["step"] == pytest.approx(times["compute"] + times["exposed"])
    assert found.efficiency == pytest.approx(times["compute"] / times["step"])
    large = found.at(width=4096, hidden=16384, layers=32, tokens=64)
    assert 0 < large.seconds["overlapped"] < large.seconds["communication"]
    endless = found.at(link_gbps=1e12)
    assert endless.efficiency == pytest.approx(1.0, abs=1e-6)


def test_tensor_parallelism_reduces_activations_four_times_in_a_block() -> None:
    found = predict(EVEN, 2, 16, devices=4, strategy="tensor", **RATES)
    assert found.sent == 2 * 3 * 4 * (4 * 3 * 2 * 16 * 48) // 4  # 4 of B N D numbers of 4 bytes in 3 blocks
    assert found.seconds["exposed"] == found.seconds["communication"]
    assert any("no run was compared" in note for note in found.notes)
    with pytest.raises(CostError, match="not known here"):
        _ = found.peak


def test_context_divides_activations_and_windows_send_the_same_however_long() -> None:
    found = predict(WINDOW, 2, 32, devices=4, strategy="context", **RATES)
    sent = found.sent_by_collective["keys and values"]
    assert N not in sent.formula.free_symbols
    assert found.at(tokens=2**20).sent_by_collective["keys and values"] == sent
    one = predict(WINDOW, 2, 32, devices=4, strategy="ddp", **RATES)
    assert 4 * found.memory["activations"].value == one.memory["activations"].value
    assert found.at(devices=8, tokens=64).memory["activations"] == found.memory["activations"]


def test_other_sizes_are_those_of_another_model() -> None:
    larger = {**EVEN, "dim": 96, "layers": 5, "heads": 8, "vocab_size": 128}
    here = predict(EVEN, 2, 16, devices=4, strategy="fsdp", **RATES)
    there = predict(larger, 2, 16, devices=8, strategy="fsdp", **RATES)
    again = here.at(width=96, layers=5, heads=8, vocab_size=128, hidden=384, devices=8)
    assert again.sent == there.sent
    for name, quantity in there.memory.items():
        if name != "optimizer_state":  # it counts the tensors, which are not a letter
            assert again.memory[name] == quantity, name
    assert again.efficiency.value == pytest.approx(there.efficiency.value)


# Showing and refusing


def test_it_is_shown_and_saved(tmp_path: Any) -> None:
    found = predict(EVEN, 2, 16, devices=4, strategy="fsdp", **RATES)
    text = str(found)
    assert all(words in text for words in ("fsdp on 4 devices", "reduce-scatter", "efficiency", "devices", "gathered"))
    saved = json.loads(found.to_json(str(tmp_path / "cost.json")))
    assert saved == json.loads((tmp_path / "cost.json").read_text())
    assert saved["sent"]["all"]["value"] == found.sent.value
    assert saved["strategy"]["devices"] == 4
    assert "fsdp on 4" in repr(found)
    symbolic = cost(make_model(**EVEN), devices=4)
    assert symbolic.sent == 4 * 2 * 3 * symbolic.cost.parameters.value // 4
    assert not symbolic.seconds["compute"].known  # neither a length nor a rate was given
    assert "4 devices" in str(symbolic)
    with pytest.raises(CostError, match="no size yet"):
        _ = symbolic.peak


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "devices is not a number of devices"),
        ({"devices": 8, "strategy": "zero"}, "no strategy 'zero'"),
        ({"devices": 8, "context": 3}, "8 devices cannot share sequences 3 by 3"),
        ({"devices": 8, "context": 0}, "context is not a number of devices"),
        ({"devices": 8, "strategy": "context", "context": 2}, "leaves no choice of context"),
        ({"devices": 8, "context": 2, "layout": "striped"}, "no layout 'striped'"),
        ({"devices": 8, "link_gbps": 0}, "link_gbps is not a rate"),
        ({"devices": 8, "step": "decode"}, "A decode step on several devices"),
        ({"devices": 8, "param_dtype": torch.bfloat16}, "ddp gathers no parameters"),
        ({"devices": 3, "strategy": "tensor", "tokens": 8}, "heads of GPT cannot be shared by 3 devices"),
        ({"link_gbps": 10}, r"There is no size 'link_gbps'(.|\n)*devices=8, link_gbps=10"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_four_parts(options: dict, words: str) -> None:
    model = GPT(GPTConfig(**EVEN))
    with pytest.raises(CostError, match=words) as caught:
        cost(model, **options)
    assert caught.value.because
    assert caught.value.instead


def test_a_model_without_attention_has_no_sequences_to_cut() -> None:
    with pytest.raises(CostError, match="no attention whose sequences could be cut"):
        cost(torch.nn.Linear(4, 4), inputs=((2, 4),), tokens=4, devices=2, strategy="context")


def test_other_numbers_are_checked() -> None:
    found = predict(EVEN, 2, 32, devices=4, strategy="ddp", context=2)
    with pytest.raises(CostError, match="9 devices cannot share sequences 2 by 2"):
        found.at(devices=9)
    with pytest.raises(CostError, match="for devices that share a sequence"):
        found.at(context=1)
    with pytest.raises(CostError, match="cannot be spread otherwise"):
        found.at(devices=8).using(strategy="fsdp")
    window = predict(WINDOW, 2, 32, devices=4, strategy="context")
    with pytest.raises(CostError, match="The window is a number"):
        window.at(window=9)
    with pytest.raises(CostError, match="windows that reach into one chunk"):
        window.at(tokens=16)


def test_the_command_line(capsys: pytest.CaptureFixture) -> None:
    words = ["cost", "Causal()", "--tokens", "64", "--dim", "8", "--heads", "2"]
    several = ["--devices", "4", "--strategy", "context", "--link-gbps", "8", "--device-tflops", "0.001"]
    assert main([*words, *several]) == 0
    assert "context on 4 devices" in capsys.readouterr().out
    assert main([*words, *several, "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["sent"]["keys and values"]["value"] == 3 * 16 * 2 * 16 * 4  # tokens, heads, key and value, bytes
    assert main([*words, "--link-gbps", "8"]) == 2
    assert "--link-gbps does not go without --devices" in capsys.readouterr().err
    assert main([*words, *several, "--depth"]) == 2
    assert "--depth does not go with --devices" in capsys.readouterr().err
    tiny = "regard.layers:MultiHeadAttention(16, 2)"
    assert main(["cost", tiny, "--tokens", "8", "--devices", "2", "--memory"]) == 0
    assert "Peak memory of a device" in capsys.readouterr().out
