"""Whole models against their peers: one case, and the program that compares results, races and reports."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks import limits, machine, report
from benchmarks.limits import Limits
from benchmarks.machine import Watch
from benchmarks.results import OURS, Result, Verdict
from benchmarks.runner import run_cases, save
from benchmarks.timing import Run, race


@dataclass
class ModelCase:
    """One model, ours and its peers, with the same weights and inputs.

    Attributes:
        ours, peers: what is timed; peers by name.
        bar: how many times as fast as the fastest peer we want to be; by group where there are several.
        error: the relative difference between our result and the peers'.
        against: what the peers have in common, for the table.
        per_second: a count that one call makes, and its name, for a rate.
        compared: the results that `error` compares.
        gflop: operations of one call.
        groups: the group of each peer; all of them are `against` if not given.
        absent: peers that do not run here, and why.
        bytes_each: bytes that each of the counted things has to read, for a bound by the speed of memory.
    """

    name: str
    about: str
    ours: Run
    peers: dict[str, Run]
    bar: float | Mapping[str, float | None]
    error: float
    against: str
    per_second: tuple[int, str]
    compared: str = "outputs"
    gflop: float | None = None
    bytes_each: float | None = None
    notes: list[str] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def run_contests(
    cases: Mapping[str, Callable[[], ModelCase]],
    args: argparse.Namespace,
    *,
    most_error: float,
    warm_up: int,
    figures: Mapping[str, Callable[[], Result]] | None = None,
) -> int:
    """Measure the cases and figures that `--only` names, print and save the results; returns the exit code."""
    warnings.filterwarnings("ignore")
    figures = figures or {}
    names = [name for name in (*cases, *figures) if args.only.lower() in name.lower()]
    if not names:
        print(f"no case contains {args.only!r}; the cases are {', '.join((*cases, *figures))}")
        return 2
    described, reached = machine.describe(), limits.measure()
    print(report.header(described, reached, "auto"), flush=True)

    def measure(name: str) -> Result:
        if name in figures:
            return figures[name]()
        case = cases[name]()
        if not case.error < most_error:
            return Result(case.name, failed=f"{case.compared} differ by {case.error:.1e}")
        return _race_case(case, args, warm_up, reached)

    repeats = run_cases(names, measure, args.repeat, reached)
    return save(args.out, described, reached, repeats)


def _race_case(case: ModelCase, args: argparse.Namespace, warm_up: int, reached: Limits) -> Result:
    result = Result(case.name, case.about, gflop=case.gflop, notes=list(case.notes))
    result.notes.append(f"{case.compared} differ by {case.error:.0e}, relative")
    with Watch() as watch:
        result.timings = race({OURS: case.ours} | case.peers, rounds=args.rounds, seconds=args.seconds, warm_up=warm_up)
    result.load = watch.load
    result.groups = case.groups or dict.fromkeys(case.peers, case.against)
    result.absent = case.absent
    count, what = case.per_second
    rates = {name: count / timing.seconds for name, timing in result.timings.items()}
    result.notes.append("; ".join(f"{name} {rate:,.1f} {what}/s" for name, rate in rates.items()))
    if case.bytes_each is not None:
        bound = 1e9 * reached.read / case.bytes_each
        result.notes.append(
            f"bound by memory: {bound:.1f} {what}/s; ours reaches {rates[OURS] / bound:.2f} of it, reading "
            "the prompt included"
        )
    bars = case.bar if isinstance(case.bar, Mapping) else {case.against: case.bar}
    for group, bar in bars.items():
        peers = [name for name in case.peers if result.groups[name] == group]
        if not peers:
            why = next((why for name, why in case.absent.items() if name.startswith(group)), "")
            result.verdicts.append(Verdict(case.name, group, None, bar, why=why))
            continue
        fastest = min(peers, key=lambda name: result.timings[name].median)
        ratio = result.timings[fastest].median / result.timings[OURS].median
        result.verdicts.append(Verdict(case.name, group, ratio, bar, by=fastest))
    return result
