"""Decoding of GPT-2, 124 million parameters, one token after the other: the prompt is not counted.

All engines run in turn, and memory is read before and after each of ours: the bandwidth of a shared machine changes
from minute to minute. Every round has its own ratios; their medians count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.decode_peers import Decode, make_ctranslate2, make_llama_cpp, make_regard, make_transformers
from benchmarks.machine import Watch
from benchmarks.results import OURS, Result, Verdict
from benchmarks.timing import Timing
from regard.kernels.bandwidth import measure_bandwidth
from regard.models import GPT, explain_decoding

PROMPT, NEW_TOKENS = 128, 128
FLOAT32 = "GPT-2 124M, decode, float32"
IDLE = "processor time of a loaded model that waits"


def measure_float32(args: argparse.Namespace) -> Result:
    """Ours, CTranslate2, llama.cpp and transformers with float32 weights, and the bound by memory."""
    transformers = __import__("transformers")
    torch.manual_seed(0)
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    ours = GPT.from_checkpoint(peer.config.to_dict(), peer.state_dict()).eval().requires_grad_(False)
    prompt = torch.randint(1, 50257, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    makers: dict[str, Callable[[], Decode]] = {
        "CTranslate2 float32": lambda: make_ctranslate2(peer, prompt, NEW_TOKENS),
        "llama.cpp float32": lambda: make_llama_cpp(peer, prompt, NEW_TOKENS),
        "transformers": lambda: make_transformers(peer, prompt, NEW_TOKENS),
    }
    bars = {"CTranslate2 float32": 1.2, "llama.cpp float32": 1.2, "transformers": 2.0}
    result = Result(FLOAT32, f"batch 1, greedy, {PROMPT} tokens read before, {NEW_TOKENS} written; random weights")
    explained = explain_decoding(ours, tokens=PROMPT + NEW_TOKENS // 2)
    runs = {OURS: make_regard(ours, prompt, NEW_TOKENS)} | build(makers, result)
    race_decoding(result, runs, explained.weight_bytes, args, bars, share_bar=0.80)
    result.notes.append(str(explained).splitlines()[0])
    result.verdicts.append(measure_idle())
    return result


def build(makers: dict[str, Callable[[], Decode]], result: Result) -> dict[str, Decode]:
    """The engines that run here; the others are named in the result."""
    runs = {}
    for name, make in makers.items():
        try:
            runs[name] = make()
        except Exception as reason:  # an engine of others that fails must not hide the rest
            result.absent[name] = f"{type(reason).__name__}: {reason}"
    return runs


def race_decoding(
    result: Result,
    runs: dict[str, Decode],
    weight_bytes: int,
    args: argparse.Namespace,
    bars: dict[str, float],
    share_bar: float | None,
) -> None:
    """Run all engines in turn; fill in timings for each token, notes and verdicts."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    bandwidths, shares, tokens = [], [], {}
    for run in runs.values():
        run()
    begin, rounds = time.perf_counter(), 0
    with Watch() as watch:
        while rounds < args.rounds or time.perf_counter() - begin < args.seconds:
            names = list(runs)
            for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
                before = measure_bandwidth(seconds=0.1) if name == OURS else 0.0
                spent, tokens[name] = runs[name]()
                seconds[name].append(spent)
                if name == OURS:
                    around = (before + measure_bandwidth(seconds=0.1)) / 2
                    bandwidths.append(around)
                    shares.append(weight_bytes / around / spent)
            rounds += 1
    result.load = watch.load
    for name, each in seconds.items():
        low, median, high = (
            1e3 * q for q in (statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3)
        )
        result.timings[name] = Timing(median, low, high, len(each))
    result.groups = {name: name for name in runs if name != OURS}
    rates = ", ".join(f"{name} {1 / statistics.median(each):.1f}" for name, each in seconds.items())
    result.notes.append(f"tokens/s: {rates}")
    bandwidth = statistics.median(bandwidths)
    bound = bandwidth / weight_bytes
    result.notes.append(
        f"bound by memory: {bound:.1f} tokens/s, {weight_bytes / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s "
        f"({min(bandwidths) / 1e9:.1f} to {max(bandwidths) / 1e9:.1f}), read beside each run; shares of it: "
        + ", ".join(f"{name} {1 / statistics.median(each) / bound:.2f}" for name, each in seconds.items())
    )
    same = {name: sum(a == b for a, b in zip(made, tokens[OURS], strict=False)) for name, made in tokens.items()}
    result.notes.append(
        f"tokens of {NEW_TOKENS} as ours: " + ", ".join(f"{name} {n}" for name, n in same.items() if name != OURS)
    )
    result.verdicts = [Verdict(result.name, "share of memory bandwidth", statistics.median(shares), share_bar)]
    for name, bar in bars.items():
        if name in runs:
            ratio = statistics.median(b / a for a, b in zip(seconds[OURS], seconds[name], strict=True))
            result.verdicts.append(Verdict(result.name, name, ratio, bar, by=name))
        else:
            result.verdicts.append(Verdict(result.name, name, None, bar, why=result.absent[name]))


def measure_idle(wait: float = 2.0) -> Verdict:
    """Seconds of processor time in a second of waiting, after threads have gone to sleep."""
    time.sleep(0.3)
    begin, own = time.perf_counter(), time.process_time()
    time.sleep(wait)
    used = (time.process_time() - own) / (time.perf_counter() - begin)
    return Verdict(FLOAT32, IDLE, used, 0.005, by="seconds a second", at_least=False)
