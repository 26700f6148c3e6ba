"""Predicted beside measured: how far the lower bound of `cost(...).roofline()` is from what things take here.

python -m benchmarks.roofline [--seconds S] [--refresh] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import Watch, describe
from regard import Attention, Causal, Window
from regard.cost_model.machine import this_machine
from regard.cost_model.measuring import Comparison, compare
from regard.cost_model.roofline import duration
from regard.models import GPT, GPTConfig, ViT, ViTConfig

HEADS, DIM = 8, 64
NEAR, FAR = 0.95, 2.0  # times the lower bound, outside of which a row is explained


@dataclass(frozen=True)
class Case:
    """What is run, with which words, and what the bound leaves out where it is far off."""

    name: str
    target: Any
    words: dict[str, Any]
    why: str


def cases() -> Iterator[Case]:
    """Models first: one waits for memory, the other for multiply-adds; then attention alone."""
    gpt = GPT(GPTConfig.gpt2()).eval()
    for tokens in (128, 1023):
        words = {"step": "decode", "tokens": tokens}
        yield Case(f"GPT-2 decode, {tokens} cached", gpt, words, "some hundred calls of operators between the matrices")
    yield Case("GPT-2 forward, 128 tokens", gpt, {"tokens": 128}, "products of 128 rows, and logits for all of them")
    vit = ViT(ViTConfig(dim=384, layers=12, heads=6)).eval()
    for batch in (1, 8):
        yield Case(f"ViT-S forward, batch {batch}", vit, {"batch": batch}, "products, gelu and softmax below the peak")
    sizes = {"heads": HEADS, "dim": DIM}
    for pattern, lengths in ((None, (512, 2048)), (Causal(), (512, 2048)), (Window(128, 128), (4096, 16384))):
        for tokens in lengths:
            name = f"{pattern or 'dense'}, {tokens} tokens"
            for backend in (None, "native"):
                words = {"tokens": tokens, "backend": backend, **sizes}
                kind = "the mathematics" if backend is None else "the kernel's tiles"
                yield Case(f"{name}: {kind}", Attention(pattern=pattern), words, "exponentials, and tiles' edges")
    causal = Attention(pattern=Causal())
    yield Case(
        "Causal(), 512 tokens, training", causal, {"tokens": 512, "step": "training", **sizes}, "scores made twice"
    )
    yield Case("Causal(), 4096 cached, decode", causal, {"tokens": 4096, "step": "decode", **sizes}, "one small call")
    tiny = {"tokens": 16, "heads": 1, "dim": 16}
    yield Case("dense, 16 tokens, one head", Attention(), tiny, "a call costs more than what it calls")


def row(name: str, found: Comparison) -> str:
    measured, predicted = found.measured, found.predicted
    cells = (
        f"{duration(predicted.seconds):>9} {predicted.bound:>8} {duration(measured.median):>9} {measured.spread:>7.0%}"
    )
    rates = f"{found.flops_per_second / 1e9:>7.1f} {found.bytes_per_second / 1e9:>6.1f}"
    return f"{name:<52}{cells} {found.ratio:>8.2f} {rates}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for the runs of each case")
    parser.add_argument("--refresh", action="store_true", help="measure the machine again")
    parser.add_argument("--out", type=Path, help="write the numbers there, as JSON")
    options = parser.parse_args()
    machine = this_machine(refresh=options.refresh)
    print(machine)
    print(f"\n{'':<52}{'at least':>9} {'bound':>8} {'median':>9} {'spread':>7} {'ratio':>8} {'GF/s':>7} {'GB/s':>6}")
    results: dict[str, Any] = {}
    far = []
    with Watch() as whole:
        for case in cases():
            with Watch() as watch:
                found = compare(case.target, machine=machine, seconds=options.seconds, **case.words)
            mark = "  ~" if watch.load.disturbed else ""
            print(row(case.name, found) + mark, flush=True)
            if not NEAR <= found.ratio <= FAR:
                far.append((case, found.ratio))
            results[case.name] = {
                "predicted": found.predicted.to_dict(),
                "median": found.measured.median,
                "quartiles": [found.measured.low, found.measured.high],
                "repeats": found.measured.repeats,
                "ratio": found.ratio,
                "disturbed": watch.load.disturbed,
            }
    print("\nratio: measured / lower bound. ~: others used the machine meanwhile.", whole.load)
    for case, ratio in far:
        below = "below the bound: its bytes stayed in caches, or the machine was busy when it was measured"
        print(f"  {ratio:6.2f}  {case.name}: {case.why if ratio > 1 else below}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"machine": describe(), "limits": str(machine), "results": results}, indent=2)
        )


if __name__ == "__main__":
    main()
