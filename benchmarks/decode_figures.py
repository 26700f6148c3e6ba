"""Decoding of GPT-2 and SmolLM2, one token after the other: the prompt is not counted.

All engines run in turn, and memory is read before and after each of ours: the bandwidth of a shared machine changes
from minute to minute. Every round has its own ratios; their medians count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.decode_peers import (
    Decode,
    make_ctranslate2,
    make_llama_cpp,
    make_llama_cpp_from_file,
    make_regard,
    make_transformers,
)
from benchmarks.machine import Watch
from benchmarks.quantized_quality import compare_quality, find_text, measure_memory
from benchmarks.results import OURS, Result, Verdict
from benchmarks.timing import Timing
from regard import downloads
from regard.kernels.bandwidth import measure_bandwidth
from regard.models import GPT, explain_decoding
from regard.models.io.gguf import read_tokenizer

PROMPT, NEW_TOKENS = 128, 128
FLOAT32 = "GPT-2 124M, decode, float32"
INT8 = "GPT-2 124M, decode, int8"
SMOLLM2 = "SmolLM2-135M, decode, its Q4_1 file"
IDLE = "processor time of a loaded model that waits"
MEMORY = "memory of the process"


def measure_float32(args: argparse.Namespace) -> Result:
    """Ours, CTranslate2, llama.cpp and transformers with float32 weights, and the bound by memory."""
    peer, ours, prompt = _make_gpt2()
    makers: dict[str, Callable[[], Decode]] = {
        "CTranslate2 float32": lambda: make_ctranslate2(peer, prompt, NEW_TOKENS),
        "llama.cpp float32": lambda: make_llama_cpp(peer, prompt, NEW_TOKENS),
        "transformers": lambda: make_transformers(peer, prompt, NEW_TOKENS),
    }
    bars = {"CTranslate2 float32": 1.2, "llama.cpp float32": 1.2, "transformers": 2.0}
    result = Result(FLOAT32, f"batch 1, greedy, {PROMPT} tokens read before, {NEW_TOKENS} written; random weights")
    race_decoding(result, _build(ours, prompt, makers, result), ours, args, bars, share_bar=0.80)
    result.verdicts.append(measure_idle())
    return result


def measure_int8(args: argparse.Namespace) -> Result:
    """The same with weights in 8 bits, each engine in blocks or rows of its own."""
    peer, ours, prompt = _make_gpt2()
    with torch.no_grad():
        exact = ours(prompt)
        difference = (ours.quantize("int8")(prompt) - exact).abs().max() / exact.abs().max()
    makers: dict[str, Callable[[], Decode]] = {
        "llama.cpp q8_0": lambda: make_llama_cpp(peer, prompt, NEW_TOKENS, "q8_0"),
        "CTranslate2 int8": lambda: make_ctranslate2(peer, prompt, NEW_TOKENS, "int8"),
    }
    bars = {"llama.cpp q8_0": 1.3, "CTranslate2 int8": 2.0}
    result = Result(INT8, f"batch 1, greedy, {PROMPT} tokens read before, {NEW_TOKENS} written; random weights")
    race_decoding(result, _build(ours, prompt, makers, result), ours, args, bars, share_bar=None)
    result.notes.append(f"largest logit difference to float32: {difference:.1e} of the largest logit")
    result.notes += compare_quality("int8")
    return result


def measure_smollm2(args: argparse.Namespace) -> Result:
    """Ours and llama.cpp on one file of GGUF, which both run as it is stored."""
    file = downloads.find("smollm2")
    if file is None:
        return Result(SMOLLM2, failed="the file is not here: python -m regard.downloads smollm2")
    ours, tokenizer = GPT.from_pretrained(file, quantized=True), read_tokenizer(file)
    prompt = torch.tensor([tokenizer.encode(find_text()[:4000]).ids[:PROMPT]])
    makers = {"llama.cpp, same file": lambda: make_llama_cpp_from_file(file, prompt, NEW_TOKENS)}
    result = Result(SMOLLM2, f"batch 1, greedy, {PROMPT} tokens of a novel read before, {NEW_TOKENS} written")
    runs = _build(ours, prompt, makers, result)
    texts = {OURS: lambda made: tokenizer.decode(made, skip_special_tokens=False)}
    race_decoding(result, runs, ours, args, dict.fromkeys(makers, 1.0), share_bar=None, texts=texts)
    result.notes += compare_quality(None)
    memory = measure_memory(file) / file.stat().st_size
    result.verdicts.append(Verdict(SMOLLM2, MEMORY, memory, 1.3, by="times the file", at_least=False))
    return result


def _make_gpt2() -> tuple[torch.nn.Module, GPT, torch.Tensor]:
    """GPT-2 of transformers with random weights, ours with the same, and a prompt."""
    transformers = __import__("transformers")
    torch.manual_seed(0)
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    ours = GPT.from_checkpoint(peer.config.to_dict(), peer.state_dict()).eval().requires_grad_(False)
    return peer, ours, torch.randint(1, 50257, (1, PROMPT), generator=torch.Generator().manual_seed(1))


def _build(
    ours: GPT, prompt: torch.Tensor, makers: dict[str, Callable[[], Decode]], result: Result
) -> dict[str, Decode]:
    """Ours, and the engines that run here; the others are named in the result."""
    runs = {OURS: make_regard(ours, prompt, NEW_TOKENS)}
    for name, make in makers.items():
        try:
            runs[name] = make()
        except Exception as reason:  # an engine of others that fails must not hide the rest
            result.absent[name] = f"{type(reason).__name__}: {reason}"
    return runs


def race_decoding(
    result: Result,
    runs: dict[str, Decode],
    ours: GPT,
    args: argparse.Namespace,
    bars: dict[str, float],
    share_bar: float | None,
    texts: dict[str, Callable[[list[int]], str]] | None = None,
) -> None:
    """Run all engines in turn; fill in timings for each token, notes and verdicts.

    texts: how tokens become the text that is compared, for engines that give text.
    """
    explained = explain_decoding(ours, tokens=PROMPT + NEW_TOKENS // 2)
    weight_bytes = explained.weight_bytes
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
    made = {name: texts[name](found) if texts and name in texts else found for name, found in tokens.items()}
    unit = "characters" if texts else "tokens"
    same = {name: _count_equal(found, made[OURS]) for name, found in made.items() if name != OURS}
    result.notes.append(f"first {unit} of {len(made[OURS])} as ours: {', '.join(f'{k} {n}' for k, n in same.items())}")
    result.notes += str(explained).splitlines()
    result.verdicts = [Verdict(result.name, "share of memory bandwidth", statistics.median(shares), share_bar)]
    for name, bar in bars.items():
        if name in runs:
            ratio = statistics.median(b / a for a, b in zip(seconds[OURS], seconds[name], strict=True))
            result.verdicts.append(Verdict(result.name, name, ratio, bar, by=name))
        else:
            result.verdicts.append(Verdict(result.name, name, None, bar, why=result.absent[name]))


def _count_equal(some: Sequence, others: Sequence) -> int:
    """How far two sequences are the same."""
    pairs = zip(some, others, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


def measure_idle(wait: float = 2.0) -> Verdict:
    """Seconds of processor time in a second of waiting, after threads have gone to sleep."""
    time.sleep(0.3)
    begin, own = time.perf_counter(), time.process_time()
    time.sleep(wait)
    used = (time.process_time() - own) / (time.perf_counter() - begin)
    return Verdict(FLOAT32, IDLE, used, 0.005, by="seconds a second", at_least=False)


FIGURES: dict[str, Callable[[argparse.Namespace], Result]] = {
    FLOAT32: measure_float32,
    INT8: measure_int8,
    SMOLLM2: measure_smollm2,
}
