"""One case: check every result, time the peers of a group in heats, race the fast ones against ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import flex
from benchmarks.cases import FLEX, SIMPLE, Case, Peer
from benchmarks.check import assert_ours, assert_peer, outcome
from benchmarks.limits import Limits
from benchmarks.machine import Watch
from benchmarks.peers import Form
from benchmarks.results import OURS, Result, Verdict
from benchmarks.timing import Run, Timing, race

CLOSE = 1.3  # peers within this factor of the fastest of their group in the heats go on to the race


@dataclass
class Settings:
    """How to measure.

    Attributes:
        no_flex: why FlexAttention is left out, or `None`.
        checked: for each case that has been checked the errors and the absent peers; neither changes between
            repeats.
    """

    backend: str
    rounds: int
    seconds: float
    limits: Limits
    no_flex: str | None = None
    checked: dict[str, tuple[dict[str, float], dict[str, str]]] = field(default_factory=dict)


def contest(case: Case, settings: Settings) -> Result:
    """Time ours and every peer on the same inputs; the ratio for each group is its fastest over ours."""
    inputs = case.inputs()
    result = Result(case.name, case.about, gflop=case.gflop)
    forms: dict[str, Form] = {OURS: lambda *qkv: case.attend(*qkv, settings.backend)}
    if settings.no_flex is not None:
        result.absent = {peer.name: settings.no_flex for peer in case.peers if peer.group == FLEX}
    forms |= {peer.name: peer.form for peer in case.peers if peer.name not in result.absent}
    if case.name in settings.checked:
        result.errors, result.absent = settings.checked[case.name]
    else:
        _check_results(case, forms, inputs, result)
        settings.checked[case.name] = result.errors, result.absent
    able = [peer for peer in case.peers if peer.name not in result.absent]
    result.groups = {peer.name: peer.group for peer in able}
    runners = {name: _make_runner(case, form, inputs) for name, form in forms.items() if name not in result.absent}
    racing = _time_heats(able, runners, result)
    with Watch() as watch:
        result.timings = race(
            {name: runners[name] for name in (OURS, *racing)}, rounds=settings.rounds, seconds=settings.seconds
        )
    result.load = watch.load
    result.verdicts = _compute_verdicts(case, able, result)
    return result


def _check_results(case: Case, forms: Mapping[str, Form], inputs: tuple[Tensor, ...], result: Result) -> None:
    """Ours against float64, the others against ours. What cannot run is absent; a wrong result stops the case."""
    ours = outcome(case, forms[OURS], inputs)
    result.errors[OURS] = assert_ours(case, ours, inputs)
    for name, form in forms.items():
        if name == OURS:
            continue
        try:
            peer = outcome(case, form, inputs)
        except Exception as reason:  # a compiler can fail in any way; the other peers are still measured
            result.absent[name] = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
            continue
        result.errors[name] = assert_peer(case, name, peer, ours)


def _make_runner(case: Case, form: Form, inputs: tuple[Tensor, ...]) -> Run:
    query, key, value, grad_output = inputs
    if case.backward:
        return lambda: torch.autograd.grad(form(query, key, value), (query, key, value), grad_output)

    def forward() -> Tensor:
        with torch.no_grad():
            return form(query, key, value)

    return forward


def _time_heats(able: list[Peer], runners: Mapping[str, Run], result: Result) -> list[str]:
    """The peers that race. A group of one peer needs no heat; simple forms never race."""
    rivals = [peer for peer in able if peer.group == SIMPLE or sum(p.group == peer.group for p in able) > 1]
    if not rivals:
        return [peer.name for peer in able]
    heats = race({peer.name: runners[peer.name] for peer in rivals}, rounds=2, warm_up=1)
    best: dict[str, float] = {}
    for peer in rivals:
        best[peer.group] = min(heats[peer.name].low, best.get(peer.group, float("inf")))
    slow = {p.name for p in rivals if p.group == SIMPLE or heats[p.name].low > CLOSE * best[p.group]}
    result.heats = {name: heats[name] for name in heats if name in slow}
    return [peer.name for peer in able if peer.name not in slow]


def _compute_verdicts(case: Case, able: list[Peer], result: Result) -> list[Verdict]:
    """One verdict for each group, those without a bar too."""
    ours = result.timings[OURS].median
    groups = dict.fromkeys([*case.bars, *(peer.group for peer in able if peer.group != SIMPLE)])
    verdicts = []
    for group in groups:
        raced: dict[str, Timing] = {
            peer.name: result.timings[peer.name] for peer in able if peer.group == group and peer.name in result.timings
        }
        bar = case.bars.get(group)
        if raced:
            name = min(raced, key=lambda one: raced[one].median)
            verdicts.append(Verdict(case.name, group, raced[name].median / ours, bar, by=name))
        else:
            why = next((result.absent[p.name] for p in case.peers if p.group == group and p.name in result.absent), "")
            verdicts.append(Verdict(case.name, group, None, bar, why=why))
    return verdicts


def flex_is_off(compiled: bool) -> str | None:
    """Why FlexAttention will not race: it was not wanted, or cannot be compiled."""
    return flex.missing() if compiled else "left out by --no-flex"
