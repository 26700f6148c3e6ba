"""Figures that compare us with the machine and with ourselves: decoding, sparse against dense, growth with length."""

from __future__ import annotations

import itertools
import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import Case
from benchmarks.check import assert_ours, outcome
from benchmarks.contest import Settings
from benchmarks.limits import READERS
from benchmarks.machine import Watch
from benchmarks.results import OURS, Result, Verdict
from benchmarks.timing import Run, race
from regard import Causal, Full, Window, attend

WINDOW, HEADS, DIM = Window(128, 128), 8, 64
LENGTHS = (4096, 8192, 16384, 32768, 65536)
CACHE_KEYS, CACHES = 16384, 5  # five caches of 64 MiB: when one comes round again, nothing of it is left in a cache


def decode(settings: Settings) -> Result:
    """One query over a cache: the time to read keys and values once, over our time.

    The readers read these very caches: which pages of memory a tensor got can alone make half the speed.
    """
    result = Result(
        DECODE, f"Causal(), batch 1, {HEADS} heads, 1 query, {CACHE_KEYS} keys, dim {DIM}, {CACHES} caches in turn"
    )
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, 1, DIM)
    caches = [torch.randn(2, 1, HEADS, CACHE_KEYS, DIM) for _ in range(CACHES)]
    turn = itertools.cycle(
        caches
    )  # shared by all competitors, so that none reads what another has just brought into the cache

    def ours() -> torch.Tensor:
        key, value = next(turn)
        return attend(query, key, value, pattern=Causal(), backend=settings.backend)

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(query, *next(turn))

    def read(name: str) -> Run:
        return lambda: READERS[name](next(turn).view(-1))

    key, value = caches[0]
    truth = attend(query.double(), key.double(), value.double(), pattern=Causal(), backend="reference")
    error = float((attend(query, key, value, pattern=Causal(), backend=settings.backend) - truth).abs().max())
    assert error <= 8 * torch.finfo(torch.float32).eps * math.sqrt(CACHE_KEYS), f"decoding is wrong by {error:.1e}"
    result.errors[OURS] = error
    runners = {OURS: ours, "SDPA": sdpa} | {f"read by {name}": read(name) for name in READERS}
    with Watch() as watch, torch.no_grad():
        result.timings = race(runners, rounds=settings.rounds, seconds=settings.seconds)
    result.load = watch.load
    best = min((f"read by {name}" for name in READERS), key=lambda name: result.timings[name].median)
    share = result.timings[best].median / result.timings[OURS].median
    result.verdicts = [Verdict(DECODE, "share of memory bandwidth", share, 0.70, by=best)]
    size = 4e-9 * caches[0].numel()
    rates = {name: size / timing.seconds for name, timing in result.timings.items()}
    result.notes = ["GB/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())]
    alone = rates[OURS] / settings.limits.read
    result.notes.append(f"of the best read at the start of the run, from other memory: {alone:.2f}")
    return result


def sparse_against_dense(settings: Settings) -> Result:
    """How much of our own dense rate is left in a sparse pattern, counting useful operations only."""
    cases = [
        Case("sparse", (1, HEADS, 4096, DIM), WINDOW, {}, list),
        Case("dense", (1, HEADS, 2048, DIM), Full(), {}, list),
    ]
    runners = {case.name: _make_runner(case, settings, check=True) for case in cases}
    result = Result(SPARSE)
    with Watch() as watch:
        result.timings = race(runners, rounds=settings.rounds, seconds=settings.seconds)
    result.load = watch.load
    sparse, dense = (case.gflop / result.timings[case.name].seconds for case in cases)
    result.verdicts = [Verdict(SPARSE, "own dense rate", sparse / dense, 0.65, by="dense")]
    result.notes = [f"useful GF/s: Window(128, 128) at 4096 {sparse:.1f}, dense 1x8x2048x64 {dense:.1f}"]
    return result


def growth(settings: Settings) -> Result:
    """The exponent of time over tokens, fitted to all lengths on logarithms."""
    cases = {tokens: Case(f"{tokens} tokens", (1, HEADS, tokens, DIM), WINDOW, {}, list) for tokens in LENGTHS}
    runners = {case.name: _make_runner(case, settings, check=False) for case in cases.values()}
    result = Result(GROWTH)
    with Watch() as watch:
        result.timings = race(runners, rounds=settings.rounds, seconds=settings.seconds)
    result.load = watch.load
    medians = {tokens: result.timings[case.name].median for tokens, case in cases.items()}
    exponent = _fit_slope({math.log(tokens): math.log(median) for tokens, median in medians.items()})
    result.verdicts = [Verdict(GROWTH, "exponent of tokens", exponent, 1.05, by="fit", at_least=False)]
    result.notes = [f"{'tokens':>8} {'ms':>9} {'us a token':>11} {'useful GF/s':>12}"]
    for tokens, median in medians.items():
        rate = cases[tokens].gflop / median * 1e3
        result.notes.append(f"{tokens:8,} {median:9.1f} {1e3 * median / tokens:11.2f} {rate:12.1f}")
    return result


def _make_runner(case: Case, settings: Settings, *, check: bool) -> Run:
    inputs = case.inputs()
    if check:
        assert_ours(case, outcome(case, lambda *qkv: case.attend(*qkv, settings.backend), inputs), inputs)
    query, key, value, _ = inputs

    def run() -> torch.Tensor:
        with torch.no_grad():
            return case.attend(query, key, value, settings.backend)

    return run


def _fit_slope(points: dict[float, float]) -> float:
    """Least squares."""
    x, y = list(points), list(points.values())
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / sum((a - middle_x) ** 2 for a in x)


DECODE = f"decode one query on {CACHE_KEYS} keys"
SPARSE = "sparse rate against own dense rate"
GROWTH = "growth of Window(128, 128) from 4k to 64k tokens"
FIGURES = {DECODE: decode, SPARSE: sparse_against_dense, GROWTH: growth}
