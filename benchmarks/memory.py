"""Predicted peaks of memory beside measured ones, for the six models at two sizes.

python -m benchmarks.memory [--only TEXT] [--system]

Predictions run nothing. Measured is what torch's CPU allocator reports to the profiler
(tests/cost_model/allocator.py), or, with --system, what the kernel says a process of its own came to hold (VmHWM),
less what it held before the run: that also counts scratch of matrix libraries, packed weights and tiles of our
kernels, and what the C library does not give back. A case that is off by more than 10 % of the allocator's number is
marked, and the exit status tells.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

BAR = 0.10
MOST_SYSTEM_SECONDS = 300
Case = tuple["nn.Module", tuple["Tensor", ...], dict[str, Any]]


def cases() -> dict[str, Callable[[], Case]]:
    """Each of the six models, small and larger; with the dropout that it has by default."""
    import torch

    from regard.models import (
        GPT,
        Bert,
        BertConfig,
        DaViT,
        DaViTConfig,
        GPTConfig,
        SpatialConfig,
        SpatialTransformer,
        Transformer,
        TransformerConfig,
        ViT,
        ViTConfig,
    )

    def text(model: Callable[[], nn.Module], batch: int, tokens: int) -> Callable[[], Case]:
        return lambda: (model(), (torch.randint(0, 997, (batch, tokens)),), {"batch": batch, "tokens": tokens})

    def texts(model: Callable[[], nn.Module], batch: int, tokens: int, others: int) -> Callable[[], Case]:
        sizes = {"batch": batch, "tokens": tokens, "context_tokens": others}
        return lambda: (model(), tuple(torch.randint(0, 997, (batch, size)) for size in (others, tokens)), sizes)

    def images(model: Callable[[], nn.Module], batch: int, *image: int) -> Callable[[], Case]:
        return lambda: (model(), (torch.randn(batch, 3, *image),), {"batch": batch, "image": image})

    sizes = {"vocab_size": 997, "context_length": 1024}
    grown = {"vocab_size": 50257, "context_length": 1024}
    return {
        "GPT 4 x 256": text(lambda: GPT(GPTConfig(**sizes, dim=256, layers=4, heads=4)), 4, 509),
        "GPT-2 small": text(lambda: GPT(GPTConfig(**grown)), 1, 509),
        "GPT llama 4 x 256": text(lambda: GPT(GPTConfig.llama(**sizes, dim=256, layers=4, heads=4)), 4, 509),
        "Bert mini": text(lambda: Bert(BertConfig.bert("mini")), 4, 251),
        "Bert medium": text(lambda: Bert(BertConfig.bert("medium")), 4, 383),
        "Transformer 3 x 256": texts(
            lambda: Transformer(TransformerConfig(vocab_size=997, dim=256, layers=3, heads=4, hidden_dim=1024)),
            4,
            257,
            383,
        ),
        "Transformer base": texts(lambda: Transformer(TransformerConfig.base()), 2, 131, 197),
        "ViT Ti/16": images(lambda: ViT(ViTConfig.vit("Ti/16")), 4, 224, 224),
        "ViT S/16": images(lambda: ViT(ViTConfig.vit("S/16")), 4, 224, 224),
        "DaViT 48": images(lambda: DaViT(DaViTConfig(dims=(48, 96, 192, 384), heads=(3, 6, 12, 24))), 2, 224, 160),
        "DaViT tiny": images(lambda: DaViT(DaViTConfig.variant("tiny")), 4, 224, 224),
        "Spatial quadratic": images(lambda: SpatialTransformer(SpatialConfig()), 8, 32, 32),
        "Spatial content": images(lambda: SpatialTransformer(SpatialConfig(position="content")), 2, 32, 32),
    }


def predicted(case: Case, step: str) -> int:
    from regard.cost_model import cost

    model, _, sizes = case
    return int(cost(model, **sizes).memory.peak(step))


def measured(case: Case, step: str) -> int:
    from tests.cost_model.allocator import forward_peak, training_peak

    model, inputs, _ = case
    return (forward_peak if step == "forward" else training_peak)(model, inputs)


def measured_by_system(name: str, step: str) -> int | None:
    """The same by a process of its own, or nothing where there is no /proc."""
    command = [sys.executable, "-m", "benchmarks.memory", "--alone", name, "--step", step]
    found = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SYSTEM_SECONDS, check=False)
    last = found.stdout.strip().split("\n")[-1]
    return int(last) if found.returncode == 0 and last.isdecimal() else None


def run_alone(name: str, step: str) -> None:
    """Print resident bytes and the growth of this process's high-water mark, together."""
    from tests.cost_model.allocator import resident_bytes, run_forward, run_training, state_bytes

    model, inputs, _ = cases()[name]()
    resident = resident_bytes(model, inputs)
    if step == "forward":
        run = run_forward(model, inputs)
        run()
        state = 0
    else:
        run, optimizer = run_training(model, inputs)
        run()
        model.zero_grad()
        state = state_bytes(optimizer)
    before = held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
    run()
    print(resident + state + held("VmHWM") - before)


def held(what: str) -> int:
    lines = Path("/proc/self/status").read_text().split("\n")
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument(
        "--system", action="store_true", help="also measure the resident memory, in a process of its own"
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--step", default="forward", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        run_alone(args.alone, args.step)
        return 0
    warnings.simplefilter("ignore")
    print(
        f"{'model':<20} {'step':<9} {'predicted':>14} {'measured':>14} {'off':>8}" + (" " * 9 + "system") * args.system
    )
    lost = 0
    for name, make in cases().items():
        if args.only not in name:
            continue
        case = make()
        for step in ("forward", "training"):
            prediction, measurement = predicted(case, step), measured(case, step)
            off = prediction / measurement - 1
            lost += abs(off) > BAR
            line = f"{name:<20} {step:<9} {prediction:>14,} {measurement:>14,} {off:>+8.2%}"
            if args.system:
                system = measured_by_system(name, step)
                line += f" {'-' if system is None else format(system, ','):>14}"
            print(line + ("   off by more than 10 %" if abs(off) > BAR else ""), flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
