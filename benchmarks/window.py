"""A sliding window on the CPU: against its peers at one length, and how time and memory grow with length.

python -m benchmarks.window [--rounds N] [--flex] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.flex import compiled_flex, window
from benchmarks.peers import Form, chunked_window, masked_sdpa
from benchmarks.timing import race
from regard import Window, attend, plan

REACH, HEADS, DIM, TOKENS = 128, 8, 64, 4096
LENGTHS = [4096, 8192, 16384, 32768, 65536]
PATTERN = Window(REACH, REACH)


def tensors(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, tokens, DIM, requires_grad=True) for _ in range(3)]


def useful_gflop(tokens: int) -> float:
    """Operations on allowed pairs only: four per pair, head and dimension."""
    return 4 * DIM * HEADS * PATTERN.pairs(tokens) / 1e9


def versus_peers(rounds: int, with_flex: bool) -> dict:
    """Everyone on the same inputs, checked against each other, then timed in turn."""
    query, key, value = tensors(TOKENS)
    grad_output = torch.randn(query.shape)
    prepared: dict[str, Form] = {
        "regard blocked": lambda *qkv: attend(*qkv, pattern=PATTERN, backend="blocked"),
        "chunked SDPA, 64": chunked_window(TOKENS, REACH, 64),
        "chunked SDPA, 128": chunked_window(TOKENS, REACH, 128),
        "SDPA, mask": masked_sdpa(PATTERN, TOKENS),
    }
    forms: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(form, query, key, value) for name, form in prepared.items()
    }
    truth = attend(query.double(), key.double(), value.double(), pattern=PATTERN, backend="reference").detach()
    for name, form in forms.items():
        error = float((form().detach() - truth).abs().max())
        assert error < 1e-5, f"{name} is wrong by {error}"

    def forward(form: Callable[[], Tensor]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return form()

        return run

    def both(form: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(form(), (query, key, value), grad_output)

    forwards = {name: forward(form) for name, form in forms.items()}
    if with_flex:
        forwards["FlexAttention, compiled"] = _make_flex(query, key, value)
    report = {}
    for what, runners, factor in (
        ("forward", forwards, 1.0),
        ("forward + backward", {name: both(form) for name, form in forms.items()}, 3.5),
    ):
        timings = race(runners, rounds=rounds)
        mine = timings["regard blocked"].median
        print(f"\n{what}: Window({REACH}, {REACH}), {TOKENS:,} tokens, {HEADS} heads of {DIM}, float32")
        for name, timing in sorted(timings.items(), key=lambda item: item[1].median):
            rate = factor * useful_gflop(TOKENS) / timing.median * 1e3
            print(f"  {name:<24} {timing}   {rate:6.1f} useful GF/s   {timing.median / mine:5.2f} x ours")
        report[what] = {name: vars(timing) | {"ratio": timing.median / mine} for name, timing in timings.items()}
    return report


def _make_flex(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
    form = compiled_flex(TOKENS, window(REACH))
    return functools.partial(form, *(tensor.detach() for tensor in (query, key, value)))


def peak_memory() -> float:
    """The largest resident set of this process in GiB. (getrusage would report the parent's, which exec inherits.)"""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def one_length(tokens: int) -> None:
    """Run in a process of its own, so that its peak memory is its own."""
    query, key, value = tensors(tokens)
    attend(*(tensor[:, :, :512] for tensor in (query, key, value)), pattern=PATTERN, backend="blocked").sum().backward()
    begin = time.perf_counter()
    plan(PATTERN, tokens, block=64)
    planned = time.perf_counter() - begin
    before = peak_memory()
    times = []
    for _ in range(4):
        query.grad = key.grad = value.grad = None
        begin = time.perf_counter()
        attend(query, key, value, pattern=PATTERN, backend="blocked").sum().backward()
        times.append(time.perf_counter() - begin)
    peak = peak_memory()
    found = {"tokens": tokens, "seconds": sorted(times[1:])[1], "plan": planned, "peak": peak, "grew": peak - before}
    print(json.dumps(found))


def growth() -> dict:
    """Time and memory of forward and backward from 4k to 64k tokens, and the exponent of growth."""
    print(f"\nforward + backward, growth with length: Window({REACH}, {REACH}), {HEADS} heads of {DIM}, float32")
    print("   tokens   seconds   plan s   peak GiB   dense scores GiB")
    rows = []
    for tokens in LENGTHS:
        command = [sys.executable, "-m", "benchmarks.window", "--one", str(tokens)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows.append(row)
        dense = 4 * HEADS * tokens**2 / 2**30
        print(f"  {tokens:7,} {row['seconds']:9.3f} {row['plan']:8.3f} {row['peak']:10.2f} {dense:18.1f}", flush=True)
    x = [math.log(row["tokens"]) for row in rows]
    y = [math.log(row["seconds"]) for row in rows]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    exponent = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    exponent /= sum((a - middle_x) ** 2 for a in x)
    print(f"  seconds grow as tokens ** {exponent:.3f}")
    return {"rows": rows, "exponent": exponent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--flex", action="store_true", help="also compile FlexAttention (forward only; takes a while)")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/window.json"))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_length(options.one)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    report = {"peers": versus_peers(options.rounds, options.flex), "growth": growth()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))
    print(f"\nsaved {options.out}")


if __name__ == "__main__":
    main()
